"""What the loopback server says, and when: text, steps, drafts and faults from a script and the prompt alone.

Two servers with one seed say the same text whatever they draft, so greedy arms are equal by construction.
Replies are OpenAI chat chunks, with llama.cpp's `timings` where asked and vLLM's
`metrics.speculative_decoding` where configured.

A step is one imagined target pass: it drafts up to k tokens, keeps the first ones by the conditional
acceptance of each position, and emits one more (Leviathan et al. 2023, arXiv 2211.17192, section 2).

Boundary: no socket and no clock here, and nothing of specbench or the other runners.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import orjson

WORDS = (  # noqa: SIM905
    "the of and to in is that it was for on are with as be at one have this from or had by hot but some what "
    "there we can out other were all your when up use word how said an each she which do their time if will way "
    "about many then them would write like so these her long make thing see him two has look more day could go "
    "come did my sound no most number who over know water than call first people may down side been now find"
).split()
"""What it says: common English words, one token each."""


@dataclass(frozen=True)
class Script:
    """Everything that decides what the server does. Times are milliseconds."""

    seed: int = 0
    k: int = 0
    accept: tuple[float, ...] = ()
    """Conditional acceptance of each draft position; the last one holds for the positions after it."""
    coverage: float = 1.0
    """Share of steps that find something to draft."""
    step_ms: float = 2.0
    draft_ms: float = 0.0
    """Added to a step for each drafted token."""
    prefill_ms: float = 5.0
    frames: str = "token"
    """`token`: one event a token, like llama.cpp; `step`: one event a step, like vLLM."""
    style: str = "llamacpp"
    """Whose names the counters have, `llamacpp` or `vllm`."""
    overrun: bool = False
    """Drafts are whole, and counted whole, also where the reply ends inside them, as vLLM and SGLang have them."""
    faults: dict[str, str] = field(default_factory=dict)
    """Index of a request, from 0, to the fault that hits it: a key of FAULTS, or 429, 503, hang, forget."""
    burst: int = 1
    """Events that are due together and share one write, so that the client has a backlog."""
    stamps: bool = False
    """Keep the due and the real time of every frame's write for /stamps."""

    @classmethod
    def from_json(cls, text: str) -> Script:
        """Read a script; an unknown key is a ValueError."""
        given = orjson.loads(text)
        if unknown := set(given) - {f.name for f in fields(cls)}:
            raise ValueError(f"script: unknown key {sorted(unknown)[0]!r}")
        return cls(**given | {"accept": tuple(given.get("accept", ()))})


# --- what will be said, and when --------------------------------------------------------------------------


class Step(NamedTuple):
    """One target pass: tokens emitted, drafted and accepted. The first of a reply is the prefill."""

    tokens: int
    drafted: int
    accepted: int


class Event(NamedTuple):
    """One server-sent event: when it is due after the request, its bytes, and whether it carries output."""

    due_s: float
    data: bytes
    frame: bool


def tokens_of(script: Script, prompt: str, count: int) -> list[int]:
    """The reply's tokens, as indices of WORDS: from prompt and seed alone."""
    return random.Random(f"{script.seed}|{prompt}").choices(range(len(WORDS)), k=count)


def steps_of(script: Script, prompt: str, count: int) -> list[Step]:
    """Draft and keep until `count` tokens are out; drafts are cut to what is still wanted, unless they overrun."""
    rng = random.Random(f"{script.seed}|{prompt}|steps")
    steps, left = [Step(1, 0, 0)], count - 1
    while left > 0:
        wanted = script.k if script.overrun else min(script.k, left - 1)
        drafted = wanted if rng.random() < script.coverage else 0
        accepted = 0
        while accepted < drafted and rng.random() < script.accept[min(accepted, len(script.accept) - 1)]:
            accepted += 1
        tokens = min(accepted + 1, left)
        steps.append(Step(tokens, drafted, accepted))
        left -= tokens
    return steps


