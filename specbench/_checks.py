"""What one cell can show to be wrong with itself: one function a finding, answering with advice or None.

Boundary: reads a record and its tables; the codes, their severity and the list of checks are `validity`'s.
Each limit says where it comes from.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from specbench._view import CellView, Floats, Missing
from specbench.cell import CellRecord, Method
from specbench.host import is_busy
from specbench.metrics import METRICS, tpot
from specbench.stats import MIN_N

Severity: TypeAlias = Literal["invalid", "warning", "note"]

if TYPE_CHECKING:
    import pandas as pd

CLIENT_LIMIT = 0.7
"""Share of the client's ceiling: queueing makes stamps late well before 1."""
CACHED_LIMIT = 0.01
"""Share of prompt tokens from the prefix cache: above this TTFT and throughput bend (vLLM issue 52884)."""
RATE_LIMIT = 0.95
"""Least achieved share of the scheduled rate."""
STEADY_LIMIT = 0.5
"""Least share of the window at full concurrency for output_tps to describe that concurrency."""
NOT_STREAMED_LIMIT = 0.1
"""Share of replies in one piece up to which the rest still speaks for the cell."""
COALESCED_LIMIT = 0.2
"""Share of gaps between frames of different steps that are zero."""
COUNT_LIMIT = 0.02
"""Disagreement of two counts of the same tokens that is no longer an end token or two."""
FIRST_OUTLIER = 2.0
"""The first request's TTFT against the next slowest: 1.537 s against 0.058 s is a cold start (vLLM 39790)."""
DRIFT_LIMIT = 1.10
"""First third's median TPOT against the rest's, on a baseline, whose TPOT hardly depends on the text."""
REPEAT_BYTES = 200
REPEAT_RATIO = 0.2
"""zlib's compressed share of a text's second half. Prose of this length keeps 0.5 to 0.7; a loop under 0.15."""
REPEAT_SHARE = 0.1
"""Share of replies that loop before it is a finding."""
ROOF_SLACK = 1.5
"""Of the measured roof: tries of one machine differ by a third, and a step does not read every stored tensor."""
FEW_TOKENS = 16
"""Median reply below which a handful of steps makes the TPOT."""
PLACEHOLDER = "full benchmark data should be fetched"
"""Opens each row of the published SPEED-Bench files until its own tool has fetched the prompts."""


@dataclass(frozen=True)
class Case:
    """What the checks look at."""

    record: CellRecord
    requests: pd.DataFrame
    texts: Sequence[Mapping[str, Any]]
    prompts: Sequence[str] = ()
    counter_reset: bool = False
    prompt_ids: Mapping[int, int] = field(default_factory=dict)
    """Request to the number of token ids that were sent as its prompt."""

    @cached_property
    def view(self) -> CellView:
        """The measured rows."""
        return CellView.of(self.record, self.requests)

    @property
    def method(self) -> Method:
        """The method that was asked for."""
        return self.record.config.method

    def metric(self, name: str) -> float | None:
        """A metric of the table over this cell, or None."""
        try:
            found = METRICS[name].function(self.view)
        except Missing:
            return None
        return found[0] if isinstance(found, tuple) else found


def nothing_succeeded(case: Case) -> str | None:
    if (case.view.status != "failed").any():
        return None
    errors = case.view.rows["error"].dropna()
    why = f" (first error: {errors.iloc[0]})" if len(errors) else ""
    return f"No request succeeded{why}: read the engine's log and try one request by hand."


def requests_failed(case: Case) -> str | None:
    failed, total = case.view.count("failed"), case.view.count("requests")
    if not failed or failed == total:
        return None
    return f"{failed} of {total} requests failed and are in no latency: see the error column of requests.parquet."


def throttled(case: Case) -> str | None:
    refused = case.view.count("throttled")
    if refused:
        return (
            f"The server answered HTTP 429 {refused} times: lower load.concurrency or raise its rate limit."
        )
    share, heat, power = (case.record.telemetry.get(f"throttled_{of}share") for of in ("", "heat_", "power_"))
    if not share:
        return None
    why = (
        f" (heat in {heat:.0%}, power limit in {power:.0%})" if heat is not None and power is not None else ""
    )
    return (
        f"The device throttled its clocks in {share:.0%} of the samples{why}: "
        "cool it down, raise its power limit, or lock its clocks below what it can hold."
    )


