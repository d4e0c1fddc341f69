"""Acceptance against published counts and closed forms, its names, and the --acceptance syntax."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_roofline.acceptance import (
    Acceptance,
    AcceptanceByContext,
    geometric_sum,
    parse_acceptance,
    rate_of_al,
)
from models_roofline.errors import RooflineError
from models_roofline.namings import (
    DRAFT_LENGTHS,
    NAMINGS,
    al_of_all_steps,
    al_of_drafted_steps,
    convert,
    drafts_of,
)

DATA = Path(__file__).parent / "data" / "roofline"
KNOWN: dict[str, Any] = json.loads((DATA / "acceptance_known.json").read_text(encoding="utf-8"))
COUNTERS = {case["id"]: case for case in KNOWN["counters"]}

shares = st.floats(0, 1)
marginals = st.lists(shares, min_size=1, max_size=12).map(lambda p: sorted(p, reverse=True))


@pytest.mark.parametrize("row", KNOWN["expected_tokens_per_step"], ids=lambda row: f"alpha={row['alpha']}")
def test_expected_tokens_are_the_closed_form(row: dict[str, float]) -> None:
    acceptance, k = Acceptance.from_rate(row["alpha"]), int(row["gamma"])
    assert acceptance.al_drafted(k) == pytest.approx(row["E_incl_bonus"], rel=1e-14)
    assert acceptance.accepted(k) == pytest.approx(row["E_accepted"], rel=1e-14)
    assert acceptance.al_drafted(k) / (1 + 0.05 * k) == pytest.approx(row["speedup_c05"], rel=1e-14)


def test_ends_are_exact() -> None:
    k = np.arange(2000)
    assert np.array_equal(Acceptance.from_rate(1).al_all(k), k + 1)
    assert np.array_equal(Acceptance.from_rate(0).al_all(k), np.ones(2000))
    assert Acceptance.from_marginal([1.0] * 7).al_all(7) == 8


@pytest.mark.parametrize("rate", [1e-12, 0.3, 0.999999999, 1 - 2**-53])
def test_geometric_sum_keeps_its_digits_near_one(rate: float) -> None:
    powers = np.cumprod(np.full(50, rate))
    assert geometric_sum(rate, range(1, 51)) == pytest.approx(np.cumsum(powers), rel=1e-13)


@given(marginals, shares)
def test_accept_length_lies_between_one_and_k_plus_one(p: list[float], coverage: float) -> None:
    acceptance = Acceptance.from_marginal(p, extend=True).with_coverage(coverage)
    k = np.arange(30)
    drafted, everywhere = acceptance.al_drafted(k), acceptance.al_all(k)
    assert np.all((everywhere >= 1) & (everywhere <= drafted) & (drafted <= k + 1))
    assert np.all(np.diff(drafted) >= 0)
    assert everywhere - 1 == pytest.approx(coverage * (drafted - 1))
    assert np.all(np.diff(acceptance.survival(k)) <= 0)
    assert drafted == pytest.approx(np.cumsum(acceptance.survival(k)))


@given(st.lists(shares, min_size=1, max_size=8))
def test_conditional_and_marginal_are_inverse(rates: list[float]) -> None:
    acceptance = Acceptance.from_conditional(rates)
    assert Acceptance.from_conditional(acceptance.conditional).marginal == pytest.approx(acceptance.marginal)


@given(shares, st.integers(1, 64))
def test_from_al_finds_the_rate(rate: float, k: int) -> None:
    al = float(Acceptance.from_rate(rate).al_drafted(k))
    assert Acceptance.from_al(al, k).al_drafted(k) == pytest.approx(al, rel=1e-12)
    assert rate_of_al(al, k) == pytest.approx(rate, abs=1e-9)


def test_shapes_are_those_of_k() -> None:
    acceptance = Acceptance.from_marginal([0.8, 0.6, 0.4])
    assert acceptance.accepted([[0], [1], [3]]) == pytest.approx(np.array([[0], [0.8], [1.8]]))
    assert acceptance.survival(3) == 0.4
    assert acceptance.rate_per_draft([1, 3]) == pytest.approx([0.8, 0.6])
    assert np.isnan(acceptance.rate_per_draft(0))
    assert acceptance.conditional == pytest.approx((0.8, 0.75, 2 / 3))


def test_extension_repeats_the_last_conditional_rate() -> None:
    acceptance = Acceptance.from_marginal([0.8, 0.6], extend=True)
    assert acceptance.survival([2, 3, 4]) == pytest.approx([0.6, 0.45, 0.3375])
    assert acceptance.accepted(4) == pytest.approx(0.8 + 0.6 + 0.45 + 0.3375)


def test_vllm_counts_of_pr_26498() -> None:
    case = COUNTERS["vllm-26498-mtbench"]
    count, k = case["given"], case["given"]["k"]
    al = 1 + count["num_accepted_tokens"] / count["num_drafts"]
    assert al == pytest.approx(case["expect"]["acceptance_length"])
    rate = convert(al, "accept_length", "acceptance_rate", k)
    assert rate == pytest.approx(case["expect"]["acceptance_rate"])
    assert rate == pytest.approx(count["num_accepted_tokens"] / count["num_draft_tokens"])
    assert convert(al, "accept_length", "accepted_length", k) == pytest.approx(2.6388, abs=5e-5)
    assert Acceptance.from_al(al, k).rate_per_draft(k) == pytest.approx(rate)


def test_vllm_histogram() -> None:
    case = COUNTERS["vllm-perreq-histogram"]
    acceptance = Acceptance.from_histogram(case["given"]["acceptance_histogram"])
    assert acceptance.al_drafted(3) == pytest.approx(case["expect"]["acceptance_length"])
    assert acceptance.rate_per_draft(3) == pytest.approx(case["expect"]["acceptance_rate"])


def test_llama_cpp_positions_of_pr_24536() -> None:
    case = COUNTERS["llamacpp-24536"]
    acceptance = Acceptance.from_marginal(case["given"]["per_pos"])
    assert acceptance.al_drafted(3) == pytest.approx(case["expect"]["acceptance_length"], abs=1.5e-3)


def test_one_mtp_head_of_vllm_pr_48892() -> None:
    case = COUNTERS["vllm-48892-mtp1"]
    rate, al = case["expect"]["acceptance_rate"], case["expect"]["acceptance_length"]
    for name in ("acceptance_rate", "alpha", "first_position_rate"):
        assert convert(al, "accept_length", name, 1) == pytest.approx(rate)
    assert Acceptance.from_marginal(case["expect"]["per_pos"]).al_all(1) == pytest.approx(al, abs=5e-5)


def test_lengths_that_no_step_had_are_still_passed() -> None:
    assert Acceptance.from_trace({1: 40, 4: 60}, 3).marginal == (0.6, 0.6, 0.6)
    assert Acceptance.from_trace([1, 1, 4, 4, 4], 3).marginal == (0.6, 0.6, 0.6)
    assert Acceptance.from_trace({1: 40, 2: 30, 3: 30}, 3).marginal == (0.6, 0.3, 0.0)


@given(st.lists(st.integers(1, 6), min_size=1))
def test_a_trace_keeps_its_mean(lengths: list[int]) -> None:
    assert Acceptance.from_trace(lengths, 5).al_drafted(5) == pytest.approx(np.mean(lengths))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Acceptance.from_rate(1.2), r"rate 1\.2 lies outside \[0, 1\]"),
        (lambda: Acceptance.from_rate(float("nan")), "rate nan"),
        (lambda: Acceptance.from_marginal([0.5, 0.2, 0.3]), "0.3 at position 3 is above 0.2"),
        (lambda: Acceptance.from_marginal([0.5, -0.1]), r"-0\.1 at position 2"),
        (lambda: Acceptance.from_marginal([0.5, float("nan")]), "nan at position 2"),
        (lambda: Acceptance.from_marginal([]), "at least one"),
        (lambda: Acceptance.from_conditional([0.5, 1.5]), "conditional rate 1.5 at position 2"),
        (lambda: Acceptance.from_rate(0.5).with_coverage(1.1), "coverage 1.1"),
        (lambda: Acceptance.from_al(5.1, 4), r"5\.1 is impossible with k = 4.*\[1, 5\]"),
        (lambda: Acceptance.from_al(0.9, 4), r"\[1, 5\]"),
        (lambda: Acceptance.from_trace([1, 5], 3), "accept length 5 lies outside 1 … 4"),
        (lambda: Acceptance.from_trace([], 3), "not all 0"),
        (lambda: Acceptance.from_histogram([3, -1]), "none negative"),
        (lambda: Acceptance.from_histogram([3]), "k at least 1"),
        (lambda: Acceptance.from_marginal([0.5, 0.2]).accepted([1, 4]), "known for 2 positions.*k = 4"),
        (lambda: Acceptance((0.5, 0.2), block=True).al_all(1), "blocks of 2 drafts.*k = 1"),
        (lambda: Acceptance((0.5,), tail=0.5, block=True), "block drafter"),
        (lambda: Acceptance.from_rate(0.5).accepted(-1), "-1 is below 0"),
        (lambda: Acceptance.from_rate(0.5).accepted(1.5), "whole number, not 1.5"),
        (lambda: Acceptance.from_rate(0.5).accepted(float("nan")), "whole number"),
        (lambda: AcceptanceByContext((2, 1), (Acceptance(), Acceptance())), "ascending"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(RooflineError, match=words):
        make()


def test_a_block_holds_at_its_own_length() -> None:
    assert Acceptance((0.5, 0.2), block=True).al_drafted([0, 2]) == pytest.approx([1, 1.7])


def _magicdec() -> tuple[list[int], list[float]]:
    lines = (DATA / "magicdec_selfspec_acceptance.csv").read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return [int(row["sequence_length"]) for row in rows], [float(row["acceptance_rate"]) for row in rows]


def test_decay_with_context_meets_the_measured_points() -> None:
    contexts, rates = _magicdec()
    decay = AcceptanceByContext(tuple(contexts), tuple(map(Acceptance.from_rate, rates)))
    assert decay.survival(1, contexts) == pytest.approx(rates)
    assert decay.survival(1, [10, 10**6]) == pytest.approx([0.84, 0.79])
    assert decay.survival(1, np.sqrt(4000 * 8000)) == pytest.approx(0.835)
    assert decay.accepted(np.array([[1], [2]]), [4000, 8000]) == pytest.approx(
        np.array([[0.84, 0.83], [0.84 + 0.84**2, 0.83 + 0.83**2]])
    )
    assert decay.note(contexts) is None
    assert "4000 to 100000" in (decay.note([5000, 200_000]) or "")


def test_a_drafter_past_its_positions() -> None:
    """EAGLE-3 with 2,048 positions falls from 2.85 to 1.14 tokens a step at 7.4K tokens (vLLM #48894)."""
    decay = AcceptanceByContext((2048, 7400), (Acceptance.from_al(2.85, 5), Acceptance.from_al(1.14, 5)))
    assert decay.al_drafted(5, [100, 2048, 7400, 10_000]) == pytest.approx([2.85, 2.85, 1.14, 1.14])
    assert 1.14 < decay.al_all(5, 4096) < 2.85


def test_a_single_context_is_flat() -> None:
    flat = AcceptanceByContext((4096,), (Acceptance.from_rate(0.5),))
    assert flat.al_drafted(1, [1, 4096, 10**6]) == pytest.approx([1.5, 1.5, 1.5])


@given(st.sampled_from(sorted(NAMINGS)), st.sampled_from(sorted(NAMINGS)), st.integers(1, 16), shares)
def test_every_name_converts_to_every_other_and_back(source: str, target: str, k: int, share: float) -> None:
    value = NAMINGS[source].from_al(1 + share * k, k)
    there = convert(value, source, target, k)
    assert convert(there, target, source, k) == pytest.approx(value, rel=1e-9, abs=1e-9)


def test_names_on_known_values() -> None:
    assert convert(0.8, "alpha", "accepted_length", 8) == pytest.approx(3.32891136)
    assert convert(0.8, "alpha", "accept_length", 8) == pytest.approx(4.32891136)
    assert convert(4.32891136, "accept_length", "alpha", 8) == pytest.approx(0.8)
    # MoESD's σ counts the bonus token: all of 4 drafts accepted is 1, none is 1/5.
    assert convert(5, "accept_length", "sigma", 4) == 1
    assert convert(0, "acceptance_rate", "sigma", 4) == pytest.approx(0.2)
    # DeepSeek-V3 reports 85 to 90 % for its one MTP token.
    assert convert(0.85, "first_position_rate", "accept_length", 1) == pytest.approx(1.85)


def test_chain_and_tree_rows_of_specdecode_bench() -> None:
    """τ 2.25 at k = 3 is printed with rate .415; τ 2.92 of the tree "k = 21" with .095: its k counts the root."""
    assert convert(2.25, "accept_length", "acceptance_rate", 3) == pytest.approx(0.415, abs=0.002)
    k = drafts_of("specdecode_bench.tree_k", 21)
    assert convert(2.92, "accept_length", "acceptance_rate", k) == pytest.approx(0.095, abs=0.0011)
    assert convert(2.92, "accept_length", "acceptance_rate", 21) < 0.0915


def test_draft_lengths_of_engines() -> None:
    assert drafts_of("sglang.speculative_num_draft_tokens", 4) == 3
    assert drafts_of("vllm.num_speculative_tokens", 4) == 4
    assert drafts_of("dflash.block_size", 16) == 15
    with pytest.raises(RooflineError, match=r"vllm\.num_speculative_tokens"):
        drafts_of("vllm.k", 4)


def test_every_name_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "acceptance.md").read_text(encoding="utf-8")
    assert [name for name in (*NAMINGS, *DRAFT_LENGTHS) if f"`{name}`" not in page] == []


