"""Output equality: greedy text of an arm against the baseline's, per prompt, inside blocks.

A diagnostic, not a verdict: batching numerics can change a greedy text without any fault of the method, so
the baseline against itself stands beside it. Boundary: compares strings that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import pandas as pd

from specbench.results import Equality

Texts = Mapping[Any, str]
"""Prompt key (prompt_id, turn) to the whole reply."""


@dataclass(frozen=True)
class Pair:
    """One text against the reference's: `common` characters match before the first difference."""

    equal: bool
    common: int
    share: float
    """Matching share of the reference; 1 where both are equal."""


def compare(reference: str, text: str) -> Pair:
    """Compare one reply with its reference. Where one is the other's beginning, they differ at its end."""
    if reference == text:
        return Pair(True, len(reference), 1.0)
    common = next((i for i, (a, b) in enumerate(zip(reference, text, strict=False)) if a != b), None)
    common = min(len(reference), len(text)) if common is None else common
    return Pair(False, common, common / len(reference) if reference else 0.0)


def pairs(reference: Texts, texts: Texts) -> list[Pair]:
    """Every prompt that both have."""
    return [compare(reference[key], texts[key]) for key in reference if key in texts]


def equality(arm: Iterable[tuple[Texts, Texts]], itself: Iterable[tuple[Texts, Texts]]) -> Equality | None:
    """Equality over passes: `arm` holds (baseline, arm) of each pass of each block, `itself` the baseline's
    first and second pass of each block. None where nothing can be compared.
    """
    found = [pair for reference, texts in arm for pair in pairs(reference, texts)]
    own = [pair for reference, texts in itself for pair in pairs(reference, texts)]
    if not found:
        return None
    differing = [pair.common for pair in found if not pair.equal]
    return Equality(
        compared=len(found),
        exact_share=_exact(found),
        mean_matching_prefix=sum(pair.share for pair in found) / len(found),
        first_divergence_median=float(median(differing)) if differing else None,
        self_exact_share=_exact(own) if own else None,
        self_compared=len(own),
    )


def _exact(found: Sequence[Pair]) -> float:
    return sum(pair.equal for pair in found) / len(found)


def texts_of(requests: pd.DataFrame, texts: Iterable[Mapping[str, Any]]) -> dict[Any, str]:
    """Replies of one cell by (prompt_id, turn): measured and answered ones only, reasoning before answer.

    `requests` are the cell's rows, `texts` the rows of its `texts.jsonl.zst`, joined on `request`.
    """
    answered = requests[~requests["warmup"].to_numpy(dtype=bool) & (requests["status"] != "failed")]
    keys = dict(
        zip(answered["request"], zip(answered["prompt_id"], answered["turn"], strict=True), strict=True)
    )
    return {keys[row["request"]]: _whole(row) for row in texts if row["request"] in keys}


def _whole(row: Mapping[str, Any]) -> str:
    reasoning, text = row.get("reasoning") or "", row.get("text") or ""
    return f"{reasoning}\0{text}" if reasoning else text
