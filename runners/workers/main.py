"""A worker: loads one engine and answers the requests that come as JSON lines on its stdin.

Started by path with the engine's interpreter, so it imports the standard library only. Its arguments are the file
of the engine and the engine's settings as JSON; `runners/worker.py` describes the lines. An engine's file has

    load(asked, log) -> engine      asked: the settings; log(text) writes to stderr
    engine.facts() -> dict          what it resolved to, for the line that says that it is ready
    engine.add(body, reply)         take a request up; raises where it cannot
    engine.busy() -> bool           whether a request is under way
    engine.step()                   go on by at least one step; reports to the replies
    engine.drop()                   forget the requests under way, after `step` raised
    engine.counters() -> dict       numbers counted since the start
    engine.reset() -> bool          forget what earlier requests left; False: it cannot

It ends when its stdin closes, and with its parent (whoever starts it asks the kernel for that).
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

now = time.monotonic_ns


class Out:
    """The pipe to the suite. Whatever else writes to stdout goes to the log instead."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._pipe = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def send(self, record: dict[str, Any]) -> None:
        """One record on one line."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._pipe.write(line)
            self._pipe.flush()


class Reply:
    """What is said to one request. An engine calls `step` once a target pass, then `end` or `fail` once."""

    def __init__(self, out: Out, number: int, forget: Callable[[int], object]) -> None:
        self._out, self.number, self._forget = out, number, forget
        self.cancelled = False
        """The suite has given this request up: end it soon."""
        self.ended = False
        self.steps = 0

    def step(self, ids: list[int], at_ns: int | None = None, **more: Any) -> None:
        """The tokens that one target pass emitted, at the time it ended."""
        at = now() if at_ns is None else at_ns
        self.steps += 1
        known = {name: value for name, value in more.items() if value is not None}
        self._out.send({"id": self.number, "at": at, "step": ids, **known})

    def end(self, **done: Any) -> None:
        """The reply is whole: finish, prompt_tokens, text, and what else the engine knows."""
        if "text" in done:  # half a surrogate pair, which a decoder can leave, is no JSON to strict readers
            done["text"] = done["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self._last("done", done)

    def fail(self, message: str, kind: str = "in_band") -> None:
        """The reply ends here."""
        self._last("error", {"kind": kind, "message": message})

    def _last(self, name: str, value: dict[str, Any]) -> None:
        if not self.ended:
            self.ended = True
            self._forget(self.number)
            self._out.send({"id": self.number, "at": now(), name: value})


class Inbox:
    """Reads stdin in a thread of its own, so that a request can be given up while another is computed."""

    def __init__(self, out: Out, replies: dict[int, Reply]) -> None:
        self._out, self._replies = out, replies
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def take(self, wait: bool) -> dict[str, Any] | None:
        """The next message; None where there is none and `wait` is false."""
        try:
            return self._messages.get(block=wait)
        except queue.Empty:
            return None

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            message = json.loads(line)
            reply = self._replies.get(message["id"])
            if message["op"] == "cancel":
                if reply is not None:
                    reply.cancelled = True
                continue
            number = message["id"]
            self._replies[number] = Reply(self._out, number, self._replies.pop)
            self._messages.put(message)
        end()


def end() -> None:
    """The suite is gone: so is this process, and whatever the engine started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


class Worker:
    """One engine and its requests, in one thread."""

    def __init__(self, engine: Any, out: Out) -> None:
        self.engine = engine
        self._replies: dict[int, Reply] = {}
        """Every message that has no last word yet; the thread of the inbox adds to it."""
        self._under_way: list[Reply] = []
        """Those that the engine has taken up."""
        self._inbox = Inbox(out, self._replies)

    def run(self) -> None:
        """Take requests up as they come and step while there are any."""
        while True:
            message = self._inbox.take(wait=not self.engine.busy())
            if message is not None:
                self._handle(message["op"], message["body"], self._replies[message["id"]])
            elif self.engine.busy():
                self._step()
            self._under_way = [reply for reply in self._under_way if not reply.ended]

    def _handle(self, op: str, body: dict[str, Any], reply: Reply) -> None:
        try:
            if reply.cancelled:
                reply.fail("given up before it began")
            elif op in ("generate", "ids"):
                self.engine.add(body, reply)
                self._under_way.append(reply)
            elif op == "counters":
                reply.end(**self.engine.counters())
            elif op == "reset":
                reply.end(ok=bool(self.engine.reset()))
            else:
                reply.fail(f"the worker knows no {op}")
        except Exception as error:
            reply.fail(said(error))

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as error:
            words = said(error)
            self.engine.drop()
            for reply in self._under_way:
                reply.fail(words)


def said(error: BaseException) -> str:
    """An error in one line; all of it goes to the log."""
    traceback.print_exc()
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def module(path: str) -> Any:
    """The engine's file, imported."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found  # dataclasses look their module up there
    spec.loader.exec_module(found)
    return found


def main() -> None:
    """Load, say that it is ready, serve."""
    out = Out()
    # The folder of this file is not a place to import from: its names could hide the engine's.
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [place for place in sys.path if place != here]
    asked = json.loads(sys.argv[2])
    try:
        engine = module(sys.argv[1]).load(asked, lambda text: print(text, file=sys.stderr, flush=True))
    except Exception as error:
        print(said(error), file=sys.stderr, flush=True)
        sys.exit(1)
    worker = Worker(engine, out)
    out.send({"address": f"worker:{os.getpid()}", "facts": engine.facts()})
    worker.run()


if __name__ == "__main__":
    main()
