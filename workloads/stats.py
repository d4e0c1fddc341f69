"""Counts and likeness of prompts: what a split is made of, and whether two prompts are nearly one.

Boundary: reads prompts, changes nothing. Likeness is the Jaccard index (Jaccard 1912) of the sets of
character 5-grams, case and white space folded; on characters because not every language puts spaces
between words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import mean, median
from typing import Any

from workloads.prompt import Prompt

GRAM_CHARS = 5


def describe(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """JSON-able counts: prompts, turns, characters, expected tokens, difficulties, languages, categories.

    Lengths are in characters, since tokens depend on the model. `expected_tokens` sums those that are known.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return _counts(prompts) | {
        "difficulties": _tally([p.difficulty for p in prompts]),
        "languages": _tally([p.language for p in prompts]),
        "categories": {category: _counts(group) for category, group in groups.items()},
    }


def _counts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    chars = [p.chars for p in prompts]
    expected = [p.expected_tokens for p in prompts if p.expected_tokens is not None]
    return {
        "prompts": len(prompts),
        "multi_turn": sum(p.multi_turn for p in prompts),
        "turns": sum(len(p.turns) for p in prompts),
        "chars_mean": round(mean(chars), 1) if chars else None,
        "chars_median": median(chars) if chars else None,
        "expected_tokens": sum(expected) if expected else None,
    }


def _tally(values: Sequence[str | None]) -> dict[str, int]:
    """Counts, the most frequent first; what is not stated is left out."""
    return dict(Counter(v for v in values if v is not None).most_common())


def near_duplicates(prompts: Sequence[Prompt], threshold: float = 0.5) -> list[tuple[str, str, float]]:
    """Pairs of ids whose likeness is at least `threshold` (0 to 1), the likest first.

    Quadratic in the number of prompts: meant for splits of some hundreds.
    """
    grams = [(p.id, _grams(p)) for p in prompts]
    pairs = [(a, b, _jaccard(x, y)) for (a, x), (b, y) in combinations(grams, 2)]
    return sorted((pair for pair in pairs if pair[2] >= threshold), key=lambda pair: -pair[2])


def _grams(prompt: Prompt) -> frozenset[str]:
    text = " ".join(" ".join([prompt.system or "", *prompt.turns]).casefold().split())
    return frozenset(text[i : i + GRAM_CHARS] for i in range(max(1, len(text) - GRAM_CHARS + 1)))


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)
