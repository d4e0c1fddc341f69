"""The streaming client: sends one HTTP/1.1 request a connection and keeps every socket read with its time.

A benchmark client must not be what it measures. Here a read costs one clock call and one list append:
`data_received` stamps first (CLOCK_MONOTONIC, the clock that engines on this host share) and keeps the
bytes; `runners.frames` parses them after the cell's window. Only the end of a reply is looked for on
line, and only where the tail of a read could be one.

Boundary: bytes and times. What the bytes mean is `frames`' business; when to send is `load`'s.
HTTP framing: RFC 9112. The cost of other clients: `specbench selftest`.
"""

from __future__ import annotations

import asyncio
import os
import select
import ssl
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from runners.spill import Read, Spill
from specbench.errors import SpecbenchError

T = TypeVar("T")
Eof = Literal["complete", "closed", "reset", "timeout", "refused"]

CONNECT_TIMEOUT_S = 10.0
"""A SYN is repeated after 1, 3 and 7 s; a host that has not answered by then is down."""
IDLE_TIMEOUT_S = 300.0
"""Longest silence within a reply: a queued request or a long prefill sends nothing for minutes."""
TOTAL_TIMEOUT_S = 1800.0
"""Longest whole reply: 32 Ki tokens at 20 tokens/s."""
MEMORY_CAP_BYTES = 1 << 30
"""Finished replies beyond this go to a temporary file until they are parsed."""

_now = time.monotonic_ns
_CHUNKED_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Exchange:
    """One request and the raw reply. Times are absolute CLOCK_MONOTONIC nanoseconds.

    `reads` holds (time of the read, its bytes), HTTP header included. `eof` says how it ended: `complete`
    (by HTTP's own framing), `closed` or `reset` by the peer before that, `timeout`, or `refused` where no
    connection was made; `error` is then the reason in words.
    """

    scheduled_ns: int | None
    sent_ns: int
    reads: Sequence[Read]
    end_ns: int
    eof: Eof
    error: str | None = None


