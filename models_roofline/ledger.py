"""One forward pass as a short list of operations with exact bytes and FLOPs.

Everything that costs time is written here once: prediction, implied-bandwidth checks and waterfalls all read this
list. A pass runs `tokens` new tokens for each of `batch` sequences: 1 in plain decoding, k + 1 when k drafts are
verified, the whole prompt (`context=1`, `head_tokens=batch`) in prefill.

Formulas (`../docs/constants.md` has their sources and how well they hold):
  matrices   bytes = W + x + y, FLOPs = 2 m n k, with m = batch × tokens; x and y are two bytes a value, four in fp32
  experts    bytes = N(m) × one expert + K m (x + y) of its matrices, FLOPs = 2 K m × parameters of one expert
  attention  bytes = batch × cached tokens read × values × bytes of a value, read once for all new tokens;
             FLOPs = pairs of query and cached token × FLOPs of a pair
  state      one state read and one written for every position that may have to be rolled back to
  comm       bytes one device sends and receives in a ring all-reduce, 2 (tp − 1)/tp of the activations

Left out: input embedding rows, norms' arithmetic, writing the new keys and values (each below a thousandth of a
step). With tensor parallelism a fused qkv counts n/tp also where few KV heads are replicated.

Boundary: counts, no time and no device. Every numeric argument broadcasts; results keep the shape that their own
arguments have together, so that a grid is only expanded where terms are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from models_roofline.architecture import Architecture, Attention, Experts, Layer, Matrix, State
from models_roofline.arrays import Floats, at_least, share, share_or_none
from models_roofline.errors import RooflineError
from models_roofline.experts import Routing, distinct_experts, independent_tokens
from models_roofline.formats import kv_value_bytes

Term = Literal["dense", "head", "experts", "attention", "state", "comm"]
Kind = Literal["gemm", "vectors", "experts", "attention", "state", "comm"]

TERMS: tuple[Term, ...] = ("dense", "head", "experts", "attention", "state", "comm")
FFN = frozenset(
    {"gate_up", "up", "down", "shared_gate_up", "shared_up", "shared_down", "latent_down", "latent_up"}
)
"""Matrices that `ffn_only` means, beside the routed experts."""


@dataclass(frozen=True)
class Op:
    """`calls` equal kernel calls; `bytes` and `flops` are of one call on one device."""

    term: Term
    kind: Kind
    calls: int
    bytes: Floats
    flops: Floats
    compute: str
    """Number type of the products: a column of peaks in the device catalogue."""
    tokens: Floats
    """Rows of the operation over all sequences: m of a matrix product."""
    batch: Floats
    context: Floats
    """Cached tokens that one sequence can read, drafts included."""
    kv_heads: float = 0.0
    bits: float = 16.0
    """Stored bits of a weight or cached value, scales included: tells weight-only formats apart."""


@dataclass(frozen=True)
class _Pass:
    """The arguments of `forward`, as arrays."""

    batch: Floats
    context: Floats
    tokens: Floats
    head_tokens: Floats
    keep_projection: Floats
    keep_kv: Floats
    overlap: Floats
    kv_value_bytes: float
    tp: int
    ffn_only: bool
    routing: Routing

    @property
    def m(self) -> Floats:
        return np.asarray(self.batch * self.tokens)

    def keep(self, name: str) -> Floats:
        """Share of the matrix of that name which is read."""
        return self.keep_rows if not self.ffn_only or name in FFN else np.asarray(1.0)

    @cached_property
    def keep_rows(self) -> Floats:
        """Share of a matrix that any row of the pass needs."""
        return independent_union(self.keep_projection, self.m)


def independent_union(keep: ArrayLike, rows: ArrayLike) -> Floats:
    """Share of weights that any of `rows` tokens needs if each keeps its own at random: 1 − (1 − keep)^rows.

    An overestimate, since real channels agree: at keep 0.5219 and 4 rows it says 0.948 where ByteCross measured 0.920
    (`bounds.MEASURED_UNION`).
    """
    return np.asarray(1 - (1 - np.asarray(keep, float)) ** np.asarray(rows, float))


def forward(
    arch: Architecture,
    *,
    batch: ArrayLike,
    context: ArrayLike,
    tokens: ArrayLike = 1,
    head_tokens: ArrayLike | None = None,
    kv: str = "bf16",
    tp: int = 1,
    keep_projection: ArrayLike = 1.0,
    keep_kv: ArrayLike = 1.0,
    ffn_only: bool = False,
    routing: Routing = "independent",
    overlap: ArrayLike = 0.0,
) -> tuple[Op, ...]:
    """The operations of one forward pass, on one of `tp` devices.

    `batch` sequences run `tokens` new tokens each; `context` tokens are what the FIRST of them attends, itself
    included. `head_tokens` rows reach the output projection (default all; `batch` in prefill), and as many positions
    keep their recurrent state. `kv` names the format of cached values. `keep_projection` is the share of the layers'
    matrices and experts (with `ffn_only` of the feed-forward part only) that one token needs; what any token of the
    pass needs is read and multiplied (`independent_union`). `keep_kv` scales the cached tokens that are read. `routing` and `overlap` are described in `experts`. All numbers but `tp` broadcast.

    Raises RooflineError, naming the flag, for values outside their range and a `tp` that does not divide the heads.
    """
    sequences = at_least("--batch", batch, 1, "sequences")
    width = at_least("tokens (k + 1)", tokens, 1, "tokens")
    rows = sequences * width if head_tokens is None else at_least("head_tokens", head_tokens, 1, "rows")
    step = _Pass(
        batch=sequences,
        context=at_least("--context", context, 1, "tokens"),
        tokens=width,
        head_tokens=rows,
        keep_projection=share("--keep-projection", keep_projection),
        keep_kv=share("--keep-kv", keep_kv),
        overlap=share_or_none("--overlap", overlap),
        kv_value_bytes=kv_value_bytes(kv),
        tp=int(at_least("--tp", tp, 1, "devices")),
        ffn_only=ffn_only,
        routing=routing,
    )
    layers = (op for layer in arch.layers for op in _layer(arch, layer, step))
    head = _gemm("head", arch.head, 1, step.head_tokens, np.asarray(1.0), step)
    return (*layers, head, _vectors(arch.final_vector_bytes, 1, step))


def _layer(arch: Architecture, layer: Layer, step: _Pass) -> Iterator[Op]:
    for each in layer.matrices:
        yield _gemm("dense", each, layer.count, step.m, step.keep(each.name), step)
    if layer.vector_bytes:
        yield _vectors(layer.vector_bytes, layer.count, step)
    if layer.attention:
        yield _attention(layer.attention, layer, step)
    if layer.state:
        yield _state(layer.state, layer.count, step)
    if layer.experts:
        yield _experts(layer.experts, layer.count, step)
    if step.tp > 1:
        yield _all_reduce(arch, layer, step)


def _gemm(term: Term, each: Matrix, calls: int, m: Floats, keep: Floats, step: _Pass) -> Op:
    n, k, shard = _shard(each, step.tp)
    return Op(
        term=term,
        kind="gemm",
        calls=calls,
        bytes=np.asarray(each.bytes / shard * keep + _value_bytes(each) * m * (n + k)),
        flops=np.asarray(2 * m * n * k * keep),
        compute=each.compute,
        tokens=m,
        batch=step.batch,
        context=step.context,
        bits=8 * each.bytes / each.params,
    )


def _shard(each: Matrix, tp: int) -> tuple[float, float, int]:
    """Outputs, inputs and the number of devices over which the matrix is split."""
    n = each.n / (tp if each.split == "column" else 1)
    k = each.k / (tp if each.split == "row" else 1)
    return n, k, 1 if each.split == "none" else tp


def _value_bytes(each: Matrix) -> int:
    return 4 if each.compute == "fp32" else 2


def _vectors(size: int, calls: int, step: _Pass) -> Op:
    zero = np.asarray(0.0)
    return Op(
        "dense", "vectors", calls, np.asarray(float(size)), zero, "bf16", step.m, step.batch, step.context
    )


def _attention(each: Attention, layer: Layer, step: _Pass) -> Op:
    kv_heads = _kv_heads(each, step.tp)
    seen = step.context if each.window is None else np.minimum(step.context, each.window)
    read = np.asarray(seen + step.tokens - 1)
    token_bytes = each.values_per_device(step.tp) * step.kv_value_bytes
    return Op(
        term="attention",
        kind="attention",
        calls=layer.count,
        bytes=np.asarray(step.batch * read * token_bytes * step.keep_kv),
        flops=np.asarray(step.batch * _pairs(each, step) * (each.flops_per_pair / step.tp) * step.keep_kv),
        compute=_attention_compute(layer),
        tokens=step.m,
        batch=step.batch,
        context=read,
        kv_heads=kv_heads,
        bits=8 * step.kv_value_bytes,
    )


def _pairs(each: Attention, step: _Pass) -> Floats:
    """Query and cached token pairs of one sequence: Σ_{i < tokens} min(context + i, window)."""
    unbounded = each.window is None
    growing = step.tokens if unbounded else np.clip((each.window or 0) - step.context + 1, 0, step.tokens)
    beyond = (step.tokens - growing) * (each.window or 0)
    return np.asarray(growing * step.context + growing * (growing - 1) / 2 + beyond)


def _attention_compute(layer: Layer) -> str:
    """Scores are taken in the wide type of the layer: cached values and weights in eight bits are widened first."""
    compute = layer.matrices[0].compute if layer.matrices else "bf16"
    return compute if compute in ("bf16", "fp16", "fp32") else "bf16"


def _kv_heads(each: Attention, tp: int) -> float:
    """KV heads that one device holds."""
    if each.q_heads % tp:
        raise RooflineError(f"--tp: {each.q_heads} query heads do not divide by {tp}.")
    if each.latent is not None:
        return float(each.kv_heads)
    if each.kv_heads % tp and tp % each.kv_heads:
        raise RooflineError(f"--tp: {each.kv_heads} KV heads and {tp} devices do not divide one another.")
    return max(each.kv_heads / tp, 1.0)


def _state(each: State, calls: int, step: _Pass) -> Op:
    return Op(
        term="state",
        kind="state",
        calls=calls,
        bytes=np.asarray((step.batch + step.head_tokens) * (each.bytes / step.tp)),
        flops=np.asarray(step.m * (each.flops_per_token / step.tp)),
        compute="fp32",
        tokens=step.m,
        batch=step.batch,
        context=step.context,
    )


def _experts(each: Experts, calls: int, step: _Pass) -> Op:
    """The routed experts of a layer as one operation; each is split along its intermediate size."""
    woken = independent_tokens(step.batch, step.tokens, step.overlap)
    distinct = distinct_experts(each.number, each.top_k, woken, step.routing)
    shards = [_shard(one, step.tp) for one in each.matrices]
    weights = sum(one.bytes / parts for one, (_, _, parts) in zip(each.matrices, shards, strict=True))
    values = sum(_value_bytes(one) * (n + k) for one, (n, k, _) in zip(each.matrices, shards, strict=True))
    rows = step.m * each.top_k
    kept = independent_union(step.keep_projection, rows / distinct)
    return Op(
        term="experts",
        kind="experts",
        calls=calls,
        bytes=np.asarray(distinct * (weights + each.vector_bytes_per_expert) * kept + rows * values),
        flops=np.asarray(rows * sum(2 * n * k for n, k, _ in shards) * kept),
        compute=each.matrices[0].compute,
        tokens=step.m,
        batch=step.batch,
        context=step.context,
        bits=8 * sum(one.bytes for one in each.matrices) / sum(one.params for one in each.matrices),
    )


def _all_reduce(arch: Architecture, layer: Layer, step: _Pass) -> Op:
    """One after the mixer (attention or state) and one after the feed-forward part, where the layer has them."""
    mixer = layer.attention is not None or layer.state is not None
    feed_forward = layer.experts is not None or any(each.name in FFN for each in layer.matrices)
    sent = 2 * (step.tp - 1) / step.tp * 2 * arch.hidden
    return Op(
        term="comm",
        kind="comm",
        calls=layer.count * (mixer + feed_forward),
        bytes=np.asarray(step.m * sent),
        flops=np.asarray(0.0),
        compute="bf16",
        tokens=step.m,
        batch=step.batch,
        context=step.context,
    )
