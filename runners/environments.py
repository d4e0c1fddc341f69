"""Where engines live: this interpreter, another one, a container, or an environment of `specbench engines install`.

An engine's environment is `engines/NAME` in the cache directory, a link to a virtual environment beside it. It is
built under a name of its own and linked when it is whole, so a half-built one is never found. It shares nothing
with this environment: engines pin versions of torch that clash with each other's. The recipes are data,
`flags/recipes.toml`.

Boundary: interpreters, packages and pip. How an engine is started is its adapter's business.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

from runners import pip
from specbench import models
from specbench.errors import SpecbenchError

Say = Callable[[str], None]


# --- finding ----------------------------------------------------------------------------------------------

_ASK = """
import importlib.metadata as m, sys
for name in sys.argv[1:]:
    try:
        print(name, m.version(name))
        break
    except m.PackageNotFoundError:
        pass
"""
_ASK_TIMEOUT_S = 20.0
"""A cold disk can make an interpreter start slowly; none that works needs this long."""


def engines_dir() -> Path:
    """Where the environments of installed engines are."""
    return models.cache_dir() / "engines"


def installed_python(engine: str) -> str | None:
    """The interpreter of an engine's own environment; None where none was installed."""
    python = engines_dir() / engine / "bin" / "python"
    return str(python) if os.access(python, os.X_OK) and python.is_file() else None


def python_for(engine: str, asked: str | None) -> str:
    """The interpreter that an engine runs in: the one asked for, else its own environment's, else this one."""
    return asked or installed_python(engine) or sys.executable


def interpreter_for(engine: str, python: str | None, command: str | None) -> tuple[str, ...]:
    """The same as the start of a command; in a container (`docker run … IMAGE`) it is the interpreter in there."""
    if command is not None:
        return (*shlex.split(command), python or "python3")
    return (python_for(engine, python),)


def version_in(python: str, distributions: Sequence[str]) -> str | None:
    """Version of the first of these packages that an interpreter has; None where it has none or cannot run."""
    return version_at((python,), distributions)


def version_at(interpreter: Sequence[str], distributions: Sequence[str]) -> str | None:
    """The same for the start of a command (`interpreter_for`). Never raises; asked once in a process."""
    found = _found_at(tuple(interpreter), tuple(distributions))
    return found[1] if found else None


def distribution_in(python: str, distributions: Sequence[str]) -> str | None:
    """Which of these packages an interpreter has: one engine can come from builds of different names."""
    found = _found_at((python,), tuple(distributions))
    return found[0] if found else None


