"""From raw reads to a `Stream`: frames, text, token counts, status.

Runs after the cell's window, so it may be careful; it is still quick (about 2 µs a record), because its
time is client CPU that `specbench selftest` counts. A *frame* is a record that carries output on any
channel, stamped with the read that completed it: role chunks, keep-alive comments and the usage chunk are
not frames, the empty finish chunk is one only where the server's running count says that a token (the end
of text) came with it, and a frame is not a token.

Boundary: one reply in, one `Stream` out; no engine is named by the caller, the shapes tell themselves apart
(OpenAI chat and completions with the additions of vLLM, SGLang and llama.cpp, and llama.cpp's
/completion). HTTP and server-sent events are `sse`'s.
"""

from __future__ import annotations

import gc
import re
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

import orjson

from runners.base import Stream
from runners.client import Exchange
from runners.sse import Events, Message, read_events, read_message

Record = dict[str, Any]
Finish = Literal["stop", "length", "stop_string", "tool", "none"]

FINISH: dict[str, Finish] = {
    "stop": "stop",
    "eos": "stop",
    "length": "length",
    "limit": "length",
    "word": "stop_string",
    "tool_calls": "tool",
    "function_call": "tool",
}
"""`finish_reason` of OpenAI-like servers and `stop_type` of llama.cpp's /completion."""

TAIL_KEYS = ("usage", "timings", "metrics", "sglext")
CHOICE_KEYS = (
    "finish_reason",
    "stop_reason",
    "matched_stop",
    "avg_decoded_tokens_per_iter",
    "speculative_decoding",
)
"""What is kept of the choice that ends a reply; the last two are TensorRT-LLM's."""

BUFFERED_NS_PER_TOKEN = 50_000
BUFFERED_SHARE = 0.01
"""A reply is buffered where all its output comes within 1 % of the wait and faster than one token each
50 µs: 20,000 tokens/s in one stream is several times what any engine decodes."""


def parse(exchange: Exchange) -> Stream:
    """Read one exchange. Never raises for what a server sent; `status`, `error_kind` and `error` say it.

    `error_kind` is one of refused, timeout, incomplete_read, truncated, in_band, throttled, http,
    protocol, bad_json. Partial text and frames of a failed reply are kept.
    """
    collecting = gc.isenabled()
    gc.disable()  # decoding makes thousands of small dicts and no cycle: collections would find nothing
    try:
        return _parse(exchange)
    finally:
        if collecting:
            gc.enable()


def _parse(exchange: Exchange) -> Stream:
    reads = list(exchange.reads)
    message = read_message(reads)
    stream = Stream(http_status=message.status, done_ns=exchange.end_ns)
    body = b"".join(message.parts)
    if message.status is None:
        kind = {"refused": "refused", "timeout": "timeout"}.get(exchange.eof, "incomplete_read")
        return _fail(stream, "protocol" if message.broken else kind, exchange.error or message.broken)
    if not 200 <= message.status < 300:
        return _http_error(stream, message, body)
    events = read_events(message, body)
    try:
        seen = _collect(stream, events, message.times(reads, events.ends))
        _count_tokens(stream, seen)
        _check_counts(stream)
    except (AttributeError, KeyError, TypeError) as error:
        stream = Stream(http_status=message.status, done_ns=exchange.end_ns)  # nothing of it can be relied on
        return _fail(stream, "bad_json", f"a record does not have the shape of a completion: {error}")
    _judge(stream, exchange, events, seen)
    return stream


def coalesced(stream: Stream) -> float:
    """Share of the gaps between frames that are 0 because several frames came in one read (0 to 1)."""
    gaps = len(stream.frame_ns) - 1
    if gaps < 1:
        return 0.0
    return sum(a == b for a, b in zip(stream.frame_ns, stream.frame_ns[1:], strict=False)) / gaps


