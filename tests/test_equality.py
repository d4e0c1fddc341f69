"""Output equality: what counts as the same, where texts part, and what is left out."""

import math

import pytest

from specbench import trace
from specbench.equality import (
    Rescored,
    compare,
    equality,
    first_divergence,
    margin,
    score,
    texts_of,
)
from tests.make_cell import failed, row


def test_first_difference_and_matching_share() -> None:
    pair = compare("the cat sat", "the dog sat")
    assert (pair.equal, pair.common) == (False, 4)
    assert pair.share == pytest.approx(4 / 11)


@pytest.mark.parametrize(
    ("reference", "text", "common"), [("abcd", "ab", 2), ("ab", "abcd", 2), ("", "a", 0), ("a", "", 0)]
)
def test_a_beginning_is_not_the_whole(reference: str, text: str, common: int) -> None:
    pair = compare(reference, text)
    assert not pair.equal
    assert pair.common == common


def test_two_empty_replies_are_equal() -> None:
    assert compare("", "").equal


def test_characters_are_counted_not_bytes() -> None:
    assert compare("中文✅!", "中文✅?").common == 3


def test_shares_over_prompts_and_blocks() -> None:
    base = {("a", 0): "one two", ("b", 0): "three", ("c", 0): "only here"}
    arm = {("a", 0): "one two", ("b", 0): "thrxe"}
    seen = equality([(base, arm), (base, base)], [(base, base)])
    assert seen is not None
    assert seen.compared == 5
    assert seen.exact_share == pytest.approx(4 / 5)
    assert seen.mean_matching_prefix == pytest.approx((4 + 3 / 5) / 5)
    assert seen.first_divergence_median == 3
    assert (seen.self_exact_share, seen.self_compared) == (1.0, 3)


def test_nothing_to_compare_is_none() -> None:
    assert equality([], []) is None
    assert equality([({("a", 0): "x"}, {("b", 0): "x"})], []) is None


def test_equal_everywhere_has_no_divergence_and_an_unknown_self() -> None:
    texts = {("a", 0): "x"}
    seen = equality([(texts, texts)], [])
    assert seen is not None
    assert (seen.first_divergence_median, seen.self_exact_share, seen.self_compared) == (None, None, 0)


def test_failed_and_warm_up_replies_are_left_out_and_turns_kept_apart() -> None:
    table = trace.request_table(
        [
            row(0, (0.1,), warmup=True),
            row(1, (0.1,), prompt_id="q", turn=0),
            row(2, (0.1,), prompt_id="q", turn=1),
            failed(3),
        ]
    )
    lines = [
        {"request": i, "prompt_id": "", "text": f"t{i}", "reasoning": "hm" if i == 2 else ""}
        for i in range(4)
    ]
    assert texts_of(table, lines) == {("q", 0): "t1", ("q", 1): "hm\0t2"}


# --- token by token -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "other", "want"),
    [
        ((1, 2, 3), (1, 2, 3), None),
        ((1, 2, 3), (1, 5, 3), (1, 2, 5)),
        ((1, 2), (1, 2, 3), (2, None, 3)),
        ((1, 2, 3), (1, 2), (2, 3, None)),
        ((), (7,), (0, None, 7)),
        ((), (), None),
    ],
)
def test_first_divergence(
    reference: tuple[int, ...], other: tuple[int, ...], want: tuple[int, int | None, int | None] | None
) -> None:
    found = first_divergence(reference, other)
    assert (found and (found.index, found.reference, found.other)) == want


def test_a_margin_is_a_difference_of_logits() -> None:
    # Logits 3.0, 2.5 and −1.0: whatever the normaliser is, it falls out.
    logits = {7: 3.0, 8: 2.5, 9: -1.0}
    normaliser = math.log(sum(map(math.exp, logits.values())))
    listed = {token: logit - normaliser for token, logit in logits.items()}
    assert margin(listed, 7, 8) == pytest.approx(0.5)
    assert margin(listed, 9, 8) == pytest.approx(-3.5)
    assert margin(listed, 7, None) is None
    assert margin(listed, 7, 10) is None


def test_rescoring_sums_up_what_falls_short() -> None:
    listed = {1: -0.5, 2: -0.7, 3: -4.0}
    tokens = tuple(score(token, listed) for token in (1, 2, 3, 1))
    found = Rescored(tokens)
    assert [t.best for t in tokens] == [1, 1, 1, 1]
    assert found.agreement == 0.5
    assert found.largest_shortfall == pytest.approx(3.5)
    assert (found.beyond(0.1), found.beyond(0.3), found.beyond(4)) == (2, 1, 0)
    unlisted = Rescored((*tokens, score(9, listed)))
    assert (unlisted.largest_shortfall, unlisted.beyond(4)) == (None, 1)
    assert (Rescored(()).agreement, Rescored(()).largest_shortfall) == (None, None)


def test_of_equal_tokens_the_one_that_was_said_counts_as_best() -> None:
    assert score(2, {1: -1.0, 2: -1.0}).shortfall == 0
    assert score(2, {1: -1.0, 2: -1.0}).best == 2
