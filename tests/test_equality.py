"""Output equality: what counts as the same, where texts part, and what is left out."""

import pytest

from specbench import trace
from specbench.equality import compare, equality, texts_of
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
