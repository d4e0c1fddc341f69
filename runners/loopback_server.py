"""A scripted speculative-decoding server for tests, `selftest` and the example adapter: no model, real sockets.

Run as `python -m runners.loopback_server --script JSON`; it prints its address as one JSON line. It answers
/v1/chat/completions with server-sent events (`loopback_script` says which), /metrics with counters under
llama.cpp's or vLLM's names, /health, and /stamps with the due and the real time of each frame's write, on
the clock that the client stamps with, so that its lateness can be told from the client's.

Boundary: HTTP and time. Dies with its parent (PR_SET_PDEATHSIG and end of stdin).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import orjson

from runners.loopback_script import CLOSE, DIE, FAULTS, RESET, Event, Reply, Script


def http_reply(status: str, kind: str, body: bytes, extra: bytes = b"") -> bytes:
    """A whole HTTP reply."""
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\n%sContent-Length: %d\r\n\r\n"
    return head % (status.encode(), kind.encode(), extra, len(body)) + body


DEEDS = (RESET, CLOSE, DIE)
"""Events that break a reply off."""
LAST_WORDS = "RuntimeError: the scripted engine died in the middle of a reply"

REFUSALS = {
    "429": http_reply(
        "429 Too Many Requests",
        "application/json",
        b'{"error":{"message":"too many requests","type":"rate_limit_error"}}',
        b"Retry-After: 3\r\n",
    ),
    "503": http_reply("503 Service Unavailable", "text/html", b"<html><body><h1>503 Busy</h1></body></html>"),
}
"""Faults that answer at once instead of streaming."""


# --- the server -------------------------------------------------------------------------------------------


class Server:
    """What all connections share: the script, the request count, the counters, the stamps.

    A server that speaks another dialect overrides `make`, `refuse`, `get` and the counting.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests = 0
        self.stamps: dict[str, list[tuple[int, int]]] = {}
        self.prebuilt: dict[bytes, tuple[Reply, list[Event]]] = {}
        self.forget()

    def forget(self) -> None:
        """Counters at 0, as after a restart."""
        self.prompt_tokens = self.predicted = 0
        self.drafts = self.drafted = 0
        self.per_position = [0] * self.script.k

    def make(self, path: bytes, ask: dict[str, Any], index: int) -> Reply:
        """The reply to a request."""
        return Reply(self.script, ask, index)

    def refuse(self, path: bytes, body: bytes) -> bytes | None:
        """What is answered at once to a POST that asks for no text; None where it does."""
        return None

    def events(self, path: bytes, body: bytes, index: int, fault: str) -> tuple[Reply, list[Event]]:
        """A reply's events, framed as HTTP chunks. A script that waits for nothing keeps the last
        one built, so that it can write as fast as the socket takes it."""
        instant = not (self.script.step_ms or self.script.prefill_ms or fault)
        if not instant or body not in self.prebuilt:
            reply = self.make(path, orjson.loads(body), index)
            events = FAULTS[fault](reply.events()) if fault else reply.events()
            framed = [e if e.data in DEEDS else e._replace(data=_chunk(e.data)) for e in events]
            self.prebuilt = {body: (reply, framed)}
        reply, framed = self.prebuilt[body]
        self.count(reply)
        return reply, framed

    def finished(self, reply: Reply) -> None:
        """A reply was sent to its end."""

    def count(self, reply: Reply) -> None:
        """Add a reply to the counters."""
        self.prompt_tokens += reply.prompt_tokens
        for step in reply.steps:
            self.predicted += step.tokens
            self.drafts += step.drafted > 0
            self.drafted += step.drafted
            for position in range(step.accepted):
                self.per_position[position] += 1

    def metrics(self) -> str:
        """Prometheus text. As on llama.cpp, a position appears with its first acceptance."""
        vllm = self.script.style == "vllm"
        label = 'engine="0"' if vllm else ""
        names = ("vllm:", "generation_tokens") if vllm else ("llamacpp:", "tokens_predicted")
        values = {
            "prompt_tokens": self.prompt_tokens,
            names[1]: self.predicted,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_num_draft_tokens": self.drafted,
            "spec_decode_num_accepted_tokens": sum(self.per_position),
        }
        lines = [_sample(names[0] + name, (label,), value) for name, value in values.items()]
        per_position = names[0] + "spec_decode_num_accepted_tokens_per_pos"
        for position, value in enumerate(self.per_position):
            if value:
                lines.append(_sample(per_position, (label, f'position="{position}"'), value))
        return "".join(lines)

    def get(self, path: bytes) -> bytes:
        """Reply to GET."""
        if path == b"/health":
            return http_reply("200 OK", "application/json", b'{"status":"ok"}')
        if path == b"/metrics":
            return http_reply("200 OK", "text/plain; version=0.0.4", self.metrics().encode())
        if path == b"/stamps":
            return http_reply("200 OK", "application/json", orjson.dumps(self.stamps))
        return http_reply("404 Not Found", "application/json", b'{"error":{"message":"no such path"}}')


