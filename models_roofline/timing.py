"""Seconds of a forward pass: one formula per kind of operation, summed as kernels follow one another on a stream.

    gemm       c0 + pn_p(bytes / (eb BW), 2 m' n k / (ef F)),  m' = m rounded up to the kernel's tile
    attention  c0 + max(pn_p(c1 B h_kv/8, KV bytes / (e BW)), FLOPs / (ef F)) + c2 log2(1 + n/128)
    experts    c0 + pn_p(bytes / (eb BW), FLOPs / (ef F))
    state      c0 + max(bytes / (eb BW), FLOPs / (ef F))
    comm       c0 + bytes / (share of the link)
    pn_p(a, b) = (a^p + b^p)^(1/p)

The forms were chosen on published kernel timings (docs/constants.md: errors of every one where it was held out); the
attention's compute bound, state and comm had no timings to be held against. Captured graphs pay c0 of every kernel;
eager launches also wait for the host: total = max(host floor × kernels, sum).

Boundary: operations (`ledger`) and constants (`profile`) in, seconds out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from models_roofline.arrays import Floats
from models_roofline.errors import RooflineError
from models_roofline.ledger import Op
from models_roofline.profile import Kernel, Profile

Launch = Literal["graph", "eager"]

WIDE_BITS = 15
"""Weights of fewer bits that are multiplied in a 16-bit or wider type are widened on the way."""
SMALL = 64
"""Rows up to which kernels use their small tile."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one pass. `terms` keep the broadcast shape of their own arguments; `total_s` is their sum."""

    total_s: Floats
    terms: dict[str, Floats]
    """By term of the ledger; `host` is what an eager launch waits beyond the kernels."""
    low_s: Floats
    """Every term lower by the 90th percentile of its held-out error, as if all erred together: a wide bound, since
    errors of different kernels partly cancel."""
    high_s: Floats


def step_time(
    ops: Sequence[Op], profile: Profile, *, launch: Launch = "graph", graph_sizes: Sequence[int] | None = None
) -> StepTime:
    """Seconds of the pass `ops` on the device of `profile`, with an interval.

    `launch` says whether kernels are replayed from captured graphs or launched one by one. `graph_sizes` are the
    captured row counts: a pass is padded up to the next one, and beyond the largest it runs eagerly. None: every size
    is captured. They mean nothing where every pass is eager. Raises RooflineError for a number type that the device
    lacks.
    """
    graph_sizes = None if launch == "eager" else graph_sizes
    terms: dict[str, Floats] = {}
    low_s, high_s = np.asarray(0.0), np.asarray(0.0)
    for op in ops:
        kernel = profile.kernels[_class(op)][_variant(op)]
        spent = np.asarray(op.calls * TIMERS[op.kind](op, kernel, profile, graph_sizes))
        terms[op.term] = np.asarray(terms[op.term] + spent if op.term in terms else spent)
        low_s = low_s + spent * max(1 - kernel.error_p90, 0)
        high_s = high_s + spent * (1 + kernel.error_p90)
    total_s = np.asarray(sum(terms.values(), np.asarray(0.0)))
    if launch == "graph" and graph_sizes is None:
        return StepTime(total_s, terms, np.asarray(low_s), np.asarray(high_s))
    return _with_host(ops, profile, StepTime(total_s, terms, low_s, high_s), launch, graph_sizes)


def _with_host(
    ops: Sequence[Op], profile: Profile, step: StepTime, launch: Launch, graph_sizes: Sequence[int] | None
) -> StepTime:
    """Where a pass is launched eagerly it takes at least the host's time for all its kernels."""
    floor = profile.kernels["host"]["any"].constants["floor_s"]
    kernels = sum(op.calls for op in ops if op.kind != "vectors")
    rows = ops[0].tokens
    eager = np.asarray(1.0) if launch == "eager" else np.asarray(rows > max(graph_sizes or [0]), float)
    total_s = np.maximum(step.total_s, eager * (floor.value * kernels))
    return StepTime(
        total_s=total_s,
        terms={**step.terms, "host": total_s - step.total_s},
        low_s=np.maximum(step.low_s, eager * (floor.low * kernels)),
        high_s=np.maximum(step.high_s, eager * (floor.high * kernels)),
    )


def power_mean(a: Floats, b: Floats, p: float) -> Floats:
    """pn_p: the sum at p = 1, ever closer to the larger above."""
    return np.asarray((a**p + b**p) ** (1 / p))


