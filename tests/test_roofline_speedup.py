"""The algebra of rounds: what must hold whatever the constants are, and figures that others published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_roofline import (
    DraftOptions,
    RooflineError,
    Settings,
    find_device,
    grid,
    load_model,
    predict,
    with_weights,
)
from models_roofline.acceptance import Acceptance, AcceptanceByContext
from models_roofline.bounds import Sparsity, bounds
from models_roofline.drafters import (
    dflash_head,
    eagle3_head,
    eagle_head,
    medusa_head,
    mtp_module,
    p_eagle_head,
)
from models_roofline.formats import FORMATS
from models_roofline.methods import METHODS, find_method
from models_roofline.published import read_table, specdecode_bench
from models_roofline.published.__main__ import markdown as published_page
from models_roofline.speedup import Prediction, ceilings

LLAMA_8B, LLAMA_1B = load_model("llama-3.1-8b"), load_model("llama-3.2-1b")
H100 = find_device("H100-SXM5-80GB")
DERIVED = [name for name in METHODS if not name.startswith("mtp") and name != "none"]
"""Methods whose drafter follows from Llama-3.1-8B, which has no MTP layers."""


def llama(method: str, **asked: object) -> Prediction:
    asked = {
        "acceptance": Acceptance.from_rate(0.8),
        "draft": DraftOptions(model=LLAMA_1B if needs(method) else None),
    } | asked
    return predict(LLAMA_8B, H100, method=method, **asked)  # type: ignore[arg-type]


def needs(method: str) -> bool:
    return method in ("draft-model", "pearl", "ssd", "staged")


# --- invariants -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", DERIVED)
def test_without_drafts_every_method_is_autoregressive_to_the_last_bit(method: str) -> None:
    batch, context = np.array([[1], [7], [64]]), np.array([[128, 4096]])
    plain = predict(LLAMA_8B, H100, batch=batch, context=context)
    drafted = llama(method, k=np.zeros((1, 1)), batch=batch, context=context)
    assert np.array_equal(drafted.tpot_s, plain.tpot_s)
    assert np.all(drafted.speedup == 1)
    assert np.all(drafted.al == 1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([name for name in DERIVED if METHODS[name].lossless]),
    st.integers(1, 16),
    st.integers(1, 256),
    st.integers(1, 100_000),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
def test_a_lossless_speedup_stays_within_its_bounds(
    method: str, k: int, batch: int, context: int, rate: float, coverage: float
) -> None:
    found = llama(
        method, k=k, batch=batch, context=context, settings=Settings(check_memory=False),
        acceptance=Acceptance.from_rate(rate).with_coverage(coverage),
    )  # fmt: skip
    slack = 1 + 1e-12
    assert 1 <= found.al <= (k + 1) * slack
    assert found.speedup <= found.bound_free_draft * slack <= found.bound * slack**2 <= found.al * slack**3
    assert found.bound_oracle <= (k + 1) * slack
    assert found.speedup_low <= found.speedup <= found.speedup_high
    assert found.t_verify_s >= found.t_step_s
    assert sum(found.terms.values()) == pytest.approx(found.t_round_s, rel=1e-12)


def test_a_round_never_gets_shorter_with_batch_context_or_k() -> None:
    grid = np.ix_(np.array([1, 2, 3, 8, 65, 129]), np.array([1, 128, 5000, 90_000]), np.arange(0, 9))
    for method in ("eagle3", "ngram", "sparse-kv-self", "dflash"):
        found = llama(
            method, batch=grid[0], context=grid[1], k=grid[2], settings=Settings(check_memory=False),
            acceptance=Acceptance.from_rate(0.7).with_coverage(0.4 if method == "ngram" else 1),
        )  # fmt: skip
        for axis in range(3):
            assert np.all(np.diff(found.t_round_s, axis=axis) >= 0), (method, axis)


def test_coverage_mixes_drafted_and_plain_steps_exactly_at_batch_1() -> None:
    acceptance = Acceptance.from_marginal([0.8, 0.6, 0.4])
    full = llama("ngram", k=3, acceptance=acceptance)
    half = llama("ngram", k=3, acceptance=acceptance.with_coverage(0.5))
    share = METHODS["ngram"].lookup_share
    plain = full.t_step_s * (1 + share)
    assert half.t_round_s == pytest.approx(0.5 * (full.t_verify_s * (1 + share)) + 0.5 * plain, rel=1e-12)
    assert half.al - 1 == pytest.approx(0.5 * (full.al - 1))


def test_no_coverage_is_a_plain_step_and_its_lookup() -> None:
    found = llama("ngram", k=3, acceptance=Acceptance.from_rate(0.9).with_coverage(0), batch=np.array([1, 4]))
    assert np.all(found.al == 1)
    assert found.t_round_s == pytest.approx(found.t_step_s * (1 + METHODS["ngram"].lookup_share), rel=1e-12)


def test_speedup_is_leviathans_formula_with_the_ledgers_costs() -> None:
    """(1 − α^(k+1)) / ((1 − α)(k c + v)) with c = T_draft/T and v = T_verify/T (2211.17192, v = 1 there)."""
    found = llama("draft-model", k=4)
    c, v = found.t_draft_s / 4 / found.t_step_s, found.t_verify_s / found.t_step_s
    assert found.speedup == pytest.approx((1 - 0.8**5) / (0.2 * (4 * c + v)), rel=1e-12)


def test_an_overlapped_round_takes_the_longer_part_unless_it_drafted_in_vain() -> None:
    """All four accepted with chance p_4: then no bonus token and no wait; else the next round waits for its drafts."""
    serial, both = llama("draft-model", k=4), llama("pearl", k=4)
    together, apart = np.maximum(serial.t_draft_s, serial.t_verify_s), serial.t_draft_s + serial.t_verify_s
    assert serial.t_round_s == pytest.approx(apart)
    assert both.t_round_s == pytest.approx(0.8**4 * together + (1 - 0.8**4) * apart)
    assert both.al == pytest.approx(serial.al - 0.8**4)
    assert both.bound == both.al < serial.bound


@pytest.mark.parametrize("method", ["draft-model", "pearl", "ssd"])
def test_no_schedule_of_drafting_passes_its_ceilings(method: str) -> None:
    """With every draft right and long chains the drafts themselves are the limit, and rounds made ahead reach it."""
    found = llama(
        method, k=np.array([1, 4, 8, 16]), acceptance=Acceptance.from_rate(1), settings=Settings(hit_rate=1)
    )
    ceiling = ceilings(found)
    assert np.all(ceiling["overlap_gain"] <= 2)
    assert np.all(found.speedup <= ceiling["draft_rate"] * (1 + 1e-12))
    assert (found.speedup[-1] == pytest.approx(ceiling["draft_rate"][-1])) == (method == "ssd")
    if method == "pearl":  # T_step / T_draft(1): k tokens a round of k passes
        assert found.speedup[-1] == pytest.approx(found.t_step_s / (found.t_draft_s[-1] / 16))


def test_drafts_made_ahead_cost_nothing_when_every_round_was_foreseen() -> None:
    never = llama("ssd", k=4, settings=Settings(hit_rate=0.0))
    always = llama("ssd", k=4, settings=Settings(hit_rate=1.0))
    serial = llama("draft-model", k=4)
    assert never.t_round_s == pytest.approx(serial.t_round_s)
    assert always.t_round_s == pytest.approx(np.maximum(serial.t_draft_s, serial.t_verify_s))


def test_without_an_overhead_the_slow_end_holds_what_an_engine_was_seen_to_add() -> None:
    """vLLM on H100: 1.207 ms a round, drafting 2.135 ms in all; a known overhead is taken as it is."""
    unknown, known = (llama("eagle3", k=3, settings=Settings(overhead_s=s)) for s in (None, 1e-3))
    kernels = llama("eagle3", k=3, settings=Settings(overhead_s=0))
    assert unknown.t_round_s == kernels.t_round_s
    assert known.t_round_s == pytest.approx(kernels.t_round_s + 1e-3, rel=1e-12)
    slow = kernels.t_round_s / kernels.speedup_low * kernels.speedup + 1.207e-3 + 2.135e-3 - kernels.t_draft_s
    assert unknown.speedup_low == pytest.approx(unknown.al * unknown.t_step_s / slow)
    assert unknown.speedup_high == kernels.speedup_high
    assert unknown.round_high_s == pytest.approx(kernels.round_high_s + 3.342e-3 - kernels.t_draft_s)


def test_the_measured_speedup_of_specdecode_bench_lies_between_the_ends() -> None:
    """Their round at batch 1 and k = 3 takes 9.36 ms and a plain step 5.95 ms: at AL 2.73 that is 1.74."""
    found = predict("llama-3.1-8b", "H100-SXM5-80GB", method="eagle", k=3, acceptance=0.75)
    assert found.speedup_low < 2.734 * 5.95 / 9.36 < found.speedup_high


def test_lists_are_paired_and_a_grid_makes_every_combination() -> None:
    axes = grid(batch=[1, 8], k=[1, 2, 3])
    found = predict("llama-3.1-8b", "H100-SXM5-80GB", method="eagle3", acceptance=[0.8, 0.6, 0.5], **axes)
    assert found.shape == (2, 3)
    assert found.al[0] == pytest.approx([1.8, 2.4, 2.9])
    best = found.best_k()
    assert best.batch.tolist() == [1, 8]
    assert best.speedup.tolist() == pytest.approx(found.speedup.max(axis=1))
    paired = predict(
        "llama-3.1-8b", "H100-SXM5-80GB", method="eagle3", acceptance="0.8,0.6", k=[1, 2], batch=[1, 8]
    )
    assert paired.shape == (2,)
    assert "2 cells" in repr(paired)


def test_names_are_enough() -> None:
    by_name = predict(
        "llama-3.1-8b", "H100-SXM5-80GB", method="draft-model", draft="llama-3.2-1b", k=4, acceptance=0.8
    )
    assert by_name.t_round_s == llama("draft-model", k=4).t_round_s


def test_memory_is_said_and_a_head_shared_with_the_target_stands_once() -> None:
    """16,060,522,496 B of weights and 1,024 tokens of 131,072 B; EAGLE adds a layer behind the target's own head."""
    plain = predict("llama-3.1-8b", "H100-SXM5-80GB", context=1024)
    assert plain.memory_bytes == 16_060_522_496 + 1024 * 131_072
    eagle = llama("eagle", k=1, context=1023)
    assert eagle.memory_bytes == plain.memory_bytes + eagle_head(LLAMA_8B).weight_bytes + 1024 * 4096
    over = predict("llama-3.1-70b", "H100-SXM5-80GB", settings=Settings(check_memory=False))
    assert [cell["fits"] for cell in over.cells()] == [False]


