"""What `predict` answers: arrays over a grid, and the same as a table, as plain records and as the best k.

Boundary: a record and its views; how it is made is `speedup`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from models_roofline.architecture import Architecture
from models_roofline.arrays import Floats
from models_roofline.hardware import Device
from models_roofline.methods import Method


@dataclass(frozen=True)
class Prediction:
    """What is expected of every cell; arrays broadcast to `shape`, times in seconds.

    `terms` are the parts of one round, and add up to `t_round_s`.
    """

    method: Method
    target: Architecture
    device: Device
    basis: str
    """What the constants of the device rest on."""
    batch: Floats
    context: Floats
    k: Floats
    keep_projection: Floats
    keep_kv: Floats
    al: Floats
    prefill_s: Floats
    """To take in a prompt of `context` tokens, one sequence alone."""
    memory_bytes: Floats
    """On one device: weights, caches and state, the drafter's included."""
    t_step_s: Floats
    t_verify_s: Floats
    t_draft_s: Floats
    t_round_s: Floats
    round_low_s: Floats
    round_high_s: Floats
    bound: Floats
    """Largest speedup that this acceptance allows: AL, times what sparsity alone gives where some is asked for."""
    bound_free_draft: Floats
    bound_oracle: Floats
    speedup: Floats
    """Over dense autoregressive decoding at the same batch and context."""
    speedup_low: Floats
    speedup_high: Floats
    terms: Mapping[str, Floats]
    overhead_known: bool
    """An engine's overhead was given; otherwise a round is kernels only, and only the far ends hold what was seen."""

    def __repr__(self) -> str:
        cells = int(np.prod(self.shape))
        return f"Prediction({self.method.name} on {self.target.name}, {self.device.id}: {cells} cells)"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole grid."""
        axes = (self.batch, self.context, self.k, self.keep_projection, self.keep_kv)
        return np.broadcast_shapes(self.speedup.shape, *(axis.shape for axis in axes))

    @property
    def tpot_s(self) -> Floats:
        """Seconds of one output token of one sequence."""
        return self.t_round_s / self.al

    @property
    def tokens_per_s(self) -> Floats:
        """Output tokens a second of all sequences together."""
        return self.batch * self.al / self.t_round_s

    @property
    def target_efficiency(self) -> Floats:
        """T(m = batch) / T(m = batch · width): what verification keeps of a plain step's speed."""
        return self.t_step_s / self.t_verify_s

    def frame(self) -> pd.DataFrame:
        """One row a cell; terms as columns `term_NAME_s`."""
        columns = self._columns() | {f"term_{name}_s": value for name, value in self.terms.items()}
        return pd.DataFrame({name: np.broadcast_to(v, self.shape).ravel() for name, v in columns.items()})

    def cells(self) -> list[dict[str, Any]]:
        """One plain record a cell, as `predict --json` prints them; `fits` is None where the memory is unknown."""
        room = self.device.memory_bytes
        cells = [_record(row) for row in self.frame().to_dict("records")]
        return [cell | {"fits": None if room is None else cell["memory_bytes"] <= room} for cell in cells]

    def best_k(self) -> pd.DataFrame:
        """The k of the largest speedup for each other setting: one row each, with its speedup."""
        table = self.frame()[[*_SETTINGS, "k", "speedup"]]
        return table.loc[table.groupby(_SETTINGS, sort=False).speedup.idxmax()].reset_index(drop=True)

    def _columns(self) -> dict[str, Floats]:
        return {
            "batch": self.batch, "context": self.context, "k": self.k,
            "keep_projection": self.keep_projection, "keep_kv": self.keep_kv,
            "tpot_s": self.tpot_s, "tpot_low_s": self.round_low_s / self.al, "tpot_high_s": self.round_high_s / self.al,
            "tokens_per_s": self.tokens_per_s, "al": self.al, "memory_bytes": self.memory_bytes,
            "speedup": self.speedup, "speedup_low": self.speedup_low, "speedup_high": self.speedup_high,
            "bound": self.bound, "bound_free_draft": self.bound_free_draft, "bound_oracle": self.bound_oracle,
            "target_efficiency": self.target_efficiency, "prefill_s": self.prefill_s,
            "t_step_s": self.t_step_s, "t_verify_s": self.t_verify_s, "t_draft_s": self.t_draft_s,
            "t_round_s": self.t_round_s,
        }  # fmt: skip


_SETTINGS = ["batch", "context", "keep_projection", "keep_kv"]


def _record(row: Mapping[Any, Any]) -> dict[str, Any]:
    whole = ("batch", "context", "k")
    plain = {str(name): int(v) if name in whole and v == int(v) else float(v) for name, v in row.items()}
    terms = {name[5:]: plain.pop(name) for name in list(plain) if name.startswith("term_")}
    return plain | {"terms": terms}