class Client:
    """Keep-alive connections to one address; `async with` opens and closes it.

    `connections` is how many idle connections are kept, never a limit on requests in flight: `post` takes
    a free connection or opens one and does not wait for another request (`opened` counts them).
    Raises SpecbenchError for an address or header that cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        connections: int,
        timeout_s: float = TOTAL_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
        memory_cap_bytes: int = MEMORY_CAP_BYTES,
    ) -> None:
        self._host, self._port, self._base, self._tls = _split_address(address)
        self._fixed = _header_bytes(self._host, self._port, headers or {})
        self._keep, self._connect_timeout_s = connections, connect_timeout_s
        self._total_ns, self._idle_ns = int(timeout_s * 1e9), int(idle_timeout_s * 1e9)
        self._sweep_s = min(1.0, timeout_s / 4, idle_timeout_s / 4)
        self._free: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._spill = Spill(memory_cap_bytes)
        self._closed = False
        self.opened = 0
        """Connections opened so far."""

    async def __aenter__(self) -> Client:
        self._sweep()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._free, *self._busy]:
            connection.drop()
        self._free.clear()
        await asyncio.sleep(0)  # lets the transports close before the loop does

    async def post(self, path: str, body: bytes, scheduled_ns: int | None = None) -> Exchange:
        """Send `body` as JSON to `path` and return when the reply ended, however it ended.

        Network faults never raise: they are in `eof` and `error`. A kept connection that the server had
        silently closed is noticed before `sent_ns` is stamped, or, if it dies without one byte of
        reply, the request is sent once more on a fresh connection with `sent_ns` stamped anew.
        """
        request = b"POST %s%s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (
            self._base,
            path.encode(),
            self._fixed,
            len(body),
            body,
        )
        kept = self._take()
        if kept is not None:
            exchange = await self._exchange(kept, request, scheduled_ns)
            if exchange.reads or exchange.eof == "timeout" or self._closed:
                return self._finished(exchange)
        try:
            fresh = await self._open()
        except (OSError, TimeoutError) as error:
            return _refused(scheduled_ns, error)
        return self._finished(await self._exchange(fresh, request, scheduled_ns))

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        making = loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        _, connection = await asyncio.wait_for(making, self._connect_timeout_s)
        self.opened += 1
        return connection

    def _take(self) -> _Connection | None:
        while self._free:
            connection = self._free.pop()
            if connection.usable():
                return connection
            connection.drop()
        return None

    async def _exchange(self, connection: _Connection, request: bytes, scheduled_ns: int | None) -> Exchange:
        self._busy.add(connection)
        try:
            exchange = await connection.send(request, scheduled_ns)
        except asyncio.CancelledError:
            connection.drop()
            raise
        finally:
            self._busy.discard(connection)
        if connection.reusable and len(self._free) < self._keep:
            self._free.append(connection)
        else:
            connection.drop()
        return exchange

    def _finished(self, exchange: Exchange) -> Exchange:
        exchange.reads = self._spill.keep(exchange.reads)
        return exchange

    def _sweep(self) -> None:
        """One timer for all connections: a timer a read would cost more than the read."""
        now = _now()
        for connection in list(self._busy):
            connection.check_time(now, self._total_ns, self._idle_ns)
        self._sweeper = asyncio.get_running_loop().call_later(self._sweep_s, self._sweep)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop where the platform has it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class _Connection(asyncio.Protocol):
    """One socket: idle, or with one exchange in flight."""

    _transport: asyncio.Transport
    _done: asyncio.Future[Exchange]
    _parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.reusable = False
        self._in_flight = False
        self._dirty = False  # closed by the peer, or bytes that nobody asked for

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        # asyncio and uvloop set TCP_NODELAY themselves on every TCP transport.
        self._fd = transport.get_extra_info("socket").fileno()
        self._plain = transport.get_extra_info("ssl_object") is None
        self._readable = select.poll()
        self._readable.register(self._fd, select.POLLIN)

    def usable(self) -> bool:
        """Whether an idle connection is still open and silent; asks the kernel, not the event loop."""
        return not (self._dirty or self._transport.is_closing() or self._readable.poll(0))

    def send(self, request: bytes, scheduled_ns: int | None) -> asyncio.Future[Exchange]:
        """Stamp `sent_ns` and write. The future always gets an Exchange."""
        self._done = asyncio.get_running_loop().create_future()
        self._framing = _Framing()
        self._parser = httptools.HttpResponseParser(self._framing)
        self._fed, self._lazy, self._in_flight, self.reusable = 0, False, True, False
        self._reads: list[Read] = []
        self._append = self._reads.append
        self._scheduled_ns = scheduled_ns
        self._sent_ns = _now()
        self._write(request)
        return self._done

    def _write(self, request: bytes) -> None:
        """Straight to the socket where possible: uvloop writes only after the current loop pass."""
        sent = 0
        if self._plain:
            try:
                sent = os.write(self._fd, request)
            except BlockingIOError:
                pass
            except OSError as error:
                self._end("reset", str(error))
                return
        if sent < len(request):
            self._transport.write(request[sent:])

    def data_received(self, data: bytes) -> None:
        now = _now()
        if not self._in_flight:
            self._dirty = True
            return
        self._append((now, data))
        if not self._lazy or data.endswith(_CHUNKED_END) or len(data) < len(_CHUNKED_END):
            self._look_for_end()

    def _look_for_end(self) -> None:
        """Let httptools read what it has not seen yet, and end the exchange where the message ends."""
        try:
            for _, data in self._reads[self._fed :]:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end("closed", f"not an HTTP/1.1 reply: {error}")
            return
        self._fed, self._lazy = len(self._reads), self._framing.lazy
        if self._framing.complete:
            self.reusable = self._framing.keep_alive and self._parser.get_http_version() == "1.1"
            self._end("complete", None)

    def eof_received(self) -> bool:
        self._dirty = True
        if self._in_flight:
            self._peer_gone(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._dirty = True
        if self._in_flight:
            self._peer_gone(exc)

    def _peer_gone(self, exc: Exception | None) -> None:
        self._look_for_end()
        if not self._in_flight:
            return
        if exc is not None:
            self._end("reset", str(exc) or type(exc).__name__)
        elif self._framing.until_close:
            self._end("complete", None)
        else:
            self._end("closed", "the server closed the connection before the reply ended")

    def check_time(self, now: int, total_ns: int, idle_ns: int) -> None:
        """End the exchange where it has lasted or been silent too long."""
        if now - self._sent_ns > total_ns:
            self._time_out(f"no end of the reply within {total_ns / 1e9:g} s")
        elif now - (self._reads[-1][0] if self._reads else self._sent_ns) > idle_ns:
            self._time_out(f"no bytes for {idle_ns / 1e9:g} s")

    def _time_out(self, why: str) -> None:
        if self._in_flight:
            self._end("timeout", why)
            self._transport.abort()

    def _end(self, eof: Eof, error: str | None) -> None:
        self._in_flight = False
        end_ns = self._reads[-1][0] if eof == "complete" and self._reads else _now()
        if not self._done.done():
            self._done.set_result(
                Exchange(self._scheduled_ns, self._sent_ns, self._reads, end_ns, eof, error)
            )

    def drop(self) -> None:
        """Close at once."""
        if self._in_flight:
            self._end("closed", "the client was closed while the reply was in flight")
        self._transport.abort()


class _Framing:
    """What httptools reports of a reply's framing; it sees the header, then as little as possible."""

    def __init__(self) -> None:
        self.lazy = False  # chunked: only a tail that looks like the last chunk needs parsing
        self.until_close = False
        self.keep_alive = True
        self.complete = False
        self._length = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-length":
            self._length = True
        elif name.lower() == b"transfer-encoding" and value.lower().endswith(b"chunked"):
            self.lazy = True
        elif name.lower() == b"connection" and b"close" in value.lower():
            self.keep_alive = False

    def on_headers_complete(self) -> None:
        self.until_close = not (self._length or self.lazy)

    def on_message_complete(self) -> None:
        self.complete = True


# --- addresses and headers --------------------------------------------------------------------------------


def _split_address(address: str) -> tuple[str, int, bytes, ssl.SSLContext | None]:
    url = urlsplit(address)
    try:
        port = url.port
    except ValueError:
        port = -1
    if url.scheme not in ("http", "https") or not url.hostname or port == -1:
        raise SpecbenchError(
            f"url: {address!r} is not an http:// or https:// address such as http://127.0.0.1:8080."
        )
    tls = ssl.create_default_context() if url.scheme == "https" else None
    return url.hostname, port or (443 if tls else 80), url.path.rstrip("/").encode(), tls


def _header_bytes(host: str, port: int, headers: Mapping[str, str]) -> bytes:
    shown = f"[{host}]" if ":" in host else host
    fixed = {
        "Host": f"{shown}:{port}",
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Connection": "keep-alive",
    }
    for name, value in headers.items():
        if not name.isascii() or any(sign in name + value for sign in "\r\n\0"):
            raise SpecbenchError(
                f"headers: {name!r} holds a character that HTTP forbids; give it on one line."
            )
    return "".join(f"{name}: {value}\r\n" for name, value in (fixed | dict(headers)).items()).encode()


def _refused(scheduled_ns: int | None, error: BaseException) -> Exchange:
    now = _now()
    why = str(error) or f"no connection ({type(error).__name__})"
    return Exchange(scheduled_ns, now, [], now, "refused", why)
