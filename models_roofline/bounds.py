"""Bytes that activation sparsity and KV sparsity save in one decode step, and the speedups they cannot exceed.

Activation (projection) sparsity skips the rows of a weight matrix whose inputs are near zero; KV sparsity reads a part
of the cache. In a step bound by memory a method that saves bytes is at most total / (total − saved) times as fast.
Two methods save different bytes, so their savings add; their speedups do not multiply.

Formulas: the traffic model of ByteCross (Lee et al. 2026, github:js-lee-AI/ByteCross), there for dense models whose
heads × head_dim is the hidden size. Here every matrix has its own shape and stored bytes, caches end at their window,
latent caches count their latent values, a step reads the experts that its batch draws, and recurrent state is read
and written. What a method reads to choose (scores, page metadata) is not counted: a bound is not a prediction.

Boundary: bytes only; no device, no time. All arguments broadcast over numpy arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from models_roofline.architecture import Architecture, Experts
from models_roofline.arrays import Floats, above_zero, at_least, share
from models_roofline.errors import RooflineError
from models_roofline.experts import distinct_experts
from models_roofline.formats import kv_value_bytes
from models_roofline.ledger import FFN

MEASURED_UNION = {
    1: 0.5218595,
    2: 0.7512091,
    4: 0.9198221,
    8: 0.9852273,
    16: 0.99741,
    32: 0.998759,
    64: 0.9990304,
}
"""Batch → fraction of projection weights that at least one sequence needs, each keeping a nominal 0.5: TEAL on
Llama-3.1-8B with 4K contexts, ByteCross records/batching/union_keep50.json."""


@dataclass(frozen=True, eq=False)
class Sparsity:
    """What the two methods keep. Keeps are fractions in (0, 1], 1 for a method that is not used.

    `kv_budget` is the other kind of KV sparsity: a fixed number of tokens is read whatever the context; it takes the
    place of `keep_kv`. `union` is the fraction of projection weights that any sequence of the batch needs; without it
    sequences are taken as independent, which overestimates the union, since real channels agree. Raises RooflineError.
    """

    keep_projection: ArrayLike = 1.0
    keep_kv: ArrayLike = 1.0
    kv_budget: float | None = None
    ffn_only: bool = False
    """Only feed-forward matrices (dense, shared and routed) are sparse."""
    union: ArrayLike | None = None

    def __post_init__(self) -> None:
        share("--keep-projection", self.keep_projection)
        share("--keep-kv", self.keep_kv)
        if self.kv_budget is not None:
            above_zero("--kv-budget", self.kv_budget, "tokens")
            if np.any(np.asarray(self.keep_kv) != 1):
                raise RooflineError(
                    "--kv-budget: a fixed budget takes the place of --keep-kv; give one of the two."
                )
        if self.union is not None:
            share("--union", self.union)
            if np.any(np.asarray(self.union) < np.asarray(self.keep_projection)):
                raise RooflineError(
                    "--union: a batch needs at least what one sequence keeps; give --keep-projection or more."
                )


def measured_union(keep: ArrayLike, batch: ArrayLike) -> Floats:
    """The measured union of `batch` sequences, linear in log(batch) between the measured ones.

    Raises RooflineError for another keep than 0.5 and beyond batch 64, where nothing was measured.
    """
    if np.any(np.asarray(keep) != 0.5):
        raise RooflineError(
            "--union: a measured union exists for --keep-projection 0.5 only; give a fraction."
        )
    batches = np.array(list(MEASURED_UNION), float)
    if np.any(at_least("--batch", batch, 1, "sequences") > batches[-1]):
        raise RooflineError("--union: the measured union ends at --batch 64; give a fraction.")
    fractions = np.array(list(MEASURED_UNION.values()))
    return np.asarray(np.interp(np.log(np.asarray(batch, float)), np.log(batches), fractions))


@dataclass(frozen=True, eq=False)
class KvCurve:
    """Bytes of one sequence's cache past its first `start` tokens: piecewise linear in the context."""

    slopes: Floats
    """Bytes a token of each kind of layer, all layers of the kind together."""
    ends: Floats
    """Tokens at which a kind of layer stops growing (its window); infinity for full attention."""
    start: float = 0.0

    def __call__(self, context: ArrayLike) -> Floats:
        """Bytes at `context` tokens, of any shape."""
        seen = np.minimum(np.asarray(context, float)[..., None], self.ends)
        return np.asarray((self.slopes * np.maximum(seen - self.start, 0)).sum(-1))

    @property
    def grows(self) -> bool:
        """Whether any layer caches more than `start` tokens."""
        return bool((self.ends > self.start).any())

    @property
    def tail(self) -> float:
        """Bytes a token once every window is full."""
        return float(self.slopes[np.isinf(self.ends)].sum())

    def inverse(self, target: ArrayLike) -> Floats:
        """The context at which the cache holds `target` bytes, exact; NaN where it never does and for NaN."""
        wanted = np.asarray(target, float)
        finite = self.ends[np.isfinite(self.ends) & (self.ends > self.start)]
        knots = np.unique(np.append(finite, self.start))
        values = self(knots)
        inside = np.interp(wanted, values, knots)
        rest = wanted - values[-1]
        outside = knots[-1] + rest / self.tail if self.tail else np.full(wanted.shape, np.nan)
        return np.where(rest <= 0, inside, outside)  # NaN is outside, and stays NaN


