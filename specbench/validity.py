"""Validity: a closed list of findings, each with a severity and advice that knows the flags in use.

`check_cell` says what one cell shows by itself; findings that need several cells (output against the
baseline, blocks, intervals) are made in `summary` with `note`. Boundary: reads records and tables, changes
nothing, and decides no exit status. A check answers with one sentence (and a severity, where it is not
its code's) or with None; a new finding is a code, a severity and, where one cell shows it, one check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from specbench import _checks
from specbench.cell import CellRecord, Note

if TYPE_CHECKING:
    import pandas as pd

Severity: TypeAlias = _checks.Severity


class Code(StrEnum):
    """Every finding there is."""

    NOTHING_SUCCEEDED = "nothing-succeeded"
    PLACEHOLDER_DATA = "placeholder-data"
    SPECULATION_INACTIVE = "speculation-inactive"
    BASELINE_DRAFTED = "baseline-drafted"
    NOT_STREAMED = "not-streamed"
    REQUESTS_FAILED = "requests-failed"
    HOST_BUSY = "host-busy"
    CLIENT_NEAR_CEILING = "client-near-ceiling"
    RATE_BELOW_REQUESTED = "rate-below-requested"
    PREFIX_CACHE_HIT = "prefix-cache-hit"
    DRAFTER_SAW_PROMPT = "drafter-saw-prompt"
    WARM_UP_DRIFT = "warm-up-drift"
    THROTTLED = "throttled"
    STREAM_COALESCED = "stream-coalesced"
    TOKEN_COUNTS_DISAGREE = "token-counts-disagree"
    COUNTER_RESET = "counter-reset"
    IMPLIED_BANDWIDTH = "implied-bandwidth-above-roof"
    SPEEDUP_ABOVE_AL = "speedup-above-al"
    OUTPUT_DIFFERS = "output-differs-from-baseline"
    LOSSY_ACCEPTANCE = "lossy-acceptance"
    DEGENERATE_REPETITION = "degenerate-repetition"
    RANDOM_TOKEN_PROMPTS = "random-token-prompts"
    FEW_OUTPUT_TOKENS = "few-output-tokens"
    MIXED_SESSIONS = "mixed-sessions"
    BLOCK_FAILED = "block-failed"
    SHORT_TAIL = "short-tail"
    UNFINISHED = "unfinished"
    SMALL_N = "small-n"
    PERCENTILE_UNSUPPORTED = "percentile-unsupported"


_INVALID = (
    Code.NOTHING_SUCCEEDED,
    Code.PLACEHOLDER_DATA,
    Code.SPECULATION_INACTIVE,
    Code.BASELINE_DRAFTED,
    Code.NOT_STREAMED,
)
_NOTES = (Code.SHORT_TAIL, Code.UNFINISHED, Code.SMALL_N, Code.PERCENTILE_UNSUPPORTED)
SEVERITY: Mapping[Code, Severity] = {
    code: "invalid" if code in _INVALID else "note" if code in _NOTES else "warning" for code in Code
}
_RANK = {"invalid": 0, "warning": 1, "note": 2}


def note(code: Code, advice: str, severity: Severity | None = None) -> Note:
    """A finding; `severity` only where it is graver here than by its code."""
    return Note(code=code.value, severity=severity or SEVERITY[code], advice=advice)


def gravest_first(notes: Iterable[Note]) -> tuple[Note, ...]:
    """Each code once, at its gravest (the first of equals), ordered by severity and then as in `Code`."""
    order = {code.value: i for i, code in enumerate(Code)}
    kept: dict[str, Note] = {}
    for found in sorted(notes, key=lambda n: (_RANK[n.severity], order[n.code])):
        kept.setdefault(found.code, found)
    return tuple(kept.values())


# --- one cell -------------------------------------------------------------------------------------------

CHECKS: Mapping[Code, Callable[[_checks.Case], str | tuple[str, Severity] | None]] = {
    Code.NOTHING_SUCCEEDED: _checks.nothing_succeeded,
    Code.PLACEHOLDER_DATA: _checks.placeholder_data,
    Code.SPECULATION_INACTIVE: _checks.speculation_inactive,
    Code.BASELINE_DRAFTED: _checks.baseline_drafted,
    Code.NOT_STREAMED: _checks.not_streamed,
    Code.REQUESTS_FAILED: _checks.requests_failed,
    Code.HOST_BUSY: _checks.host_busy,
    Code.CLIENT_NEAR_CEILING: _checks.client_near_ceiling,
    Code.RATE_BELOW_REQUESTED: _checks.rate_below_requested,
    Code.PREFIX_CACHE_HIT: _checks.prefix_cache_hit,
    Code.DRAFTER_SAW_PROMPT: _checks.drafter_saw_prompt,
    Code.WARM_UP_DRIFT: _checks.warm_up_drift,
    Code.THROTTLED: _checks.throttled,
    Code.STREAM_COALESCED: _checks.stream_coalesced,
    Code.TOKEN_COUNTS_DISAGREE: _checks.token_counts_disagree,
    Code.COUNTER_RESET: _checks.counter_reset,
    Code.IMPLIED_BANDWIDTH: _checks.implied_bandwidth,
    Code.LOSSY_ACCEPTANCE: _checks.lossy_acceptance,
    Code.DEGENERATE_REPETITION: _checks.degenerate_repetition,
    Code.RANDOM_TOKEN_PROMPTS: _checks.random_token_prompts,
    Code.FEW_OUTPUT_TOKENS: _checks.few_output_tokens,
    Code.SHORT_TAIL: _checks.short_tail,
    Code.PERCENTILE_UNSUPPORTED: _checks.percentile_unsupported,
}


def check_cell(
    record: CellRecord,
    requests: pd.DataFrame,
    texts: Sequence[Mapping[str, Any]],
    *,
    counter_reset: bool = False,
    prompts: Sequence[str] = (),
    prompt_ids: Mapping[int, int] | None = None,
) -> tuple[Note, ...]:
    """What one cell shows by itself, the gravest first.

    `requests` is a table of `specbench.trace.REQUEST_SCHEMA`, warm-ups included; `texts` the rows of
    `texts.jsonl.zst`; `prompts` the prompt texts, which the trace does not keep; `prompt_ids` the number of
    token ids sent by request, where ids were sent; `counter_reset` what the engine's adapter saw. `record.validity` is not read. Of `record.telemetry` two optional facts are known:
    `throttled_share`, and `weight_bytes` with `memory_bytes_per_s` (the device's roof).
    """
    case = _checks.Case(record, requests, texts, prompts, counter_reset, prompt_ids or {})
    found = ((code, check(case)) for code, check in CHECKS.items())
    return gravest_first(
        note(code, *said) if isinstance(said, tuple) else note(code, said) for code, said in found if said
    )
