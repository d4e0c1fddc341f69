"""How many distinct experts a step wakes in one layer.

Independent uniform routing of t tokens touches N(t) = E (1 − (1 − K/E)^t) of E experts, K per token (MoESD,
arXiv 2505.19645); perfectly balanced routing min(E, tK), the worst case for bandwidth; a router that was watched
gives a table. The drafts of one request route alike, so they count as fewer independent tokens (`overlap`).

Boundary: counts of experts. Their bytes and FLOPs are the ledger's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from models_roofline.arrays import Floats
from models_roofline.errors import RooflineError


@dataclass(frozen=True)
class MeasuredRouting:
    """Distinct experts seen at some token counts, for one router.

    `tokens` rises from 1; `distinct` is as long. Between points the count is linear in log tokens, past the last
    point it stays.
    """

    number: int
    top_k: int
    tokens: tuple[float, ...]
    distinct: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.distinct) or self.tokens[0] != 1:
            raise RooflineError("measured routing: `tokens` starts at 1 and `distinct` has as many values.")
        if np.any(np.diff(self.tokens) <= 0) or np.any(np.diff(self.distinct) < 0):
            raise RooflineError("measured routing: `tokens` must rise and `distinct` must not fall.")


Routing = Literal["independent", "balanced"] | MeasuredRouting


def independent_tokens(batch: ArrayLike, tokens: ArrayLike, overlap: ArrayLike = 0.0) -> Floats:
    """Tokens that route independently when each of `batch` sequences runs `tokens` tokens at once.

    `overlap` in [0, 1] is how far consecutive tokens of one sequence go to the same experts: 0 counts every token,
    1 only one a sequence. Arguments broadcast.
    """
    per_sequence = 1 + (np.asarray(tokens, float) - 1) * (1 - np.asarray(overlap, float))
    return np.asarray(np.asarray(batch, float) * per_sequence)


def distinct_experts(number: int, top_k: int, tokens: ArrayLike, routing: Routing = "independent") -> Floats:
    """Experts of one layer that `tokens` independent tokens touch, shaped like `tokens`; exactly K for one token.

    Raises RooflineError for an unknown routing or a table measured on another router.
    """
    t = np.asarray(tokens, float)
    most = np.minimum(number, t * top_k)
    if routing == "balanced":
        return np.asarray(most)
    if routing == "independent":
        touched = number * (1 - (1 - top_k / number) ** t)
    elif isinstance(routing, MeasuredRouting):
        touched = _measured(routing, number, top_k, t)
    else:
        raise RooflineError(f"--routing: {routing!r} is neither independent, balanced nor a measured table.")
    return np.asarray(np.clip(touched, np.minimum(top_k, most), most))


def _measured(routing: MeasuredRouting, number: int, top_k: int, t: Floats) -> Floats:
    if (routing.number, routing.top_k) != (number, top_k):
        raise RooflineError(
            f"--routing: the table was measured on {routing.top_k} of {routing.number} experts, the model routes "
            f"{top_k} of {number}; measure this router or use independent."
        )
    return np.interp(np.log(t), np.log(routing.tokens), routing.distinct)
