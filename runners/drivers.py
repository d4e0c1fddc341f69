"""The two ways to drive an engine: our streaming client over HTTP, or a worker in the engine's own interpreter.

A driver is a client that sends one request and keeps what came back with its times, and a parser that reads that
after the window. Everything else of a run (load, records, counts) is the same for both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from runners import frames
from runners.base import Engine, Session, Stream
from runners.client import Client, Exchange


class Sender(Protocol):
    """Sends requests; safe for as many at a time as the load asks for."""

    def post(self, path: str, body: bytes, scheduled_ns: int | None = None) -> Awaitable[Exchange]:
        """Send one request and return when its reply ended, however it ended. Never raises for what came back."""


def sender(
    engine: Engine, session: Session, *, connections: int, timeout_s: float
) -> AbstractAsyncContextManager[Sender]:
    """The client of an engine's driver, open for one cell."""
    if engine.driver == "worker":
        from runners.worker import WorkerClient

        return WorkerClient(session, timeout_s=timeout_s)
    return Client(session.address, connections=connections, timeout_s=timeout_s)


def parser(engine: Engine) -> Callable[[Exchange], Stream]:
    """What reads the exchanges of an engine's driver."""
    if engine.driver == "worker":
        from runners import worker

        return worker.parse
    return frames.parse
