"""The ledger counts what arithmetic proves: every weight once, every cached token once, every pair once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_roofline.architecture import Architecture, Attention, Experts, Layer, State, matrix
from models_roofline.errors import RooflineError
from models_roofline.families import catalogue, load_model
from models_roofline.ledger import TERMS, Op, forward

LLAMA = load_model("llama-3.1-8b")
QWEN_MOE = load_model("qwen3-30b-a3b")
WEIGHTS = ("dense", "head", "experts")
VOCAB, HIDDEN = 128256, 4096
KV_PER_TOKEN = 131072
"""Bytes of Llama-3.1-8B in bf16: 32 layers × 2 × 8 heads × 128 × 2."""


def total(ops: Iterable[Op], *terms: str, what: str = "bytes") -> np.ndarray:
    return np.asarray(sum(op.calls * getattr(op, what) for op in ops if op.term in (terms or TERMS)))


def one_layer(attention: Attention | None = None, state: State | None = None) -> Architecture:
    layer = Layer(1, (matrix("o", 64, 64),), 0, 0, attention, state)
    return replace(LLAMA, layers=(layer,))


# --- weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalogue())
def test_one_token_streams_the_model_exactly(name: str) -> None:
    """Activations grow with rows, weights do not; with `overlap` 1 two tokens wake the experts of one."""
    arch = load_model(name)
    one = total(forward(arch, batch=1, context=64), *WEIGHTS)
    two = total(forward(arch, batch=1, context=64, tokens=2, overlap=1.0), *WEIGHTS)
    assert 2 * one - two == arch.streamed_bytes


def test_gpt_oss_20b_streams_its_published_bytes() -> None:
    assert load_model("gpt-oss-20b").streamed_bytes == 3_708_083_328


def test_flops_are_two_a_parameter_and_row() -> None:
    ops = forward(LLAMA, batch=3, context=64, tokens=5)
    vectors = sum(layer.count * layer.vectors for layer in LLAMA.layers) + LLAMA.final_vectors
    assert total(ops, *WEIGHTS, what="flops") == 2 * 15 * (LLAMA.streamed_params - vectors)


def test_a_product_moves_weights_inputs_and_outputs() -> None:
    (qkv,) = [op for op in forward(LLAMA, batch=8, context=64, tokens=4) if op.flops == 2 * 32 * 6144 * 4096]
    assert qkv.bytes == 2 * (6144 * 4096 + 32 * (6144 + 4096))
    assert (qkv.calls, qkv.tokens, qkv.bits) == (32, 32, 16)


def test_the_head_runs_on_the_rows_asked_for() -> None:
    prefill = forward(LLAMA, batch=2, context=1, tokens=512, head_tokens=2)
    assert total(prefill, "head", what="flops") == 2 * 2 * VOCAB * HIDDEN
    assert total(forward(LLAMA, batch=2, context=1, tokens=512), "head", what="flops") == 512 * total(
        prefill, "head", what="flops"
    )


def test_experts_read_what_is_woken() -> None:
    """Qwen3-30B-A3B: 48 layers, 128 experts, 8 a token, each 3 × 2048 × 768 weights."""
    one_expert, rows = 3 * 2048 * 768 * 2, 4 * 8
    moved = 48 * (29.123046875 * one_expert + rows * 2 * (2048 + 2 * 768 + 768 + 2048))
    assert total(forward(QWEN_MOE, batch=1, context=64, tokens=4), "experts") == pytest.approx(moved)
    balanced = forward(QWEN_MOE, batch=1, context=64, tokens=4, routing="balanced")
    assert total(balanced, "experts") - moved == pytest.approx(48 * (32 - 29.123046875) * one_expert)
    assert total(balanced, "experts", what="flops") == 48 * rows * 3 * 2 * 2048 * 768


def test_biases_of_experts_count_as_they_are_stored() -> None:
    """One token wakes one of two experts: 8 × 8 weights in bf16 and 10 biases, of two bytes each or as stored."""
    plain = Experts(2, 1, (matrix("up", 8, 8),), vectors=10)
    for experts, stored in ((plain, 20), (replace(plain, vector_bytes=40), 40)):
        arch = replace(LLAMA, layers=(Layer(1, (), 0, 0, experts=experts),))
        moved = total(forward(arch, batch=1, context=1), "experts")
        assert moved == 8 * 8 * 2 + stored + 2 * (8 + 8)


def test_formats_of_weights_are_told_apart_by_their_bits() -> None:
    (experts,) = {
        op.bits for op in forward(load_model("gpt-oss-20b"), batch=1, context=1) if op.kind == "experts"
    }
    assert experts == 4.25
    kinds = {(op.compute, op.bits > 8) for op in forward(load_model("deepseek-v3"), batch=1, context=1)}
    assert ("fp8", True) in kinds


# --- cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "gemma-3-1b", "deepseek-v3"])
@pytest.mark.parametrize("context", [1, 100, 5000])
def test_plain_decoding_reads_the_live_cache_once(name: str, context: int) -> None:
    arch = load_model(name)
    assert total(forward(arch, batch=3, context=context), "attention") == 3 * arch.kv_bytes(context)


def test_verification_reads_the_cache_once_for_all_drafts() -> None:
    found = total(forward(LLAMA, batch=2, context=1000, tokens=np.array([1, 5])), "attention")
    np.testing.assert_array_equal(found, 2 * KV_PER_TOKEN * np.array([1000, 1004]))


def test_cache_formats_and_sparsity() -> None:
    full = total(forward(LLAMA, batch=1, context=1000), "attention")
    assert total(forward(LLAMA, batch=1, context=1000, kv="fp8", keep_kv=0.5), "attention") == full / 4


@given(st.integers(1, 60), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 40)))
def test_pairs_and_reads_of_windows(context: int, tokens: int, window: int | None) -> None:
    arch = one_layer(Attention(4, 2, 8, 8, window))
    (op,) = [op for op in forward(arch, batch=3, context=context, tokens=tokens) if op.kind == "attention"]
    seen = [min(context + i, window or 10**9) for i in range(tokens)]
    first = [max(0, context + i - (window or 10**9)) for i in range(tokens)]
    assert op.flops == 3 * sum(seen) * 2 * 4 * 16
    assert op.bytes == 3 * (context + tokens - 1 - first[0]) * 2 * 16 * 2


def test_prefill_is_causal() -> None:
    (op,) = [
        op for op in forward(one_layer(Attention(1, 1, 8, 8)), batch=1, context=1, tokens=100) if op.kv_heads
    ]
    assert op.flops == 100 * 101 / 2 * 32
    assert op.context == 100


def test_state_is_read_and_written_and_kept_for_rollback() -> None:
    arch = one_layer(state=State(1000, 10))
    assert total(forward(arch, batch=4, context=9), "state") == 4 * 2 * 1000
    assert total(forward(arch, batch=4, context=9, tokens=5), "state") == 4 * 6 * 1000
    prefill = forward(arch, batch=4, context=1, tokens=500, head_tokens=4)
    assert total(prefill, "state") == 4 * 2 * 1000
    assert total(prefill, "state", what="flops") == 4 * 500 * 10


# --- sparsity ---------------------------------------------------------------------------------------------


def test_projection_sparsity_spares_weights_of_layers_only() -> None:
    half = forward(LLAMA, batch=1, context=64, keep_projection=0.5)
    full = forward(LLAMA, batch=1, context=64)
    layers = sum(m.bytes for m in LLAMA.layers[0].matrices) * 32
    assert total(full, *WEIGHTS) - total(half, *WEIGHTS) == layers / 2
    assert total(half, "head") == total(full, "head")


def test_sparsity_of_the_feed_forward_part_only() -> None:
    part = forward(LLAMA, batch=1, context=64, keep_projection=0.5, ffn_only=True)
    spared = total(forward(LLAMA, batch=1, context=64), "dense") - total(part, "dense")
    assert spared == 32 * 3 * 4096 * 14336 * 2 / 2
    experts = forward(QWEN_MOE, batch=1, context=64, keep_projection=0.5, ffn_only=True)
    full = forward(QWEN_MOE, batch=1, context=64)
    assert total(experts, "dense") == total(full, "dense")
    assert total(experts, "experts", what="flops") == total(full, "experts", what="flops") / 2


# --- tensor parallelism -----------------------------------------------------------------------------------


def test_devices_share_weights_and_cache() -> None:
    one, four = (forward(LLAMA, batch=2, context=1000, tp=tp) for tp in (1, 4))
    assert total(four, "attention") == total(one, "attention") / 4
    assert total(four, "head") == LLAMA.head.bytes / 4 + 2 * 2 * (VOCAB / 4 + HIDDEN)
    assert total(four, what="flops") == total(one, what="flops") / 4


def test_all_reduces() -> None:
    """Two a layer; a ring moves 2 (tp − 1)/tp of the activations, m × hidden × 2 bytes."""
    ops = forward(LLAMA, batch=3, context=64, tokens=2, tp=4)
    (comm,) = [op for op in ops if op.term == "comm"]
    assert (comm.calls, comm.bytes) == (64, 1.5 * 6 * 4096 * 2)
    assert not total(forward(LLAMA, batch=3, context=64), "comm")


def test_few_kv_heads_are_copied_and_a_latent_cache_is_not_divided() -> None:
    few = one_layer(Attention(16, 2, 8, 8))
    assert total(forward(few, batch=1, context=10, tp=8), "attention") == 10 * 16 * 2
    latent = load_model("deepseek-v3")
    reads = [total(forward(latent, batch=1, context=10, tp=tp), "attention") for tp in (1, 8)]
    assert reads[0] == reads[1] == 10 * 70272


def test_devices_must_divide_the_heads() -> None:
    with pytest.raises(RooflineError, match=r"--tp: 9 query heads do not divide by 2"):
        forward(load_model("smollm2-135m"), batch=1, context=1, tp=2)
    with pytest.raises(RooflineError, match=r"--tp: 4 KV heads and 3 devices"):
        forward(one_layer(Attention(12, 4, 8, 8)), batch=1, context=1, tp=3)


# --- shapes and refusals ----------------------------------------------------------------------------------


def test_shapes_stay_unexpanded() -> None:
    batch, context, tokens, keep = np.ix_(
        np.arange(1, 3), np.arange(1, 4), np.arange(1, 5), np.array([0.5, 1])
    )
    ops = forward(LLAMA, batch=batch, context=context, tokens=tokens, keep_projection=keep)
    assert {op.bytes.shape for op in ops if op.kind == "gemm"} == {(2, 1, 4, 2), (2, 1, 4, 1)}
    assert {op.bytes.shape for op in ops if op.kind == "attention"} == {(2, 3, 4, 1)}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"batch": 0}, "--batch: 0 is not a number of sequences, 1 or more"),
        ({"context": [4, -1]}, "--context: -1 is not a number of tokens, 1 or more"),
        ({"tokens": 0}, r"tokens \(k \+ 1\): 0 is not a number of tokens"),
        ({"keep_projection": 0}, r"--keep-projection: 0 is not a share in \(0, 1\]"),
        ({"keep_kv": 1.2}, "--keep-kv: 1.2 is not a share"),
        ({"overlap": -0.1}, r"--overlap: -0.1 is not a share in \[0, 1\]"),
        ({"kv": "fp2"}, "--kv: 'fp2' is not a cache format; known: bf16"),
        ({"batch": "many"}, "--batch: 'many' is not a number"),
        ({"batch": float("nan")}, "--batch: nan is not a number"),
        ({"context": "long"}, "--context: 'long' is not a number"),
        ({"tp": 0}, "--tp: 0 is not a number of devices"),
    ],
)
def test_wrong_use_is_refused_in_words(asked: dict[str, object], words: str) -> None:
    with pytest.raises(RooflineError, match=words):
        forward(LLAMA, **({"batch": 1, "context": 1} | asked))  # type: ignore[arg-type]
