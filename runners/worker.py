"""Engines without a server: a worker in the engine's own interpreter, JSON lines over its pipes.

`runners/workers/main.py` runs there. A request is one line on its stdin, a step one line on its stdout with the
token ids and the worker's own stamp (CLOCK_MONOTONIC, the clock of every process of this host), so the way
through the pipe and this process's threads is in no latency. What the worker prints beside that is in its log.

    to it:  {"id": 3, "op": "generate", "body": {"messages": […], "max_tokens": 64, …}}
            op is generate, ids (the same with prompt ids), cancel, counters or reset
    back:   {"id": 3, "at": 99, "step": [504, 28], "drafted": 4, "accepted": 1}     once a target pass
            {"id": 3, "at": 99, "done": {"finish": "stop", "prompt_tokens": 43, "text": "…", …}}
            {"id": 3, "at": 99, "error": {"kind": "in_band", "message": "…"}}

Boundary: one process and its two pipes, and what its lines mean. What a method is, is the adapter's business.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from runners.base import Raw, Stream
from runners.client import TOTAL_TIMEOUT_S, Eof, Exchange
from runners.frames import FINISH
from runners.server import ServerProcess, last_line, serve
from runners.spill import Read
from specbench.cell import Facts
from specbench.errors import EngineFailed

MAIN = Path(__file__).with_name("workers") / "main.py"
START_TIMEOUT_S = 600.0
"""Loading and compiling a large model; one that fails says so at once."""
GRACE_S = 10.0
"""How long a worker may take to give up a request: a step of a large model, or a long prefill's chunk."""
ASK_TIMEOUT_S = 600.0
"""For counters and reset, which wait until a request that is being computed has ended."""

_now = time.monotonic_ns


