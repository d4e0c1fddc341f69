"""An engine's server as a child process that cannot outlive this one.

The child says on stdout, as one JSON line with `address`, when it is ready; everything else it writes goes to
a log file. Four things end it: the caller leaves, its stdin closes, this process dies in whatever way
(PR_SET_PDEATHSIG, Linux), or the caller's start times out. It has a session of its own, so a Ctrl-C at the
terminal reaches only us and what the child started ends with it.

Boundary: processes and pipes; what the child serves is the adapter's business.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from specbench.errors import SpecbenchError

STOP_S = 5.0
"""How long a child may take to end after each of: stdin closed, SIGTERM."""
TAIL_BYTES = 64 * 1024

# Runs between fork and the engine. The death signal is set first and the parent looked at second, so a parent
# that died before the signal was set is noticed too. prctl survives the exec that follows.
_SHIM = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


@dataclass
class ServerProcess:
    """A child that is ready. `ready` is the JSON object it announced itself with."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Base URL it listens on."""
        return str(self.ready["address"])

    @property
    def pid(self) -> int:
        """Its process id, which is its process group's too."""
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return _peek(self.process)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, for an error message."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "(none)")


@contextmanager
def serve(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    timeout_s: float = 60,
    why: Callable[[Path], str] = last_line,
) -> Iterator[ServerProcess]:
    """Start `argv`, wait until it is ready, and end it on leaving.

    `env` is added to this process's environment, which is passed on and never stored. Raises SpecbenchError
    where it ends, or is not ready after `timeout_s`, with what `why` finds in its log. Call it from a thread that
    lives as long as the server: Linux counts the end of the starting thread as the parent's death.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", _SHIM, str(os.getpid()), *argv],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            start_new_session=True,
        )
    listener = _Listener(process, log, why)
    try:
        yield ServerProcess(process, listener.wait(timeout_s))
    finally:
        _stop(process)
        listener.thread.join(STOP_S)


class _Listener:
    """Reads the child's stdout to its end: the ready line is kept, the rest goes to the log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, why: Callable[[Path], str]) -> None:
        self.process, self.log, self.why = process, log, why
        self.ready: dict[str, Any] | None = None
        self.settled = threading.Event()
        self.thread = threading.Thread(target=self._read, name="server-stdout", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self.log.open("ab") as sink:
            for line in lines:
                if self.ready is None and (found := _ready_line(line)) is not None:
                    self.ready = found
                    self.settled.set()
                else:
                    sink.write(line)
                    sink.flush()
        self.settled.set()

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """The ready line, or the sentence that says why there is none."""
        in_time = self.settled.wait(timeout_s)
        if self.ready is not None:
            return self.ready
        if in_time:
            how = f"ended with status {_status(self.process)} before it was ready"
        else:
            how = f"was not ready after {timeout_s:g} s"
        raise SpecbenchError(
            f"the engine {how}; its last words: {self.why(self.log)}; the whole log is {self.log}."
        )


def _ready_line(line: bytes) -> dict[str, Any] | None:
    """The line as a JSON object with an address; None for anything else."""
    with suppress(orjson.JSONDecodeError):
        value = orjson.loads(line)
        if isinstance(value, dict) and isinstance(value.get("address"), str):
            return value
    return None


def _peek(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status without reaping: until `_stop`, the dead child's id can belong to nobody else."""
    if not hasattr(os, "waitid"):
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Exit status once it ended, not reaped; None where it has not after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while (code := _peek(process)) is None and time.monotonic() < end:
        time.sleep(0.005)
    return code


def _status(process: subprocess.Popen[bytes]) -> str:
    """Exit status in words; a child that closed its stdout but lives is waited for briefly."""
    code = _wait(process, STOP_S)
    if code is None:
        return "unknown (it closed its output)"
    return str(code) if code >= 0 else f"{code} ({signal.Signals(-code).name})"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the child and all it started: close its stdin, then SIGTERM, then SIGKILL. Leaves no zombie."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    if _wait(process, STOP_S) is None:
        _signal_group(process.pid, signal.SIGTERM)
        _wait(process, STOP_S)
    # The group may hold processes that the child started, also when the child itself has ended.
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
