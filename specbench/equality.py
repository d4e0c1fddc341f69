"""Output equality: greedy text of an arm against the baseline's, per prompt, inside blocks.

A diagnostic, not a verdict: batching numerics can change a greedy text without any fault of the method, so
the baseline against itself stands beside it. Where token ids are known, the place of the first difference has a
margin: how much the baseline's own next-token log-probability prefers its token to the other. Arithmetic in another
order turns ties, so a margin of some hundredths is numerics and one of several logits is a fault.

Boundary: compares strings, ids and log-probabilities that it is given; `runners.rescore` asks an engine for the last.
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


# --- token by token -----------------------------------------------------------------------------------------

Logprobs = Mapping[int, float]
"""Natural log-probability of each possible next token that an engine listed, by id."""


@dataclass(frozen=True)
class Divergence:
    """The first place where two token sequences differ. A token is None where its sequence has ended."""

    index: int
    """Tokens before it, which both have."""
    reference: int | None
    other: int | None
    margin: float | None = None
    """Logits by which the baseline prefers the reference's token, negative where it prefers the other; None where
    they are not known."""


def first_divergence(reference: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """Where two sequences of token ids part; None where they are equal."""
    common = 0
    for a, b in zip(reference, other, strict=False):
        if a != b:
            break
        common += 1
    if common == len(reference) == len(other):
        return None
    tokens = (ids[common] if common < len(ids) else None for ids in (reference, other))
    return Divergence(common, *tokens)


def margin(logprobs: Logprobs, reference: int | None, other: int | None) -> float | None:
    """Logit of `reference` minus logit of `other`: the normaliser of a softmax falls out of the difference."""
    if reference is None or other is None or reference not in logprobs or other not in logprobs:
        return None
    return logprobs[reference] - logprobs[other]


@dataclass(frozen=True)
class Scored:
    """One token of an output under the baseline: by how much it falls short of the baseline's own choice."""

    token: int
    best: int
    shortfall: float | None
    """Logits from the best token down to this one, 0 where it is the best; None where it was not listed."""


def score(token: int, logprobs: Logprobs) -> Scored:
    """Judge one token by what the baseline would have said in its place. `logprobs` must not be empty."""
    best = max(logprobs, key=lambda other: (logprobs[other], other == token))
    return Scored(token, best, margin(logprobs, best, token))


@dataclass(frozen=True)
class Rescored:
    """A whole output under the baseline, each token after the output's own beginning."""

    tokens: tuple[Scored, ...]

    @property
    def agreement(self) -> float | None:
        """Share of tokens that the baseline would have chosen too; None for an empty output."""
        return sum(t.best == t.token for t in self.tokens) / len(self.tokens) if self.tokens else None

    @property
    def largest_shortfall(self) -> float | None:
        """Logits by which the worst token falls short; None where one was not even listed, or nothing is there."""
        known = [t.shortfall for t in self.tokens if t.shortfall is not None]
        return max(known) if known and len(known) == len(self.tokens) else None

    def beyond(self, logits: float) -> int:
        """Tokens that fall short by more than numerics can explain (`logits`), unlisted ones among them."""
        return sum(t.shortfall is None or t.shortfall > logits for t in self.tokens)


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
