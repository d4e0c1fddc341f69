"""Metrics: one frozen table, name to unit, direction, needs and function; everything else iterates over it.

A metric is a function of a `CellView`: one cell's requests, or several cells' taken together. Times come
from the client's stamps, counts from the engine; nothing is guessed, so a metric whose needs are missing is
None with a reason. Mean and percentiles of a metric are over the same requests. Ratios of sums are summed
over cells before they are divided. Boundary: tables in, scalars out; no file is read here.
Definitions are those of the trace: a frame is not a token, a step is one target pass after prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from specbench import _energy
from specbench._view import CellView, Floats, Missing, steps_of, totals_of
from specbench.stats import MIN_N, percentile, percentile_upper

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["METRICS", "CellView", "Metric", "compute", "request_values"]

Value = tuple[float, str | None]
"""A value, and a remark where it does not come from where one would expect it."""


@dataclass(frozen=True)
class Metric:
    """One row of the table. `direction` is the better one; None where neither is."""

    name: str
    unit: str
    direction: Literal["higher", "lower"] | None
    needs: tuple[str, ...]
    function: Callable[[CellView], float | Value]
    """Raises `Missing` with the reason where the view does not support it."""
    description: str
    gated: bool = False


def compute(
    cell: CellView, names: Iterable[str] | None = None
) -> tuple[dict[str, float | None], dict[str, str]]:
    """Every metric of the table (or those named) over a view, and a reason for each that is None.

    A metric that the engine's totals had to stand in for has a value and a reason that says so.
    """
    values: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for metric in METRICS.values() if names is None else [METRICS[name] for name in names]:
        try:
            found = metric.function(cell)
            value, remark = found if isinstance(found, tuple) else (found, None)
        except Missing as missing:
            value, remark = None, str(missing)
        values[metric.name] = None if value is None else float(value)
        if remark is not None:
            reasons[metric.name] = remark
    return values, reasons


def request_values(requests: pd.DataFrame, name: str) -> Floats:
    """Per-request values of `tpot_s`, `ttft_s`, `ttfc_s` or `e2e_s`, NaN where undefined.

    One entry per measured row of `requests` (warm-ups left out), in its order.
    """
    return PER_REQUEST[name](CellView(requests))


# --- per request ------------------------------------------------------------------------------------------


def tpot(view: CellView) -> Floats:
    """(last − first output time) / tokens after the first frame; NaN unless streamed, ok and positive."""
    span = view.seconds("last_output_ns") - view.seconds("first_output_ns")
    after = view.tokens_after_first
    valid = view.ok & (after > 0) & (span > 0)
    return np.where(valid, span, np.nan) / np.where(valid, after, 1.0)


def _since(start: str, end: str) -> Callable[[CellView], Floats]:
    def function(view: CellView) -> Floats:
        return np.where(view.ok, view.seconds(end) - view.seconds(start), np.nan)

    return function


PER_REQUEST: dict[str, Callable[[CellView], Floats]] = {
    "tpot_s": tpot,
    "ttft_s": _since("sent_ns", "first_output_ns"),
    "ttfc_s": _since("sent_ns", "first_content_ns"),
    "e2e_s": _since("sent_ns", "last_output_ns"),
    "ttft_scheduled_s": _since("scheduled_ns", "first_output_ns"),
    "e2e_scheduled_s": _since("scheduled_ns", "last_output_ns"),
    "schedule_delay_s": _since("scheduled_ns", "sent_ns"),
}


def _sample(name: str) -> Callable[[CellView], Floats]:
    def function(view: CellView) -> Floats:
        values = PER_REQUEST[name](view)
        kept: Floats = values[np.isfinite(values)]
        if not len(kept):
            raise Missing(_why_empty(view, name))
        return kept

    return function


def _why_empty(view: CellView, name: str) -> str:
    if not view.ok.any():
        return "no request succeeded with a streamed reply"
    if name == "tpot_s":
        return "no reply has a known number of tokens after its first frame"
    return "no open-loop schedule was kept" if "schedule" in name else "no reply has the times it needs"


# --- frames -----------------------------------------------------------------------------------------------


def _gaps(view: CellView) -> Floats:
    gaps = view.frame_gaps_s
    if not len(gaps):
        raise Missing("no reply has two frames")
    return gaps


def _inter_frame(view: CellView) -> Floats:
    gaps = _gaps(view)
    if not (gaps > 0).any():
        raise Missing("all frames of each reply arrived in one read")
    kept: Floats = gaps[gaps > 0]
    return kept


def _coalesced_share(view: CellView) -> float:
    return float(np.mean(_gaps(view) <= 0))


def _tokens_per_frame(view: CellView) -> float:
    known = view.ok & np.isfinite(view.column("output_tokens")) & (view.frame_counts > 0)
    if not known.any():
        raise Missing("no reply has both frames and a token count")
    return float(view.column("output_tokens")[known].sum() / view.frame_counts[known].sum())


# --- counts -----------------------------------------------------------------------------------------------


def _count(mask: str) -> Callable[[CellView], float]:
    return lambda view: float(view.count(mask))


def _error_rate(view: CellView) -> float:
    total = view.count("requests")
    if not total:
        raise Missing("no request was sent")
    return view.count("failed") / total


def _sum(name: str) -> Callable[[CellView], float]:
    return lambda view: view.total(name)


def _length_share(view: CellView) -> float:
    if view.max_tokens is None:
        raise Missing("the limit on output tokens is unknown")
    return view.total("output_tokens") / (int(view.answered.sum()) * view.max_tokens)


# --- throughput and load ----------------------------------------------------------------------------------


def _output_tps(view: CellView) -> float:
    view.total("output_tokens")
    tokens = seconds = 0.0
    for part in view.parts():
        answered = part.answered
        first, last = part.seconds("sent_ns")[answered], part.seconds("last_output_ns")[answered]
        if not np.isfinite(first).any() or not np.isfinite(last).any():
            continue
        tokens += part.total("output_tokens")
        seconds += float(np.nanmax(last) - np.nanmin(first))
    if seconds <= 0:
        raise Missing("no time passed between the first send and the last output")
    return tokens / seconds


def _output_tps_steady(view: CellView) -> float:
    pairs = [part.steady() for part in view.parts()]
    seconds = sum(s for _, s in pairs)
    if seconds <= 0:
        raise Missing(f"there was no time with exactly {view.concurrency} requests in flight")
    return sum(t for t, _ in pairs) / seconds


def _steady_share(view: CellView) -> float:
    window = sum(part.span_s() for part in view.parts())
    if window <= 0:
        raise Missing("no request has both a send and an end time")
    return sum(part.steady()[1] for part in view.parts()) / window


def _batch_mean(view: CellView) -> float:
    pairs = [part.decoding() for part in view.parts()]
    seconds = sum(s for _, s in pairs)
    if seconds <= 0:
        raise Missing("no reply was decoding for a measurable time")
    return sum(streams for streams, _ in pairs) / seconds


def _context_mean(view: CellView) -> float:
    weighted, seconds = view.context_seconds()
    if seconds <= 0:
        raise Missing("no streamed reply has a known prompt length")
    return weighted / seconds


def _cached_share(view: CellView) -> float:
    cached, prompt = view.column("cached_tokens"), view.column("prompt_tokens")
    known = view.ok & np.isfinite(cached) & (prompt > 0)
    if not known.any():
        raise Missing("the engine does not say how many prompt tokens came from its cache")
    return float(cached[known].sum() / prompt[known].sum())


def _server_tpot(view: CellView) -> float:
    decode, after = view.column("server_decode_ms"), view.tokens_after_first
    known = view.ok & (decode > 0) & (after > 0)
    if not known.any():
        raise Missing("the engine does not report its decode time")
    return float(decode[known].sum() / after[known].sum() / 1e3)


# --- speculation ------------------------------------------------------------------------------------------


def _steps(view: CellView) -> Value:
    found = steps_of(view)
    return found.steps, found.remark


def _emitted(view: CellView) -> tuple[float, str | None]:
    found = steps_of(view)
    if np.isnan(found.emitted):
        raise Missing("output_tokens is unknown for a reply")
    return found.emitted, found.remark


def _step_s(view: CellView) -> Value:
    """Decode time over steps, summed over streamed replies whose steps are known; else by the cell's totals."""
    decode = view.seconds("last_output_ns") - view.seconds("first_output_ns")
    steps = view.column("steps")
    known = view.ok & (steps > 0) & (decode > 0)
    if known.any():
        return float(decode[known].sum() / steps[known].sum()), None
    if not (view.ok & (decode > 0)).any():
        raise Missing("no reply was decoding for a measurable time")
    if (view.answered & ~view.ok).any():
        raise Missing(
            "replies that came in one piece have steps but no time, and steps are known in all only"
        )
    found = steps_of(view)
    seconds = float(decode[view.ok].sum())
    return _divide(seconds, found.steps, "no step followed a prefill"), found.remark


