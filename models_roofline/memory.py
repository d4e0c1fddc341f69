"""Whether it fits: weights, caches and recurrent state on one device of a tensor-parallel group.

Engines also need room for activations, graphs and fragmentation, which is theirs to say; this is the part that is
certain, so what does not fit here fits nowhere. Boundary: bytes; sentences where they are too many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from models_roofline.architecture import Architecture
from models_roofline.arrays import Floats
from models_roofline.errors import RooflineError
from models_roofline.formats import kv_value_bytes
from models_roofline.hardware import Device

GIB = 2**30


def cache_bytes(arch: Architecture, context: ArrayLike, kv: str = "bf16", tp: int = 1) -> Floats:
    """Live cache and state of one sequence at `context` tokens on one of `tp` devices; shape of `context`."""
    tokens = np.asarray(context, dtype=np.float64)
    total = np.full(tokens.shape, arch.state_bytes / tp)
    for layer in arch.layers:
        if (attention := layer.attention) is None:
            continue
        seen = tokens if attention.window is None else np.minimum(tokens, attention.window)
        total = total + layer.count * attention.values_per_device(tp) * kv_value_bytes(kv) * seen
    return total


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device: what stands, and what each sequence adds (shape of the grid)."""

    weights: float
    per_sequence: Floats

    def total(self, batch: ArrayLike) -> Floats:
        """Bytes with `batch` sequences, broadcast against the contexts."""
        return self.weights + np.asarray(batch, dtype=np.float64) * self.per_sequence


def check_fits(need: Footprint, batch: ArrayLike, context: ArrayLike, device: Device, tp: int) -> None:
    """Raise RooflineError where the largest cell does not fit, with how much is missing and what would fit."""
    total = np.asarray(need.total(batch))
    room = device.memory_bytes
    if room is None or (worst := float(total.max())) <= room:
        return
    index = np.unravel_index(int(total.argmax()), total.shape)
    at_batch = int(np.broadcast_to(batch, total.shape)[index])
    at_context = int(np.broadcast_to(context, total.shape)[index])
    each = float(np.broadcast_to(need.per_sequence, total.shape)[index])
    largest = int(max(room - need.weights, 0) // each) if each else 0
    where = f"{device.id} has {room / GIB:.1f} GiB" + (f" on each of {tp} devices" if tp > 1 else "")
    advice = (
        f"the largest batch that fits at that context is {largest}"
        if largest
        else "not even one fits: use smaller --weights or more devices (--tp)"
    )
    raise RooflineError(
        f"--batch: {at_batch} {'sequence' if at_batch == 1 else 'sequences'} of {at_context} tokens need "
        f"{worst / GIB:.1f} GiB and {where}, {(worst - room) / GIB:.1f} GiB too little; {advice}. "
        "--no-memory-check prices the grid all the same."
    )
