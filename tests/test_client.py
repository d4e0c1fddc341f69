"""runners.client against real sockets: keep-alive, ends of replies, timeouts, faults, memory."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from runners.client import Client, Exchange
from specbench.errors import SpecbenchError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on either event loop."""
    if request.param == "asyncio":
        return asyncio.run

    def on_uvloop(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work)

    return on_uvloop


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A server that calls `handler` with each request it has read and the number of its connection."""
    connections = 0

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        number, connections = connections, connections + 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                await handler(reader, writer, number)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def says(*writes: bytes, pause_s: float = 0.0, then_close: bool = False) -> Handler:
    """A handler that writes these pieces."""

    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        for data in writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if then_close:
            writer.close()

    return handler


def ask(handler: Handler, times: int = 1, **options: Any) -> Coroutine[Any, Any, tuple[list[Exchange], int]]:
    """Post `times` requests one after another; returns what came and how many connections were opened."""

    async def work() -> tuple[list[Exchange], int]:
        async with serving(handler) as address, Client(address, connections=4, **options) as client:
            exchanges = [await client.post("/x", b"{}") for _ in range(times)]
            return exchanges, client.opened

    return work()


def body(exchange: Exchange) -> bytes:
    return b"".join(data for _, data in exchange.reads)


def test_kept_connection_is_used_again(run: Any) -> None:
    exchanges, opened = run(ask(says(OK), times=3))
    assert [(e.eof, body(e)) for e in exchanges] == [("complete", OK)] * 3
    assert opened == 1


def test_connection_close_is_obeyed(run: Any) -> None:
    reply = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    exchanges, opened = run(ask(says(reply), times=2))
    assert ([e.eof for e in exchanges], opened) == (["complete", "complete"], 2)


def test_times_are_in_order_and_the_end_is_the_last_read(run: Any) -> None:
    (exchange,), _ = run(ask(says(CHUNKED, b"1\r\na\r\n", b"0\r\n\r\n", pause_s=0.01)))
    times = [exchange.sent_ns, *(t for t, _ in exchange.reads)]
    assert times == sorted(times)
    assert exchange.end_ns == times[-1]
    assert len(exchange.reads) == 3


@pytest.mark.parametrize("cut", range(1, 6))
def test_last_chunk_is_found_however_it_is_cut(run: Any, cut: int) -> None:
    wire = CHUNKED + b"4\r\nabcd\r\n0\r\n\r\n"
    exchanges, opened = run(ask(says(wire[:-cut], wire[-cut:], pause_s=0.01), times=2))
    assert ([e.eof for e in exchanges], opened) == (["complete", "complete"], 1)


def test_body_that_looks_like_the_last_chunk_is_not_the_end(run: Any) -> None:
    fake = CHUNKED + b"5\r\n0\r\n\r\n"  # the chunk's five bytes are 0 CR LF CR LF
    (exchange,), _ = run(ask(says(fake, b"\r\n0\r\n\r\n", pause_s=0.02)))
    assert (exchange.eof, body(exchange)) == ("complete", fake + b"\r\n0\r\n\r\n")


def test_reply_without_length_ends_with_the_connection(run: Any) -> None:
    (exchange,), _ = run(ask(says(b"HTTP/1.1 200 OK\r\n\r\n", b"data", then_close=True)))
    assert (exchange.eof, exchange.error) == ("complete", None)


def test_close_within_a_reply_is_closed(run: Any) -> None:
    (exchange,), _ = run(ask(says(CHUNKED + b"4\r\nab", then_close=True)))
    assert exchange.eof == "closed"
    assert "before the reply ended" in (exchange.error or "")


def test_reset_within_a_reply_is_reset(run: Any) -> None:
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(CHUNKED + b"4\r\nabcd\r\n")
        await asyncio.sleep(0.02)
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    (exchange,), opened = run(ask(handler))
    assert (exchange.eof, opened) == ("reset", 1)
    assert body(exchange) == CHUNKED + b"4\r\nabcd\r\n"


def test_something_that_is_not_http_ends_at_once(run: Any) -> None:
    (exchange,), _ = run(ask(says(b"SSH-2.0-OpenSSH_9.6\r\n")))
    assert exchange.eof == "closed"
    assert "not an HTTP/1.1 reply" in (exchange.error or "")


def test_refused_connection_is_told(run: Any) -> None:
    async def work() -> Exchange:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound but not listening
            async with Client(f"http://127.0.0.1:{taken.getsockname()[1]}", connections=1) as client:
                return await client.post("/x", b"{}", scheduled_ns=5)

    exchange = run(work())
    assert (exchange.eof, exchange.reads, exchange.scheduled_ns) == ("refused", [], 5)
    assert exchange.error


def test_silence_ends_by_the_idle_timeout(run: Any) -> None:
    (exchange,), _ = run(ask(says(CHUNKED, b"1\r\na\r\n"), idle_timeout_s=0.1))
    assert exchange.eof == "timeout"
    assert "no bytes" in (exchange.error or "")
    assert body(exchange)


def test_endless_reply_ends_by_the_total_timeout(run: Any) -> None:
    endless = says(CHUNKED, *[b"1\r\na\r\n"] * 1000, pause_s=0.01)
    (exchange,), _ = run(ask(endless, timeout_s=0.1))
    assert exchange.eof == "timeout"
    assert "no end" in (exchange.error or "")


def test_connection_closed_while_idle_is_noticed_before_sending(run: Any) -> None:
    async def work() -> tuple[Exchange, int]:
        async with serving(says(OK, then_close=True)) as address, Client(address, connections=1) as client:
            await client.post("/x", b"{}")
            await asyncio.sleep(0.05)
            return await client.post("/x", b"{}"), client.opened

    exchange, opened = run(work())
    assert (exchange.eof, body(exchange), opened) == ("complete", OK, 2)


def test_stray_bytes_on_an_idle_connection_are_not_the_next_reply(run: Any) -> None:
    async def work() -> tuple[Exchange, int]:
        late = says(OK, b"HTTP/1.1 500 Late\r\nContent-Length: 0\r\n\r\n", pause_s=0.01)
        async with serving(late) as address, Client(address, connections=1) as client:
            await client.post("/x", b"{}")
            await asyncio.sleep(0.05)
            return await client.post("/x", b"{}"), client.opened

    exchange, opened = run(work())
    assert (body(exchange), opened) == (OK, 2)


def test_connection_that_dies_on_use_is_tried_once_more(run: Any) -> None:
    """The server takes the second request of a connection and closes it without a byte."""
    served: list[int] = []

    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if number in served:
            writer.close()
        else:
            served.append(number)
            writer.write(OK)

    exchanges, opened = run(ask(handler, times=2))
    assert ([e.eof for e in exchanges], opened) == (["complete", "complete"], 2)
    assert exchanges[1].sent_ns > exchanges[0].end_ns


def test_fresh_connection_that_dies_is_not_tried_again(run: Any) -> None:
    (exchange,), opened = run(ask(says(then_close=True)))
    assert (exchange.eof, exchange.reads, opened) == ("closed", [], 1)


def test_more_requests_than_kept_connections_do_not_wait(run: Any) -> None:
    """Every reply ends only when all 12 requests have arrived, so a pool that waits would never end."""

    async def work() -> tuple[list[Exchange], int]:
        arrived, all_here = 0, asyncio.Event()

        async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            nonlocal arrived
            arrived += 1
            if arrived == 12:
                all_here.set()
            await all_here.wait()
            writer.write(OK)

        async with serving(handler) as address, Client(address, connections=2, timeout_s=20) as client:
            done = await asyncio.gather(*(client.post("/x", b"{}") for _ in range(12)))
            return done, client.opened

    exchanges, opened = run(work())
    assert ({e.eof for e in exchanges}, opened) == ({"complete"}, 12)


def test_request_larger_than_the_socket_takes_at_once_arrives_whole(run: Any) -> None:
    async def work() -> Exchange:
        async with serving(says(OK)) as address, Client(address, connections=1) as client:
            return await client.post("/x", b"x" * 20_000_000)

    assert run(work()).eof == "complete"


def test_request_says_host_length_and_given_headers(run: Any) -> None:
    async def work() -> bytes:
        heads: list[bytes] = []

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}/base/"
        async with server, Client(url, connections=1, headers={"Authorization": "Bearer k"}) as client:
            await client.post("/v1/x", b"{}")
        return heads[0].replace(b"%d" % port, b"PORT")

    head = run(work())
    assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\nHost: 127.0.0.1:PORT\r\n")
    assert b"\r\nAuthorization: Bearer k\r\n" in head
    assert head.endswith(b"\r\nContent-Length: 2\r\n\r\n")


def test_replies_beyond_the_memory_cap_come_back_from_the_file(run: Any) -> None:
    exchanges, _ = run(ask(says(OK), times=3, memory_cap_bytes=len(OK)))
    assert [body(e) for e in exchanges] == [OK] * 3
    assert [type(e.reads) is list for e in exchanges] == [True, False, False]
    assert (len(exchanges[2].reads), exchanges[2].reads[0]) == (1, next(iter(exchanges[2].reads)))


def test_leaving_the_client_ends_what_is_in_flight(run: Any) -> None:
    async def work() -> Exchange:
        async with serving(says()) as address:
            async with Client(address, connections=1) as client:
                waiting = asyncio.create_task(client.post("/x", b"{}"))
                await asyncio.sleep(0.05)
            return await waiting

    exchange = run(work())
    assert exchange.eof == "closed"
    assert "client was closed" in (exchange.error or "")


def test_cancelled_request_does_not_leave_its_connection_to_the_next(run: Any) -> None:
    async def work() -> tuple[Exchange, int]:
        async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
            if number:
                writer.write(OK)

        async with serving(handler) as address, Client(address, connections=1) as client:
            first = asyncio.create_task(client.post("/x", b"{}"))
            await asyncio.sleep(0.05)
            first.cancel()
            return await client.post("/x", b"{}"), client.opened

    exchange, opened = run(work())
    assert (exchange.eof, opened) == ("complete", 2)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:8080", "ftp://host", "http://", "http://host:port", "http://h:99999"]
)
def test_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(SpecbenchError, match="url:"):
        Client(address, connections=1)


def test_header_with_a_line_end_is_refused() -> None:
    with pytest.raises(SpecbenchError, match="headers:"):
        Client("http://127.0.0.1:1", connections=1, headers={"X": "a\r\nY: b"})