def test_a_staged_drafter_needs_fewer_passes() -> None:
    plain = llama("draft-model", k=8)
    staged = llama("staged", k=8, draft=DraftOptions(model=LLAMA_1B, stage_k=4, stage_al=2.0))
    assert staged.t_draft_s < plain.t_draft_s
    assert staged.t_draft_s >= plain.t_draft_s / 2  # a pass over 5 tokens is not cheaper than one over 1


def test_a_tree_verifies_all_its_nodes() -> None:
    chain = llama("eagle", k=6, batch=64, acceptance=Acceptance.from_al(3.0, 6))
    tree = llama(
        "eagle", k=6, batch=64, acceptance=Acceptance.from_al(3.0, 6), settings=Settings(tree_nodes=60)
    )
    assert tree.t_verify_s > chain.t_verify_s
    assert tree.t_draft_s == chain.t_draft_s
    assert tree.speedup < 1 < chain.speedup  # the same AL does not pay for 61 × 64 tokens a step


def test_sparsity_alone_is_a_speedup_over_dense_and_its_own_bound() -> None:
    found = predict(LLAMA_8B, H100, context=32768, keep_projection=np.array([1.0, 0.5]), keep_kv=0.2)
    assert found.speedup[1] > found.speedup[0] > 1
    assert found.bound == pytest.approx(found.speedup)


