"""A virtual environment built by its own pip, with progress, a log, and one sentence where it fails.

Boundary: `venv` and `pip` as child processes, with the user's own index settings. What is built for which engine,
and where it is put, is `environments`'.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from specbench.errors import SpecbenchError

BEAT_S = 10.0
"""How often a long step says that it is still at work."""
_STOP_S = 5.0
_AT_WORK = ("Collecting ", "Downloading ", "Building ", "Installing ", "Preparing ")
"""How pip's lines begin that say what it does now."""
_QUIET = ("--disable-pip-version-check", "--no-input", "--no-color")
# What would send packages elsewhere than into the new environment, or this one's modules into it.
_STRAY = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON", "PIP_DRY_RUN",
    "PIP_REPORT", "__PYVENV_LAUNCHER__",
)  # fmt: skip


def build(
    name: str,
    home: Path,
    steps: Sequence[Sequence[str]],
    check: str,
    log: Path,
    say: Callable[[str], None],
    hint: str | None = None,
) -> None:
    """Make the environment `home`, run the steps with its pip, and see that it imports what it is for.

    Everything that the children say goes to `log`, which is started afresh. Raises SpecbenchError.
    """
    log.write_text("")
    python = str(home / "bin" / "python")
    works = [("making its environment", [sys.executable, "-P", "-m", "venv", "--clear", str(home)])]
    works += [
        (f"pip {' '.join(step)}", [python, "-P", "-m", "pip", step[0], *_QUIET, *step[1:]]) for step in steps
    ]
    works += [("trying it", [python, "-P", "-c", check])]
    work = _Work(name, log, say, hint)
    for number, (words, command) in enumerate(works, 1):
        work.run(f"{number} of {len(works)}, {words}", command)


class _Work:
    """The steps of one build: their log, the time since it began, and what to say where one fails."""

    def __init__(self, name: str, log: Path, say: Callable[[str], None], hint: str | None) -> None:
        self.name, self.log, self.say, self.hint = name, log, say, hint
        self.started = time.monotonic()

    def run(self, step: str, command: Sequence[str]) -> None:
        """One child to its end. It has a session of its own, so that all it started can be ended with it."""
        self._tell(step)
        with self.log.open("ab") as sink:
            sink.write(f"\n$ {' '.join(command)}\n".encode())
            sink.flush()
            before = sink.tell()
            child = subprocess.Popen(
                command,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
            try:
                code = self._wait(child, step)
            finally:
                _end(child)
        if code != 0:
            raise self._failed(step.partition(", ")[2], code, before)

    def _wait(self, child: subprocess.Popen[bytes], step: str) -> int:
        while True:
            try:
                return child.wait(BEAT_S)
            except subprocess.TimeoutExpired:
                self._tell(f"{step}: {_doing(self.log)}")

    def _tell(self, what: str) -> None:
        whole = round(time.monotonic() - self.started)
        self.say(f"{self.name} [{whole // 60}m {whole % 60:02d}s] {what}")

    def _failed(self, what: str, code: int, offset: int) -> SpecbenchError:
        with self.log.open("rb") as file:
            file.seek(offset)
            said = [
                line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
            ]
        if any("No space left" in line for line in said):
            what = f"{what} ran out of disk space; make room or set SPECBENCH_CACHE to another disk"
        else:
            errors = [line for line in said if line.startswith(("ERROR: ", "Error: "))]
            why = (errors or said or [f"it said nothing and ended with status {code}"])[-1]
            what = f"{what} failed ({why.partition(': ')[2] if errors else why})"
        tail = f"; {self.hint}" if self.hint else ""
        return SpecbenchError(f"engines install: {self.name}: {what}; the whole log is {self.log}{tail}.")


def _environment() -> dict[str, str]:
    """This process's environment without what points pip or Python at other places."""
    kept = {name: value for name, value in os.environ.items() if name not in _STRAY}
    return kept | {"PIP_USER": "0", "PYTHONNOUSERSITE": "1"}


def _end_with_parent() -> None:
    """In the child, before it starts: it is ended when we are, even by a kill that we cannot see (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs, and what it started. A reaped child's id may be another's: nothing is sent."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_STOP_S)


def _doing(log: Path) -> str:
    """What pip is at, short enough for a line of progress."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line[:100] for line in reversed(said) if line.startswith(_AT_WORK)), "at work")