def test_accept_length_over_all_and_over_drafted_steps() -> None:
    assert al_of_all_steps(3, 0.25) == 1.5
    assert al_of_drafted_steps(1.5, 0.25) == 3
    with pytest.raises(RooflineError, match="coverage"):
        al_of_drafted_steps(1, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2.9, "accept_length", "mal", 4), "accept_length, accepted_length"),
        ((6.0, "accept_length", "sigma", 4), r"impossible with k = 4.*\[1, 5\]"),
        ((62.5, "acceptance_rate", "accept_length", 4), "impossible"),
        ((1.0, "accept_length", "sigma", 0), "at least one draft"),
    ],
)
def test_impossible_conversions_are_refused(arguments: tuple[float, str, str, int], words: str) -> None:
    with pytest.raises(RooflineError, match=words):
        convert(*arguments)


def test_syntax() -> None:
    assert parse_acceptance(" 0.8 ") == Acceptance.from_rate(0.8)
    assert parse_acceptance("1", k=[0, 3]) == Acceptance.from_rate(1)
    assert parse_acceptance("0.8, 0.6,0.4", k=3) == Acceptance.from_marginal([0.8, 0.6, 0.4])
    assert parse_acceptance("al=2.8", k=[0, 4]).al_drafted(4) == pytest.approx(2.8)
    assert parse_acceptance("AL=1", k=4) == Acceptance.from_rate(0)


@pytest.mark.parametrize(
    ("text", "k", "words"),
    [
        ("2.8", 4, "write al=2.8"),
        ("-0.1", 4, r"-0\.1 lies outside"),
        ("nan", 4, "no finite number"),
        ("inf", 4, "no finite number"),
        ("", 4, "nothing was given"),
        ("  ", 4, "nothing was given"),
        ("80%", 4, "'80%' is no number"),
        ("0.8,", 4, "'' is no number"),
        ("0.5,0.6", 2, "0.6 at position 2"),
        ("0.8,0.6", 5, "known for 2 positions, not for k = 5"),
        ("al=2.8", [2, 4], "k = 2, 4 were asked"),
        ("al=2.8", None, "no k was asked"),
        ("al=7", 4, r"\[1, 5\]"),
        ("al=nan", 4, "no finite number"),
        ("nowhere.json", 4, "cannot be read"),
    ],
)
def test_wrong_syntax_is_refused_in_one_sentence(text: str, k: Any, words: str) -> None:
    with pytest.raises(RooflineError, match=words) as caught:
        parse_acceptance(text, k=k)
    assert str(caught.value).startswith("--acceptance: ")
    assert "\n" not in str(caught.value)