def test_acceptance_may_fall_with_context() -> None:
    by_context = AcceptanceByContext((1000, 8000), (Acceptance.from_rate(0.8), Acceptance.from_rate(0.1)))
    found = llama("eagle3", k=4, context=np.array([1000, 8000]), acceptance=by_context)
    assert found.al == pytest.approx([(1 - 0.8**5) / 0.2, (1 - 0.1**5) / 0.9])
    assert found.speedup[0] > 1 > found.speedup[1]


# --- published figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-2-7b", 0.24), ("llama-2-13b", 0.37), ("llama-2-70b", 0.99)]
)
def test_eagle_heads_have_the_size_of_the_published_ones(name: str, billions: float) -> None:
    """EAGLE (2401.15077, section 4): 0.24B, 0.37B and 0.99B for 7B, 13B and 70B, the shared head not counted."""
    head = eagle_head(load_model(name))
    assert round(head.total_params / 1e9, 2) == billions
    assert head.streamed_params == head.total_params + head.head.params


def test_eagle3_head_of_llama_3_1_8b() -> None:
    """By hand: 3·4096² fuse, q 4096·8192, k and v 2·1024·8192, o 4096², MLP 3·4096·14336, head 32000·4096, norms."""
    head = eagle3_head(LLAMA_8B)
    assert (
        head.total_params
        == 50_331_648 + 33_554_432 + 16_777_216 + 16_777_216 + 176_160_768 + 131_072_000 + 4 * 4096
    )


