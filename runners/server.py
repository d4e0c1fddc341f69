"""An engine's server as a child process that cannot outlive this one, nor can what it starts (`keeper`).

A child of ours says on stdout, as one JSON line with `address`, when it is ready. An engine's own server prints no
such line: it is given a port and is ready when its health page answers (`Health`). Everything else it writes goes
to a log file. It ends when the caller leaves, when it is not ready in time, and when this process dies in whatever way;
a child of ours is told so by its stdin, which closes. It has a session of its own, so a Ctrl-C at the terminal reaches
only us.

Boundary: processes, pipes and one health page; what the child serves is the adapter's business.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import psutil

from specbench.errors import EngineFailed

STOP_S = 5.0
"""How long a child may take to end after each of: stdin closed, SIGTERM."""
TAIL_BYTES = 64 * 1024
NO_WORDS = "(none)"
"""The last line of a log that holds none."""
LOOK_EVERY_S = 0.1
SAY_FIRST_S = 5.0
"""A start that takes longer is spoken of, and again after each doubling of the time."""

KEEPER = Path(__file__).with_name("keeper.py")
"""The child proper: it starts the engine and ends with all that the engine ever started."""
KEEPER_S = 3.0
"""What the keeper takes beyond that at most; also how soon after its last answer a server that ended has ended."""
CONTAINER_STOP_S = 30.0
"""As `STOP_S`, for a server in a container: one that is killed leaves the container to its daemon."""


@dataclass(frozen=True)
class Health:
    """How to know that an engine's own server is ready: `path` answers 200 at `address`, where it was told to listen.

    `here` is False where the server runs in a container, whose processes are not the child's.
    """

    address: str
    path: str = "/health"
    here: bool = True


@dataclass
class ServerProcess:
    """A child that is ready: the keeper and, below it, the engine. `ready` is what it announced itself with."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Base URL it listens on."""
        return str(self.ready["address"])

    @property
    def pid(self) -> int:
        """The keeper's process id, which is the process group's too; everything of the engine is below it."""
        return self.process.pid

    def poll(self, seconds: float = 0.0) -> int | None:
        """The engine's exit status; None where anything of it still runs after this time."""
        return _wait(self.process, seconds)

    def how_it_ended(self) -> str:
        """Its exit status in words, once it has ended."""
        return _status(self.process)

    def kill(self) -> None:
        """End it and what it started at once; leaving `serve` tidies up."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)


def last_line(log: Path) -> str:
    """The last line of a log that is not empty, for an error message."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), NO_WORDS)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def port_taken(port: int) -> bool:
    """Whether somebody listens on this port of 127.0.0.1, or may not be asked to share it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


# --- what a long start says -------------------------------------------------------------------------------

_SAY: ContextVar[Callable[[str], None] | None] = ContextVar("say", default=None)


@contextmanager
def telling(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, a start that takes long tells `say` for how long and what the engine last wrote."""
    token = _SAY.set(say)
    try:
        yield
    finally:
        _SAY.reset(token)


def tell(words: str) -> None:
    """Say something of a start to whoever listens (`telling`)."""
    say = _SAY.get()
    if say is not None:
        say(words)


class _Patience:
    """Speaks of a wait after `SAY_FIRST_S`, and again after each doubling."""

    def __init__(self, log: Path) -> None:
        self._log, self._started, self._next_s = log, time.monotonic(), SAY_FIRST_S

    def tell(self) -> None:
        waited = time.monotonic() - self._started
        if waited >= self._next_s:
            self._next_s *= 2
            words = last_line(self._log)
            tell(
                f"the engine is starting ({waited:.0f} s)" + (f": {words[:120]}" if words != NO_WORDS else "")
            )


# --- starting and stopping --------------------------------------------------------------------------------


@contextmanager
def serve(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    timeout_s: float = 60,
    why: Callable[[Path], str] = last_line,
    take: Callable[[bytes], bool] = lambda line: False,
    *,
    health: Health | None = None,
) -> Iterator[ServerProcess]:
    """Start `argv`, wait until it is ready, and end it on leaving.

    `env` is added to this process's environment, which is passed on and never stored. It is ready with its JSON line,
    or with `health` when its page answers. After that `take` is given each line of its stdout, and b"" at the end;
    what it answers False to goes to the log. Raises EngineFailed where it ends, or is not ready after `timeout_s`,
    with what `why` finds in its log. Call it from a thread that lives as long as the server: Linux counts the end of
    the starting thread as the parent's death.
    """
    _set_aside(log)
    watched, alive = os.pipe()
    stop_s = STOP_S if health is None or health.here else CONTAINER_STOP_S
    try:
        asked = (str(os.getpid()), str(watched), str(stop_s), *argv)
        process = _popen(asked, env, log, watched, listened=health is None)
    except BaseException:
        os.close(alive)
        raise
    finally:
        os.close(watched)
    start = _Listener(process, log, why, take) if health is None else _Asker(process, log, why, health)
    try:
        yield ServerProcess(process, start.wait(timeout_s))
    finally:
        _stop(process, alive, stop_s, waits_for_stdin=health is None)
        start.end()


