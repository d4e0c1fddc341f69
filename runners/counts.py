"""Raw acceptance from parsed replies: steps, drafts and accepted tokens of each request and of a cell.

Boundary: no network, no engine; `counters` reads the server's totals. What each engine puts into a reply was
established by running it: llama.cpp's cumulative `timings` on every frame, and vLLM's record of speculation
beside the usage. Anything a reply cannot prove is None.

Steps are target passes after prefill. A step emits one token more than it accepts, unless the end of the
reply cuts it, so without truncation emitted = steps + accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runners.base import Counts, Raw, RequestCounts, Stream
from runners.counters import SpecDelta, spec_delta, total
from specbench.cell import Acceptance

SPECULATIVE = "slots_speculative"
"""Key under which a llama.cpp session records what `/slots` says: 1 where speculation is on, else 0."""


# --- llama.cpp --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """Cumulative counts at one moment of a reply: tokens, drafted, accepted, and the step's time stamp."""

    tokens: int
    drafted: int
    accepted: int
    at_ms: float

    @classmethod
    def of(cls, timings: Mapping[str, Any] | None) -> _Reading | None:
        """None where the record has no token count."""
        if not timings or not isinstance(timings.get("predicted_n"), int):
            return None
        drafted, accepted = timings.get("draft_n") or 0, timings.get("draft_n_accepted") or 0
        if type(drafted) is not int or type(accepted) is not int:
            return None
        return cls(timings["predicted_n"], drafted, accepted, float(timings.get("predicted_ms") or 0.0))


@dataclass(frozen=True)
class _Steps:
    """The steps of one reply. `drafts` holds the accepted count of each draft; None where they blur."""

    steps: int
    drafts: tuple[int, ...] | None
    frame_step: tuple[int | None, ...]