def padded_rows(m: Floats, small_tile: float, tile: float) -> Floats:
    """Rows that are computed: m rounded up to the tile of its size."""
    size = np.where(m <= SMALL, small_tile, tile)
    return np.asarray(np.ceil(m / size) * size)


def _read_s(op: Op, kernel: Kernel, profile: Profile) -> Floats:
    return op.bytes / (kernel["bandwidth_share"] * profile.bandwidth_bytes_per_s)


def _compute_s(op: Op, kernel: Kernel, profile: Profile, flops: Floats) -> Floats:
    return flops / (kernel["compute_share"] * profile.peak(op.compute))


def _gemm(op: Op, kernel: Kernel, profile: Profile, sizes: Sequence[int] | None) -> Floats:
    rows = padded_rows(_captured(op.tokens, sizes), kernel["small_tile"], kernel["tile"])
    compute_s = _compute_s(op, kernel, profile, op.flops / op.tokens * rows)
    return kernel["floor_s"] + power_mean(_read_s(op, kernel, profile), compute_s, kernel["sharpness"])


def _vectors(op: Op, kernel: Kernel, profile: Profile, sizes: Sequence[int] | None) -> Floats:
    """Norms and biases are fused into their neighbours: bytes without a floor."""
    return _read_s(op, kernel, profile)


def _attention(op: Op, kernel: Kernel, profile: Profile, sizes: Sequence[int] | None) -> Floats:
    per_sequence_s = kernel["sequence_s"] * op.kv_heads / 8 * op.batch
    read_s = power_mean(per_sequence_s, _read_s(op, kernel, profile), kernel["sharpness"])
    body_s = np.maximum(read_s, _compute_s(op, kernel, profile, op.flops))
    return kernel["floor_s"] + body_s + kernel["split_s"] * np.log2(1 + op.context / 128)


def _experts(op: Op, kernel: Kernel, profile: Profile, sizes: Sequence[int] | None) -> Floats:
    compute_s = _compute_s(op, kernel, profile, op.flops / op.tokens * _captured(op.tokens, sizes))
    return kernel["floor_s"] + power_mean(_read_s(op, kernel, profile), compute_s, kernel["sharpness"])


def _state(op: Op, kernel: Kernel, profile: Profile, sizes: Sequence[int] | None) -> Floats:
    body_s = np.maximum(_read_s(op, kernel, profile), _compute_s(op, kernel, profile, op.flops))
    return kernel["floor_s"] + body_s


def _comm(op: Op, kernel: Kernel, profile: Profile, sizes: Sequence[int] | None) -> Floats:
    if profile.link_bytes_per_s is None:
        raise RooflineError(
            f"--tp: no link between devices is known for {profile.device}; name it in --devices."
        )
    return kernel["floor_s"] + op.bytes / (kernel["bandwidth_share"] * profile.link_bytes_per_s)


TIMERS: dict[str, Callable[[Op, Kernel, Profile, Sequence[int] | None], Floats]] = {
    "gemm": _gemm,
    "vectors": _vectors,
    "attention": _attention,
    "experts": _experts,
    "state": _state,
    "comm": _comm,
}


def _captured(m: Floats, sizes: Sequence[int] | None) -> Floats:
    """m padded to the next captured size; as it is beyond the largest, and where no sizes are given."""
    if not sizes:
        return m
    steps = np.sort(np.asarray(sizes, float))
    place = np.minimum(np.searchsorted(steps, m), len(steps) - 1)
    return np.asarray(np.maximum(m, steps[place]), float)


def _class(op: Op) -> str:
    return "gemm" if op.kind == "vectors" else op.kind


def _variant(op: Op) -> str:
    """Which constants of its kind an operation takes: by what is multiplied, for weight-only formats by what is read."""
    eight = op.compute in ("fp8", "int8", "fp4")
    if op.kind == "gemm" and not eight and op.bits < WIDE_BITS:
        return "weight_only"
    if op.kind in ("gemm", "vectors"):
        return "fp8" if eight else "bf16"
    if op.kind == "attention":
        return "fp8" if op.bits <= 8 else "bf16"
    if op.kind == "experts":
        return _expert_variant(op.bits, eight)
    return "any"


def _expert_variant(bits: float, eight: bool) -> str:
    if bits < 6:
        return "mxfp4"
    if not eight:
        return "bf16"
    return "fp8_block" if bits > 8 else "fp8"