def kv_curve(arch: Architecture, kv: str = "bf16", start: float = 0.0) -> KvCurve:
    """The cache of one sequence, `kv` one of `formats.KV_BYTES`. Raises RooflineError for another name."""
    value_bytes = kv_value_bytes(kv)
    cached = [(layer.count, layer.attention) for layer in arch.layers if layer.attention]
    slopes = [count * attention.values_per_token * value_bytes for count, attention in cached]
    ends = [attention.window or np.inf for _, attention in cached]
    return KvCurve(np.array(slopes, float), np.array(ends, float), start)


def projection_bytes(arch: Architecture, batch: ArrayLike = 1, ffn_only: bool = False) -> Floats:
    """Bytes of layer matrices that a step of `batch` sequences reads: all dense ones and the experts it draws.

    Routing is uniform and independent. Embedding, head and vectors are not layer matrices.
    """
    batch = at_least("--batch", batch, 1, "sequences")
    routed = (size * distinct_experts(e.number, e.top_k, batch) for size, e in _experts(arch))
    return np.asarray(sum(routed, np.full_like(batch, _dense(arch, ffn_only))))


def projection_saved(arch: Architecture, sparsity: Sparsity, batch: ArrayLike = 1) -> Floats:
    """Bytes of layer matrices that a dense step would read and activation sparsity leaves unread.

    Only the sequences that draw an expert need its weights. A sequence draws it with chance ρ and then needs a weight
    with chance keep, so all leave the weight with (1 − ρ keep)^batch, of which (1 − ρ)^batch draw no such expert and
    would not read it anyway.
    """
    batch = at_least("--batch", batch, 1, "sequences")
    if sparsity.union is not None:
        return np.asarray((1 - np.asarray(sparsity.union)) * projection_bytes(arch, batch, sparsity.ffn_only))
    keep = np.asarray(sparsity.keep_projection, float)
    saved = _dense(arch, sparsity.ffn_only) * (1 - keep) ** batch
    for size, e in _experts(arch):
        rho = e.top_k / e.number
        saved = saved + size * e.number * ((1 - rho * keep) ** batch - (1 - rho) ** batch)
    return np.asarray(saved)


def kv_saved(
    arch: Architecture,
    sparsity: Sparsity,
    batch: ArrayLike = 1,
    *,
    context: ArrayLike,
    kv: str = "bf16",
) -> Floats:
    """Bytes of cache that KV sparsity leaves unread in a step, in every layer that has a cache."""
    kept_of_each = np.asarray(sparsity.keep_kv, float) if sparsity.kv_budget is None else 0.0
    curve = kv_curve(arch, kv, sparsity.kv_budget or 0.0)
    return np.asarray(
        at_least("--batch", batch, 1, "sequences")
        * (1 - kept_of_each)
        * curve(above_zero("--context", context, "tokens"))
    )


def step_bytes(arch: Architecture, batch: ArrayLike = 1, *, context: ArrayLike, kv: str = "bf16") -> Floats:
    """All bytes of a dense decode step: layers, head, one embedding row a sequence, norms, cache and state."""
    batch = at_least("--batch", batch, 1, "sequences")
    row = arch.embedding.bytes / arch.embedding.n
    own = row + 2 * arch.state_bytes + kv_curve(arch, kv)(above_zero("--context", context, "tokens"))
    vectors = sum(layer.count * layer.vector_bytes for layer in arch.layers) + arch.final_vector_bytes
    return np.asarray(projection_bytes(arch, batch) + vectors + arch.head.bytes + batch * own)


@dataclass(frozen=True, eq=False)
class Bounds:
    """Largest speedups over the dense step: of each method alone and of both together."""

    projection: Floats
    kv: Floats
    both: Floats


def bounds(
    arch: Architecture,
    sparsity: Sparsity,
    batch: ArrayLike = 1,
    *,
    context: ArrayLike,
    kv: str = "bf16",
) -> Bounds:
    """total / (total − saved) for each method and for both, of the shape that all arguments broadcast to."""
    total = step_bytes(arch, batch, context=context, kv=kv)
    by_projection = projection_saved(arch, sparsity, batch)
    by_kv = kv_saved(arch, sparsity, batch, context=context, kv=kv)
    return Bounds(*(total / (total - saved) for saved in (by_projection, by_kv, by_projection + by_kv)))


def _dense(arch: Architecture, ffn_only: bool) -> int:
    size = sum(
        layer.count * matrix.bytes
        for layer in arch.layers
        for matrix in layer.matrices
        if not ffn_only or matrix.name in FFN
    )
    if ffn_only and not size and not any(layer.experts for layer in arch.layers):
        raise RooflineError(f"--ffn-only: {arch.name} has no feed-forward matrices; leave the flag out.")
    return size


def _experts(arch: Architecture) -> Iterator[tuple[float, Experts]]:
    """Each kind of layer's experts, with the bytes of one expert in all its layers; its few biases count as weights."""
    for layer in arch.layers:
        if layer.experts:
            yield float(layer.count * layer.experts.bytes_per_expert), layer.experts