def llama_counts(streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
    """Counts of a llama.cpp cell: a row per stream given, its acceptance table and the server's totals.

    In the table `request` is the index of the stream in `streams`. The server counts each draft it verified,
    also where the reply ended inside it, so its totals may exceed what was emitted.
    """
    says = (total(after, SPECULATIVE), total(after, "llamacpp:spec_decode_num_drafts_total"))
    speculating = any(says) if says != (None, None) else None
    requests = tuple(_llama_request(stream, speculating) for stream in streams)
    return _cell(requests, spec_delta(before, after, "llamacpp:"), "llama.cpp")


def _llama_request(stream: Stream, speculating: bool | None) -> RequestCounts:
    """Where neither server nor reply speaks of drafts (`speculating` None), a step may have emitted any number."""
    timings = stream.tail.get("timings") or {}
    final = _Reading.of(timings)
    if final is None or final.tokens < 1 or stream.status == "failed":
        return RequestCounts()
    known = speculating or "draft_n" in timings
    if speculating is None and not known:
        return RequestCounts(
            server_prefill_ms=timings.get("prompt_ms"), server_decode_ms=timings.get("predicted_ms")
        )
    found = _llama_steps(stream, final)
    steps = found.steps if found else _derived_steps(stream, final)
    drafts = found.drafts if found and known else None
    return RequestCounts(
        steps=steps,
        steps_from=None if steps is None else "grouped" if found else "derived",
        steps_with_draft=None if drafts is None else len(drafts),
        drafted=final.drafted if known else None,
        accepted_verified=final.accepted if known else None,
        accepted_emitted=None if steps is None else final.tokens - 1 - steps,
        accept_hist=_histogram(drafts),
        frame_step=found.frame_step if found else None,
        server_prefill_ms=timings.get("prompt_ms"),
        server_decode_ms=timings.get("predicted_ms"),
    )


def _derived_steps(stream: Stream, final: _Reading) -> int | None:
    """Steps from the final counts alone: right where nothing was accepted or the limit trimmed the draft.

    A stop token or word inside an accepted draft leaves more accepted than emitted, and a reply does not
    say whether it had one.
    """
    if final.accepted == 0 or stream.finish == "length":
        return max(final.tokens - 1 - final.accepted, 0)
    return None


def _llama_steps(stream: Stream, final: _Reading) -> _Steps | None:
    """Group the tokens that one step emitted (they share `predicted_ms`); None where a frame has no mark.

    A step whose text is held back (part of a character) has no frame of its own, so steps are counted from
    what each group added: tokens minus accepted tokens, at least one. Tokens a step still owes are carried.
    """
    readings = [reading for mark in stream.marks if (reading := _Reading.of(mark)) is not None]
    if not readings or len(readings) != len(stream.frame_ns) or readings == [final]:
        return None  # one frame that holds the whole reply tells no step from another
    last = _Reading(1, 0, 0, 0.0)  # after prefill, which emits one token
    steps, owed, clear = 0, 0, True
    drafts: list[int] = []
    at_frame: list[int | None] = []
    for place, frames in _groups(readings, final):
        if place.tokens > 1:
            tokens, accepted = place.tokens - last.tokens - owed, place.accepted - last.accepted
            taken = max(1, tokens - accepted)
            owed = taken + accepted - tokens
            steps += taken
            drafted = place.drafted - last.drafted
            clear &= taken == 1 or drafted == 0
            drafts += [accepted] * (drafted > 0)
            last = place
        at_frame += [steps] * frames
    return _Steps(steps, tuple(drafts) if clear else None, tuple(at_frame))


def _groups(readings: Sequence[_Reading], final: _Reading) -> Iterable[tuple[_Reading, int]]:
    """The last reading of each step and its number of frames, in order; at the end what no frame shows."""
    groups: dict[float, tuple[_Reading, int]] = {}
    for reading in readings:
        frames = groups[reading.at_ms][1] if reading.at_ms in groups else 0
        groups[reading.at_ms] = (reading, frames + 1)
    if final.tokens > readings[-1].tokens:
        frames = groups[final.at_ms][1] if final.at_ms in groups else 0
        groups[final.at_ms] = (final, frames)
    return groups.values()


# --- vLLM -------------------------------------------------------------------------------------------------


def vllm_counts(streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
    """Counts of a vLLM cell, from `metrics.speculative_decoding` of each reply and the server's counters.

    In the table `request` is the index of the stream in `streams`. Both sources count drafts that were
    verified beyond the end of a reply; steps are therefore counted from the tokens of each frame.
    """
    window = spec_delta(before, after, "vllm:")
    is_vllm = any(name.startswith("vllm:") for name in after)
    speculating = True if window is not None else False if is_vllm else None
    requests = tuple(_vllm_request(stream, speculating) for stream in streams)
    return _cell(requests, window, "vllm")


def _vllm_request(stream: Stream, speculating: bool | None) -> RequestCounts:
    if stream.status == "failed":
        return RequestCounts()
    times = stream.tail.get("metrics") or {}
    record = times.get("speculative_decoding") or {}
    histogram = tuple(record.get("acceptance_histogram") or ()) or None
    frame_step = _vllm_frame_steps(stream, histogram, speculating)
    emitted = _emitted(stream)
    steps = None if frame_step is None else (frame_step[-1] or 0) + (_unshown(stream) > 0)
    return RequestCounts(
        steps=steps,
        steps_from=None if steps is None else "grouped",
        steps_with_draft=record.get("num_spec_steps"),
        drafted=record.get("num_draft_tokens"),
        accepted_verified=record.get("num_accepted_draft_tokens"),
        accepted_emitted=None if steps is None or emitted is None else emitted - steps,
        accept_hist=histogram,
        frame_step=frame_step,
        server_queue_ms=times.get("queue_time_ms"),
    )


def _emitted(stream: Stream) -> int | None:
    """Output tokens after prefill's."""
    if stream.output_tokens is None or not stream.frame_tokens or stream.frame_tokens[0] is None:
        return None
    return stream.output_tokens - stream.frame_tokens[0]


def _unshown(stream: Stream) -> int:
    """Tokens that no frame shows, such as an end token that came alone."""
    return (stream.output_tokens or 0) - sum(tokens or 0 for tokens in stream.frame_tokens)


def _vllm_frame_steps(
    stream: Stream, histogram: tuple[int, ...] | None, speculating: bool | None
) -> tuple[int | None, ...] | None:
    """The step of each frame, 0 for prefill's; None where a frame may hold more than one step.

    vLLM sends one frame a step unless its reader is slow or an interval was set. One frame a step is proved
    by the histogram of accepted lengths, which must be what the frames show but for the last step, cut short.
    """
    shown = [tokens for tokens in stream.frame_tokens if tokens is not None]
    if (
        _emitted(stream) is None
        or len(shown) != len(stream.frame_tokens)
        or shown[0] != 1
        or _unshown(stream) < 0
    ):
        return None
    unshown = _unshown(stream)
    steps = shown[1:] + ([unshown] if unshown else [])
    if not _one_step_each(steps, histogram, speculating):
        return None
    return tuple(range(len(shown)))


def _one_step_each(
    tokens: Sequence[int], histogram: tuple[int, ...] | None, speculating: bool | None
) -> bool:
    """Whether groups of `tokens` are single steps: each but the last emits its accepted tokens and one more."""
    if histogram is None:
        # No record of this request. Where a draft may have been accepted, only single tokens are certain, and
        # of a server that is not known to be vLLM not even those: it may split a step over several frames.
        return speculating is False or (speculating is True and all(count == 1 for count in tokens))
    left = Counter({length: count for length, count in enumerate(histogram) if length and count})
    left.subtract(count - 1 for count in tokens[:-1] if count > 1)
    cut = [length for length, count in left.items() for _ in range(count)]
    if min(left.values(), default=0) < 0 or len(cut) > 1:
        return False
    final = tokens[-1] - 1 if tokens else 0
    return final <= cut[0] if cut else final == 0


# --- both -------------------------------------------------------------------------------------------------


def _histogram(drafts: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Entry j is the number of drafts of which j tokens were accepted; None where nothing was drafted."""
    if not drafts:
        return None
    found = Counter(drafts)
    return tuple(found[length] for length in range(max(drafts) + 1))


def _cell(requests: tuple[RequestCounts, ...], window: SpecDelta | None, engine: str) -> Counts:
    window = window or SpecDelta()
    table = (*_cell_rows(window, f"{engine} counters"), *_request_rows(requests, f"{engine} reply"))
    return Counts(requests, table, window.drafts, window.draft_tokens, window.accepted, window.reset)


def _cell_rows(window: SpecDelta, source: str) -> Iterable[Acceptance]:
    if not window.drafts:
        return
    for position, accepted in enumerate(window.per_pos or (), start=1):
        yield Acceptance(
            scope="cell",
            request=None,
            position=position,
            drafts=window.drafts,
            accepted=accepted,
            source=source,
        )


def _request_rows(requests: Sequence[RequestCounts], source: str) -> Iterable[Acceptance]:
    for index, request in enumerate(requests):
        histogram = request.accept_hist or ()
        drafts = sum(histogram)
        for position in range(1, len(histogram) if drafts else 0):
            accepted = sum(histogram[position:])
            yield Acceptance(
                scope="request",
                request=index,
                position=position,
                drafts=drafts,
                accepted=accepted,
                source=source,
            )
