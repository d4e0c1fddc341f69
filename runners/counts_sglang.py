"""Raw acceptance of a SGLang cell, from `spec_tokens_details` of each reply and two counters of the server.

Boundary: as `counts`. Read off SGLang 0.5.23's source, whose server was not run here: `spec_verify_ct` counts
the target passes after prefill that verified a draft, which is every one where speculation is on;
`spec_num_proposed_drafts` is verify_ct × (draft tokens − 1), which for a tree counts all its nodes;
`spec_num_correct_drafts` and the histogram count what was verified, also beyond the end of a reply. The gauges
`sglang:spec_accept_*` hold the latest value and give no window; `sglang:generation_tokens_total` and
`sglang:spec_verify_calls_total` are counters, raised when a request finishes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runners.base import Counts, Raw, RequestCounts, Stream
from runners.counters import delta, restarted, total, went_back
from runners.counts import after_prefill, agreeing, count_in, histogram_in, request_rows

SPECULATIVE = "sglang_speculative"
"""Key under which a session records what `/server_info` says: 1 where speculation is on, else 0."""
GENERATED, VERIFIED = "sglang:generation_tokens_total", "sglang:spec_verify_calls_total"


@dataclass(frozen=True)
class Window:
    """Tokens generated and drafts verified by the requests that finished in a window; None is unknown."""

    generated: int | None = None
    verified: int | None = None
    reset: bool = False

    @property
    def tokens_per_verify(self) -> float | None:
        """SGLang's own acceptance length over the window: it counts the tokens of prefill as if verified."""
        return self.generated / self.verified if self.generated is not None and self.verified else None


def window(before: Raw, after: Raw) -> Window:
    """What the two counters grew by; nothing where one fell or the server is another process now."""
    if restarted(before, after) or any(went_back(before, after, name) for name in (GENERATED, VERIFIED)):
        return Window(reset=True)
    generated, verified = (delta(before, after, name) for name in (GENERATED, VERIFIED))
    return Window(
        None if generated is None else round(generated), None if verified is None else round(verified)
    )


def sglang_counts(streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
    """Counts of a SGLang cell. In the table `request` is the index of the stream in `streams`.

    Only verified drafts are counted by the server as a whole, so drafted and accepted tokens stay unknown at
    the cell's level and come from the replies.
    """
    says = total(after, SPECULATIVE)
    speculating = None if says is None else bool(says)
    requests = tuple(_request(stream, speculating) for stream in streams)
    grown = window(before, after)
    reset = grown.reset or _fewer(grown, requests)
    verified = grown.verified if speculating is not False and not reset else None
    table = tuple(request_rows(requests, "sglang reply"))
    return Counts(requests, table, steps_with_draft=verified, counter_reset=reset)


def _fewer(grown: Window, requests: Sequence[RequestCounts]) -> bool:
    """Whether the server counted less than its own replies: it restarted and rose past its old value again."""
    said = sum(request.steps_with_draft or 0 for request in requests)
    return grown.verified is not None and grown.verified < said


def details_of(stream: Stream) -> Mapping[str, Any]:
    """The record of speculation in a reply: `sglext` of the OpenAI routes, `meta_info` of /generate."""
    beside = stream.tail.get("sglext")
    found = beside.get("spec_tokens_details") if isinstance(beside, dict) else None
    found = found or stream.tail.get("meta_info")
    return found if isinstance(found, dict) else {}


def _request(stream: Stream, speculating: bool | None) -> RequestCounts:
    if stream.status == "failed":
        return RequestCounts()
    details, emitted = details_of(stream), after_prefill(stream)
    verified = count_in(details, "spec_verify_ct")
    if not verified:
        return _undrafted(emitted, speculating)
    drafted, accepted = (count_in(details, f"spec_num_{what}_drafts") for what in ("proposed", "correct"))
    return RequestCounts(
        steps=verified,
        steps_from="engine",
        steps_with_draft=verified,
        drafted=drafted,
        accepted_verified=accepted,
        accepted_emitted=None if emitted is None else emitted - verified,
        accept_hist=agreeing(histogram_in(details, "spec_correct_drafts_histogram"), verified, accepted),
    )


def _undrafted(emitted: int | None, speculating: bool | None) -> RequestCounts:
    """A reply without a record: one token a step where nothing drafts, unknown where the record was lost."""
    if speculating is False and emitted is not None:
        return RequestCounts(steps=emitted, steps_from="derived", accepted_emitted=0)
    if speculating and emitted == 0:
        return RequestCounts(0, "derived", 0, 0, 0, 0)
    return RequestCounts()