# --- records to frames ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Seen:
    """What the records said beside the frames themselves."""

    cumulative: list[int | None] = field(default_factory=list)
    """Output tokens so far, per frame, where the server keeps count (usage, timings, tokens_predicted)."""
    ids: list[int | None] = field(default_factory=list)
    """Number of token ids, per frame."""
    ended: bool = False
    finish_ns: int | None = None
    """When the record that ended the reply came, where it carried no output of its own."""
    whole: bool = False
    """A complete message stood where a delta belongs."""
    error: str | None = None


def _collect(stream: Stream, events: Events, times: list[int]) -> _Seen:
    """Walk the records once and fill in the stream's frames, texts and tail."""
    seen = _Seen(ended=events.done)
    texts: list[str] = []
    reasonings: list[str] = []
    add_ns, add_mark = stream.frame_ns.append, stream.marks.append
    add_cumulative, add_ids = seen.cumulative.append, seen.ids.append
    tail = stream.tail
    content_ns = None
    for index, (record, now) in enumerate(zip(events.records, times, strict=True)):
        if type(record) is not dict:
            continue
        text = reasoning = other = ids = None
        if choices := record.get("choices"):
            choice = choices[0]
            delta = choice.get("delta")
            if delta is None:
                delta, text = _undelta(choice, seen)
            elif len(delta) == 1:
                text = delta.get("content")
            if text is None:
                text, reasoning, other = _channels(delta, tail)
            ids = choice.get("token_ids")
            if choice.get("finish_reason") is not None:
                _finish(stream, seen, choice)
                tail["id"] = record.get("id")
        else:
            text = _bare(record, stream, seen, index == events.error_at)
        usage, timings = record.get("usage"), record.get("timings")
        if usage or timings or "metrics" in record or "sglext" in record:
            _keep_tail(record, tail)
            seen.ended = seen.ended or (bool(usage) and not choices)
        if not (text or reasoning or other or ids):
            if seen.finish_ns is None and "choice" in tail:
                seen.finish_ns = now
            continue
        if text:
            texts.append(text)
            content_ns = now if content_ns is None else content_ns
        if reasoning:
            reasonings.append(reasoning)
        add_ns(now)
        add_mark(timings)
        add_ids(len(ids) if ids else None)
        add_cumulative(_cumulative(record, usage, timings) if usage or timings or not choices else None)
    stream.text, stream.reasoning = "".join(texts), "".join(reasonings)
    stream.first_content_ns = content_ns
    if stream.frame_ns:
        stream.first_output_ns, stream.last_output_ns = stream.frame_ns[0], stream.frame_ns[-1]
    stream.frame_step = [None] * len(stream.frame_ns)
    return seen


def _keep_tail(record: Record, tail: Record) -> None:
    tail.update((key, record[key]) for key in TAIL_KEYS if record.get(key))


def _undelta(choice: Record, seen: _Seen) -> tuple[Record, str | None]:
    """A choice without `delta`: `text` on /v1/completions, or a whole `message` that was not streamed."""
    if message := choice.get("message"):
        seen.whole = True
        return message, None
    return {}, choice.get("text")


def _channels(delta: Record, tail: Record) -> tuple[str | None, str | None, bool]:
    """Content, reasoning (spelled either way) and whether a tool call is being written."""
    calls = delta.get("tool_calls")
    if calls:
        tail.setdefault("tool_calls", []).extend(calls)
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    return delta.get("content"), reasoning, bool(calls)


def _finish(stream: Stream, seen: _Seen, choice: Record) -> None:
    """The end of a choice. A `stop_reason` that is a string is the stop string that ended it (vLLM; SGLang
    calls it `matched_stop`); an integer there is a stop token."""
    seen.ended = True
    reason = choice["finish_reason"]
    stream.finish = FINISH.get(reason, "none")
    meta = {key: choice[key] for key in CHOICE_KEYS if key in choice}
    stream.tail["choice"] = meta
    if isinstance(choice.get("stop_reason") or choice.get("matched_stop"), str):
        stream.finish = "stop_string"
    if reason in ("error", "abort"):
        seen.error = f"the server ended the reply with finish_reason {reason}"


