"""*When* to send: a closed loop that keeps a fixed number of conversations in flight.

*How* to send is the client's; what a turn says is built here from the prompt and its history. Open-loop
arrivals are another function beside `closed_loop`, with the same `play`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from runners.base import Engine, Request, Stream
from runners.client import Exchange
from runners.drivers import Sender, parser
from specbench.cell import Config, Facts
from workloads import Prompt

Encode = Callable[[Sequence[Mapping[str, str]]], tuple[int, ...]]
"""Messages to the ids of the prompt that asks for their answer."""


@dataclass(frozen=True)
class Conversation:
    """One prompt as it will be played. `replies` are the frozen answers to its earlier turns, if any."""

    index: int
    first_request: int
    prompt: Prompt
    replies: tuple[str, ...] | None = None
    warmup: bool = False


@dataclass(frozen=True)
class Sent:
    """One request and what came back, unparsed."""

    request: Request
    exchange: Exchange


async def closed_loop(
    conversations: Iterable[Conversation], concurrency: int, play: Callable[[Conversation], Awaitable[None]]
) -> None:
    """Play every conversation, `concurrency` at a time; the next one starts when one ends."""
    waiting = iter(conversations)

    async def worker() -> None:
        for conversation in waiting:
            await play(conversation)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())


class Player:
    """Plays conversations turn by turn through one client and keeps what was exchanged."""

    def __init__(
        self,
        client: Sender,
        engine: Engine,
        config: Config,
        facts: Facts,
        encode: Encode | None = None,
    ) -> None:
        self._client, self._engine, self._config, self._encode = client, engine, config, encode
        self._model = facts.served_model or config.model
        self.sent: list[Sent] = []

    async def play(self, conversation: Conversation) -> None:
        """Send every turn of a conversation; a turn whose own history failed is not sent."""
        messages = _opening(conversation)
        for turn, text in enumerate(conversation.prompt.turns):
            messages = [*messages, {"role": "user", "content": text}]
            request = self._request(conversation, turn, messages)
            path = self._engine.path if request.prompt_ids is None else self._engine.ids_path
            exchange = await self._client.post(str(path), self._engine.body(request))
            self.sent.append(Sent(request, exchange))
            if turn + 1 == len(conversation.prompt.turns):
                return
            reply = self._reply(conversation, turn, exchange)
            if reply is None:
                return
            messages = [*messages, {"role": "assistant", "content": reply}]

    def _reply(self, conversation: Conversation, turn: int, exchange: Exchange) -> str | None:
        if conversation.replies is not None:
            return conversation.replies[turn]
        # Own history needs the answer now; parsing one reply between turns costs microseconds per frame.
        stream: Stream = parser(self._engine)(exchange)
        return None if stream.status == "failed" else stream.text

    def _request(self, conversation: Conversation, turn: int, messages: list[dict[str, str]]) -> Request:
        workload, sampling = self._config.workload, self._config.sampling
        # Requests of warm-up count down from −1, so they never share a number with a measured one.
        number = -1 - conversation.index if conversation.warmup else conversation.first_request + turn
        return Request(
            request=number,
            prompt_id=conversation.prompt.id,
            category=conversation.prompt.category,
            conversation=conversation.index,
            turn=turn,
            messages=tuple(messages),
            prompt_ids=self._encode(messages) if self._encode else None,
            model=self._model,
            max_tokens=min(workload.max_tokens, WARMUP_TOKENS)
            if conversation.warmup
            else workload.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.seed,
            ignore_eos=workload.stop == "fixed" and not conversation.warmup,
            warmup=conversation.warmup,
        )


def _opening(conversation: Conversation) -> list[dict[str, str]]:
    system = conversation.prompt.system
    return [{"role": "system", "content": system}] if system else []


def known_messages(conversation: Conversation) -> Iterator[list[dict[str, str]]]:
    """The messages of every turn that can be written before the conversation is played.

    With frozen replies that is every turn, else the first: later ones wait for the model's own answers.
    """
    messages = _opening(conversation)
    for turn, text in enumerate(conversation.prompt.turns):
        messages = [*messages, {"role": "user", "content": text}]
        yield messages
        if conversation.replies is None or turn == len(conversation.replies):
            return
        messages = [*messages, {"role": "assistant", "content": conversation.replies[turn]}]


WARMUP_TOKENS = 16
"""Enough for several decode and verify steps, little beside a run."""


def conversations(
    prompts: Sequence[Prompt], replies: dict[str, tuple[str, ...]] | None, shuffle_seed: str
) -> list[Conversation]:
    """Number the prompts of one block in a seeded order, the same for every arm of the block."""
    order = list(prompts)
    random.Random(shuffle_seed).shuffle(order)
    result, request = [], 0
    for index, prompt in enumerate(order):
        frozen = replies.get(prompt.id) if replies is not None else None
        result.append(Conversation(index, request, prompt, frozen))
        request += len(prompt.turns)
    return result


def warmups(prompts: Sequence[Prompt], concurrency: int) -> list[Conversation]:
    """Warm-up conversations: enough to fill the concurrency, at least two.

    The split alternates prompts that copy, which make an n-gram drafter draft, with open ones.
    """
    count = max(2, concurrency)
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    return [Conversation(i, 0, prompt, None, warmup=True) for i, prompt in enumerate(chosen)]