def not_streamed(case: Case) -> str | tuple[str, Severity] | None:
    count, total = case.view.count("not_streamed"), case.view.count("requests")
    if not count:
        return None
    advice = (
        f"{count} of {total} replies came in one piece, so they have no TTFT or TPOT: "
        "turn off buffering in the server or the proxy before it."
    )
    # A short reply whose only step was accepted whole arrives in one read and says nothing about the server.
    return (advice, "warning") if count <= NOT_STREAMED_LIMIT * total else advice


def stream_coalesced(case: Case) -> str | None:
    gaps = merged = 0
    for frames, steps in zip(case.view.rows["frame_ns"], case.view.rows["frame_step"], strict=True):
        # Frames of one step belong together; merging them is how an engine writes, not a fault.
        apart = ~(np.diff(np.asarray(steps, dtype=float)) == 0)
        gaps += int(apart.sum())
        merged += int((np.diff(frames)[apart] == 0).sum())
    if not gaps or merged / gaps <= COALESCED_LIMIT:
        return None
    return (
        f"{merged / gaps:.0%} of the steps came in one read with the step before: gaps between frames say "
        "little; TPOT is from totals and stays valid."
    )


def token_counts_disagree(case: Case) -> str | None:
    view = case.view
    most = case.record.config.workload.max_tokens
    output = view.column("output_tokens")
    over = int((output[view.answered] > most).sum())
    if over:
        return f"{over} replies count more than workload.max_tokens = {most}: the token count is not the engine's."
    counted = np.array([np.asarray(t, dtype=float).sum() for t in view.rows["frame_tokens"]])
    apart = np.abs(output - counted) > np.maximum(1, COUNT_LIMIT * output)
    bad = int((apart & view.ok).sum())
    if not bad:
        return _prompts_disagree(case)
    return f"In {bad} replies the frames and the reply's own total disagree by more than an end token."


def _prompts_disagree(case: Case) -> str | None:
    """Ids are what was sent, so a server that counts others has put tokens of its own before or between them."""
    counted = zip(case.view.rows["request"], case.view.column("prompt_tokens"), strict=True)
    apart = [n - case.prompt_ids[i] for i, n in counted if i in case.prompt_ids and np.isfinite(n)]
    bad = [difference for difference in apart if difference]
    if not bad:
        return None
    return (
        f"In {len(bad)} of {len(apart)} requests the server counts other prompt tokens than the ids it was sent "
        f"({bad[0]:+.0f} in the first): it adds or drops tokens, so other engines did not get the same prompt."
    )


def few_output_tokens(case: Case) -> str | None:
    known = case.view.column("output_tokens")[case.view.answered]
    known = known[np.isfinite(known)]
    if not len(known) or np.median(known) >= FEW_TOKENS:
        return None
    return (
        f"The median reply has {np.median(known):.0f} tokens: raise workload.max_tokens "
        f"(now {case.record.config.workload.max_tokens}) or choose prompts with longer answers."
    )


def percentile_unsupported(case: Case) -> str | None:
    return percentile_advice(int(np.isfinite(tpot(case.view)).sum()))


def percentile_advice(n: int) -> str | None:
    """The advice on percentiles for n values, or None where p90 stands."""
    if not 0 < n < MIN_N[90]:
        return None
    return f"p90 needs {MIN_N[90]} replies and there are {n}: raise workload.prompts_per_category or repeat.blocks."


def host_busy(case: Case) -> str | None:
    host = case.record.host
    if not is_busy(host):
        return None
    known = {
        "other processes": host.other_cpu_share,
        "steal": host.steal_share,
        "CPU pressure": host.cpu_pressure_share,
    }
    seen = ", ".join(f"{name} {share:.0%}" for name, share in known.items() if share is not None)
    threads = case.record.facts.threads
    spare = f", or leave it a core with [[engine]] args.threads (now {threads})" if threads != 1 else ""
    return f"Other work ran during the cell ({seen}): close it{spare}."