def _bare(record: Record, stream: Stream, seen: _Seen, is_error: bool) -> str | None:
    """A record without choices: usage, an error in a stream of status 200, or llama.cpp's /completion."""
    error = record.get("error")
    if error or is_error or record.get("object") == "error":
        seen.error = seen.error or _message_of(error or record)
        return None
    if record.get("stop") is True:
        seen.ended = True
        stream.finish = FINISH.get(record.get("stop_type", ""), "none")
        kept = (
            "stop_type",
            "stopping_word",
            "truncated",
            "tokens_evaluated",
            "tokens_predicted",
            "tokens_cached",
        )
        stream.tail["choice"] = {key: record[key] for key in kept if key in record}
    content = record.get("content")
    return content if isinstance(content, str) else None


def _message_of(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or orjson.dumps(error).decode())
    return str(error)


# --- token counts -----------------------------------------------------------------------------------------


def _cumulative(record: Record, usage: Record | None, timings: Record | None) -> int | None:
    """Output tokens up to and with this record, by the server's own count."""
    if usage:
        return usage.get("completion_tokens")
    if timings:
        return timings.get("predicted_n")
    return record.get("tokens_predicted")


def _count_tokens(stream: Stream, seen: _Seen) -> None:
    """Fill in every token count of the stream, each with its source."""
    usage, timings = stream.tail.get("usage") or {}, stream.tail.get("timings") or {}
    last = stream.tail.get("choice", {})
    stream.frame_tokens = _frame_tokens(seen)
    known_ids = [n for n in seen.ids if n is not None]
    for count, source in (
        (usage.get("completion_tokens"), "usage"),
        (sum(known_ids) or None, "server_ids"),
        (timings.get("predicted_n"), "usage"),
        (last.get("tokens_predicted"), "usage"),
    ):
        if count is not None:
            stream.output_tokens, stream.output_tokens_from = count, source
            break
    if stream.frame_tokens:
        first = stream.frame_tokens[0]
        stream.first_frame_tokens = 1 if first is None else first
        stream.first_frame_tokens_from = "assumed" if first is None else "reported"
    _add_finish_frame(stream, seen)
    stream.reasoning_tokens = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    _count_prompt(stream, usage, timings, last)


def _check_counts(stream: Stream) -> None:
    """Raise TypeError for a count that no server can mean: not a whole number, negative, or beyond 32 bits."""
    timings = stream.tail.get("timings") or {}
    names = ("prompt_tokens", "cached_tokens", "output_tokens", "first_frame_tokens", "reasoning_tokens")
    counts = {name: getattr(stream, name) for name in names} | {
        name: timings.get(name) for name in ("predicted_n", "draft_n", "draft_n_accepted")
    }
    if wrong := set(map(type, stream.frame_tokens)) - {int, NoneType}:
        raise TypeError(f"a count of tokens is a {wrong.pop().__name__}")
    counts["frame_tokens"] = max((n for n in stream.frame_tokens if n), default=0)
    for name, count in counts.items():
        if count is not None and (type(count) is not int or not 0 <= count < 2**31):
            raise TypeError(f"{name} is {count!r}")
    for name in ("prompt_ms", "predicted_ms"):
        if not isinstance(timings.get(name) or 0, int | float):
            raise TypeError(f"{name} is {timings[name]!r}")


def _add_finish_frame(stream: Stream, seen: _Seen) -> None:
    """Make the finish record a frame where the server's own count says that tokens came with it.

    llama.cpp sends no record for an end-of-text token, yet counts it and spends a step on it; that step
    ends when the finish record is sent. Without a running count nothing is known, and nothing is added.
    """
    shown = seen.cumulative[-1] if seen.cumulative else None
    if seen.finish_ns is None or not shown or stream.output_tokens is None or stream.output_tokens <= shown:
        return
    stream.frame_ns.append(seen.finish_ns)
    stream.frame_tokens.append(stream.output_tokens - shown)
    stream.frame_step.append(None)
    stream.marks.append(stream.tail.get("timings"))
    stream.last_output_ns = seen.finish_ns


