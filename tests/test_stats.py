"""Intervals against published tables, and against what chance does."""

import math

import numpy as np
import pytest

from specbench import stats
from specbench.errors import SpecbenchError

# Two-sided critical values of the signed-rank sum as printed in statistics text books (Wilcoxon 1945 and later).
CRITICAL = {
    0.05: {6: 0, 7: 2, 8: 3, 9: 5, 10: 8, 12: 13, 15: 25, 20: 52, 25: 89},
    0.01: {8: 0, 9: 1, 10: 3, 12: 7, 15: 15, 20: 37, 25: 68},
}


@pytest.mark.parametrize(
    ("alpha", "n", "w"), [(a, n, w) for a, row in CRITICAL.items() for n, w in row.items()]
)
def test_signed_rank_critical_values_are_the_published_ones(alpha: float, n: int, w: int) -> None:
    assert stats.wilcoxon_critical(n, alpha) == w


def test_too_few_for_any_rank_sum_to_be_rare() -> None:
    assert stats.wilcoxon_critical(5, 0.05) is None
    assert stats.wilcoxon_interval([0.1] * 5, 0.95) is None


def test_interval_agrees_with_the_test_it_inverts() -> None:
    from scipy.stats import wilcoxon

    data = np.random.default_rng(3).normal(0.03, 0.05, 12)
    low, high = stats.wilcoxon_interval(data, 0.95) or (math.nan, math.nan)
    for shift, rejected in (
        (low - 1e-6, True),
        (low + 1e-6, False),
        (high - 1e-6, False),
        (high + 1e-6, True),
    ):
        p = wilcoxon(data - shift, method="exact").pvalue
        assert (p <= 0.05) == rejected


def test_hodges_lehmann_is_the_median_of_pairwise_averages() -> None:
    # Walsh averages of 1, 2, 9: 1, 1.5, 2, 5, 5.5, 9; their median is 3.5.
    assert stats.hodges_lehmann([1, 2, 9]) == 3.5


def test_ratio_turns_slower_is_positive_into_a_speedup() -> None:
    twice_as_fast = stats.ratio([math.log(1 / 2)] * 10)
    assert twice_as_fast.estimate == pytest.approx(2.0)
    slower = stats.ratio(np.log([1.09, 1.1, 1.11, 1.1, 1.1, 1.12, 1.08, 1.1, 1.1, 1.1]))
    assert slower.estimate == pytest.approx(1 / 1.1, rel=1e-3)
    assert slower.low < slower.estimate < slower.high < 1


def test_both_signs_mirror_each_other() -> None:
    d = np.random.default_rng(5).normal(0.1, 0.03, 11)
    up, down = stats.ratio(d), stats.ratio(-d)
    assert up.estimate == pytest.approx(1 / down.estimate)
    assert (up.low, up.high) == pytest.approx((1 / down.high, 1 / down.low))
    assert down.t_low is not None
    assert down.t_high is not None
    assert (up.t_low, up.t_high) == pytest.approx((1 / down.t_high, 1 / down.t_low))


def test_eight_blocks_are_exact_and_seven_are_not() -> None:
    assert stats.ratio([0.01 * i for i in range(8)]).method == "wilcoxon"
    seven = stats.ratio([0.01 * i for i in range(7)])
    assert (seven.method, seven.t_low, seven.t_high) == ("welch", None, None)


def test_confidence_beyond_what_eight_blocks_can_give_falls_back() -> None:
    # The rarest two-sided signed-rank event of 8 blocks has probability 2/256 = 0.0078.
    assert stats.ratio([0.01 * i for i in range(8)], confidence=0.995).method == "welch"


def test_constant_data_keeps_the_floor_where_n_is_small() -> None:
    seen = stats.ratio([0.0] * 5)
    half = 2.776 * 0.02 / math.sqrt(5)  # t(0.975, 4 degrees of freedom) = 2.776
    assert (seen.low, seen.high) == pytest.approx((math.exp(-half), math.exp(half)), rel=1e-4)
    wider = stats.ratio([0.0] * 5, floor=0.05)
    assert wider.high > seen.high


