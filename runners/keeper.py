"""Between us and an engine stands this small process, which ends the engine and all that it ever started.

`server` starts it by path, so it imports the standard library only. It is the engine's parent, leads the process
group of both, and on Linux adopts whatever the engine's processes leave behind (a *child subreaper*, prctl(2)). So
nothing gets away: not what made a session of its own (`setsid`, as MPI does for its workers), nor what outlived the
process that started it. All of it ends when the engine has ended, in whatever way, and when the pipe closes that only
our process holds open: it is done with the engine, or was killed. SIGTERM is then sent first; SIGUSR1 kills at once.
The keeper's own exit status is the engine's.

A process is only ever killed as a child that has not been waited for yet, so never one that got its number later.

Boundary: processes. What runs elsewhere on this host's behalf (a container, whose parent is its daemon) is not here.
"""

from __future__ import annotations

import glob
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

LEFT_S = 1.0
"""For what an engine that has ended left behind, to end by itself after SIGTERM: Python's resource tracker then
clears up shared memory."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_HEEDED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
_STOPS = {signal.SIGTERM, signal.SIGHUP}
_OURS = (*_HEEDED, signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that this process or its interpreter treats in another way than an engine should inherit."""


class Keeper:
    """One engine, and what it started."""

    def __init__(self, argv: Sequence[str], alive: int) -> None:
        self._alive = alive
        self._bell, ring = os.pipe()
        os.set_blocking(ring, False)
        os.set_blocking(self._bell, False)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
        for number in _HEEDED:
            signal.signal(number, lambda *_: None)
        self._poll = select.poll()
        for file in (alive, self._bell):
            self._poll.register(file, select.POLLIN)
        self._status: int | None = None
        me = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEEDED)  # or the engine to be could miss one
        self._engine = os.fork()
        if self._engine == 0:
            _become(argv, me, alive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEEDED)
        os.close(0)  # the engine's alone: its ends are heard at the other side
        os.close(1)

    def run(self, stop_s: float) -> int:
        """The engine's wait status, once nothing of it is left. SIGKILL comes `stop_s` after SIGTERM."""
        how = self._wait(None)
        told = how != "ended"
        if how == "stop":
            os.killpg(0, signal.SIGTERM)
            how = self._wait(stop_s)
        if how == "ended":
            self._leave_time()
        self._kill()
        if told and sys.platform != "linux":  # where no orphan is adopted, the group is what is known
            os.killpg(0, signal.SIGKILL)
        return self._status or 0

    def _wait(self, seconds: float | None) -> str:
        """What came first: "ended", "stop" (only without a limit), "kill", or "late"."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            self._reap()
            if self._status is not None:
                return "ended"
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return "late"
            heard = self._hear(left)
            if "kill" in heard or ("stop" in heard and end is None):
                return "kill" if "kill" in heard else "stop"

    def _hear(self, seconds: float | None) -> set[str]:
        """What happened in this time: "stop", "kill", or nothing (a child may have ended)."""
        heard: set[str] = set()
        for file, _ in self._poll.poll(None if seconds is None else seconds * 1000):
            if file == self._alive:
                self._poll.unregister(file)
                heard.add("stop")
                continue
            rung = set(os.read(file, 4096))
            heard |= ({"kill"} if signal.SIGUSR1 in rung else set()) | ({"stop"} if _STOPS & rung else set())
        return heard

    def _reap(self) -> bool:
        """Take leave of the children that ended. Whether any is left."""
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._note(*found)
            return True
        return False

    def _note(self, pid: int, status: int) -> None:
        if pid == self._engine:
            self._status = status

    def _leave_time(self) -> None:
        """The engine has ended; what it left is asked to, and waited for a little."""
        end = time.monotonic() + LEFT_S
        _signal(_children(), signal.SIGTERM)
        while self._reap() and (left := end - time.monotonic()) > 0:
            if "kill" in self._hear(left):
                return

    def _kill(self) -> None:
        """Kill each child; theirs are ours then. Until there is none."""
        while True:
            _signal(_children() or [self._engine] * (self._status is None), signal.SIGKILL)
            try:
                self._note(*os.waitpid(-1, 0))
            except ChildProcessError:
                return


def _become(argv: Sequence[str], keeper: int, alive: int) -> None:
    """In the child: be the engine. It dies with the keeper too."""
    signal.set_wakeup_fd(-1)
    for number in _OURS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEEDED)
    os.close(alive)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != keeper:
        os._exit(1)
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        print(f"{argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(1)


def _children() -> list[int]:
    """Our children, by /proc: those that ended and were not waited for are among them, so none is a stranger."""
    me, found = str(os.getpid()).encode(), []
    for path in glob.glob("/proc/[0-9]*/stat"):
        with suppress(OSError), open(path, "rb") as file:
            # pid (command) state parent …, where the command may hold anything
            if file.read().rpartition(b")")[2].split()[1] == me:
                found.append(int(path.split("/")[2]))
    return found


def _signal(children: Sequence[int], number: signal.Signals) -> None:
    for pid in children:
        with suppress(PermissionError):  # a program that runs as another user
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_as(status: int) -> None:
    """End as the engine did; the core is the engine's to leave."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        _prctl(_PR_SET_DUMPABLE, 0)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def main() -> None:
    """PARENT ALIVE STOP_S COMMAND…: the process that started us, the pipe's number, and what to run."""
    parent, alive, stop_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if os.getppid() != parent:
        os._exit(1)
    _end_as(Keeper(sys.argv[4:], alive).run(stop_s))


if __name__ == "__main__":
    main()