def _count_prompt(stream: Stream, usage: Record, timings: Record, last: Record) -> None:
    """Prompt and cached tokens; llama.cpp's `prompt_n` is only what was not cached."""
    processed = timings.get("prompt_n")
    prompt = usage.get("prompt_tokens", last.get("tokens_evaluated"))
    if prompt is None and processed is not None:
        prompt = processed + timings.get("cache_n", 0)
    if prompt is not None:
        stream.prompt_tokens, stream.prompt_tokens_from = prompt, "usage"
    stream.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if stream.cached_tokens is None and processed is not None and prompt is not None:
        stream.cached_tokens = max(prompt - processed, 0)


def _frame_tokens(seen: _Seen) -> list[int | None]:
    """Tokens of each frame: differences of a running count, else the number of ids; None where unsaid.

    A running count that never leaves 0 while text flows is a placeholder, and one that goes back is wrong.
    """
    counts = seen.cumulative
    if not counts or (None in counts and any(seen.ids)) or not any(counts):
        return list(seen.ids)
    tokens: list[int | None] = []
    before: int | None = 0
    for count in counts:
        step = None if count is None or before is None else count - before
        tokens.append(step if step is None or step >= 0 else None)
        before = count
    return tokens


# --- status -----------------------------------------------------------------------------------------------


def _judge(stream: Stream, exchange: Exchange, events: Events, seen: _Seen) -> None:
    """Decide `status`: what failed, what was empty, what was not really streamed."""
    if seen.error is not None:
        _fail(stream, "in_band", seen.error)
        if not stream.frame_ns and stream.output_tokens is None:
            stream.output_tokens = 0  # seen, not reported: nothing was delivered
    elif not seen.ended and exchange.eof != "complete":
        _fail(stream, "timeout" if exchange.eof == "timeout" else "incomplete_read", exchange.error)
    elif events.bad is not None:
        _fail(stream, "bad_json", f"a record is not JSON: {_snippet(events.bad)}")
    elif not seen.ended:
        _fail(stream, "truncated", "the reply stopped without finish_reason, usage or [DONE]")
    elif not stream.frame_ns:
        stream.status = "empty"
    else:
        stream.status = "not_streamed" if seen.whole or _unstreamed(stream, exchange.sent_ns) else "ok"


def _unstreamed(stream: Stream, sent_ns: int) -> bool:
    """Whether several tokens came with no meaningful time between the first and the last."""
    first_ns, last_ns = stream.frame_ns[0], stream.frame_ns[-1]
    if len(stream.frame_ns) == 1:
        # Where only the total is known, an end-of-text token may be in it.
        tokens = stream.frame_tokens[0] or (stream.output_tokens or 0) - (stream.finish == "stop")
        return tokens > 1
    if first_ns == last_ns:
        return True
    after_first = max(stream.output_tokens or 0, len(stream.frame_ns)) - (stream.first_frame_tokens or 1)
    span_ns = last_ns - first_ns
    return span_ns < BUFFERED_NS_PER_TOKEN * after_first and span_ns < BUFFERED_SHARE * (last_ns - sent_ns)


def _http_error(stream: Stream, message: Message, body: bytes) -> Stream:
    retry = message.headers.get(b"retry-after", b"").strip()
    if retry.replace(b".", b"", 1).isdigit():
        stream.retry_after_s = float(retry)
    try:
        said = orjson.loads(body)
        why = _message_of(said.get("error") or said) if isinstance(said, dict) else _snippet(body)
    except orjson.JSONDecodeError:
        why = _snippet(body)
    return _fail(stream, "throttled" if message.status == 429 else "http", f"HTTP {message.status}: {why}")


def _snippet(body: bytes) -> str:
    words = re.sub(r"<[^>]*>", " ", body[:2000].decode(errors="replace")).split()
    return " ".join(words)[:200] or "(empty body)"


def _fail(stream: Stream, kind: str, why: str | None) -> Stream:
    stream.status, stream.error_kind, stream.error = "failed", kind, why
    return stream