def test_parallel_drafters_are_deeper_than_an_eagle_head() -> None:
    """Four layers (P-EAGLE) and five with the whole vocabulary (DFlash): one pass has to do what k passes did."""
    assert (p_eagle_head(LLAMA_8B).n_layers, dflash_head(LLAMA_8B).n_layers) == (4, 5)
    assert dflash_head(LLAMA_8B).vocab == LLAMA_8B.vocab
    one, eagle = llama("dflash", k=8), llama("eagle", k=8)
    assert 2 < one.t_draft_s / (eagle.t_draft_s / 8) < 5
    plain = LLAMA_8B.layers[0].total_params
    assert p_eagle_head(LLAMA_8B).total_params == eagle3_head(LLAMA_8B).total_params + 3 * plain


def test_a_medusa_head_is_a_square_and_a_vocabulary() -> None:
    head = medusa_head(load_model("llama-2-7b"))
    assert head.total_params == 4096 * 4096 + 4096 + 32000 * 4096 + 4096
    assert head.kv_bytes_per_token() == 0


def test_deepseek_v3_drafts_with_its_own_mtp_layer() -> None:
    module = mtp_module(load_model("deepseek-v3"))
    assert module.n_layers == 1
    assert module.layers[0].experts
    assert module.layers[0].experts.number == 256


def test_pruning_the_vocabulary_of_a_head_makes_drafting_cheaper() -> None:
    pruned = llama("eagle3", k=3, draft=DraftOptions(vocab=16_000))
    assert pruned.t_draft_s < llama("eagle3", k=3).t_draft_s < llama("eagle", k=3).t_draft_s


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"k": -1, "method": "eagle3"}, "--k: -1 is not a number of drafted tokens, 0 or more."),
        ({"k": 4, "method": "none"}, "--k: method none drafts nothing; use --k 0 or name a --method."),
        ({"k": 4, "method": "eagle3", "acceptance": None}, "--acceptance: needed where --k is above 0, as in --acceptance 0.8 or al=2.8."),
        ({"batch": 0}, "--batch: 0 is not a number of sequences, 1 or more."),
        ({"context": float("nan")}, "--context: nan is not a number of tokens, 1 or more."),
        ({"context": 131_072, "k": 1, "method": "eagle3"}, "--context: 131073 tokens (drafts included) are beyond the 131072 that llama-3.1-8b was made for."),
        ({"keep_kv": 0.0}, "--keep-kv: 0 is not a share in (0, 1]."),
        ({"keep_projection": 1.5}, "--keep-projection: 1.5 is not a share in (0, 1]."),
        ({"method": "eagel3"}, "--method: 'eagel3' is not a method here; did you mean eagle3?"),
        ({"method": "mtp", "k": 1}, "--method: mtp needs a model with multi-token-prediction layers and llama-3.1-8b has none; use eagle3, or draft-model with --draft."),
        ({"method": "draft-model", "k": 1}, "--draft: this method drafts with a model of its own; name it, as in --draft llama-3.2-1b."),
        ({"settings": Settings(kv="fp7")}, "--kv: 'fp7' is not a cache format; known: bf16, fp16, fp32, fp8, int8, int4."),
    ],
)  # fmt: skip
def test_wrong_use_is_refused_in_words(asked: dict[str, object], sentence: str) -> None:
    with pytest.raises(RooflineError) as refused:
        predict(LLAMA_8B, H100, **{"acceptance": Acceptance.from_rate(0.8), **asked})  # type: ignore[arg-type]
    assert str(refused.value) == sentence


