"""Intervals: from paired blocks to one ratio, and what a percentile of few samples can promise.

Boundary: numbers in, numbers out; no file, no cell, no policy (a verdict on an interval is made elsewhere).
The datum is a log ratio of a block, `log(TPOT of the arm / TPOT of the baseline)`, so that + is slower.
Formulas: signed ranks and their exact null distribution, Wilcoxon 1945; the estimate and the interval from
Walsh averages, Hodges & Lehmann 1963; the bound on a percentile is the order-statistic (binomial) bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench.errors import SpecbenchError
from specbench.results import Ratio

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

WILCOXON_MIN_BLOCKS = 8
"""Below this the exact interval at 95 % is close to the whole range of the data."""

SIGMA_FLOOR = 0.02
"""Least spread (log) between blocks that a small sample may claim: 2 %, the least worth a word."""

MIN_N = {90: 29, 95: 59, 99: 299}
"""Smallest n at which the largest of n samples bounds the percentile from above with 95 % confidence:
the first n with (q/100)**n <= 0.05."""


# --- the datum --------------------------------------------------------------------------------------------


def block_log_ratio(passes: Sequence[tuple[Mapping[Any, float], Mapping[Any, float]]]) -> float | None:
    """Median over prompts and passes of log(arm / baseline).

    `passes` holds one pair (arm, baseline) a pass, each from prompt key to a positive value in one unit; a
    prompt counts where both have it. None where no prompt does.
    """
    logs = [np.log(arm[key] / base[key]) for arm, base in passes for key in arm.keys() & base.keys()]
    return float(np.median(logs)) if logs else None


# --- the interval -----------------------------------------------------------------------------------------


def ratio(d: ArrayLike, confidence: float = 0.95, floor: float = SIGMA_FLOOR) -> Ratio:
    """Speedup with its interval from block data `d`, log(TPOT arm / TPOT baseline), shape [blocks].

    Above 1 the arm is faster. From 8 blocks on the interval inverts the exact signed-rank test (`wilcoxon`)
    and a t interval stands beside it; with fewer, or where so few blocks cannot reach the confidence, it is
    a t interval whose spread is at least `floor` (`welch`). Raises SpecbenchError on no data, NaN, infinity.
    """
    values = _checked(d)
    if not 0 < confidence < 1:
        raise SpecbenchError(f"confidence: {confidence:g} is not between 0 and 1; give a share such as 0.95.")
    exact = wilcoxon_interval(values, confidence) if len(values) >= WILCOXON_MIN_BLOCKS else None
    if exact is None:
        centre = float(np.mean(values))
        low, high = t_interval(values, confidence, max(floor, SIGMA_FLOOR))
        return _ratio(centre, low, high, confidence, len(values), "welch")
    low, high = exact
    t_low, t_high = t_interval(values, confidence)
    beside = (float(np.exp(-t_high)), float(np.exp(-t_low)))
    return _ratio(hodges_lehmann(values), low, high, confidence, len(values), "wilcoxon", beside)


def hodges_lehmann(values: ArrayLike) -> float:
    """Median of all pairwise (Walsh) averages, each value with itself included."""
    return float(np.median(_walsh(_checked(values))))


def wilcoxon_interval(values: ArrayLike, confidence: float) -> tuple[float, float] | None:
    """Interval of the centre by inverting the exact two-sided signed-rank test.

    The bounds are the (W+1)-th smallest and largest Walsh average, W the critical value. None where n is so
    small that no rank sum is rare enough.
    """
    data = _checked(values)
    critical = wilcoxon_critical(len(data), 1 - confidence)
    if critical is None:
        return None
    averages = np.sort(_walsh(data))
    return float(averages[critical]), float(averages[-1 - critical])


def wilcoxon_critical(n: int, alpha: float) -> int | None:
    """Largest rank sum W with P(sum <= W) <= alpha/2 under the null; None where even 0 is too likely."""
    allowed = int(np.searchsorted(_signed_rank_cdf(n), alpha / 2, side="right"))
    return allowed - 1 if allowed else None


def t_interval(values: ArrayLike, confidence: float, floor: float = 0.0) -> tuple[float, float]:
    """Student interval of the mean, with a spread of at least `floor`.

    One value shows no spread: then `floor` is used with the widest t, that of one degree of freedom.
    """
    from scipy.stats import t as student

    data = _checked(values)
    n = len(data)
    spread = max(float(np.std(data, ddof=1)) if n > 1 else 0.0, floor)
    half = float(student.ppf((1 + confidence) / 2, max(n - 1, 1))) * spread / n**0.5
    centre = float(np.mean(data))
    return centre - half, centre + half


def _ratio(
    centre: float,
    low: float,
    high: float,
    confidence: float,
    blocks: int,
    method: str,
    beside: tuple[float, float] | tuple[None, None] = (None, None),
) -> Ratio:
    """Turn slower-is-positive logs into a speedup: the bounds change places."""
    bounds = (float(np.exp(-centre)), float(np.exp(-high)), float(np.exp(-low)))
    return Ratio(*bounds, confidence, blocks, method, *beside)


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    data = np.asarray(values, dtype=float).ravel()
    if not len(data):
        raise SpecbenchError("d: there is no block to take a ratio from; run at least one whole block.")
    if not np.isfinite(data).all():
        raise SpecbenchError("d: a log ratio is NaN or infinite; drop blocks without a valid TPOT first.")
    return data


def _walsh(data: NDArray[np.float64]) -> NDArray[np.float64]:
    first, second = np.triu_indices(len(data))
    return np.asarray((data[first] + data[second]) / 2)


@lru_cache(maxsize=256)
def _signed_rank_cdf(n: int) -> NDArray[np.float64]:
    """P(W <= w) for w = 0 … n(n+1)/2: each rank enters the sum or not, so the counts convolve."""
    chance = np.ones(1)
    for rank in range(1, n + 1):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    return np.cumsum(chance)


# --- percentiles ------------------------------------------------------------------------------------------


def percentile(values: ArrayLike, q: int) -> float | None:
    """The q-th percentile (linear between order statistics), or None where n does not support it.

    p50 needs one value; p90, p95 and p99 need 29, 59 and 299.
    """
    data = np.asarray(values, dtype=float)
    return float(np.percentile(data, q)) if len(data) >= MIN_N.get(q, 1) else None


def percentile_upper(values: ArrayLike, q: int, confidence: float = 0.95) -> float | None:
    """Distribution-free upper bound of the q-th percentile: the smallest order statistic that holds.

    Order statistic r of n bounds it where P(Binomial(n, q/100) < r) >= confidence. None where none does.
    """
    from scipy.stats import binom

    data = np.sort(np.asarray(values, dtype=float))
    rank = int(binom.ppf(confidence, len(data), q / 100)) + 1 if len(data) else 1
    return float(data[rank - 1]) if rank <= len(data) else None
