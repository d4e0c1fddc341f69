"""The answer as records: what each arm did, what it gained over the baseline, and whether to believe it.

`summarise` makes a `Summary` from a run; the terminal, `--json`, HTML and Markdown all show this record and
compute nothing of their own. Ratios exist only inside a block (see `stats`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from specbench.cell import Note

Reading = Literal["gain", "loss", "same", "few", "none"]
"""What an interval says: above 1, below 1, holding 1, resting on too few blocks, or not there."""

MIN_BLOCKS = 3
"""Below this the width of an interval is an assumption about the host, not something that was seen."""


@dataclass(frozen=True)
class Ratio:
    """A speedup (baseline TPOT / arm TPOT, so above 1 is faster) with its interval."""

    estimate: float
    low: float
    high: float
    confidence: float
    blocks: int
    method: str
    """How the interval was made: `wilcoxon` (exact signed rank, from 8 blocks) or `welch` (small n)."""
    t_low: float | None = None
    t_high: float | None = None

    @property
    def settled(self) -> bool:
        """Whether enough blocks stand behind it to say anything."""
        return self.blocks >= MIN_BLOCKS


def reading(ratio: Ratio | None) -> Reading:
    """On which side of 1 the whole interval lies, where enough blocks stand behind it."""
    if ratio is None:
        return "none"
    if not ratio.settled:
        return "few"
    return "gain" if ratio.low > 1 else "loss" if ratio.high < 1 else "same"


@dataclass(frozen=True)
class Position:
    """Acceptance at one draft position, counted from 1; shares are 0 to 1."""

    position: int
    drafts: int
    marginal: float
    """P(the first `position` drafted tokens were all accepted) over all drafts."""
    conditional: float | None
    """marginal / marginal of the position before."""
    source: str


@dataclass(frozen=True)
class Equality:
    """Greedy output against the baseline's, per prompt and block, on the text (or token) sequence."""

    compared: int
    exact_share: float
    mean_matching_prefix: float
    """Mean share of the baseline's characters that match before the first difference (1 where equal)."""
    first_divergence_median: float | None
    """Median character index of the first difference among those that differ; None where none does."""
    self_exact_share: float | None
    """The baseline against itself within a block: what this engine repeats of its own accord."""
    self_compared: int


@dataclass(frozen=True)
class Distribution:
    """A metric's values over requests of an arm, with the percentiles that n supports (others None)."""

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    values: tuple[float, ...] = ()
    """The values themselves, thinned to at most 2,000, for figures."""


@dataclass(frozen=True)
class Group:
    """One category of prompts under one arm."""

    category: str
    requests: int
    speedup: Ratio | None
    tpot_s: float | None
    al_all: float | None
    coverage: float | None
    acceptance_rate: float | None


@dataclass(frozen=True)
class Arm:
    """One method of one comparison: its cells taken together."""

    config_id: str
    comparison: str
    engine: str
    engine_version: str | None
    model: str
    method: str
    label: str
    k: int | None
    concurrency: int
    baseline: bool
    pinned: bool
    cells: int
    blocks: int
    metrics: dict[str, float | None]
    """Every metric of the metrics table, over the arm's cells."""
    reasons: dict[str, str]
    """Why a metric is null."""
    speedup: Ratio | None
    """None for the baseline, and where no block holds both."""
    speedup_output_tps: float | None
    """Ratio of summed tokens per second: reported, not decided on."""
    groups: tuple[Group, ...]
    positions: tuple[Position, ...]
    equality: Equality | None
    tpot_s: Distribution
    ttft_s: Distribution
    validity: tuple[Note, ...]
    """Each code once, the gravest first."""


# --- engines side by side ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFacts:
    """One engine of a run that holds several, as its cells met it; None where it does not say."""

    name: str
    """As the other records name it: the engine, with its version where the run holds two of one engine."""
    version: str | None
    precision: str | None
    threads: int | None
    model_sha256: str | None
    self_exact_share: float | None
    """Plain greedy output against itself within a block."""


@dataclass(frozen=True)
class Side:
    """One arm as a row beside those of other engines; its other figures are the arm's."""

    config_id: str
    engine: str
    detail: str
    """What its method was asked for beyond the idea, such as `k=4 n=3`."""
    step_s: float | None
    """Time of a target step, drafting included."""
    baseline_step_s: float | None
    """That of this engine's baseline."""
    step_cost: float | None
    """Baseline steps that a step cost, AL_all / speedup: both are read inside blocks."""


@dataclass(frozen=True)
class Idea:
    """Arms of all engines that draft by one idea at one concurrency. No ratio is taken between them."""

    name: str
    """The suite's word for it, such as `ngram`, whatever each engine calls it."""
    concurrency: int
    sides: tuple[Side, ...]


@dataclass(frozen=True)
class Agreement:
    """Plain greedy output of two engines, prompt by prompt: says how far both run the same model."""

    engines: tuple[str, str]
    compared: int
    exact_share: float
    mean_matching_prefix: float
    first_divergence_median: float | None


@dataclass(frozen=True)
class SideBySide:
    """What a run of several engines shows beyond each of them."""

    engines: tuple[EngineFacts, ...]
    ideas: tuple[Idea, ...]
    agreements: tuple[Agreement, ...]
    remarks: tuple[str, ...]
    """What is the same for all engines and what is not, one sentence a thing; differences first."""


@dataclass(frozen=True)
class Summary:
    """A whole run, ready to show."""

    run: str
    path: str
    verdict: str
    """The answer in one or two sentences."""
    ok: bool
    """False where nothing succeeded or a finding of severity `invalid` voids the comparison."""
    model: str
    model_sha256: str | None
    engine: str
    engine_version: str | None
    arms: tuple[Arm, ...]
    validity: tuple[Note, ...]
    environment: dict[str, Any] = field(default_factory=dict)
    """Machine, facts, seeds, split: label to value, in display order."""
    dropped_blocks: int = 0
    blocks: int = 0
    explanations: tuple[str, ...] = ()
    """Why it paid or did not, one sentence a finding, each from numbers in this record."""
    side_by_side: SideBySide | None = None
    """None where the run holds one engine."""


# --- as JSON ----------------------------------------------------------------------------------------------


def to_dict(value: Any) -> Any:
    """A summary, or any record in it, as JSON-able values: NaN and infinity become None."""
    if isinstance(value, Note):
        return value.model_dump()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_dict(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_dict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cells_json(summary: Summary) -> list[dict[str, Any]]:
    """One flat row per arm, as `--json` of `run` and `demo` prints it."""
    rows = [
        {
            "engine": arm.engine,
            "engine_version": arm.engine_version,
            "method": arm.method,
            "label": arm.label,
            "k": arm.k,
            "concurrency": arm.concurrency,
            "baseline": arm.baseline,
            "pinned": arm.pinned,
            "output_tps": arm.metrics.get("output_tps"),
            "tpot_s": arm.metrics.get("tpot_s"),
            "step_s": arm.metrics.get("step_s"),
            "speedup": arm.speedup.estimate if arm.speedup else None,
            "speedup_low": arm.speedup.low if arm.speedup else None,
            "speedup_high": arm.speedup.high if arm.speedup else None,
            "al_all": arm.metrics.get("al_all"),
            "al_drafted": arm.metrics.get("al_drafted"),
            "coverage": arm.metrics.get("coverage"),
            "equal_share": arm.equality.exact_share if arm.equality else None,
            "validity": [note.code for note in arm.validity],
        }
        for arm in summary.arms
    ]
    plain: list[dict[str, Any]] = to_dict(rows)
    return plain
