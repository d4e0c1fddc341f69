"""Where one way of saving decode time overtakes another, and where a method stops paying.

- Byte crossover: the context from which KV sparsity saves more bytes a step than activation sparsity,
  W (1 − keep_projection) = KV(n) (1 − keep_kv), both sides in stored bytes. ByteCross (Lee et al. 2026) gives
  n* = P (1 − r_P) / (2 h_kv d_h (1 − r_KV)) × w/k for dense full attention; a cache with windows is piecewise linear
  in the context and is inverted exactly, and may never get there.
- Kernel-corrected crossover: the same with a dense step time and each kernel's cost beyond its bytes (ByteCross).
- Context at which the cache is as large as the weights; critical context of large-batch speculation (MagicDec,
  arXiv 2408.11049); batch at which a speedup falls to 1.

Boundary: bytes, ratios and given times; no device catalogue, no step model. Arguments broadcast unless said otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from models_roofline.architecture import Architecture
from models_roofline.arrays import Counts, Floats, at_least
from models_roofline.bounds import (
    Sparsity,
    bounds,
    kv_curve,
    kv_saved,
    projection_bytes,
    projection_saved,
)
from models_roofline.errors import RooflineError
from models_roofline.families import load_model

Curve = Callable[[Floats], Floats]
"""Seconds against context, both arrays of one shape."""
_SCAN_POINTS = 2049
"""Contexts tried for a sign change before it is refined: steps of 0.3 % over 2K to 1M tokens."""


@dataclass(frozen=True)
class Crossover:
    """A context in tokens, or None with the reason why there is none."""

    tokens: float | None
    reason: str | None
    beyond_window: bool | None
    """Whether it lies past the context that the model was made for; None where either is unknown."""


def crossover_tokens(
    arch: Architecture, sparsity: Sparsity, batch: ArrayLike = 1, kv: str = "bf16"
) -> Floats:
    """Context from which KV sparsity saves more bytes than activation sparsity; NaN where it never does.

    `keep_projection`, `keep_kv` and `union` of `sparsity` and `batch` broadcast. `kv` names the cache format.
    """
    saved = projection_saved(arch, sparsity, batch)
    kept = np.asarray(sparsity.keep_kv, float) if sparsity.kv_budget is None else np.zeros(())
    share = np.asarray(batch, float) * (1 - kept)
    saved, share = np.broadcast_arrays(saved, share)
    # Where KV sparsity can save nothing there is nothing to cross, even if the other side saves nothing: NaN, not 0.
    curve = kv_curve(arch, kv, sparsity.kv_budget or 0.0)
    target = np.divide(saved, share, out=np.full(saved.shape, np.nan), where=(share > 0) & curve.grows)
    return curve.inverse(target)


def crossover(model: Architecture | str, sparsity: Sparsity, batch: int = 1, kv: str = "bf16") -> Crossover:
    """The byte crossover of one setting, with its reason where there is none. Scalars only; `model` may be a name.

    Raises RooflineError where both keeps are 1.
    """
    arch = load_model(model) if isinstance(model, str) else model
    if sparsity.kv_budget is None and float(np.asarray(sparsity.keep_kv)) == 1:
        if float(np.asarray(sparsity.keep_projection)) == 1:
            raise RooflineError(
                "--keep-projection, --keep-kv: with both at 1 neither method saves anything and nothing can cross; "
                "lower at least one."
            )
        return Crossover(
            None, "--keep-kv is 1: KV sparsity saves nothing, so projection sparsity always wins.", None
        )
    tokens = float(crossover_tokens(arch, sparsity, batch, kv))
    if np.isnan(tokens):
        return Crossover(None, _never(arch, sparsity, batch, kv), None)
    return _found(arch, tokens)


def _found(arch: Architecture, tokens: float) -> Crossover:
    return Crossover(tokens, None, None if arch.max_context is None else tokens > arch.max_context)


def _never(arch: Architecture, sparsity: Sparsity, batch: int, kv: str) -> str:
    windows = [layer.attention.window or 0 for layer in arch.layers if layer.attention]
    if not windows:
        return f"{arch.name} keeps no keys and values, so KV sparsity saves nothing at any context."
    most = float(kv_saved(arch, sparsity, batch, context=max(windows), kv=kv))
    least = float(projection_saved(arch, sparsity, batch))
    return (
        f"every layer of {arch.name} that has a cache ends at a window: with all of them full KV sparsity saves "
        f"{most / 1e6:.4g} MB a step, less than the {least / 1e6:.4g} MB of projection sparsity."
    )


def log_log(contexts: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Step time through the given points, linear in the logs of both. Points in rising order of context."""
    x, y = np.log(np.asarray(contexts, float)), np.log(np.asarray(seconds, float))
    return lambda n: np.asarray(np.exp(np.interp(np.log(n), x, y)))


def linear(contexts: Sequence[float], seconds: Sequence[float]) -> Curve:
    """A cost through the given points, linear between them and constant outside (costs may be negative)."""
    x, y = np.asarray(contexts, float), np.asarray(seconds, float)
    return lambda n: np.asarray(np.interp(n, x, y))


def kernel_cost_s(method_s: ArrayLike, dense_s: ArrayLike, bound: ArrayLike) -> Floats:
    """What a method's kernels cost beyond their bytes: its step time less dense time / bound. Same session for both."""
    return np.asarray(np.asarray(method_s) - np.asarray(dense_s) / np.asarray(bound))


