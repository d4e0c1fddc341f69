"""Crossovers and bounds: published figures, and what arithmetic proves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from models_roofline.architecture import Architecture, Attention, Experts, Layer, State, matrix
from models_roofline.bounds import (
    MEASURED_UNION,
    Sparsity,
    bounds,
    kv_curve,
    kv_saved,
    measured_union,
    projection_bytes,
    projection_saved,
    step_bytes,
)
from models_roofline.crossovers import (
    batch_stops_paying,
    compute_bound_batch,
    corrected_crossover,
    critical_context,
    crossover,
    crossover_tokens,
    kernel_cost_s,
    kv_equals_weights,
    linear,
    log_log,
    paying_ranges,
    ridge,
)
from models_roofline.errors import RooflineError
from models_roofline.formats import FORMATS, KV_BYTES, Format
from models_roofline.ledger import forward, independent_union

KI = 1024
SWEEP = Path(__file__).parent / "data" / "roofline" / "bytecross_sweep_a100.csv"
BF16 = FORMATS["bf16"]


def block(
    hidden: int,
    inter: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    count: int = 1,
    window: int | None = None,
    fmt: Format = BF16,
    experts: Experts | None = None,
) -> Layer:
    """A Llama-like layer; with experts, without a dense feed-forward part."""
    ffn = () if experts else (
        matrix("gate_up", 2 * inter, hidden, fmt), matrix("down", hidden, inter, fmt),
    )  # fmt: skip
    return Layer(
        count=count,
        matrices=(
            matrix("qkv", (heads + 2 * kv_heads) * head_dim, hidden, fmt),
            matrix("o", hidden, heads * head_dim, fmt),
            *ffn,
        ),
        vectors=2 * hidden,
        vector_bytes=4 * hidden,
        attention=Attention(heads, kv_heads, head_dim, head_dim, window=window),
        experts=experts,
    )


def model(
    name: str, hidden: int, vocab: int, *layers: Layer, tied: bool = False, max_context: int | None = 131072
) -> Architecture:
    return Architecture(
        name=name, family="llama", hidden=hidden, vocab=vocab, layers=layers,
        embedding=matrix("embedding", vocab, hidden), head=matrix("head", vocab, hidden), tied=tied,
        final_vectors=hidden, final_vector_bytes=2 * hidden, max_context=max_context,
    )  # fmt: skip


def llama_8b(fmt: Format = BF16, max_context: int | None = 131072) -> Architecture:
    return model(
        "llama-3.1-8b", 4096, 128256, block(4096, 14336, 32, 8, 128, count=32, fmt=fmt), max_context=max_context
    )  # fmt: skip


LLAMA_8B = llama_8b()
LLAMA_3B = model("llama-3.2-3b", 3072, 128256, block(3072, 8192, 24, 8, 128, count=28), tied=True)
LLAMA_70B = model("llama-3.1-70b", 8192, 128256, block(8192, 28672, 64, 8, 128, count=80))
LLAMA2_7B = model("llama-2-7b", 4096, 32000, block(4096, 11008, 32, 32, 128, count=32), max_context=4096)
MISTRAL = model("mistral-7b-v0.3", 4096, 32768, block(4096, 14336, 32, 8, 128, count=32), max_context=32768)
QWEN_8B = model("qwen3-8b", 4096, 151936, block(4096, 12288, 32, 8, 128, count=36), max_context=40960)
QWEN_06B = model("qwen3-0.6b", 1024, 151936, block(1024, 3072, 16, 8, 128, count=28), tied=True)
SMOL = model("smollm2-135m", 576, 49152, block(576, 1536, 9, 3, 64, count=30), tied=True, max_context=8192)
_EXPERT = Experts(128, 8, (matrix("gate_up", 2 * 768, 2048), matrix("down", 2048, 768)), vectors=10)
MOE = model("moe-30b-a3b", 2048, 151936, block(2048, 0, 32, 4, 128, count=48, experts=_EXPERT))
WINDOWS = model("all-windows", 4096, 32000, block(4096, 14336, 32, 8, 128, count=32, window=4096))
MIXED = model(
    "mixed", 1152, 262144,
    block(1152, 6912, 4, 1, 256, count=22, window=512), block(1152, 6912, 4, 1, 256, count=4), max_context=32768,
)  # fmt: skip
STATE_ONLY = model(
    "state-only", 1024, 50280,
    Layer(24, (matrix("in_proj", 4096, 1024), matrix("out_proj", 1024, 2048)), 1024, 2048, state=State(1 << 20, 1)),
    max_context=None,
)  # fmt: skip


def mla(count: int = 60) -> Architecture:
    """Latent cache of 576 values a token and layer, as in DeepSeek-V3."""
    attention = Attention(128, 1, 576, 512, latent=576)
    return model("mla", 7168, 129280, Layer(count, (matrix("qkv", 24576, 7168),), 0, 0, attention=attention))


@pytest.mark.parametrize(
    ("arch", "keep", "keep_kv", "ki"),
    [
        (LLAMA_8B, 0.7, 0.3, 44.6),  # ByteCross, paper table 2
        (LLAMA_8B, 0.5, 0.3, 74.3),
        (LLAMA_8B, 0.5, 0.5, 104.0),
        (LLAMA_3B, 0.5, 0.3, 34.3),
        (QWEN_8B, 0.5, 0.3, 65.7),  # ByteCross, paper table 1
        (MISTRAL, 0.5, 0.3, 74.3),
        (LLAMA_70B, 0.5, 0.3, 291.4),
        (SMOL, 0.7, 0.3, 3.9),
        (SMOL, 0.5, 0.3, 6.4),
        (SMOL, 0.5, 0.5, 9.0),
    ],
)
def test_published_crossovers(arch: Architecture, keep: float, keep_kv: float, ki: float) -> None:
    found = crossover(arch, Sparsity(keep, keep_kv))
    assert found.tokens is not None
    assert round(found.tokens / KI, 1) == ki


@pytest.mark.parametrize(
    ("arch", "ki"), [(QWEN_8B, 51.4), (LLAMA_8B, 60.0), (MISTRAL, 60.0), (LLAMA_70B, 240.0)]
)
def test_published_crossovers_of_the_feed_forward_part(arch: Architecture, ki: float) -> None:
    tokens = crossover_tokens(arch, Sparsity(0.5, 0.3, ffn_only=True))
    assert round(float(tokens) / KI, 1) == ki


def test_the_hand_check_of_the_closed_form() -> None:
    assert crossover_tokens(LLAMA_8B, Sparsity(0.5, 0.3)) == pytest.approx(
        218_103_808 * 0.5 / (2 * 1024 * 0.7), rel=1e-12
    )


def test_heads_that_do_not_make_up_the_hidden_size() -> None:
    # 16 heads of 128 on a hidden size of 1024: P = 15,728,640 a layer, 2,048 cached values.
    assert crossover_tokens(QWEN_06B, Sparsity(0.5, 0.3)) == pytest.approx(15_728_640 * 0.5 / (2048 * 0.7))
    assert round(float(crossover_tokens(QWEN_06B, Sparsity(0.5, 0.3)))) == 5486


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("kv", ["bf16", "fp8", "int4"])
def test_bytes_of_weights_and_cache_scale_the_crossover(fmt: str, kv: str) -> None:
    ratio = FORMATS[fmt].bits_per_weight / 8 / KV_BYTES[kv]
    plain = crossover_tokens(LLAMA_8B, Sparsity(0.5, 0.3))
    assert crossover_tokens(llama_8b(FORMATS[fmt]), Sparsity(0.5, 0.3), kv=kv) == pytest.approx(plain * ratio)
    assert kv_equals_weights(llama_8b(FORMATS[fmt]), 1, kv) == pytest.approx(106_496 * ratio)


def test_a_fixed_budget_shifts_the_crossover() -> None:
    tokens = crossover_tokens(LLAMA_8B, Sparsity(0.5, kv_budget=4096))
    assert tokens == pytest.approx(4096 + 218_103_808 * 0.5 / 2048)
    assert crossover_tokens(LLAMA_8B, Sparsity(0.5, kv_budget=4096), kv="fp8") == pytest.approx(
        4096 + 218_103_808 * 0.5 / 2048 * 2
    )
    assert kv_saved(LLAMA_8B, Sparsity(kv_budget=4096), context=4096) == 0
    assert kv_saved(LLAMA_8B, Sparsity(kv_budget=4096), 3, context=5096) == 3 * 1000 * 131072


def test_a_batch_shares_weights() -> None:
    # u = 0.92 at batch 4: 3.0 Ki (ByteCross).
    assert round(float(crossover_tokens(LLAMA_8B, Sparsity(0.5, 0.3, union=0.92), 4)) / KI, 1) == 3.0
    independent = crossover_tokens(LLAMA_8B, Sparsity(0.5, 0.3), 4)
    assert independent == pytest.approx(218_103_808 * 0.5**4 / (4 * 2048 * 0.7))
    measured = crossover_tokens(LLAMA_8B, Sparsity(0.5, 0.3, union=measured_union(0.5, 4)), 4)
    assert measured > independent


def test_independence_overestimates_the_measured_union() -> None:
    published = {1: 0.5219, 2: 0.7714, 4: 0.9477, 8: 0.9973, 16: 1.0, 32: 1.0, 64: 1.0}
    for batch, fraction in published.items():
        # The column was made with the keep that was counted, not with the nominal 0.5.
        assert round(float(independent_union(0.5218595, batch)), 4) == pytest.approx(fraction, abs=1e-4)
        assert measured_union(0.5, batch) == pytest.approx(MEASURED_UNION[batch])
        assert measured_union(0.5, batch) <= independent_union(0.5218595, batch) + 1e-12
    assert MEASURED_UNION[2] < measured_union(0.5, 3) < MEASURED_UNION[4]


@pytest.mark.parametrize(
    ("sparsity", "context", "method", "bound"),
    [
        (Sparsity(1, 0.3), 131072, "kv", 1.60),  # ByteCross README
        (Sparsity(0.5, 0.2), 32768, "both", 2.172),
    ],
)
def test_published_bounds(sparsity: Sparsity, context: int, method: str, bound: float) -> None:
    found = float(getattr(bounds(LLAMA_8B, sparsity, context=context), method))
    assert round(found, 2 if bound == 1.60 else 3) == bound


@pytest.mark.parametrize(("keep", "measured"), [(1.0, 1.20), (0.7, 1.53), (0.6, 1.69), (0.5, 1.86)])
def test_no_measured_composition_beats_its_bound(keep: float, measured: float) -> None:
    # ByteCross, paper table 4: RTX A6000, 32K context, KV keep 0.2.
    assert measured < bounds(LLAMA_8B, Sparsity(keep, 0.2), context=32768).both


keeps = st.floats(0.05, 1)
models = st.sampled_from([LLAMA_8B, QWEN_06B, MOE, MIXED, WINDOWS, mla(), STATE_ONLY])


@given(models, keeps, keeps, st.integers(1, 64), st.integers(1, 1 << 20))
def test_savings_add_in_bytes(arch: Architecture, keep: float, keep_kv: float, batch: int, n: int) -> None:
    found = bounds(arch, Sparsity(keep, keep_kv), batch, context=n)
    assert 1 / found.both == pytest.approx(1 / found.projection + 1 / found.kv - 1, abs=1e-9)
    assert found.both >= max(found.projection, found.kv) >= 1
    assert found.both >= found.projection * found.kv - 1e-9  # shares of one total: more than the product


@given(models, keeps, st.floats(0.05, 0.95), st.integers(1, 64), st.sampled_from(["bf16", "fp8"]))
def test_both_methods_save_the_same_at_the_crossover(
    arch: Architecture, keep: float, keep_kv: float, batch: int, kv: str
) -> None:
    sparsity = Sparsity(keep, keep_kv)
    found = crossover(arch, sparsity, batch, kv)
    by_projection = projection_saved(arch, sparsity, batch)
    if found.tokens is None:
        assert kv_saved(arch, sparsity, batch, context=1e9, kv=kv) < by_projection or arch is STATE_ONLY
        assert found.reason
    elif found.tokens:
        by_kv = kv_saved(arch, sparsity, batch, context=found.tokens, kv=kv)
        assert by_kv == pytest.approx(by_projection, rel=1e-9)


@given(st.integers(0, 200_000), st.sampled_from([0.0, 300.0, 512.0, 4000.0]))
def test_the_cache_curve_is_inverted_exactly(n: int, start: float) -> None:
    curve = kv_curve(MIXED, start=start)
    expected = max(0, n - start) * 4 * 1024 + max(0, min(n, 512) - start) * 22 * 1024
    assert curve(n) == expected
    assert curve.inverse(curve(n)) == pytest.approx(max(n, start))


def test_dense_step_bytes_are_the_streamed_ones_and_the_cache() -> None:
    for arch in (LLAMA_8B, QWEN_06B, MOE, MIXED, mla(), STATE_ONLY):
        own = arch.kv_bytes(3000) + 2 * arch.state_bytes + 2 * arch.hidden
        assert step_bytes(arch, context=3000) == arch.streamed_bytes + own


@pytest.mark.parametrize(
    ("arch", "ffn_only"),
    [
        *((arch, False) for arch in (LLAMA_8B, QWEN_06B, MOE, MIXED, mla(), STATE_ONLY)),
        *(
            (arch, True) for arch in (LLAMA_8B, QWEN_06B, MOE, MIXED)
        ),  # the others have no feed-forward matrices
    ],
    ids=lambda value: value.name if isinstance(value, Architecture) else str(value),
)
def test_savings_are_those_of_the_ledger(arch: Architecture, ffn_only: bool) -> None:
    def read(**keeps: float) -> float:
        step = forward(arch, batch=1, context=3000, ffn_only=ffn_only, **keeps)
        return sum(op.calls * float(op.bytes) for op in step)

    sparsity = Sparsity(0.5, 0.3, ffn_only=ffn_only)
    assert read() - read(keep_projection=0.5) == pytest.approx(projection_saved(arch, sparsity))
    assert read() - read(keep_kv=0.3) == pytest.approx(kv_saved(arch, sparsity, context=3000))


def test_windows_bend_the_crossover() -> None:
    # 0.1 % of the projections of `mixed` is less than its windows hold when full: crossed where all layers grow.
    projections = float(projection_bytes(MIXED))
    steep = crossover_tokens(MIXED, Sparsity(0.999, 0.5))
    assert steep == pytest.approx(0.001 * projections / (26 * 1024 * 0.5))
    late = crossover_tokens(MIXED, Sparsity(0.5, 0.3))
    assert late == pytest.approx((0.5 * projections / 0.7 - 22 * 1024 * 512) / (4 * 1024))


def test_a_cache_of_windows_alone_may_never_cross() -> None:
    never = crossover(WINDOWS, Sparsity(0.5, 0.3))
    assert never.tokens is None
    assert never.reason is not None
    assert "window" in never.reason
    assert crossover(WINDOWS, Sparsity(0.99, 0.3)).tokens is not None
    assert crossover(WINDOWS, Sparsity(0.99, kv_budget=4096)).tokens is None
    assert np.isnan(kv_equals_weights(WINDOWS))


def test_without_a_cache_nothing_crosses() -> None:
    for keep in (0.5, 1.0):
        found = crossover(STATE_ONLY, Sparsity(keep, 0.3))
        assert found.tokens is None
        assert "keeps no keys and values" in str(found.reason)
    assert crossover(LLAMA_8B, Sparsity(0.5, 1)).tokens is None
    assert crossover(LLAMA_8B, Sparsity(1, 0.5)).tokens == 0


def test_a_latent_cache_counts_its_latent() -> None:
    assert crossover_tokens(mla(), Sparsity(0.5, 0.3)) == pytest.approx(24576 * 7168 * 0.5 / (576 * 0.7))


def test_a_crossover_beyond_the_window_is_flagged() -> None:
    assert crossover(MISTRAL, Sparsity(0.5, 0.3)).beyond_window is True
    assert crossover(LLAMA_8B, Sparsity(0.5, 0.3)).beyond_window is False
    assert crossover(llama_8b(max_context=None), Sparsity(0.5, 0.3)).beyond_window is None


def test_experts_read_by_a_batch() -> None:
    expert = _EXPERT.bytes_per_expert
    dense = projection_bytes(MOE) - 48 * 8 * expert
    # 128 experts, 8 a token: 29.12 distinct at 4 tokens.
    assert (projection_bytes(MOE, 4) - dense) / (48 * expert) == pytest.approx(29.12, abs=0.005)
    one = projection_saved(MOE, Sparsity(0.5))
    assert one == pytest.approx(0.5 * projection_bytes(MOE))
    ffn = projection_saved(MOE, Sparsity(0.5, ffn_only=True))
    assert ffn == pytest.approx(0.5 * 48 * 8 * expert)


def test_savings_inside_experts_match_a_simulation() -> None:
    """Draw experts and needed weights token by token; the closed form is the mean."""
    random = np.random.default_rng(0)
    batch, keep, rho, trials = 4, 0.3, 8 / 128, 200_000
    drawn = random.random((trials, batch)) < rho
    needed = drawn & (random.random((trials, batch)) < keep)
    simulated = (drawn.any(1) & ~needed.any(1)).mean()
    layer = 48 * 128 * _EXPERT.bytes_per_expert
    formula = (projection_saved(MOE, Sparsity(keep, ffn_only=True), batch)) / layer
    assert formula == pytest.approx(simulated, rel=0.02)


def test_arrays_broadcast() -> None:
    keep, batch = np.array([0.3, 0.5, 0.7])[:, None], np.array([1, 2, 4, 8])
    tokens = crossover_tokens(LLAMA_8B, Sparsity(keep, 0.3), batch)
    assert tokens.shape == (3, 4)
    assert tokens[1, 0] == crossover_tokens(LLAMA_8B, Sparsity(0.5, 0.3), 1)
    assert (np.diff(tokens, axis=0) < 0).all()
    assert (np.diff(tokens, axis=1) < 0).all()
    context = np.array([1024, 8192])[:, None, None]
    assert bounds(LLAMA_8B, Sparsity(keep, 0.3), batch, context=context).both.shape == (2, 3, 4)


def test_cache_against_weights() -> None:
    assert kv_equals_weights(LLAMA_8B) == 106_496  # 106.5K in MagicDec's terms, at batch 1
    assert kv_equals_weights(LLAMA_8B, 8) == 106_496 / 8
    assert kv_equals_weights(LLAMA_8B, head=True) == 106_496 + 128256 * 4096 * 2 / 131072


@pytest.mark.parametrize(
    ("arch", "tflops", "gb_per_s", "tokens"),
    [  # dense bf16 peaks
        (LLAMA_8B, 989.4, 3350, 361),
        (LLAMA_8B, 312, 2039, 696),
        (LLAMA_8B, 362, 864, 254),
        (LLAMA_8B, 148, 4000, 2880),
        (LLAMA2_7B, 312, 2039, 161),
    ],
)
@pytest.mark.parametrize("k", [0, 3, 7])
def test_critical_context_of_large_batch_speculation(
    arch: Architecture, tflops: float, gb_per_s: float, tokens: float, k: int
) -> None:
    found = critical_context(arch, k, ridge(tflops * 1e12, gb_per_s * 1e9))
    assert float(f"{float(found) / (k + 1):.3g}") == tokens  # printed to three digits


def test_measured_efficiencies_move_the_critical_context() -> None:
    # A100: matrix products reach 0.864 of the compute peak, cache reads 0.759 of the bandwidth.
    effective = ridge(312e12, 2039e9, 0.864, 0.759)
    assert round(float(critical_context(LLAMA_8B, 0, effective))) == 611
    assert critical_context(LLAMA_8B, 0, effective, kv="fp8") == 2 * critical_context(LLAMA_8B, 0, effective)
    assert critical_context(LLAMA_8B, 0, effective, head=True) > critical_context(LLAMA_8B, 0, effective)


def test_the_batch_from_which_verification_is_bound_by_compute() -> None:
    assert compute_bound_batch(LLAMA_8B, 0, 153.0) == 153
    assert compute_bound_batch(LLAMA_8B, 3, 153.0) == 39
    assert compute_bound_batch(llama_8b(FORMATS["fp8"]), 3, 153.0) == 20
    assert compute_bound_batch(MOE, 3, 153.0) > 5 * 39  # a token meets 8 of 128 experts


def sweep() -> pd.DataFrame:
    rows = pd.read_csv(SWEEP, comment="#")
    table = rows.pivot_table(index=["block", "context"], columns="mode", values="ms_per_token").reset_index()
    limit = bounds(LLAMA_8B, Sparsity(0.5, 0.3), context=table["context"])
    table["projection_cost"] = kernel_cost_s(table["proj"], table["dense"], limit.projection)
    table["kv_cost"] = kernel_cost_s(table["sel"], table["dense"], limit.kv)
    return table


def corrected(table: pd.DataFrame) -> float:
    mean = table.groupby("context").mean().reset_index()
    context = list(mean["context"])
    found = corrected_crossover(
        LLAMA_8B, Sparsity(0.5, 0.3), log_log(context, mean["dense"]),
        linear(context, mean["projection_cost"]), linear(context, mean["kv_cost"]), contexts=(32768, 65536),
    )  # fmt: skip
    assert found.tokens is not None
    return found.tokens / KI


def test_kernel_costs_give_the_published_prediction() -> None:
    # ByteCross, paper table 2: 51.9 Ki predicted and 50.4 Ki measured at (0.5, 0.3) on A100; bytes alone say 74.3.
    table = sweep()
    assert round(corrected(table), 1) == 51.9
    assert table["projection_cost"].between(1.8, 2.3).all()  # about 2 ms a step
    # One block alone is noisier: the selection's cost at 32K is 0.08 ms in block 0 and 0.73 ms in block 2.
    assert round(corrected(table[table["block"] == 0]), 1) == 45.0


@given(st.floats(0.1, 0.9), st.floats(0.1, 0.9), st.floats(1e-5, 1))
def test_without_kernel_costs_the_correction_is_the_byte_crossover(
    keep: float, keep_kv: float, step_s: float
) -> None:
    sparsity = Sparsity(keep, keep_kv)
    plain = crossover(LLAMA_8B, sparsity).tokens
    assert plain is not None
    found = corrected_crossover(
        LLAMA_8B, sparsity, lambda n: step_s * (1 + n / 1e5), 0.0, 0.0, contexts=(plain / 2.3, plain * 1.9)
    )
    assert found.tokens == pytest.approx(plain, rel=1e-6)


def test_a_corrected_crossover_outside_the_range_is_none() -> None:
    dense = log_log([1024, 131072], [0.010, 0.020])
    for cost, winner in ((-1.0, "projection"), (1.0, "KV")):
        found = corrected_crossover(LLAMA_8B, Sparsity(0.5, 0.3), dense, cost, 0.0, contexts=(1024, 131072))
        assert found.tokens is None
        assert str(found.reason).startswith(winner)
    with pytest.raises(RooflineError, match="contexts"):
        corrected_crossover(LLAMA_8B, Sparsity(0.5, 0.3), dense, 0.0, 0.0, contexts=(2048, 1024))


def test_where_a_method_stops_paying() -> None:
    assert batch_stops_paying(lambda b: 2 / (1 + b / 100)) == 100  # exactly 1 at 100
    assert batch_stops_paying(lambda b: np.full(b.shape, 1.2)) is None
    assert batch_stops_paying(lambda b: np.full(b.shape, 0.9)) == 1

    def experts(b: Any) -> Any:
        return 1.5 - np.abs(np.log2(b) - 5) / 4  # rises to batch 32, then falls

    assert paying_ranges(experts, np.arange(1, 4097)) == ((9, 127),)
    assert batch_stops_paying(experts) == 128
    assert paying_ranges(lambda n: np.where(n < 10, 2, np.nan), np.arange(5, 20)) == ((5, 9),)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Sparsity(0, 0.3), "--keep-projection"),
        (lambda: Sparsity(1.2, 0.3), "--keep-projection"),
        (lambda: Sparsity(float("nan"), 0.3), "--keep-projection"),
        (lambda: Sparsity(0.5, -0.1), "--keep-kv"),
        (lambda: Sparsity(np.array([0.5, 1.5])), "1.5"),
        (lambda: Sparsity(0.5, 0.3, kv_budget=1024), "--kv-budget"),
        (lambda: Sparsity(0.5, kv_budget=0), "--kv-budget"),
        (lambda: Sparsity(0.5, 0.3, union=1.1), "--union"),
        (lambda: Sparsity(0.5, 0.3, union=0.4), "--union"),
        (lambda: measured_union(0.7, 4), "--keep-projection 0.5"),
        (lambda: measured_union(0.5, 65), "64"),
        (lambda: crossover(LLAMA_8B, Sparsity(1, 1)), "nothing can cross"),
        (lambda: crossover(LLAMA_8B, Sparsity(0.5, 0.3), 0), "--batch"),
        (lambda: crossover(LLAMA_8B, Sparsity(0.5, 0.3), kv="int3"), "--kv"),
        (lambda: crossover(STATE_ONLY, Sparsity(0.5, 0.3, ffn_only=True)), "--ffn-only"),
        (lambda: bounds(LLAMA_8B, Sparsity(0.5), context=0), "--context"),
        (lambda: critical_context(LLAMA_8B, -1, 153), "--k"),
    ],
)
def test_wrong_use_is_refused_in_words(make: Any, word: str) -> None:
    with pytest.raises(RooflineError, match=word):
        make()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on an app of its own, with the models of this file."""
    from specbench.cli import _roofline
    from specbench.cli.crossover import crossover as command

    known = {arch.name: arch for arch in (LLAMA_8B, MISTRAL, WINDOWS, STATE_ONLY, MOE)}
    monkeypatch.setattr(_roofline, "architecture", lambda name, weights=None: known[name])
    app = typer.Typer()
    app.command()(command)

    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(app, list(arguments))

    return invoke