@cache
def _found_at(interpreter: tuple[str, ...], distributions: tuple[str, ...]) -> tuple[str, str] | None:
    """Name and version of the first package found."""
    if interpreter == (sys.executable,):
        return _found_here(distributions)
    command = [*interpreter, "-c", _ASK, *distributions]
    asked = partial(subprocess.run, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    try:
        done = asked(command, timeout=_ASK_TIMEOUT_S)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    name, _, version = done.stdout.strip().rpartition("\n")[2].partition(" ")
    return (name, version) if name in distributions and version else None


def _found_here(distributions: Sequence[str]) -> tuple[str, str] | None:
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


# --- recipes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """One way to build an engine's environment: steps for its own pip, and the import that proves it whole."""

    engine: str
    distributions: tuple[str, ...]
    check: str
    steps: tuple[tuple[str, ...], ...]
    room_gb: float
    device: str | None = None
    systems: tuple[str, ...] = ("*",)
    hint: str | None = None
    """What to look at first where it fails."""
    tried: str | None = None
    """The machine on which it was run; None: it is the engine's documented way and was not run."""

    @property
    def commands(self) -> str:
        """The steps as a person would type them in an environment of their own."""
        return " && ".join(f"pip {shlex.join(step)}" for step in self.steps)


@cache
def recipes() -> dict[str, tuple[Recipe, ...]]:
    """Every recipe by engine, in the order in which they are tried."""
    with (Path(__file__).parent / "flags" / "recipes.toml").open("rb") as file:
        document = tomllib.load(file)
    return {name: tuple(_recipes(name, entry)) for name, entry in document.items()}


def _recipes(name: str, entry: dict[str, Any]) -> Iterator[Recipe]:
    about = {"engine": name, "distributions": tuple(entry["distributions"]), "check": entry["check"]}
    for given in entry["recipe"]:
        listed = {"steps": tuple(map(tuple, given["steps"])), "systems": tuple(given.get("systems", ["*"]))}
        yield Recipe(**about, **(given | listed))


def recipe_for(engine: str) -> Recipe:
    """The recipe for this machine. Raises SpecbenchError that says what is missing here and what to do there."""
    known = recipes().get(engine)
    if known is None:
        raise SpecbenchError(
            f"engines install: there is nothing to install for {engine}; it can install {', '.join(recipes())}."
        )
    here = [recipe for recipe in known if any(fnmatch(_system(), pattern) for pattern in recipe.systems)]
    cuda = _cuda()
    for recipe in here:
        if recipe.device is None or cuda:
            return recipe
    raise _no_recipe(engine, here or known, bool(here))


def can_install(engine: str) -> bool:
    """Whether there is a recipe for this machine."""
    try:
        return bool(recipe_for(engine))
    except SpecbenchError:
        return False


def how_to_install(engine: str) -> str:
    """One sentence for a probe that did not find the engine."""
    if can_install(engine):
        return (
            f"Run `specbench engines install {engine}`, or name an interpreter that has it in engine.python."
        )
    return f"Name an interpreter that has {engine} in engine.python, or a container in engine.command."


def _no_recipe(engine: str, known: Sequence[Recipe], system_fits: bool) -> SpecbenchError:
    missing = "an NVIDIA GPU, and none is seen here" if system_fits else f"another system than {_system()}"
    return SpecbenchError(
        f"engines install: {engine} needs {missing}; on a machine that fits, it is installed in an environment of "
        f"its own by `{known[0].commands}`, and engine.python names that environment's interpreter."
    )


def _system() -> str:
    return f"{sys.platform}-{platform.machine().lower()}"


def _cuda() -> bool:
    from specbench import device

    return bool(device.read_gpus().gpus)


# --- installing -------------------------------------------------------------------------------------------


def install(engine: str, say: Say) -> Path:
    """Build the engine's environment and return where it is; nothing is done where it is there already.

    `say` is told what goes on. Raises SpecbenchError with one sentence. An install that is cut off leaves nothing
    that would be taken for an engine, and the next one clears what it left.
    """
    recipe = recipe_for(engine)
    root, place = engines_dir(), engines_dir() / engine
    with _sentences(engine), _alone(root, engine, say):
        _sweep(root, engine)
        if version := _version_now(engine, recipe):
            say(f"{engine} {version} is installed already at {place}")
            return place
        _make_way(place, recipe)
        _need_room(root, recipe)
        _build(recipe, root, place, say)
    say(f"{engine} {_version_now(engine, recipe)} is at {place}")
    return place


def log_of(engine: str) -> Path:
    """What pip said at the last install."""
    return engines_dir() / f"{engine}.log"


def _version_now(engine: str, recipe: Recipe) -> str | None:
    """The version in the engine's own environment, asked afresh."""
    _found_at.cache_clear()
    python = installed_python(engine)
    return version_in(python, recipe.distributions) if python else None


def _build(recipe: Recipe, root: Path, place: Path, say: Say) -> None:
    """The environment under a name that says who builds it, then the link that makes it the engine's."""
    home = Path(tempfile.mkdtemp(prefix=f"{recipe.engine}-{os.getpid()}-", dir=root))
    try:
        pip.build(recipe.engine, home, recipe.steps, recipe.check, log_of(recipe.engine), say, recipe.hint)
        link = root / f".{home.name}"
        link.symlink_to(home.name)
        link.replace(place)
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise


def _make_way(place: Path, recipe: Recipe) -> None:
    """A link is replaced; a directory that is no environment of the engine is somebody's, and stays."""
    if place.exists() and not place.is_symlink():
        raise SpecbenchError(
            f"engines install: {place} is in the way and has no {recipe.distributions[0]}; move it away."
        )


def _need_room(root: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(root).free / 1e9
    if free < recipe.room_gb:
        raise SpecbenchError(
            f"engines install: {recipe.engine} needs {recipe.room_gb:g} GB and {root} has {free:.1f} GB free; make "
            "room or set SPECBENCH_CACHE to another disk."
        )


def _sweep(root: Path, engine: str) -> None:
    """Remove what killed installs left: environments that no link names and whose builder is gone."""
    import psutil

    in_use = (root / engine).resolve()
    for left in root.glob(f"{engine}-*-*"):
        builder = left.name.removeprefix(f"{engine}-").partition("-")[0]
        if left.resolve() != in_use and builder.isdigit() and not psutil.pid_exists(int(builder)):
            shutil.rmtree(left, ignore_errors=True)
    for link in root.glob(f".{engine}-*-*"):
        link.unlink(missing_ok=True)


@contextmanager
def _alone(root: Path, engine: str, say: Say) -> Iterator[None]:
    """One install of an engine at a time; a second one waits and then finds it done."""
    import fcntl

    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{engine}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Another install of {engine} is running; waiting for it …")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _sentences(engine: str) -> Iterator[None]:
    """Say in one sentence what the file system refused."""
    try:
        yield
    except OSError as error:
        raise SpecbenchError(
            f"SPECBENCH_CACHE: {engine} cannot be installed under {engines_dir()} ({error.strerror or error}); set "
            "it to a directory that can be written."
        ) from None
