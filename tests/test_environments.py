"""runners.environments and runners.pip: finding interpreters, and building environments with the real venv and pip."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from runners import environments, pip
from runners.environments import Recipe
from specbench.errors import SpecbenchError
from tests.fake_environment import environment, wheel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a pip that can reach nothing but the local directory."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    environments._found_at.cache_clear()
    yield tmp_path / "cache"
    environments._found_at.cache_clear()


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The recipe of an engine `toy`, whose wheel and a stray one lie in the local index."""
    wheel(tmp_path / "index", "toy-engine", "1.2", {"toy_engine.py": "speed = 3\n"})
    wheel(tmp_path / "index", "stray", "1", {"stray.py": ""})
    found = Recipe(
        engine="toy",
        distributions=("toy-gpu", "toy-engine"),
        check="import toy_engine",
        steps=(("install", "toy-engine==1.2", "stray"), ("uninstall", "--yes", "stray")),
        room_gb=0.001,
    )
    give(monkeypatch, found)
    return found


def give(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    monkeypatch.setitem(environments.recipes(), "toy", (recipe,))


def built(cache: Path) -> list[str]:
    """Environments in the cache, whole or not."""
    return [path.name for path in (cache / "engines").glob("toy-*")]


# --- finding ----------------------------------------------------------------------------------------------


def test_the_interpreter_asked_for_then_the_engines_own_then_this_one(cache: Path) -> None:
    assert environments.python_for("toy", None) == sys.executable
    own = environment(cache / "engines" / "toy", {})
    assert environments.python_for("toy", None) == own == environments.installed_python("toy")
    assert environments.python_for("toy", "python3.99") == "python3.99"
    assert environments.python_for("other", None) == sys.executable


def test_an_environment_whose_interpreter_is_gone_is_none(cache: Path) -> None:
    python = Path(environment(cache / "engines" / "toy", {}))
    python.unlink()
    python.symlink_to(cache / "nowhere")
    assert environments.installed_python("toy") is None


def test_in_a_container_the_command_comes_first() -> None:
    command = "docker run --rm --network host 'an image'"
    words = ("docker", "run", "--rm", "--network", "host", "an image")
    assert environments.interpreter_for("toy", None, command) == (*words, "python3")
    assert environments.interpreter_for("toy", "/opt/python", command) == (*words, "/opt/python")
    assert environments.interpreter_for("toy", "python9", None) == ("python9",)


def test_version_of_the_first_package_that_is_there(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", {"toy-engine": "1.2+cpu", "other": "9"})
    assert environments.version_in(python, ("toy-gpu", "toy-engine", "other")) == "1.2+cpu"
    assert environments.distribution_in(python, ("toy-gpu", "toy-engine", "other")) == "toy-engine"
    assert environments.version_in(python, ("toy-gpu",)) is None
    assert environments.version_in(sys.executable, ("toy-gpu", "pytest")) == pytest.__version__
    assert (
        environments.version_at(("env", python), ("other",)) == "9"
    )  # any command that ends in an interpreter


def test_an_interpreter_that_cannot_answer_has_nothing(tmp_path: Path) -> None:
    mute, noisy = tmp_path / "mute", tmp_path / "noisy"
    mute.write_text("#!/bin/sh\nexit 0\n")
    noisy.write_text("#!/bin/sh\necho 'welcome 1.0'\n")
    for path in (mute, noisy):
        path.chmod(0o755)
        assert environments.version_in(str(path), ("toy-engine",)) is None
    for path in (tmp_path / "nothing", tmp_path):
        assert environments.version_in(str(path), ("toy-engine",)) is None
    assert environments.version_in("a\0b", ("toy-engine",)) is None


def test_a_version_is_asked_for_once(tmp_path: Path) -> None:
    home = tmp_path / "env"
    python = environment(home, {"toy-engine": "1.2"})
    assert environments.version_in(python, ("toy-engine",)) == "1.2"
    shutil.rmtree(home)
    assert environments.version_in(python, ("toy-engine",)) == "1.2"


# --- recipes ----------------------------------------------------------------------------------------------


def test_the_recipes_that_come_with_it() -> None:
    assert set(environments.recipes()) == {
        "llamacpp", "vllm", "openvino", "transformers", "sglang", "tensorrt_llm",
    }  # fmt: skip
    for engine, known in environments.recipes().items():
        for recipe in known:
            assert recipe.engine == engine
            assert recipe.room_gb > 0
            assert {step[0] for step in recipe.steps} <= {"install", "uninstall"}
            assert recipe.tried is None or recipe.device is None


def test_the_first_recipe_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    gpu, moon = replace(recipe, device="cuda", systems=("linux-*",)), replace(recipe, systems=("moon-*",))
    monkeypatch.setitem(environments.recipes(), "toy", (moon, gpu, recipe))
    monkeypatch.setattr(environments, "_system", lambda: "linux-x86_64")
    monkeypatch.setattr(environments, "_cuda", lambda: True)
    assert environments.recipe_for("toy") is gpu
    monkeypatch.setattr(environments, "_cuda", lambda: False)
    assert environments.recipe_for("toy") is recipe
    monkeypatch.setattr(environments, "_system", lambda: "moon-lander")
    assert environments.recipe_for("toy") is moon


def test_without_a_recipe_the_sentence_says_what_would_be_done(
    monkeypatch: pytest.MonkeyPatch, recipe: Recipe
) -> None:
    monkeypatch.setattr(environments, "_cuda", lambda: False)
    give(monkeypatch, replace(recipe, device="cuda"))
    with pytest.raises(
        SpecbenchError,
        match=r"toy needs an NVIDIA GPU, and none is seen here; .* `pip install toy-engine==1\.2",
    ):
        environments.install("toy", print)
    give(monkeypatch, replace(recipe, systems=("moon-*",)))
    with pytest.raises(SpecbenchError, match=r"toy needs another system than \S+; "):
        environments.install("toy", print)
    with pytest.raises(SpecbenchError, match=r"nothing to install for openai; it can install .*vllm"):
        environments.install("openai", print)
    assert not environments.can_install("toy")
    assert "engine.command" in environments.how_to_install("toy")


# --- installing -------------------------------------------------------------------------------------------


def test_an_environment_of_its_own(cache: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(cache))  # what points elsewhere is not passed on
    monkeypatch.setenv("PIP_TARGET", str(cache / "astray"))
    before = sorted(path.name for path in Path(environments.__file__).parent.iterdir())
    said: list[str] = []
    place = environments.install("toy", said.append)
    assert place == cache / "engines" / "toy"
    assert [words.partition("] ")[2] for words in said[:-1]] == [
        "1 of 4, making its environment",
        "2 of 4, pip install toy-engine==1.2 stray",
        "3 of 4, pip uninstall --yes stray",
        "4 of 4, trying it",
    ]
    assert said[-1] == f"toy 1.2 is at {place}"
    python = environments.python_for("toy", None)
    code = "import toy_engine, sys; print(toy_engine.speed, sys.prefix)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", str(place)]
    assert environments.version_in(python, ["stray"]) is None
    assert environments.version_in(sys.executable, recipe.distributions) is None
    assert before == sorted(path.name for path in Path(environments.__file__).parent.iterdir())
    assert not (cache / "astray").exists()
    scripts = subprocess.run([place / "bin" / "pip", "--version"], capture_output=True, text=True, check=True)
    assert str(cache) in scripts.stdout  # scripts work too: the environment was not moved after it was built


def test_installed_once(cache: Path, recipe: Recipe, tmp_path: Path) -> None:
    environments.install("toy", print)
    link = os.readlink(cache / "engines" / "toy")
    shutil.rmtree(tmp_path / "index")
    said: list[str] = []
    assert environments.install("toy", said.append) == cache / "engines" / "toy"
    assert said == [f"toy 1.2 is installed already at {cache / 'engines' / 'toy'}"]
    assert (os.readlink(cache / "engines" / "toy"), built(cache)) == (link, [link])


def test_an_environment_without_the_engine_is_replaced(cache: Path, recipe: Recipe, tmp_path: Path) -> None:
    environment(tmp_path / "other", {"unrelated": "1"})
    (cache / "engines").mkdir(parents=True)
    (cache / "engines" / "toy").symlink_to(tmp_path / "other")
    environments.install("toy", print)
    assert environments.version_in(environments.python_for("toy", None), recipe.distributions) == "1.2"
    assert (tmp_path / "other").is_dir()


def test_a_directory_in_the_way_stays(cache: Path, recipe: Recipe) -> None:
    (cache / "engines" / "toy").mkdir(parents=True)
    (cache / "engines" / "toy" / "mine").touch()
    with pytest.raises(SpecbenchError, match=r"engines/toy is in the way and has no toy-gpu; move it away"):
        environments.install("toy", print)
    assert (cache / "engines" / "toy" / "mine").exists()


def test_one_sentence_where_pip_fails(cache: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, replace(recipe, steps=(("install", "toy-engine==9"),), hint="look at the index"))
    with pytest.raises(SpecbenchError) as caught:
        environments.install("toy", print)
    log = environments.log_of("toy")
    assert str(caught.value) == (
        "engines install: toy: pip install toy-engine==9 failed (No matching distribution found for toy-engine==9); "
        f"the whole log is {log}; look at the index."
    )
    assert "from versions: 1.2" in log.read_text()
    assert (built(cache), environments.installed_python("toy")) == ([], None)


def test_no_room(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, replace(recipe, room_gb=10**9))
    with pytest.raises(
        SpecbenchError, match=r"toy needs 1e\+09 GB and .* GB free; make room or set SPECBENCH_CACHE"
    ):
        environments.install("toy", print)


def test_a_cache_that_cannot_be_written(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        SpecbenchError, match=r"^SPECBENCH_CACHE: toy cannot be installed under .*Not a directory"
    ):
        environments.install("toy", print)


INSTALL = """
import sys
from runners import environments
steps = tuple(tuple(step.split()) for step in sys.argv[1].split(";"))
environments.recipes()["toy"] = (environments.Recipe("toy", ("toy-engine",), "import toy_engine", steps, 0.001),)
environments.install("toy", lambda said: print(said, file=sys.stderr, flush=True))
"""


def installing(recipe: Recipe) -> subprocess.Popen[str]:
    steps = ";".join(" ".join(step) for step in recipe.steps)
    argv = [sys.executable, "-c", INSTALL, steps]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_two_processes_at_once(cache: Path, recipe: Recipe) -> None:
    both = [installing(recipe), installing(recipe)]
    said = [process.communicate(timeout=100)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sum("trying it" in words for words in said) == 1
    assert sum("waiting for it" in words for words in said) <= 1
    assert len(built(cache)) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_cut_off_in_the_middle(
    cache: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """An index that takes a connection and never answers keeps pip busy until it is ended."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(60)
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        with installing(recipe) as process:
            connection, _ = index.accept()
            (busy,) = [child for child in psutil.Process(process.pid).children() if "pip" in child.cmdline()]
            process.send_signal(number)
            process.communicate(timeout=30)
            assert busy.wait(30) is None or not busy.is_running()
            connection.close()
    assert process.returncode != 0
    assert environments.installed_python("toy") is None
    assert len(built(cache)) == (number is signal.SIGKILL)


def test_what_a_killed_install_left_is_removed_by_the_next(cache: Path, recipe: Recipe) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for builder in (ended.pid, os.getpid()):
        (cache / "engines" / f"toy-{builder}-x" / "bin").mkdir(parents=True)
    (cache / "engines" / f".toy-{ended.pid}-x").symlink_to("nowhere")
    environments.install("toy", print)
    assert f"toy-{ended.pid}-x" not in built(cache)
    assert f"toy-{os.getpid()}-x" in built(cache)  # its builder still runs
    assert not (cache / "engines" / f".toy-{ended.pid}-x").is_symlink()


# --- one step of a build ----------------------------------------------------------------------------------


def step(tmp_path: Path, code: str, say: Callable[[str], None] = print) -> None:
    """One step that runs this Python code, as the trial import at the end of a build does."""
    log = tmp_path / "toy.log"
    log.touch()
    pip._Work("toy", log, say, "look at the index").run("4 of 4, trying it", [sys.executable, "-c", code])


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import toy_engine.fast", r"failed \(ModuleNotFoundError: No module named 'toy_engine'\)"),
        ("print('ERROR: no wheel'); print('bye'); exit(1)", r"failed \(no wheel\)"),
        ("exit('OSError: [Errno 28] No space left on device')", r"ran out of disk space; make room or set"),
        ("exit(7)", r"failed \(it said nothing and ended with status 7\)"),
        ("import os; os.kill(os.getpid(), 9)", r"failed \(it said nothing and ended with status -9\)"),
    ],
)
def test_one_sentence_where_a_step_fails(tmp_path: Path, code: str, why: str) -> None:
    with pytest.raises(
        SpecbenchError,
        match=rf"^engines install: toy: trying it {why}.*; the whole log is \S+toy\.log; look at the index\.$",
    ):
        step(tmp_path, code)
    assert (tmp_path / "toy.log").read_text().startswith("\n$ ")


def test_a_long_step_says_what_it_is_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pip, "BEAT_S", 0.05)
    done = tmp_path / "done"
    said: list[str] = []

    def say(words: str) -> None:
        said.append(words)
        if any("Collecting" in line for line in said):
            done.touch()

    wait = f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.01)"
    step(tmp_path, "print('Collecting toy-engine', flush=True); print('hm', flush=True); " + wait, say)
    assert said[0] == "toy [0m 00s] 4 of 4, trying it"
    assert said[-1].endswith("] 4 of 4, trying it: Collecting toy-engine")