def _sample(name: str, labels: tuple[str, ...], value: int) -> str:
    inside = ",".join(label for label in labels if label)
    return f"{name}_total{{{inside}}} {value}\n" if inside else f"{name}_total {value}\n"


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


class Connection(asyncio.Protocol):
    """One client connection, kept alive; requests on it are answered in turn."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def connection_lost(self, exc: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, gap, rest = self.buffer.partition(b"\r\n\r\n")
        if not gap:
            return
        method, path, _ = head.split(b" ", 2)
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0]) if lengths else 0
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        if method != b"POST":
            self.transport.write(self.server.get(path))
        elif (answer := self.server.refuse(path, rest[:length])) is not None:
            self.transport.write(answer)
        else:
            self.post(path, rest[:length])

    def post(self, path: bytes, body: bytes) -> None:
        """Start a reply, or refuse where a fault says so."""
        index, self.server.requests = self.server.requests, self.server.requests + 1
        fault = self.server.script.faults.get(str(index), "")
        if fault == "forget":
            self.server.forget()
            fault = ""
        if fault in REFUSALS:
            self.transport.write(REFUSALS[fault])
        elif fault != "hang":
            reply, events = self.server.events(path, body, index, fault)
            self.task = asyncio.create_task(self.play(reply, events, str(reply.ask.get("user", index))))

    async def play(self, reply: Reply, events: list[Event], user: str) -> None:
        """Write each event when it is due; events of one burst share a write."""
        start_ns = time.monotonic_ns()
        stamps: list[tuple[int, int]] = []
        self.transport.write(STREAM_HEAD)
        for burst in _bursts(events, self.server.script.burst):
            due_ns = start_ns + int(burst[0].due_s * 1e9)
            await asyncio.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            if burst[0].data in DEEDS:
                self.break_off(burst[0].data)
                return
            now_ns = time.monotonic_ns()
            self.transport.write(b"".join([event.data for event in burst]))
            stamps += [(due_ns, now_ns) for event in burst if event.frame]
        self.server.finished(reply)
        self.transport.write(b"0\r\n\r\n")
        if self.server.script.stamps:
            self.server.stamps[user] = stamps

    def break_off(self, deed: bytes) -> None:
        """Close within a reply; with a TCP reset where asked (RFC 9293: linger of 0 s), or by ending at once."""
        if deed == DIE:
            print(LAST_WORDS, file=sys.stderr, flush=True)
            os._exit(1)
        if deed == RESET:
            raw = self.transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


def _bursts(events: list[Event], size: int) -> Iterator[list[Event]]:
    """Runs of at most `size` events that are due together; a break of the connection stands alone."""
    burst: list[Event] = []
    for event in events:
        alone = event.data in DEEDS
        if burst and (len(burst) == size or event.due_s != burst[0].due_s or alone):
            yield burst
            burst = []
        burst.append(event)
    yield burst


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def announce(address: str) -> None:
    """Say on stdout, as one JSON line, where the server listens."""
    print(orjson.dumps({"address": address, "pid": os.getpid()}).decode(), flush=True)


async def serve(server: Server, port: int, listens: Callable[[str], None] = announce) -> None:
    """Listen on 127.0.0.1, tell `listens` where, and run until the parent is gone."""
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=1024)
    address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    listens(address)
    await listening.serve_forever()


def die_with_parent() -> None:
    """End with the parent, however it ends: by signal from the kernel, and when its end of stdin closes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    threading.Thread(target=_exit_at_end_of_stdin, daemon=True).start()


def _exit_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(prog="runners.loopback_server")
    parser.add_argument("--script", default="{}", help="Script as JSON")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free port")
    args = parser.parse_args()
    die_with_parent()
    run(Server(Script.from_json(args.script)), args.port)


def run(server: Server, port: int, listens: Callable[[str], None] = announce) -> None:
    """Serve on the fastest event loop there is."""
    with asyncio.Runner(loop_factory=_fastest_loop()) as runner:
        runner.run(serve(server, port, listens))


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