def test_what_does_not_fit_is_refused_with_what_is_missing_and_what_would_fit() -> None:
    """Weights 8,030,261,248 × 2 B; a sequence of 131,072 tokens keeps 131,072 × 131,072 B = 16 GiB."""
    with pytest.raises(RooflineError) as refused:
        predict(LLAMA_8B, H100, batch=np.array([1, 8]), context=131_072)
    assert "8 sequences of 131072 tokens need 143.0 GiB" in str(refused.value)
    assert "has 79.6 GiB, 63.3 GiB too little; the largest batch that fits at that context is 4." in str(
        refused.value
    )
    predict(LLAMA_8B, H100, batch=4, context=131_072)
    predict(LLAMA_8B, H100, batch=8, context=131_072, settings=Settings(tp=2))


def test_a_device_without_the_number_type_is_refused() -> None:
    with pytest.raises(RooflineError, match="A100-SXM4-80GB has no fp8 peak; it has"):
        predict(with_weights(LLAMA_8B, FORMATS["fp8"]), find_device("A100-SXM4-80GB"))


def test_other_names_of_a_method_are_known() -> None:
    assert find_method("NEXTN").name == "mtp"
    assert find_method("magicdec").name == "sparse-kv-self"


def test_every_row_says_what_validated_it_and_no_row_is_two() -> None:
    assert all(method.validated for method in METHODS.values())
    assert len({method.about for method in METHODS.values()}) == len(METHODS)


def test_a_prediction_is_a_table() -> None:
    found = llama("eagle3", k=np.array([[1, 3]]), batch=np.array([[1], [8]]))
    frame = found.frame()
    assert len(frame) == 4
    cell = found.cells()[-1]
    assert (cell["batch"], cell["k"]) == (8, 3)
    assert cell["tpot_s"] == pytest.approx(cell["t_round_s"] / cell["al"])
    assert cell["tokens_per_s"] == pytest.approx(8 / cell["tpot_s"])
    assert sum(cell["terms"].values()) == pytest.approx(cell["t_round_s"])


def test_the_overlap_of_experts_makes_verification_cheaper() -> None:
    moe = load_model("qwen3-30b-a3b")
    asked = {"method": "ngram", "k": 7, "acceptance": Acceptance.from_rate(0.7)}
    apart = predict(moe, H100, **asked)  # type: ignore[arg-type]
    alike = predict(moe, H100, settings=replace(Settings(), overlap=1.0), **asked)  # type: ignore[arg-type]
    assert alike.t_verify_s < apart.t_verify_s
    assert alike.t_step_s == apart.t_step_s


def test_the_interval_of_a_speedup_holds_it_however_much_is_left_unread() -> None:
    found = predict(
        LLAMA_8B, find_device("EPYC-9654"), keep_projection=np.array([1, 0.5, 0.1, 0.02]), keep_kv=0.05
    )
    assert np.all(found.speedup_low > 0)
    assert np.all(found.speedup_low <= found.speedup)
    assert np.all(found.speedup <= found.speedup_high)
    assert np.all(found.speedup_high < 2 * found.speedup)


def test_the_table_has_every_cell_where_an_axis_changes_nothing() -> None:
    """A model without a cache is as fast at any share of it."""
    found = predict("mamba-130m", H100, keep_kv=np.array([0.5, 1.0]))
    assert found.frame().keep_kv.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_sparse_weights_never_beat_the_bytes_that_a_batch_needs(model: str) -> None:
    """Each sequence skips weights of its own, so that a batch reads nearly all of them."""
    arch, batch = load_model(model), np.array([1, 4, 32, 128])
    asked = {"batch": batch, "context": 1024, "keep_projection": 0.5}
    found = predict(arch, H100, settings=Settings(check_memory=False), **asked)  # type: ignore[arg-type]
    assert np.all(found.speedup <= bounds(arch, Sparsity(0.5), batch, context=1024).projection)