def client_near_ceiling(case: Case) -> str | None:
    use, window = case.record.client, case.record.window_s
    if not use.frames:
        return None
    if use.ceiling_frames_per_cpu_s and use.frames_per_s is not None:
        share = use.frames_per_s / use.ceiling_frames_per_cpu_s
    else:
        share = use.cpu_s / window if window > 0 else 0.0
    if share <= CLIENT_LIMIT:
        return None
    return (
        f"The client ran at {share:.0%} of what it can time: lower load.concurrency "
        f"(now {case.record.config.concurrency}) or give it a core of its own; see `specbench selftest`."
    )


def rate_below_requested(case: Case) -> str | None:
    scheduled, sent = case.view.seconds("scheduled_ns"), case.view.seconds("sent_ns")
    known = np.isfinite(scheduled) & np.isfinite(sent)
    if known.sum() < 2:
        return None
    asked, took = float(np.ptp(scheduled[known])), float(np.ptp(sent[known]))
    if took <= 0 or asked / took >= RATE_LIMIT:
        return None
    return (
        f"Requests went out at {asked / took:.0%} of the scheduled rate: lower the rate or raise connections."
    )


def short_tail(case: Case) -> str | None:
    asked, share = case.record.config.concurrency, case.metric("steady_share")
    if asked == 1 or share is None or share >= STEADY_LIMIT:
        return None
    return (
        f"All {asked} streams ran for {share:.0%} of the window only: use output_tps_steady, or raise "
        "workload.prompts_per_category."
    )


def prefix_cache_hit(case: Case) -> str | None:
    share = case.metric("cached_share") or 0.0
    if share <= CACHED_LIMIT or case.record.config.engine.args.get("cache_prompt"):
        return None
    return (
        f"{share:.0%} of the prompt tokens came from the prefix cache, so TTFT is too good: start the server "
        "without it (vLLM: --no-enable-prefix-caching, SGLang: --disable-radix-cache)."
    )


def drafter_saw_prompt(case: Case) -> str | None:
    first = case.requests[case.requests["attempt"] == 0]
    seen = first["prompt_sha256"].duplicated() & first["prompt_sha256"].notna() & ~first["warmup"]
    if case.method.name == "none":
        return None
    if case.record.facts.url and case.record.facts.extra.get("drafter_learns"):
        return (
            f"{case.method.name} learns from earlier requests and the server at engine.url is not restarted "
            "between runs, which repeat their prompts: leave out engine.url, or choose a method that forgets."
        )
    if not seen.any():
        return None
    return (
        f"{int(seen.sum())} prompts had been sent before (warm-ups included), so {case.method.name} may draft "
        "from the earlier answer: send no prompt twice."
    )


def warm_up_drift(case: Case) -> str | None:
    view = case.view
    order = np.argsort(view.column("sent_ns"), kind="stable")
    order = order[view.ok[order]]
    ttft = (view.seconds("first_output_ns") - view.seconds("sent_ns"))[order]
    if len(order) >= 5 and _first_is_cold(ttft, view.column("prompt_tokens")[order]):
        return (
            f"The first request's TTFT was {ttft[0]:.3g} s, the next slowest {ttft[1:].max():.3g} s: warm up this "
            "feature at this concurrency with other prompts."
        )
    if case.method.name == "none" and (drift := _drift(tpot(view)[order])) is not None:
        return f"TPOT of the first third was {drift:.2f}× the rest's: warm up longer or lock the clocks."
    return None


def _first_is_cold(ttft: Floats, prompt: Floats) -> bool:
    """An outlier that the prompt's length does not explain."""
    longest_of_rest = np.nanmax(prompt[1:]) if np.isfinite(prompt[1:]).any() else np.inf
    explained = prompt[0] > 2 * longest_of_rest
    return bool(ttft[0] > FIRST_OUTLIER * ttft[1:].max()) and not explained