def _accepted_emitted(view: CellView) -> Value:
    emitted, remark = _emitted(view)
    return emitted - steps_of(view).steps, remark


def _al_all(view: CellView) -> Value:
    emitted, remark = _emitted(view)
    return _divide(emitted, steps_of(view).steps, "no step followed a prefill"), remark


def _al_request_mean(view: CellView) -> float:
    steps, emitted = view.column("steps"), view.emitted
    known = view.answered & (steps > 0) & np.isfinite(emitted)
    if not known.any():
        raise Missing("the engine does not count steps per request")
    return float(np.mean(emitted[known] / steps[known]))


def _total(name: str) -> Callable[[CellView], Value]:
    def function(view: CellView) -> Value:
        found = totals_of(view, name)
        return found[name], found.remark

    return function


def _al_drafted(view: CellView) -> Value:
    found = totals_of(view, "accepted_verified", "steps_with_draft")
    accepted = _divide(found["accepted_verified"], found["steps_with_draft"], "nothing was drafted")
    return 1.0 + accepted, found.remark


def _acceptance_rate(view: CellView) -> Value:
    found = totals_of(view, "accepted_verified", "drafted")
    return _divide(found["accepted_verified"], found["drafted"], "nothing was drafted"), found.remark


def _coverage(view: CellView) -> Value:
    steps = steps_of(view)
    found = totals_of(view, "steps_with_draft", server=steps.server)
    share = _divide(found["steps_with_draft"], steps.steps, "no step followed a prefill")
    if share > 1:
        raise Missing("the server counts more drafts than these replies had steps: other traffic or failures")
    return share, steps.remark or found.remark