class Reply:
    """One reply, worked out before its first byte: its steps, its tokens and its events."""

    def __init__(self, script: Script, ask: dict[str, Any], index: int) -> None:
        self.script, self.ask = script, ask
        self.chat = "prompt" not in ask
        if self.chat:
            self.prompt = "\n".join(str(message.get("content", "")) for message in ask["messages"])
        else:
            self.prompt = " ".join(map(str, ask["prompt"]))  # ids: each is a token of the prompt
        self.prompt_tokens = len(self.prompt.split())
        count = int(ask.get("max_tokens", 16))
        self.steps = steps_of(script, self.prompt, count)
        self.tokens = tokens_of(script, self.prompt, count)
        self.phase_s = random.Random(f"{script.seed}|{index}").random() * script.step_ms / 1e3
        self.id = f"chatcmpl-{index:016x}"

    def events(self) -> list[Event]:
        """Role, output, finish, usage and [DONE], as the OpenAI API orders them."""
        script, now_s = self.script, self.phase_s + self.script.prefill_ms / 1e3
        sent = drafted = accepted = 0
        decode_ms = 0.0
        out = [self._event(now_s, {"role": "assistant", "content": ""}, None)]
        for number, step in enumerate(self.steps):
            if number:
                step_ms = script.step_ms + step.drafted * script.draft_ms
                now_s, decode_ms = now_s + step_ms / 1e3, decode_ms + step_ms
            drafted, accepted = drafted + step.drafted, accepted + step.accepted
            size = 1 if script.frames == "token" else step.tokens
            for first in range(sent, sent + step.tokens, size):
                # A microsecond a step tells steps apart that take no time.
                timings = self._timings(first + size, decode_ms + number * 1e-3 + 1e-3, drafted, accepted)
                out.append(self._frame(now_s, first, size, timings))
            sent += step.tokens
        return [*out, *self._closing(now_s, timings), Event(now_s, b"data: [DONE]\n\n", False)]

    def _closing(self, due_s: float, timings: dict[str, Any]) -> list[Event]:
        """What follows the output."""
        return [self._event(due_s, {}, "length"), self._usage(due_s, timings)]

    def _frame(self, due_s: float, first: int, size: int, timings: dict[str, Any]) -> Event:
        """An event with tokens `first` to `first + size`, and what the style and the request add to it."""
        tokens = self.tokens[first : first + size]
        extra: dict[str, Any] = {"timings": timings} if self.ask.get("timings_per_token") else {}
        if self.script.style == "vllm":
            extra = {}
            if (self.ask.get("stream_options") or {}).get("continuous_usage_stats"):
                extra["usage"] = self._tokens_used(first + size)
        text = "".join(f" {WORDS[token]}" for token in tokens)
        ids = tokens if self.ask.get("return_token_ids") else None
        return self._event(due_s, {"content": text}, None, True, ids, **extra)

    def _event(
        self,
        due_s: float,
        delta: dict[str, Any],
        finish: str | None,
        frame: bool = False,
        ids: list[int] | None = None,
        **extra: Any,
    ) -> Event:
        says = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **says, "logprobs": None, "finish_reason": finish}
        if self.script.style == "vllm":
            choice["token_ids"] = ids
        return Event(due_s, self._sse({"choices": [choice]} | extra), frame)

    def _tokens_used(self, output: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
        }

    def _usage(self, due_s: float, timings: dict[str, Any]) -> Event:
        usage = self._tokens_used(timings["predicted_n"]) | {"prompt_tokens_details": {"cached_tokens": 0}}
        extra: dict[str, Any] = {"timings": timings}
        if self.script.style == "vllm":
            extra = {"metrics": {"speculative_decoding": self._speculative()}}
        return Event(due_s, self._sse({"choices": [], "usage": usage} | extra), False)

    def _sse(self, content: dict[str, Any]) -> bytes:
        base = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": 1_790_000_000,
            "model": "loopback",
        }
        return b"data: %s\n\n" % orjson.dumps(base | content)

    def _timings(self, predicted: int, decode_ms: float, drafted: int, accepted: int) -> dict[str, Any]:
        timings: dict[str, Any] = {
            "cache_n": 0,
            "prompt_n": self.prompt_tokens,
            "prompt_ms": self.script.prefill_ms,
            "predicted_n": predicted,
            "predicted_ms": round(decode_ms, 3),
        }
        # As on llama.cpp, the fields exist only once something was drafted.
        return timings | ({"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {})

    def _speculative(self) -> dict[str, Any]:
        drafts = [step for step in self.steps if step.drafted]
        histogram = [sum(step.accepted == n for step in drafts) for n in range(self.script.k + 1)]
        return {
            "acceptance_histogram": histogram,
            "num_spec_steps": len(drafts),
            "num_accepted_draft_tokens": sum(step.accepted for step in drafts),
            "num_draft_tokens": sum(step.drafted for step in drafts),
            "num_spec_tokens": self.script.k,
            "per_step_accepted": [step.accepted for step in drafts],
            "per_step_drafted": [step.drafted for step in drafts],
        }


# --- faults -----------------------------------------------------------------------------------------------

RESET, CLOSE, DIE = b"\0reset", b"\0close", b"\0die"
"""Events that the player does not send but does."""


def _half(events: list[Event]) -> list[Event]:
    return events[: len(events) // 2]


def _cut(events: list[Event], how: bytes) -> list[Event]:
    kept = _half(events)
    return [*kept, Event(kept[-1].due_s, how, False)]


def _in_band_error(events: list[Event]) -> list[Event]:
    kept = _half(events)
    error = b'data: {"error":{"message":"the loopback engine stopped","type":"InternalServerError","code":500}}\n\n'
    return [*kept, Event(kept[-1].due_s, error, False), events[-1]]


def _merged(events: list[Event], size: int) -> list[Event]:
    groups = [events[i : i + size] for i in range(0, len(events), size)]
    return [Event(group[-1].due_s, b"".join(e.data for e in group), group[0].frame) for group in groups]


def _empty(events: list[Event]) -> list[Event]:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":0,"total_tokens":1}}\n\n'
    return [events[0], events[-3], Event(events[-2].due_s, usage, False), events[-1]]


FAULTS: dict[str, Callable[[list[Event]], list[Event]]] = {
    "reset": lambda events: _cut(events, RESET),
    "close": lambda events: _cut(events, CLOSE),
    "die": lambda events: _cut(events, DIE),
    "truncated": _half,
    "error": _in_band_error,
    "coalesced": lambda events: _merged(events, 3),
    "buffered": lambda events: _merged(events, len(events)),
    "empty": _empty,
    "usage_missing": lambda events: [*events[:-2], events[-1]],
}
"""What can go wrong in a stream, as a change to its events."""