def _drift(values: Floats) -> float | None:
    if len(values) < 9:
        return None
    third = len(values) // 3
    early, late = values[:third], values[third:]
    early, late = early[np.isfinite(early)], late[np.isfinite(late)]
    if not len(early) or not len(late):
        return None
    share = float(np.median(early) / np.median(late))
    return share if share > DRIFT_LIMIT else None


def speculation_inactive(case: Case) -> str | None:
    if case.method.name == "none":
        return None
    if case.record.facts.speculative is False:
        return (
            f"Speculation did not run: the server says it is off, though {case.method.label} was asked for."
        )
    if case.metric("drafted") == 0:
        return (
            f"Speculation did not run: {case.method.label} drafted nothing in this cell; a lower match length "
            "or another method is needed for this workload."
        )
    return None


def baseline_drafted(case: Case) -> str | None:
    if case.method.name != "none":
        return None
    if drafted := case.metric("drafted"):
        return f"The baseline drafted {drafted:.0f} tokens: start its server without speculation."
    if case.record.facts.speculative:
        return "The baseline's server says that speculation is on: start it without."
    return None


def counter_reset(case: Case) -> str | None:
    before, after = case.record.counters_before, case.record.counters_after
    fallen = [
        name
        for name, value in before.items()
        if name.partition("{")[0].endswith("_total") and after.get(name, value) < value
    ]
    if not fallen and not case.counter_reset:
        return None
    return f"{fallen[0] if fallen else 'A counter'} fell during the cell, so the server restarted or was reset: its counts are unknown."


def implied_bandwidth(case: Case) -> str | None:
    weights = case.record.telemetry.get("weight_bytes")
    roof = case.record.telemetry.get("memory_bytes_per_s")
    steps = case.view.column("steps")
    decode = case.view.seconds("last_output_ns") - case.view.seconds("first_output_ns")
    known = case.view.ok & (steps > 0) & (decode > 0)
    if not weights or not roof or not known.any():
        return None
    # Streams of a batch share a pass over the weights, so passes are counted along one stream.
    implied = float(np.median(steps[known] / decode[known])) * weights
    if implied <= ROOF_SLACK * roof:
        return None
    return (
        f"Reading the weights once a step takes {implied / 1e9:.3g} GB/s, and the device has {roof / 1e9:.3g}: "
        "check the model, its precision and the token counts."
    )


def lossy_acceptance(case: Case) -> str | None:
    switches = case.record.facts.extra.get("lossy")
    if not isinstance(switches, list) or not switches:
        return None
    names = ", ".join(map(str, switches))
    return (
        f"Drafts are accepted that the target would not have chosen ({names}): the text is another model's, so "
        "compare quality too, or leave the switch out."
    )


def degenerate_repetition(case: Case) -> str | None:
    replies = [str(row.get("reasoning") or "") + str(row.get("text") or "") for row in case.texts]
    replies = [reply for reply in replies if reply]
    loops = sum(is_degenerate(reply) for reply in replies)
    if not replies or loops / len(replies) < REPEAT_SHARE:
        return None
    return (
        f"{loops} of {len(replies)} replies run in a loop, which any drafter predicts: use a stronger model, "
        f"or a smaller workload.max_tokens (now {case.record.config.workload.max_tokens})."
    )


def is_degenerate(text: str) -> bool:
    """Whether the second half of a text repeats itself, by how far zlib shrinks it."""
    data = text.encode()
    tail = data[-max(len(data) // 2, REPEAT_BYTES) :]
    return len(tail) >= REPEAT_BYTES and len(zlib.compress(tail)) / len(tail) < REPEAT_RATIO


def random_token_prompts(case: Case) -> str | None:
    names = {case.record.config.workload.split, *case.view.rows["category"].dropna()}
    random = sorted(name for name in names if str(name).lower().startswith("random"))
    if not random or case.method.name == "none":
        return None
    return f"Prompts of {random[0]} are not language: acceptance on them says nothing of real use."


def placeholder_data(case: Case) -> str | None:
    given = (*case.prompts, *(str(row.get("prompt") or "") for row in case.texts))
    if not any(PLACEHOLDER in prompt.lower() for prompt in given):
        return None
    return "Prompts are SPEED-Bench's placeholder sentence: fetch the data with its own tool first."