def _set_aside(log: Path) -> None:
    """A log is of one start, whose last words are looked for in it; what the start before left is kept beside it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        log.replace(log.with_name(f"{log.name}.old"))


def _popen(
    asked: Sequence[str], env: Mapping[str, str], log: Path, watched: int, listened: bool
) -> subprocess.Popen[bytes]:
    """The keeper. What nobody listens to goes straight to the log, in the order in which it was written."""
    with log.open("ab") as sink:
        return subprocess.Popen(
            [sys.executable, "-P", "-S", str(KEEPER), *asked],
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if listened else sink,
            stderr=sink,
            start_new_session=True,
            pass_fds=(watched,),
        )


@dataclass
class _Start:
    """A child that is not ready yet."""

    process: subprocess.Popen[bytes]
    log: Path
    why: Callable[[Path], str]
    ready: dict[str, Any] | None = field(default=None, init=False)

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """What the server announced. Raises EngineFailed with the sentence that says why it did not get ready."""
        end, patience = time.monotonic() + timeout_s, _Patience(self.log)
        while not self.settled():
            if time.monotonic() > end:
                raise self._failed(f"was not ready after {timeout_s:g} s")
            patience.tell()
        if self.ready is None:
            raise self._failed(f"ended with status {_status(self.process)} before it was ready")
        return self.ready

    def settled(self) -> bool:
        """Whether it is ready or never will be; looks for `LOOK_EVERY_S`."""
        raise NotImplementedError

    def end(self) -> None:
        """The child has ended."""

    def _failed(self, how: str) -> EngineFailed:
        return EngineFailed(
            f"the engine {how}; its last words: {self.why(self.log)}; the whole log is {self.log}."
        )


@dataclass
class _Listener(_Start):
    """Reads the child's stdout to its end: the ready line is kept, the rest goes to the log."""

    take: Callable[[bytes], bool]

    def __post_init__(self) -> None:
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._read, name="server-stdout", daemon=True)
        self._thread.start()

    def settled(self) -> bool:
        return self._settled.wait(LOOK_EVERY_S)

    def end(self) -> None:
        self._thread.join(STOP_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self.log.open("ab") as sink:
            for line in lines:
                if not self._taken(line):
                    sink.write(line)
                    sink.flush()
        self._settled.set()
        if self.ready is not None:
            self.take(b"")

    def _taken(self, line: bytes) -> bool:
        """Whether the line was the ready line, or one that `take` knows."""
        if self.ready is not None:
            return self.take(line)
        self.ready = _ready_line(line)
        if self.ready is not None:
            self._settled.set()
        return self.ready is not None


@dataclass
class _Asker(_Start):
    """Asks for the child's health page."""

    health: Health

    def settled(self) -> bool:
        if _peek(self.process) is not None:
            return True
        if _answers(self.health) and (not self.health.here or _listens(self.health, self.process.pid)):
            self.ready = {"address": self.health.address}
            return True
        time.sleep(LOOK_EVERY_S)
        return False


def _answers(health: Health) -> bool:
    """Whether the page answers 200."""
    import httpx

    with suppress(httpx.HTTPError):
        # Straight to the server: a proxy of the environment would be another machine.
        return httpx.get(health.address + health.path, timeout=STOP_S, trust_env=False).status_code == 200
    return False


def _listens(health: Health, keeper: int) -> bool:
    """Whether who listens there is below the keeper, not a stranger who took the port. True where unseen."""
    port = urlsplit(health.address).port
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            here = found.laddr and found.laddr.port == port
            if here and found.status == psutil.CONN_LISTEN and found.pid:
                return keeper in {parent.pid for parent in psutil.Process(found.pid).parents()}
    return True


def _ready_line(line: bytes) -> dict[str, Any] | None:
    """The line as a JSON object with an address; None for anything else."""
    with suppress(orjson.JSONDecodeError):
        value = orjson.loads(line)
        if isinstance(value, dict) and isinstance(value.get("address"), str):
            return value
    return None


def _peek(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status without reaping: until `_stop`, the dead child's id can belong to nobody else."""
    if process.returncode is not None or not hasattr(os, "waitid"):
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


def _stop(process: subprocess.Popen[bytes], alive: int, stop_s: float, waits_for_stdin: bool) -> None:
    """End the engine and all it started: close its stdin, then what the keeper watches. Leaves no zombie.

    An engine's own server does not look at its stdin, so it is not given time to notice.
    """
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    if waits_for_stdin:
        _wait(process, STOP_S)
    os.close(alive)  # the keeper sends SIGTERM, and SIGKILL `stop_s` later
    _wait(process, stop_s + KEEPER_S)
    _signal_group(process.pid, signal.SIGKILL)  # where it hangs, or was itself killed
    process.wait()
    end = time.monotonic() + KEEPER_S
    while _signal_group(process.pid, 0) and time.monotonic() < end:  # being killed takes a moment
        time.sleep(0.005)


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anybody to send it to."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False