def _divide(top: float, bottom: float, why: str) -> float:
    if bottom <= 0:
        raise Missing(why)
    return top / bottom


# --- the table --------------------------------------------------------------------------------------------


def _mean(sample: Callable[[CellView], Floats]) -> Callable[[CellView], float]:
    return lambda view: float(np.mean(sample(view)))


def _quantile(sample: Callable[[CellView], Floats], q: int, upper: bool) -> Callable[[CellView], float]:
    def function(view: CellView) -> float:
        values = sample(view)
        found = percentile_upper(values, q) if upper else percentile(values, q)
        if found is None:
            raise Missing(f"p{q} needs {MIN_N[q]} values, here are {len(values)}")
        return found

    return function


def _latency(
    name: str,
    needs: tuple[str, ...],
    what: str,
    quantiles: tuple[int, ...] = (50, 90, 95, 99),
    bounds: bool = False,
) -> Iterable[Metric]:
    """Mean and percentiles of one per-request latency; `bounds` adds what n can promise of them."""
    sample, stem = _sample(name), name.removesuffix("_s")
    yield Metric(name, "s", "lower", needs, _mean(sample), f"{what}, mean over requests", name == "tpot_s")
    for q in quantiles:
        text = f"{what}, p{q} over requests"
        yield Metric(f"{stem}_p{q}_s", "s", "lower", needs, _quantile(sample, q, False), text)
        if bounds and q in MIN_N:
            text = f"{what}, distribution-free 95 % upper bound of p{q}"
            yield Metric(f"{stem}_p{q}_upper_s", "s", "lower", needs, _quantile(sample, q, True), text)


_OUTPUT = ("sent_ns", "first_output_ns")
_STEPS = ("steps", "output_tokens", "accepted_emitted")
METERED = "telemetry"
"""What metrics need that are only there where a device has a meter."""