def test_floor_cannot_be_lowered_below_two_percent() -> None:
    assert stats.ratio([0.0] * 5, floor=0.0) == stats.ratio([0.0] * 5)


def test_zero_variance_with_many_blocks_is_a_point() -> None:
    seen = stats.ratio([0.1] * 10)
    assert seen.low == seen.high == seen.estimate == pytest.approx(math.exp(-0.1))


def test_a_single_block_is_wide_but_finite() -> None:
    seen = stats.ratio([0.0])
    assert seen.high == pytest.approx(math.exp(12.706 * 0.02), rel=1e-4)  # t(0.975, 1) = 12.706


@pytest.mark.parametrize("bad", [[], [0.1, math.nan], [math.inf]])
def test_no_data_nan_and_infinity_are_refused(bad: list[float]) -> None:
    with pytest.raises(SpecbenchError, match=r"^d: "):
        stats.ratio(bad)


@pytest.mark.parametrize("confidence", [0.0, 1.0, 95.0])
def test_confidence_is_a_share(confidence: float) -> None:
    with pytest.raises(SpecbenchError, match=r"^confidence: "):
        stats.ratio([0.1] * 10, confidence=confidence)


@pytest.mark.parametrize(("blocks", "least"), [(10, 0.95), (20, 0.95), (5, 0.95)])
def test_nothing_changed_is_rarely_called_a_change(blocks: int, least: float) -> None:
    rng = np.random.default_rng(blocks)
    above = below = 0
    for _ in range(1500):
        seen = stats.ratio(rng.normal(0.0, 0.04, blocks))
        above, below = above + (seen.low > 1), below + (seen.high < 1)
    # Nominal 2.5 % on each side; three standard errors of 1,500 trials are 1.2 %.
    assert above / 1500 < 0.037
    assert below / 1500 < 0.037
    assert 1 - (above + below) / 1500 > least - 0.017
    # An interval that never misses would be of no use.
    assert above + below > 0


def test_datum_is_the_median_over_prompts_and_both_passes() -> None:
    first = ({"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 1.0, "b": 1.0, "c": 1.0})
    second = ({"a": 8.0, "b": 16.0, "x": 1.0}, {"a": 1.0, "b": 1.0})
    # logs of 1, 2, 4, 8, 16: their median is log 4; x has no baseline.
    assert stats.block_log_ratio([first, second]) == pytest.approx(math.log(4))


def test_datum_shrugs_off_a_burst_that_hits_few_prompts() -> None:
    quiet = {f"p{i}": 0.010 for i in range(20)}
    burst = quiet | {f"p{i}": 0.100 for i in range(5)}
    assert stats.block_log_ratio([(quiet, quiet), (burst, quiet)]) == 0.0


def test_no_common_prompt_is_no_datum() -> None:
    assert stats.block_log_ratio([({"a": 1.0}, {"b": 1.0})]) is None
    assert stats.block_log_ratio([]) is None


@pytest.mark.parametrize(("q", "n"), [(90, 29), (95, 59), (99, 299)])
def test_percentile_needs_enough_samples(q: int, n: int) -> None:
    # The n at which q^n first falls to 5 %.
    assert (q / 100) ** n <= 0.05 < (q / 100) ** (n - 1)
    assert stats.percentile(range(n - 1), q) is None
    assert stats.percentile(range(n), q) is not None
    assert stats.percentile_upper(range(n - 1), q) is None
    assert stats.percentile_upper(range(n), q) == n - 1


def test_median_needs_one_value() -> None:
    assert stats.percentile([3.0], 50) == 3.0
    assert stats.percentile([], 50) is None
    assert stats.percentile_upper([], 90) is None


def test_percentile_bound_holds_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    held = sum((stats.percentile_upper(rng.uniform(size=60), 90) or 0.0) >= 0.9 for _ in range(1000))
    assert held / 1000 >= 0.93