def document(result: Any) -> Any:
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def test_command_prints_one_document(run: Any) -> None:
    said = document(run("--model", "llama-3.1-8b", "--keep-projection", "0.5", "--keep-kv", "0.3", "--json"))
    assert round(said["crossover_ki"], 1) == 74.3
    assert said["crossover_tokens"] == pytest.approx(said["crossover_ki"] * KI)
    assert said["beyond_window"] is False
    assert (said["context"], said["context_from"]) == (131072, "window")
    assert round(said["bound_kv"], 2) == 1.60
    assert said["bound_projection"] < said["bound_kv"] < said["bound_both"]
    assert said["kv_equals_block_weights_tokens"] == 106_496
    assert said["kv_equals_weights_with_head_tokens"] > 106_496


def test_command_takes_every_option(run: Any, tmp_path: Path) -> None:
    common = ["--model", "llama-3.1-8b", "--keep-projection", "0.5"]
    batched = document(run(*common, "--keep-kv", "0.3", "--batch", "4", "--union", "0.92", "--json"))
    assert round(batched["crossover_ki"], 1) == 3.0
    assert batched["union_overestimated"] is False
    feed_forward = document(run(*common, "--keep-kv", "0.3", "--ffn-only", "--json"))
    assert round(feed_forward["crossover_ki"], 1) == 60.0
    budget = document(run(*common, "--kv-budget", "4096", "--kv", "fp8", "--context", "32Ki", "--json"))
    assert budget["crossover_tokens"] == pytest.approx(4096 + 106_496)
    assert (budget["context"], budget["context_from"], budget["keep_kv"]) == (32768, "given", None)
    path = tmp_path / "cells.csv"
    grid = [*common[:2], "--keep-projection", "0.7,0.5", "--keep-kv", "0.3,0.5", "--batch", "1,4"]
    cells = document(run(*grid, "--csv", str(path), "--json"))["cells"]
    assert len(cells) == 8
    assert {cell["union_overestimated"] for cell in cells} == {False, True}
    written = pd.read_csv(path)
    assert list(written["crossover_tokens"]) == pytest.approx([cell["crossover_tokens"] for cell in cells])


