"""Raw acceptance of a TensorRT-LLM cell, from each reply, `/perf_metrics` and the server's counters.

Boundary: as `counts`; `tensorrt_llm` reads the pages. Read off TensorRT-LLM's source and documentation, whose
server was not run here:

- `avg_decoded_tokens_per_iter` of a choice is generated tokens / iterations, and prefill is an iteration, so
  steps = tokens / it − 1.
- `/perf_metrics` names a request by the number in its reply's id, and gives its drafted and accepted tokens.
- `speculative_decoding` of a choice (an open proposal) has the histogram and the steps with a draft.
- `/prometheus/metrics` counts drafted and accepted tokens but no drafts; the iterations of `/metrics` also say
  how many requests drafted, but are given away when they are read and kept only for so long. Older servers have
  one queue for both pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runners.base import Counts, Raw, RequestCounts, Stream
from runners.counters import SpecDelta, delta, spec_delta, total, went_back
from runners.counts import MOST, after_prefill, agreeing, count_in, histogram_in, record_of, request_rows

PREFIX = "trtllm_"
SPECULATIVE = "trtllm_speculative"
"""Key under which a session records whether the server says that speculation is on."""
PERF = "trtllm_perf_"
"""Prefix of the keys that hold `/perf_metrics`, by request: `trtllm_perf_total_draft_tokens{request="7"}`."""
ITERATIONS = "trtllm_iter_"
"""Prefix of the sums over the iterations that `/metrics` gave away."""
_ID = re.compile(r"-(\d+)$")
_ROUNDING = 0.02
"""Tokens per iteration is sent as a 32-bit float: a whole number of iterations is met this closely."""


def trtllm_counts(streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
    """Counts of a TensorRT-LLM cell. In the table `request` is the index of the stream in `streams`."""
    says = total(after, SPECULATIVE)
    speculating = None if says is None else bool(says)
    requests = tuple(_request(stream, speculating, after) for stream in streams)
    found = _window(before, after)
    table = tuple(request_rows(requests, "tensorrt-llm reply"))
    return Counts(requests, table, found.drafts, found.draft_tokens, found.accepted, found.reset)


def _window(before: Raw, after: Raw) -> SpecDelta:
    """The server's totals, with the drafts of the iterations where both counted the same tokens.

    Iterations alone stand where there are no totals; a part of them (some were lost) proves nothing.
    """
    counted, summed = spec_delta(before, after, PREFIX), _iterations(before, after)
    if counted is None:
        return summed
    same = (counted.draft_tokens, counted.accepted) == (summed.draft_tokens, summed.accepted)
    return replace(counted, drafts=summed.drafts) if same else counted


def _iterations(before: Raw, after: Raw) -> SpecDelta:
    """Sums over the iterations of the window; nothing where none was read or one was lost."""
    names = [ITERATIONS + what for what in ("count", "drafts", "draft_tokens", "accepted_tokens", "lost")]
    if any(went_back(before, after, name) for name in names):
        return SpecDelta(reset=True)
    count, drafts, tokens, accepted, lost = (round(delta(before, after, name) or 0) for name in names)
    return SpecDelta(drafts, tokens, accepted) if count and not lost else SpecDelta()


def _request(stream: Stream, speculating: bool | None, after: Raw) -> RequestCounts:
    if stream.status == "failed":
        return RequestCounts()
    choice = stream.tail.get("choice") or {}
    steps, emitted = _steps(stream, choice, speculating), after_prefill(stream)
    known = RequestCounts(
        steps=steps,
        steps_from=None if steps is None else "derived",
        accepted_emitted=None if steps is None or emitted is None else max(emitted - steps, 0),
    )
    record = choice.get("speculative_decoding")
    if isinstance(record, dict):
        return _with_record(known, record)
    drafted, accepted = (_perf(stream, after, f"total_{what}_tokens") for what in ("draft", "accepted_draft"))
    return replace(known, drafted=drafted, accepted_verified=accepted)


def _with_record(known: RequestCounts, record: Mapping[str, Any]) -> RequestCounts:
    """Add the per-choice record of speculation, as far as it makes sense."""
    names = ("num_spec_steps", "total_draft_tokens", "total_accepted_draft_tokens")
    drafts, drafted, accepted = (count_in(record, name) for name in names)
    histogram = agreeing(histogram_in(record, "acceptance_histogram"), drafts, accepted)
    return replace(
        known,
        steps_with_draft=drafts,
        drafted=drafted,
        accepted_verified=accepted,
        accept_hist=histogram,
    )


def _steps(stream: Stream, choice: Mapping[str, Any], speculating: bool | None) -> int | None:
    """Iterations less prefill's; None where tokens per iteration give no whole number of them."""
    tokens, mean = stream.output_tokens, choice.get("avg_decoded_tokens_per_iter")
    if tokens and isinstance(mean, int | float) and mean > tokens / MOST:
        iterations = tokens / mean
        whole = round(iterations)
        return whole - 1 if whole >= 1 and abs(iterations - whole) <= _ROUNDING * max(mean, 1) else None
    return after_prefill(stream) if speculating is False else None


def _perf(stream: Stream, after: Raw, name: str) -> int | None:
    """A figure of `/perf_metrics` for this reply; None where the page does not know the request."""
    found = _ID.search(str(stream.tail.get("id") or ""))
    value = after.get(f'{PERF}{name}{{request="{found.group(1)}"}}') if found else None
    return None if value is None else round(value)


# --- pages ------------------------------------------------------------------------------------------------

_SAID = {
    "drafts": "numRequestsWithDraftTokens",
    "draft_tokens": "numDraftTokens",
    "accepted_tokens": "numAcceptedTokens",
}


def _count_or_0(record: Mapping[str, Any], name: str) -> int | None:
    """A count, 0 where it was left out; None where it is no count."""
    return 0 if record.get(name) is None else count_in(record, name)


def perf_raw(page: object) -> dict[str, float]:
    """`/perf_metrics` as counters by request. A request without drafts has no record there and counts 0."""
    raw: dict[str, float] = {}
    for item in page if isinstance(page, list) else []:
        if not isinstance(item, dict) or not isinstance(item.get("request_id"), int):
            continue
        spoken = record_of(record_of(item.get("perf_metrics")).get("speculative_decoding"))
        for name in ("total_draft_tokens", "total_accepted_draft_tokens"):
            count = _count_or_0(spoken, name)
            if count is not None:
                raw[f'{PERF}{name}{{request="{item["request_id"]}"}}'] = float(count)
    return raw


def iteration_sums(page: object, sums: Raw) -> dict[str, float]:
    """Running sums with the iterations that `/metrics` just gave away added.

    Gaps in the numbering of iterations are ones that the server dropped; one whose counts make no sense is as good
    as lost. With attention data parallelism the
    same record comes from every rank; the first rank's counts.
    """
    added = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "count", "lost"), 0.0)
    last = sums.get(ITERATIONS + "last")
    for row in page if isinstance(page, list) else []:
        if not isinstance(row, dict) or row.get("attentionDpRank"):
            continue
        number = row.get("iter")
        if isinstance(number, int):
            added["lost"] += max(number - last - 1, 0) if last is not None else 0
            last = float(number)
        said = record_of(row.get("specDecodingStats"))
        added["count"] += 1
        for what, name in _SAID.items():
            count = _count_or_0(said, name)
            added["lost" if count is None else what] += 1 if count is None else count
    grown = {ITERATIONS + name: sums.get(ITERATIONS + name, 0.0) + value for name, value in added.items()}
    return grown | ({} if last is None else {ITERATIONS + "last": last})
