"""Whether a method samples from the model's own distribution: a test on short continuations at a temperature above 0.

At temperature 0 losslessness is equality. Above it, two runs differ by chance, so many continuations of one prompt are
drawn from both arms with different seeds, and their frequencies are compared: Pearson's chi-square for two samples,
with rare outcomes taken together until every expected count is at least 5 (Cochran 1954). The first token comes from
prefill and is drafted by nobody, so prefixes of two tokens and more are what tests a drafter; several prefixes of one
sample are several tests, for which the p-values are multiplied by their number (Bonferroni).

That nothing was found says only that a difference above `detectable` would probably have been (power 0.8).

Boundary: counts what it is given; `runners.continuations` draws them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

LEAST_EXPECTED = 5.0
POWER = 0.8


@dataclass(frozen=True)
class DistributionTest:
    """One comparison of two samples. `p_value` is small where they hardly come from one distribution."""

    outcomes: int
    """Kinds of outcome after rare ones were taken together; with fewer than two nothing can be told."""
    reference_n: int
    candidate_n: int
    statistic: float
    p_value: float
    distance: float
    """Total variation between the two samples (0 to 1), rare outcomes together; chance alone makes it above 0."""
    detectable: float | None
    """Total variation that the test would have found at `alpha` with a probability of at least 0.8."""


@dataclass(frozen=True)
class Verdict:
    """The tests of prefixes of 1, 2, … tokens, and what they say together."""

    prefixes: tuple[DistributionTest, ...]
    alpha: float

    @property
    def p_value(self) -> float:
        """The smallest, corrected for the number of tests (at most 1)."""
        return min(1.0, len(self.prefixes) * min((t.p_value for t in self.prefixes), default=1.0))

    @property
    def differs(self) -> bool:
        """Whether the candidate was seen to sample from another distribution."""
        return self.p_value < self.alpha


def compare_continuations(
    reference: Sequence[Sequence[Hashable]],
    candidate: Sequence[Sequence[Hashable]],
    tokens: int = 3,
    alpha: float = 0.01,
) -> Verdict:
    """Compare prefixes of 1 to `tokens` tokens of two samples of continuations (each a sequence of token ids).

    The draws must be independent: one seed must not serve both samples, or equal draws are counted as agreement.
    Raises ValueError for a sample without a draw.
    """
    lengths = range(1, tokens + 1)
    tests = (
        compare_samples([tuple(c[:n]) for c in reference], [tuple(c[:n]) for c in candidate], alpha / tokens)
        for n in lengths
    )
    return Verdict(tuple(tests), alpha)


def compare_samples(
    reference: Sequence[Hashable], candidate: Sequence[Hashable], alpha: float = 0.01
) -> DistributionTest:
    """Pearson's chi-square test that two samples of outcomes come from one distribution."""
    from scipy.stats import chi2

    if not reference or not candidate:
        raise ValueError("both samples need at least one draw")
    rows = _pooled(Counter(reference), Counter(candidate))
    n, m = len(reference), len(candidate)
    distance = sum(abs(a / n - b / m) for a, b in rows) / 2
    if len(rows) < 2:
        return DistributionTest(len(rows), n, m, 0.0, 1.0, distance, None)
    statistic = sum((a * m - b * n) ** 2 / (a + b) for a, b in rows) / (n * m)
    free = len(rows) - 1
    found = float(chi2.sf(statistic, free))
    return DistributionTest(len(rows), n, m, statistic, found, distance, _detectable(n, m, free, alpha))


def _pooled(reference: Counter[Hashable], candidate: Counter[Hashable]) -> list[tuple[int, int]]:
    """Counts of each outcome in both samples, rare ones together.

    What is rare is decided by both counts together, so that the pooling knows nothing of their difference.
    """
    n, m = reference.total(), candidate.total()
    need = LEAST_EXPECTED * (n + m) / min(n, m)
    both = [(reference[outcome], candidate[outcome]) for outcome in {*reference, *candidate}]
    often = [row for row in both if sum(row) >= need]
    rare = [row for row in both if sum(row) < need]
    rest = (sum(a for a, _ in rare), sum(b for _, b in rare))
    if sum(rest) >= need or not often:
        return [*often, rest] if sum(rest) else often
    often.sort(key=sum)  # too few even together: they join the rarest of the others
    first = often.pop(0)
    return [*often, (first[0] + rest[0], first[1] + rest[1])]


def _detectable(n: int, m: int, free: int, alpha: float) -> float:
    """Total variation whose chi-square is beyond the critical value with the wanted power, at least.

    For shares p and q with the mixture π the statistic is non-central chi-square with n·m/(n+m)·Σ(p − q)²/π, and that
    sum is at least (Σ|p − q|)², four times the squared total variation (Cauchy–Schwarz).
    """
    from scipy.optimize import brentq
    from scipy.stats import chi2, ncx2

    critical = float(chi2.isf(alpha, free))
    shift = brentq(lambda lam: float(ncx2.sf(critical, free, lam)) - POWER, 1e-6, 1e6)
    return min(1.0, float((shift * (n + m) / (n * m)) ** 0.5) / 2)
