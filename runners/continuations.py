"""Draws many short continuations of one prompt, one a seed, for the test of `specbench.losslessness`.

Boundary: sends requests through the engine's own driver and hands back token ids. Nothing here is timed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from runners.base import Engine, Request, Session
from runners.client import TOTAL_TIMEOUT_S, Exchange, run_async
from runners.drivers import parser, sender
from runners.tokens import Tokenizer
from specbench.errors import InvalidMeasurement


def seeds(count: int, seed: int) -> tuple[int, ...]:
    """Different 31-bit seeds in a fixed order. Another `seed` gives others, for an independent sample."""
    return tuple(random.Random(f"continuations/{seed}").sample(range(2**31), count))


def continuations(
    engine: Engine,
    session: Session,
    request: Request,
    drawn: Sequence[int],
    tokenizer: Tokenizer,
    concurrency: int = 1,
) -> list[tuple[int, ...]]:
    """The reply to `request` under each seed, as ids made of its text, in the order of the seeds.

    Ask for one token more than is compared: engines cut a draft at the limit, so the last token is never drafted.
    Raises InvalidMeasurement where a reply fails.
    """
    requests = [replace(request, request=index, seed=seed) for index, seed in enumerate(drawn)]
    return [tokenizer.encode(text) for text in replies(engine, session, requests, concurrency)]


def replies(engine: Engine, session: Session, requests: Sequence[Request], concurrency: int = 1) -> list[str]:
    """The text of the reply to each request. Raises InvalidMeasurement where one fails."""
    exchanges = run_async(_post(engine, session, requests, concurrency))
    parse = parser(engine)
    streams = [parse(exchange) for exchange in exchanges]
    failed = next((stream for stream in streams if stream.status == "failed"), None)
    if failed is not None:
        raise InvalidMeasurement(
            f"continuations: a request failed ({failed.error}); look at the engine's log."
        )
    return [stream.text for stream in streams]


async def _post(
    engine: Engine, session: Session, requests: Sequence[Request], concurrency: int
) -> list[Exchange]:
    gate = asyncio.Semaphore(concurrency)
    async with sender(engine, session, connections=concurrency, timeout_s=TOTAL_TIMEOUT_S) as client:

        async def one(request: Request) -> Exchange:
            path = engine.path if request.prompt_ids is None else engine.ids_path
            async with gate:
                return await client.post(str(path), engine.body(request))

        return await asyncio.gather(*map(one, requests))