def test_each_medusa_position_has_a_head_of_its_own_in_memory() -> None:
    """Five times a residual block and an output table beside Llama-3.1-8B: 15.0 + 5.0 GiB, and 100.1 of caches."""
    with pytest.raises(RooflineError, match=r"need 120\.1 GiB"):
        predict(
            LLAMA_8B, find_device("RTX-PRO-6000-Blackwell-Server MIG 1g.24gb"), method="medusa", k=5,
            batch=200, context=4096, acceptance=Acceptance.from_rate(0.5),
        )  # fmt: skip


def test_a_drafter_that_runs_beside_the_target_has_a_device_of_its_own() -> None:
    """70B in fp8 leaves 12 GiB of an H100, and the drafter needs 15."""
    target = with_weights(load_model("llama-3.1-70b"), FORMATS["fp8"])
    asked = {"k": 4, "acceptance": Acceptance.from_rate(0.8), "draft": DraftOptions(model=LLAMA_8B)}
    for method in ("pearl", "ssd"):
        assert predict(target, H100, method=method, **asked).speedup > 1  # type: ignore[arg-type]
    with pytest.raises(RooflineError, match="GiB too little"):
        predict(target, H100, method="draft-model", **asked)  # type: ignore[arg-type]


def test_a_drafter_does_not_see_beyond_its_own_window() -> None:
    draft = DraftOptions(model=load_model("tinyllama-1.1b"))
    with pytest.raises(
        RooflineError, match=r"^--context: 8196 tokens .* beyond the 2048 that tinyllama-1.1b was"
    ):
        llama("draft-model", k=4, context=8192, draft=draft)


def test_a_staged_round_with_drafts_takes_at_least_one_pass() -> None:
    options = DraftOptions(model=LLAMA_1B, stage_k=7, stage_al=8.0)
    found = llama("staged", k=np.array([0, 1, 8, 16]), draft=options)
    assert found.t_draft_s[0] == 0
    assert found.t_draft_s[1] == found.t_draft_s[2] == found.t_draft_s[3] / 2 > 0


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"vocab": 0}, "--draft-vocab"),
        ({"keep_layers": 5.0}, "--keep-layers"),
        ({"keep_layers": -1.0}, "--keep-layers"),
        ({"kv_budget": -5}, "--kv-budget"),
        ({"stage_k": -1}, "--stage-k"),
        ({"stage_k": 1, "stage_al": 50.0}, "--stage-al"),
        ({"stage_al": 0.0}, "--stage-al"),
    ],
)
def test_a_drafter_out_of_range_is_refused(asked: dict[str, float], flag: str) -> None:
    with pytest.raises(RooflineError, match=f"^{flag}: "):
        DraftOptions(**asked)  # type: ignore[arg-type]


# --- published steps --------------------------------------------------------------------------------------


def test_speed_benchs_projection_is_arithmetic_on_its_printed_numbers() -> None:
    """Speedup = t_ar · AL / t_sd; the printed step times are rounded to 0.1 ms and AL to 0.01."""
    table = read_table("speed_bench_table10")
    assert len(table) == 12
    projected = table.t_ar_ms * table.al / table.t_sd_ms
    assert projected.to_numpy() == pytest.approx(table.speedup_projected.to_numpy(), rel=0.012)
    assert projected.to_numpy() == pytest.approx(table.speedup_measured.to_numpy(), rel=0.018)


def test_the_page_of_predictions_is_what_the_code_prints() -> None:
    page = (Path(__file__).parent.parent / "docs" / "prediction.md").read_text()
    assert published_page() in page


def test_plain_steps_of_llama_3_1_8b_on_h100_are_as_specdecode_bench_measured_them() -> None:
    """Their fitted line, at batches up to 8 where it is dominated by the weights; nothing here is fitted to it."""
    table = specdecode_bench.steps().query("k == 0 and batch <= 8")
    assert table.verify_ms.to_numpy() == pytest.approx(table.verify_theirs_ms.to_numpy(), rel=0.05)
