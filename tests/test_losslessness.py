"""specbench.losslessness: the test's own numbers, how often it cries wolf, and what it finds."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from scipy.stats import chi2_contingency

from specbench.losslessness import LEAST_EXPECTED, compare_continuations, compare_samples

SHARES = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}


def draw(shares: dict[str, float], n: int, rng: random.Random) -> list[str]:
    return rng.choices(list(shares), list(shares.values()), k=n)


def test_the_statistic_is_pearsons() -> None:
    rng = random.Random(1)
    reference, candidate = draw(SHARES, 300, rng), draw(SHARES, 200, rng)
    found = compare_samples(reference, candidate)
    counts = [Counter(reference), Counter(candidate)]
    table = [[count[key] for key in SHARES] for count in counts]
    known = chi2_contingency(table, correction=False)
    assert (found.statistic, found.p_value) == pytest.approx((known.statistic, known.pvalue), rel=1e-9)
    assert (found.outcomes, found.reference_n, found.candidate_n) == (4, 300, 200)
    assert found.distance == pytest.approx(
        sum(abs(counts[0][key] / 300 - counts[1][key] / 200) for key in SHARES) / 2
    )


def test_two_shares_by_hand() -> None:
    # 60 of 100 against 40 of 100: chi-square 8, and the sampled distance 0.2.
    found = compare_samples(["x"] * 60 + ["y"] * 40, ["x"] * 40 + ["y"] * 60)
    assert (found.statistic, found.distance, found.outcomes) == (pytest.approx(8.0), pytest.approx(0.2), 2)
    assert found.p_value == pytest.approx(0.004678, rel=1e-3)


def test_rare_outcomes_are_taken_together() -> None:
    reference = ["x"] * 90 + [f"r{i}" for i in range(10)]
    candidate = ["x"] * 85 + [f"s{i}" for i in range(15)]
    found = compare_samples(reference, candidate)
    assert (found.outcomes, found.distance) == (2, pytest.approx(0.05))
    # Too few even together (an expected count of 2): they join the rarest of the others.
    few = compare_samples(["x"] * 60 + ["y"] * 38 + ["z"] * 2, ["x"] * 60 + ["y"] * 38 + ["w"] * 2)
    assert (few.outcomes, few.statistic) == (2, 0.0)
    assert LEAST_EXPECTED > 2


def test_one_outcome_tells_nothing() -> None:
    found = compare_samples(["x"] * 50, ["x"] * 50)
    assert (found.outcomes, found.p_value, found.detectable) == (1, 1.0, None)
    scattered = compare_samples(list(range(50)), list(range(50, 100)))
    assert (scattered.outcomes, scattered.p_value) == (1, 1.0)


def test_a_sample_without_a_draw() -> None:
    with pytest.raises(ValueError, match="at least one draw"):
        compare_samples([], ["x"])


def test_false_alarms_stay_near_alpha() -> None:
    rng = random.Random(2)
    alarms = sum(
        compare_samples(draw(SHARES, 150, rng), draw(SHARES, 150, rng)).p_value < 0.05 for _ in range(1000)
    )
    # 50 are expected; beyond 30 to 75 lies less than one binomial draw in a thousand on either side.
    assert 30 <= alarms <= 75


def test_what_is_called_detectable_is_detected() -> None:
    rng = random.Random(3)
    detectable = compare_samples(draw(SHARES, 400, rng), draw(SHARES, 400, rng), alpha=0.01).detectable
    assert detectable is not None
    # Moving mass between the two commonest outcomes is the hardest shift to see of its size.
    moved = SHARES | {"a": SHARES["a"] - detectable, "b": SHARES["b"] + detectable}
    seen = sum(
        compare_samples(draw(SHARES, 400, rng), draw(moved, 400, rng)).p_value < 0.01 for _ in range(200)
    )
    assert seen / 200 > 0.75


def test_detectable_shrinks_with_the_sample() -> None:
    rng = random.Random(4)
    small, large = (
        compare_samples(draw(SHARES, n, rng), draw(SHARES, n, rng)).detectable for n in (100, 400)
    )
    assert small is not None
    assert large is not None
    assert small == pytest.approx(2 * large)


def test_prefixes_are_tested_apart_and_corrected() -> None:
    rng = random.Random(5)
    same = [tuple(rng.choices("ab", k=3)) for _ in range(400)]
    # The first token agrees, the second copies the first: only prefixes of two tokens and more show it.
    copied = [(first, first, third) for first, _, third in (rng.choices("ab", k=3) for _ in range(400))]
    found = compare_continuations(same, copied)
    assert found.prefixes[0].p_value > 0.01
    assert found.prefixes[1].p_value < 1e-6
    assert found.differs
    assert found.p_value == min(1.0, 3 * min(t.p_value for t in found.prefixes))
    again = compare_continuations(same, [tuple(rng.choices("ab", k=3)) for _ in range(400)])
    assert not again.differs


def test_a_continuation_that_ended_is_an_outcome() -> None:
    ended = compare_continuations([("a",)] * 60 + [("a", "b")] * 60, [("a", "b")] * 120, tokens=2)
    assert ended.prefixes[0].outcomes == 1
    assert ended.differs