def test_command_says_what_it_means(run: Any) -> None:
    said = run(
        "--model", "mistral-7b-v0.3", "--keep-projection", "0.5", "--keep-kv", "0.3", "--batch", "1,2"
    ).stdout
    assert "76,069 (74.3 Ki) beyond the window" in said
    assert "made for 32,768 tokens" in said
    assert "overestimates" in said
    never = run("--model", "all-windows", "--keep-projection", "0.5", "--keep-kv", "0.3").stdout
    assert "never" in never
    assert "No crossover: every layer" in never


def test_command_without_a_crossover_and_without_a_window(run: Any) -> None:
    said = document(run("--model", "state-only", "--keep-projection", "0.5", "--keep-kv", "0.3", "--json"))
    assert said["crossover_tokens"] is None
    assert said["bound_both"] is None
    assert "no keys and values" in said["reason"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--keep-projection", "1", "--keep-kv", "1"], "nothing can cross"),
        (["--keep-projection", "0", "--keep-kv", "0.3"], "--keep-projection"),
        (["--keep-projection", "half", "--keep-kv", "0.3"], "--keep-projection"),
        (["--keep-projection", "0.5", "--keep-kv", "0.3", "--batch", "0"], "--batch"),
        (["--keep-projection", "0.5", "--keep-kv", "0.3", "--batch", "1.5"], "--batch"),
        (["--keep-projection", "0.5", "--keep-kv", "0.3", "--union", "most"], "--union"),
        (["--keep-projection", "0.5", "--keep-kv", "0.3", "--context", "0"], "--context"),
        (["--keep-projection", "0.5", "--keep-kv", "0.3", "--context", "1,2"], "--context"),
        (["--keep-projection", "0.5", "--keep-kv", "0.3", "--kv", "int3"], "--kv"),
        (["--keep-projection", "0.5", "--keep-kv", "0.3", "--kv-budget", "9"], "--kv-budget"),
    ],
)
def test_command_refuses_in_words(run: Any, arguments: list[str], word: str) -> None:
    result = run("--model", "llama-3.1-8b", *arguments)
    assert result.exit_code != 0
    assert word in str(result.exception)


def test_the_documented_table_is_what_its_code_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / "crossovers.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    exec(compile(code, "docs/crossovers.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == text.split("|---|\n")[-1].splitlines()