def corrected_crossover(
    arch: Architecture,
    sparsity: Sparsity,
    dense_s: Curve,
    projection_cost_s: Curve | float,
    kv_cost_s: Curve | float,
    *,
    contexts: tuple[float, float],
    batch: int = 1,
    kv: str = "bf16",
) -> Crossover:
    """First context within `contexts` from which the KV method is the faster one, kernel costs included.

    A method takes dense_s(n) / bound(n) + cost(n) seconds a step. `dense_s` is measured or predicted; costs may be
    constants. Nothing is said outside `contexts`, the range in which the given times hold.
    """
    low, high = contexts
    if not 0 < low < high:
        raise RooflineError("contexts: give the lower and the upper end of the range, in tokens above 0.")

    def projection_behind_s(n: Floats) -> Floats:
        limit = bounds(arch, sparsity, batch, context=n, kv=kv)
        gap = dense_s(n) * (1 / limit.projection - 1 / limit.kv)
        return np.asarray(gap + _at(projection_cost_s, n) - _at(kv_cost_s, n))

    grid = np.geomspace(low, high, _SCAN_POINTS)
    ahead = projection_behind_s(grid) < 0
    turns = np.flatnonzero(ahead[:-1] & ~ahead[1:])
    if turns.size:
        return _found(arch, _zero(projection_behind_s, grid[turns[0]], grid[turns[0] + 1]))
    winner = "projection" if ahead[0] else "KV"
    return Crossover(
        None, f"{winner} sparsity is the faster one from {low:,.0f} tokens on, to {high:,.0f}.", None
    )


def _at(cost: Curve | float, n: Floats) -> Floats:
    return np.asarray(cost(n) if callable(cost) else cost)


def _zero(function: Curve, low: float, high: float) -> float:
    from scipy.optimize import brentq

    return float(brentq(lambda n: float(function(np.asarray(n))), low, high))


def kv_equals_weights(
    arch: Architecture, batch: ArrayLike = 1, kv: str = "bf16", *, head: bool = False
) -> Floats:
    """Context at which the caches of `batch` sequences are as large as the weights that a step reads; NaN if never.

    Weights are the blocks' matrices (with the experts that the batch draws), and the output head if `head`.
    """
    weights = projection_bytes(arch, batch) + (arch.head.bytes if head else 0)
    return kv_curve(arch, kv).inverse(weights / np.asarray(batch, float))


def ridge(
    flops_per_s: ArrayLike,
    bytes_per_s: ArrayLike,
    compute_efficiency: ArrayLike = 1.0,
    read_efficiency: ArrayLike = 1.0,
) -> Floats:
    """FLOPs per byte at which computing takes as long as reading.

    Nominal with peaks alone. Effective with the share of the compute peak that matrix products reach and the share of
    bandwidth that reading the cache reaches: it lies above or below the nominal one, as the device has it.
    """
    compute = np.asarray(flops_per_s) * np.asarray(compute_efficiency)
    return np.asarray(compute / (np.asarray(bytes_per_s) * np.asarray(read_efficiency)))


def critical_context(
    arch: Architecture, k: ArrayLike, ridge: ArrayLike, kv: str = "bf16", *, head: bool = False
) -> Floats:
    """Context past which reading the cache outweighs computing the layers of a verification; NaN if never.

    n_crit = P (k + 1) / (2 h_kv d_h × ridge) for a bf16 cache: past it a bigger batch means a bigger speedup. The
    batch cancels, but only once the layers are bound by compute: `batch ≥ compute_bound_batch(...)`.
    """
    flops = 2 * (_active_params(arch) + (arch.head.params if head else 0))
    return kv_curve(arch, kv).inverse(
        flops * (at_least("--k", k, 0, "drafted tokens") + 1) / np.asarray(ridge, float)
    )


def compute_bound_batch(arch: Architecture, k: int, ridge: float) -> int:
    """Smallest batch whose verification of k drafted tokens is bound by compute in the layers. Scalars only.

    batch × (k + 1) ≥ ridge for bf16 weights of a dense model; fewer bytes a weight lower it, experts raise it (each
    draws but a part of the tokens).
    """
    width = int(at_least("--k", k, 0, "drafted tokens")) + 1

    def compute_bound(batch: int) -> bool:
        flops = 2 * _active_params(arch) * batch * width
        return flops >= ridge * float(projection_bytes(arch, batch * width))

    return 1 + bisect_left(range(1, 1 << 40), True, key=compute_bound)


def _active_params(arch: Architecture) -> int:
    """Parameters of layer matrices that one token is multiplied with."""
    return sum(
        layer.count * sum(m.params for m in layer.matrices)
        + (
            layer.count * layer.experts.top_k * sum(m.params for m in layer.experts.matrices)
            if layer.experts
            else 0
        )
        for layer in arch.layers
    )


Speedup = Callable[[Counts], ArrayLike]
"""Speedup at each value of one axis (batches, contexts), all else fixed."""


def paying_ranges(speedup: Speedup, axis: Counts) -> tuple[tuple[int, int], ...]:
    """The stretches of `axis` (first and last value) on which the speedup is above 1. NaN does not pay."""
    pays = np.concatenate([[False], np.asarray(speedup(axis), float) > 1, [False]])
    edges = np.flatnonzero(pays[1:] != pays[:-1])
    return tuple((int(axis[a]), int(axis[b - 1])) for a, b in edges.reshape(-1, 2))


def batch_stops_paying(speedup: Speedup, largest: int = 4096) -> int | None:
    """Smallest batch from which on, up to `largest`, no batch pays; 1 if none ever does, None if `largest` pays.

    Every batch is tried, because a speedup need not fall steadily (experts: low, then high, then low).
    """
    ranges = paying_ranges(speedup, np.arange(1, largest + 1))
    last = ranges[-1][1] if ranges else 0
    return None if last == largest else last + 1
