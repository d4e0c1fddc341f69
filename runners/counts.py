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
from specbench.cell import MAX_K, Acceptance

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
        """None where the record has no token count, or one of its figures is none."""
        said = record_of(timings)
        tokens, at_ms = count_in(said, "predicted_n"), said.get("predicted_ms") or 0.0
        drafted, accepted = (
            0 if said.get(name) is None else count_in(said, name) for name in ("draft_n", "draft_n_accepted")
        )
        if tokens is None or drafted is None or accepted is None or not isinstance(at_ms, int | float):
            return None
        return cls(tokens, drafted, accepted, float(at_ms))


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
        accept_hist=histogram_of(drafts),
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
            clear &= (taken == 1 or drafted == 0) and 0 <= accepted <= MAX_K
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
    times = record_of(stream.tail.get("metrics"))
    record = record_of(times.get("speculative_decoding"))
    histogram = histogram_in(record, "acceptance_histogram")
    frame_step = _vllm_frame_steps(stream, histogram, speculating)
    emitted = _emitted(stream)
    steps = None if frame_step is None else (frame_step[-1] or 0) + (_unshown(stream) > 0)
    return RequestCounts(
        steps=steps,
        steps_from=None if steps is None else "grouped",
        steps_with_draft=count_in(record, "num_spec_steps"),
        drafted=count_in(record, "num_draft_tokens"),
        accepted_verified=count_in(record, "num_accepted_draft_tokens"),
        accepted_emitted=None if steps is None or emitted is None else emitted - steps,
        accept_hist=histogram,
        frame_step=frame_step,
        server_queue_ms=_ms(times, "queue_time_ms"),
        server_prefill_ms=_prefill_ms(times),
        server_decode_ms=_ms(times, "generation_time_ms"),
    )


def _ms(times: Mapping[str, Any], name: str) -> float | None:
    value = times.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _prefill_ms(times: Mapping[str, Any]) -> float | None:
    """vLLM times the first token from the arrival of the request, its wait in the queue included."""
    first, queue = _ms(times, "time_to_first_token_ms"), _ms(times, "queue_time_ms")
    return None if first is None or queue is None else first - queue


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
    if min(left.values(), default=0) < 0 or left.total() > 1:
        return False
    cut = [length for length, count in left.items() if count]
    final = tokens[-1] - 1 if tokens else 0
    return final <= cut[0] if cut else final == 0


# --- what several engines share ---------------------------------------------------------------------------


def after_prefill(stream: Stream) -> int | None:
    """Output tokens after prefill's, of an engine whose prefill emits one."""
    return None if stream.output_tokens is None else max(stream.output_tokens - 1, 0)


MOST = 2**31
"""No request has as many tokens or drafts: a larger count is garbage."""


def record_of(value: object) -> dict[str, Any]:
    """What should be an object; empty where it is anything else."""
    return value if isinstance(value, dict) else {}


def count_in(record: Mapping[str, Any], name: str) -> int | None:
    """A count that a server sent; None where it is absent, or is anything but a number of things."""
    value = record.get(name)
    return value if type(value) is int and 0 <= value < MOST else None


def histogram_in(record: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """Drafts by accepted length as a server sent them; None where they are absent, none, or no counts."""
    found = record.get(name)
    if not isinstance(found, list) or len(found) > MAX_K + 1:
        return None
    if not all(type(count) is int and 0 <= count < MOST for count in found):
        return None
    return tuple(found) or None


def agreeing(
    histogram: tuple[int, ...] | None, drafts: int | None, accepted: int | None
) -> tuple[int, ...] | None:
    """The histogram; None where it disagrees with the two counts beside it."""
    if histogram is None or sum(histogram) != drafts:
        return None
    return histogram if sum(length * count for length, count in enumerate(histogram)) == accepted else None


def histogram_of(drafts: Sequence[int] | None) -> tuple[int, ...] | None:
    """Entry j is the number of drafts of which j tokens were accepted; None where nothing was drafted."""
    if not drafts:
        return None
    found = Counter(drafts)
    return tuple(found[length] for length in range(max(drafts) + 1))


def _cell(requests: tuple[RequestCounts, ...], window: SpecDelta | None, engine: str) -> Counts:
    window = window or SpecDelta()
    table = (*_cell_rows(window, f"{engine} counters"), *request_rows(requests, f"{engine} reply"))
    return Counts(requests, table, window.drafts, window.draft_tokens, window.accepted, window.reset)


def _cell_rows(window: SpecDelta, source: str) -> Iterable[Acceptance]:
    if not window.drafts:
        return
    # No draft was accepted, so no position has a counter yet: the drafts count all the same.
    per_pos = window.per_pos or ((0,) if window.accepted == 0 else ())
    for position, accepted in enumerate(per_pos, start=1):
        yield Acceptance(
            scope="cell",
            request=None,
            position=position,
            drafts=window.drafts,
            accepted=accepted,
            source=source,
        )


def request_rows(requests: Sequence[RequestCounts], source: str) -> Iterable[Acceptance]:
    """A row for each position that was reached, and for the first one in any case: its drafts count."""
    for index, request in enumerate(requests):
        histogram = request.accept_hist or ()
        drafts = sum(histogram)
        for position in range(1, max(len(histogram), 2) if drafts else 0):
            accepted = sum(histogram[position:])
            yield Acceptance(
                scope="request",
                request=index,
                position=position,
                drafts=drafts,
                accepted=accepted,
                source=source,
            )