_ROWS: tuple[Metric, ...] = (
    *_latency("ttft_s", _OUTPUT, "time to the first frame with output on any channel", bounds=True),
    *_latency("ttfc_s", ("sent_ns", "first_content_ns"), "time to the first content, after reasoning", (50,)),
    *_latency("tpot_s", ("first_output_ns", "last_output_ns", "output_tokens"), "time per output token",
              bounds=True),
    *_latency("e2e_s", ("sent_ns", "last_output_ns"), "first send to last output", bounds=True),
    *_latency("ttft_scheduled_s", ("scheduled_ns",), "first output from the scheduled time", (50, 99)),
    *_latency("e2e_scheduled_s", ("scheduled_ns",), "last output from the scheduled time", (50, 99)),
    *_latency("schedule_delay_s", ("scheduled_ns",), "sent later than scheduled by", (99,)),
    Metric("inter_frame_s", "s", "lower", ("frame_ns",), _mean(_inter_frame),
           "gap between frames that came in different reads, mean"),
    Metric("inter_frame_p50_s", "s", "lower", ("frame_ns",), _quantile(_inter_frame, 50, False),
           "gap between frames that came in different reads, p50"),
    Metric("inter_frame_p90_s", "s", "lower", ("frame_ns",), _quantile(_inter_frame, 90, False),
           "gap between frames that came in different reads, p90"),
    Metric("coalesced_share", "share", None, ("frame_ns",), _coalesced_share,
           "share of gaps that are zero: several frames in one read"),
    Metric("tokens_per_frame", "tokens", None, ("frame_ns", "output_tokens"), _tokens_per_frame,
           "output tokens per frame"),
    Metric("output_tps", "tokens/s", "higher", ("sent_ns", "last_output_ns", "output_tokens"), _output_tps,
           "output tokens per second, first send to last output"),
    Metric("output_tps_steady", "tokens/s", "higher", ("frame_ns", "done_ns"), _output_tps_steady,
           "output tokens per second while as many requests as asked are in flight"),
    Metric("steady_share", "share", "higher", ("sent_ns", "done_ns"), _steady_share,
           "share of the window with as many requests in flight as asked"),
    Metric("batch_mean", "streams", None, ("first_output_ns", "last_output_ns"), _batch_mean,
           "decoding streams, mean over the time in which any decodes"),
    Metric("context_mean", "tokens", None, ("prompt_tokens", "frame_ns"), _context_mean,
           "prompt and emitted tokens of a decoding stream, mean over its time"),
    Metric("requests", "requests", None, (), _count("requests"), "requests sent, retries not counted twice"),
    Metric("ok", "requests", "higher", ("status",), _count("ok"), "requests answered with a streamed reply"),
    Metric("not_streamed", "requests", "lower", ("status",), _count("not_streamed"),
           "requests answered in one piece"),
    Metric("empty", "requests", "lower", ("status",), _count("empty"), "requests answered with no token"),
    Metric("failed", "requests", "lower", ("status",), _count("failed"), "requests without an answer"),
    Metric("throttled", "replies", "lower", ("http_status",), _count("throttled"), "replies with HTTP 429"),
    Metric("error_rate", "share", "lower", ("status",), _error_rate, "failed requests over requests", True),
    Metric("output_tokens", "tokens", None, ("output_tokens",), _sum("output_tokens"),
           "output tokens of answered requests"),
    Metric("length_share", "share", None, ("output_tokens",), _length_share,
           "output tokens produced over workload.max_tokens, answered requests"),
    Metric("prompt_tokens", "tokens", None, ("prompt_tokens",), _sum("prompt_tokens"),
           "prompt tokens of answered requests"),
    Metric("cached_share", "share", None, ("cached_tokens", "prompt_tokens"), _cached_share,
           "share of prompt tokens that the engine took from its prefix cache"),
    Metric("server_tpot_s", "s", "lower", ("server_decode_ms",), _server_tpot,
           "time per output token by the engine's own clock"),
    Metric("steps", "steps", None, _STEPS, _steps, "target passes after prefill"),
    Metric("step_s", "s", "lower", ("steps", "first_output_ns", "last_output_ns"), _step_s,
           "time of a target step along one stream, drafting included: decode time over steps"),
    Metric("emitted", "tokens", None, _STEPS, _emitted, "output tokens less those that prefill emitted"),
    Metric("steps_with_draft", "steps", None, ("steps_with_draft",), _total("steps_with_draft"),
           "steps that verified a draft"),
    Metric("drafted", "tokens", None, ("drafted",), _total("drafted"), "drafted tokens"),
    Metric("accepted_verified", "tokens", None, ("accepted_verified",), _total("accepted_verified"),
           "accepted drafted tokens as the engine counts, which may run past the end"),
    Metric("accepted_emitted", "tokens", None, _STEPS, _accepted_emitted,
           "accepted drafted tokens that the replies hold: emitted less steps"),
    Metric("al_all", "tokens/step", "higher", _STEPS, _al_all,
           "emitted tokens per step, all steps; bounds a lossless decode-time speedup at equal batch"),
    Metric("al_drafted", "tokens/step", "higher", ("accepted_verified", "steps_with_draft"), _al_drafted,
           "1 + accepted tokens per step that verified a draft"),
    Metric("al_request_mean", "tokens/step", "higher", ("steps",), _al_request_mean,
           "emitted tokens per step, mean over requests (al_all weighs by steps)"),
    Metric("coverage", "share", "higher", ("steps", "steps_with_draft"), _coverage,
           "share of steps that verified a draft"),
    Metric("acceptance_rate", "share", "higher", ("accepted_verified", "drafted"), _acceptance_rate,
           "accepted drafted tokens over drafted tokens"),
    Metric("energy_j", "J", None, (METERED,), _energy.energy_j,
           "energy of the device that decoded, over the window; the remark says which"),
    Metric("power_mean_w", "W", None, (METERED,), _energy.power_mean_w, "its energy over the window's time"),
    Metric("energy_per_token_j", "J/token", "lower", (METERED, "output_tokens"), _energy.energy_per_token_j,
           "its energy over output tokens, prefill and idle time included"),
    Metric("tokens_per_j", "tokens/J", "higher", (METERED, "output_tokens"), _energy.tokens_per_j,
           "output tokens over its energy"),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ROWS}