class Worker:
    """The pipes of one worker: who waits for which answer. Its methods may be called from any thread."""

    def __init__(self, log: Path, why: Callable[[Path], str] = last_line) -> None:
        self.log, self._why = log, why
        self._process: ServerProcess | None = None
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._waiting: dict[int, Waiting] = {}
        self._numbers = itertools.count()
        self._ended: str | None = None

    def attach(self, process: ServerProcess) -> None:
        """The process is ready: its pipes are these."""
        self._process = process

    def send(self, op: str, body: bytes, scheduled_ns: int | None = None) -> Waiting:
        """Write one request. What it waits for always comes: the last line, or the end of the worker."""
        waiting = Waiting(next(self._numbers), scheduled_ns)
        with self._lock:
            refused = self._ended
            if refused is None:
                self._waiting[waiting.number] = waiting
        if refused is not None:
            waiting.finish("refused", refused)
        elif (lost := self._write(waiting, op, body)) is not None:
            self._finish(waiting, "closed", lost)
        return waiting

    def cancel(self, waiting: Waiting) -> None:
        """Ask the worker to give up a request; what it had said stays. Does not wait."""
        # A worker that no longer reads its pipe must not hold the caller up.
        arguments = (Waiting(waiting.number, None), "cancel", b"{}")
        threading.Thread(target=self._write, args=arguments, daemon=True).start()

    def ask(self, op: str, timeout_s: float = ASK_TIMEOUT_S) -> Mapping[str, Any]:
        """An answer that is no reply to a prompt (`counters`, `reset`). Raises EngineFailed where none comes."""
        waiting = self.send(op, b"{}")
        try:
            exchange = waiting.future.result(timeout_s)
        except TimeoutError:
            raise EngineFailed(
                f"the engine's worker has not answered for {timeout_s:g} s; its log is {self.log}."
            ) from None
        if exchange.eof != "complete":
            raise EngineFailed(f"{exchange.error}.")
        answer: dict[str, Any] = orjson.loads(exchange.reads[-1][1])
        if "error" in answer:
            raise EngineFailed(f"the engine's worker: {answer['error'].get('message')}.")
        return dict(answer["done"])

    def kill(self, why: str) -> None:
        """End the worker: every request that waits ends with it, and later ones are refused for this reason."""
        with self._lock:
            self._ended = self._ended or why
        if self._process is not None:
            self._process.kill()

    def take(self, line: bytes) -> bool:
        """One line of the worker's stdout; b"" is its end. False where the line is none of the protocol's."""
        now = _now()
        if not line:
            self._lost()
            return True
        try:
            said = orjson.loads(line)
            number = said["id"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return False
        waiting = self._waiting.get(number) if type(number) is int else None
        if waiting is None:  # an answer that nobody waits for any more
            return type(number) is int
        waiting.reads.append((now, line))
        if "step" not in said:
            self._finish(waiting, "complete", None)
        return True

    def _write(self, waiting: Waiting, op: str, body: bytes) -> str | None:
        """The line on the worker's stdin, `sent_ns` stamped just before; else why it could not be written."""
        assert self._process is not None
        pipe = self._process.process.stdin
        assert pipe is not None
        line = b'{"id":%d,"op":"%s","body":%s}\n' % (waiting.number, op.encode(), _one_line(body))
        with self._writing:
            waiting.sent_ns = _now()
            try:
                pipe.write(line)
                pipe.flush()
            except (OSError, ValueError):
                return self._how_it_ended()
        return None

    def _finish(self, waiting: Waiting, eof: Eof, error: str | None) -> None:
        """Only the first end of a request counts."""
        with self._lock:
            first = self._waiting.pop(waiting.number, None) is not None
        if first:
            waiting.finish(eof, error)

    def _lost(self) -> None:
        """The worker's stdout ended: nothing more will come."""
        why = self._how_it_ended()
        with self._lock:
            self._ended = self._ended or why
            why, left = self._ended, list(self._waiting.values())
        for waiting in left:
            self._finish(waiting, "closed", why)

    def _how_it_ended(self) -> str:
        how = self._process.how_it_ended() if self._process is not None else "unknown"
        return (
            f"the engine's worker ended (status {how}); its last words: {self._why(self.log)}; see {self.log}"
        )


@dataclass
class Waiting:
    """One request under way."""

    number: int
    scheduled_ns: int | None
    sent_ns: int = 0
    reads: list[Read] = field(default_factory=list)
    future: Future[Exchange] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # so that nothing but its end can settle it

    def finish(self, eof: Eof, error: str | None) -> None:
        """Hand over what came."""
        end_ns = self.reads[-1][0] if eof == "complete" and self.reads else _now()
        self.future.set_result(
            Exchange(self.scheduled_ns, self.sent_ns or end_ns, self.reads, end_ns, eof, error)
        )


def _one_line(body: bytes) -> bytes:
    return orjson.dumps(orjson.loads(body)) if b"\n" in body else body


# --- a worker as a session --------------------------------------------------------------------------------


@dataclass
class WorkerSession:
    """A worker that is ready. `counters` and `reset` ask it."""

    facts: Facts
    worker: Worker
    pids: tuple[int, ...]
    ready: Mapping[str, Any] = field(default_factory=dict)
    """What the worker said of itself when it was ready."""
    address: str = "worker:"

    def counters(self) -> Raw:
        """What the worker counted since it started."""
        return {name: float(value) for name, value in self.worker.ask("counters").items()}

    def reset(self) -> bool:
        """Whether the engine could forget what earlier requests left."""
        return bool(self.worker.ask("reset").get("ok"))


@contextmanager
def start_worker(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    facts: Facts,
    *,
    timeout_s: float = START_TIMEOUT_S,
    why: Callable[[Path], str] = last_line,
) -> Iterator[WorkerSession]:
    """Start a worker, wait until its model is loaded, and end it and all it started on leaving.

    Raises EngineFailed where it ends or is not ready in time. It dies with this process (`runners.server`).
    """
    worker = Worker(log, why)
    with serve(argv, env, log, timeout_s, why, worker.take) as process:
        worker.attach(process)
        yield WorkerSession(facts, worker, (process.pid,), process.ready)


def command(python: Sequence[str], engine: str | Path, asked: Mapping[str, Any]) -> tuple[str, ...]:
    """How a worker is started: `engine` is a file beside `main.py`, or any file with the same functions."""
    name = str(engine) if isinstance(engine, Path) else str(MAIN.with_name(f"{engine}_worker.py"))
    return (*python, "-u", str(MAIN), name, orjson.dumps(asked, option=orjson.OPT_SORT_KEYS).decode())


# --- the driver -------------------------------------------------------------------------------------------


class WorkerClient:
    """Sends requests to a worker, as many at a time as the load asks for; the worker batches or queues them."""

    def __init__(self, session: Any, *, timeout_s: float = TOTAL_TIMEOUT_S, grace_s: float = GRACE_S) -> None:
        self._worker: Worker = session.worker
        self._timeout_s, self._grace_s = timeout_s, grace_s

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def post(self, path: str, body: bytes, scheduled_ns: int | None = None) -> Exchange:
        """Send one request and return when its reply ended, however it ended.

        A request that lasts longer than `timeout_s` is given up; a worker that does not give it up either is
        ended, since nothing could be measured in it any more.
        """
        # Not in the event loop's thread: a write waits where the pipe is full.
        waiting = await asyncio.to_thread(self._worker.send, path, body, scheduled_ns)
        coming = asyncio.wrap_future(waiting.future)
        try:
            return await asyncio.wait_for(asyncio.shield(coming), self._timeout_s)
        except TimeoutError:
            return await self._give_up(waiting, coming)
        except asyncio.CancelledError:
            self._worker.cancel(waiting)
            raise

    async def _give_up(self, waiting: Waiting, coming: asyncio.Future[Exchange]) -> Exchange:
        why = f"no end of the reply within {self._timeout_s:g} s"
        self._worker.cancel(waiting)
        try:
            exchange = await asyncio.wait_for(asyncio.shield(coming), self._grace_s)
        except TimeoutError:
            self._worker.kill(f"the engine's worker hung in an earlier request ({why}) and was ended")
            exchange = await coming
        return Exchange(
            exchange.scheduled_ns, exchange.sent_ns, exchange.reads, exchange.end_ns, "timeout", why
        )


# --- from lines to a stream -------------------------------------------------------------------------------

_SHAPE = (AttributeError, KeyError, TypeError, ValueError)


def parse(exchange: Exchange) -> Stream:
    """One exchange with a worker as a Stream: one frame a step, its time the worker's own.

    `frame_tokens` are the numbers of ids, `marks` the records of the steps (ids, drafted, accepted) and
    `tail["worker"]` the last record. `error_kind` is one of refused, timeout, incomplete_read, in_band, bad_json.
    """
    try:
        return _parse(exchange)
    except _SHAPE as error:
        stream = Stream(done_ns=exchange.end_ns)  # nothing of it can be relied on
        return _fail(stream, "bad_json", f"a record of the worker does not have its shape: {error!r}")


def _parse(exchange: Exchange) -> Stream:
    records = [orjson.loads(line) for _, line in exchange.reads]
    steps = [record for record in records if record.get("step")]
    stream = Stream(done_ns=exchange.end_ns)
    _frames(stream, steps)
    end = records[-1] if records and not records[-1].get("step") else {}
    if "done" in end:
        _end(stream, end["done"], int(end["at"]))
    if exchange.eof != "complete":
        kind = {"refused": "refused", "timeout": "timeout"}.get(exchange.eof, "incomplete_read")
        return _fail(stream, kind, exchange.error)
    if "error" in end:
        return _fail(stream, str(end["error"]["kind"]), str(end["error"]["message"]))
    if "done" not in end:
        return _fail(stream, "bad_json", "the worker's last record is neither done nor error")
    stream.status = "ok" if steps else "empty"
    return stream


def _frames(stream: Stream, steps: Sequence[dict[str, Any]]) -> None:
    stream.frame_ns = [int(step["at"]) for step in steps]
    stream.frame_tokens = [len(step["step"]) for step in steps]
    stream.frame_step = list(range(len(steps)))
    stream.marks = list(steps)
    if not steps:
        return
    stream.first_output_ns, stream.last_output_ns = stream.frame_ns[0], stream.frame_ns[-1]
    stream.output_tokens, stream.output_tokens_from = sum(len(s["step"]) for s in steps), "server_ids"
    stream.first_frame_tokens, stream.first_frame_tokens_from = len(steps[0]["step"]), "reported"


def _end(stream: Stream, done: dict[str, Any], at_ns: int) -> None:
    stream.tail["worker"] = done
    stream.done_ns = at_ns
    stream.finish = FINISH.get(str(done.get("finish")), "none")
    stream.text = str(done.get("text") or "")
    if isinstance(done.get("prompt_tokens"), int):
        stream.prompt_tokens, stream.prompt_tokens_from = done["prompt_tokens"], "usage"
    stream.cached_tokens = done.get("cached_tokens")
    if stream.text:
        stream.first_content_ns = stream.first_output_ns
    if stream.output_tokens is None:
        stream.output_tokens, stream.output_tokens_from = 0, "server_ids"


def _fail(stream: Stream, kind: str, why: str | None) -> Stream:
    stream.status, stream.error_kind, stream.error = "failed", kind, why
    return stream
