"""Choosing prompts from a split: the same choice for the same seed, on every machine, in every plan.

Boundary: takes a split, returns a split; no files. How a category's prompts are spread:

1. They are shuffled by a hash of seed and prompt id, so nothing outside the category moves the order.
2. Of n chosen, multi-turn prompts get their share n·m/t (m of t are multi-turn), rounded; from n = 2 on at
   least one, and at least one single-turn prompt, where the category has both.
3. Within each of the two, difficulties take turns, then sub-categories, then the shuffled order.

It follows that a larger n keeps every prompt of a smaller one, and that adding a category leaves the others
as they were. The result is in the split's own order, so the order of `categories` does not matter.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from workloads.prompt import Prompt, WorkloadError
from workloads.split import Split


def select(
    split: Split,
    categories: Sequence[str] | None = None,
    prompts_per_category: int | None = None,
    seed: int = 0,
    max_turns: int | None = None,
) -> Split:
    """A smaller split under the same name; its `sha256` covers exactly what was chosen.

    `categories` None means all; `prompts_per_category` None means every prompt; `max_turns` leaves out longer
    conversations whole (none is cut). A text is chosen once: later repeats stay listed in `duplicates`.
    Raises WorkloadError for an unknown category and where a category has too few prompts.
    """
    _check_positive("prompts_per_category", prompts_per_category)
    _check_positive("max_turns", max_turns)
    repeats = {duplicate.id for duplicate in split.duplicates}
    usable = [p for p in split.prompts if p.id not in repeats and len(p.turns) <= (max_turns or len(p.turns))]
    kept: set[str] = set()
    for category in _wanted(split, usable, categories):
        group = [p for p in usable if p.category == category]
        count = len(group) if prompts_per_category is None else prompts_per_category
        if not 0 < count <= len(group):
            raise WorkloadError(_too_few(split, category, count, len(group), max_turns))
        kept.update(p.id for p in _choose(group, count, seed))
    return replace(split, prompts=tuple(p for p in usable if p.id in kept))


def _wanted(split: Split, usable: Sequence[Prompt], categories: Sequence[str] | None) -> tuple[str, ...]:
    """The categories asked for, each once; all that have a usable prompt where none is named."""
    if isinstance(categories, str):
        raise WorkloadError(f"categories: give a list, such as [{categories!r}], not one string.")
    if categories is not None and not categories:
        raise WorkloadError("categories: the list is empty; name at least one, or leave it out for all.")
    if categories is None and not usable:
        raise WorkloadError(f"max_turns: every prompt of {split.name!r} is longer; raise it or leave it out.")
    for name in categories or ():
        if name not in split.categories:
            raise WorkloadError(_unknown_category(split, name))
    return tuple(dict.fromkeys(categories or (p.category for p in usable)))


def _choose(group: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    multi = [p for p in group if p.multi_turn]
    single = [p for p in group if not p.multi_turn]
    quota = _multi_turn_quota(count, len(multi), len(group))
    return _spread(multi, seed)[:quota] + _spread(single, seed)[: count - quota]


def _multi_turn_quota(count: int, multi: int, total: int) -> int:
    """How many of `count` are multi-turn: the rounded share, but both kinds from two prompts on."""
    share = (2 * count * multi + total) // (2 * total)
    if count < 2 or multi in (0, total):
        return share
    return min(max(share, 1), count - 1)


def _spread(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """All prompts, ordered so that any prefix is spread over difficulties and sub-categories."""
    difficulties: Counter[str | None] = Counter()
    sub_categories: Counter[str | None] = Counter()
    keyed = []
    for place, prompt in enumerate(sorted(prompts, key=lambda p: _rank(seed, p.id))):
        keyed.append(((difficulties[prompt.difficulty], sub_categories[prompt.sub_category], place), prompt))
        difficulties[prompt.difficulty] += 1
        sub_categories[prompt.sub_category] += 1
    return [prompt for _, prompt in sorted(keyed, key=lambda pair: pair[0])]


def _rank(seed: int, prompt_id: str) -> str:
    return hashlib.sha256(f"{seed}\0{prompt_id}".encode()).hexdigest()


def _check_positive(field: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise WorkloadError(f"{field} = {value}: it must be 1 or more; leave it out for no limit.")


def _unknown_category(split: Split, name: str) -> str:
    near = get_close_matches(name, split.categories, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"categories: {name!r} is not in {split.name!r}{hint}; it has {', '.join(split.categories)}."


def _too_few(split: Split, category: str, asked: int, there: int, max_turns: int | None) -> str:
    notes = [f"of at most {max_turns} turns"] if max_turns else []
    notes += [f"{len(split.duplicates)} repeats left out"] if split.duplicates else []
    notes += [f"{len(split.rejected)} rows rejected"] if split.rejected else []
    detail = f" ({', '.join(notes)})" if notes else ""
    place = f"category {category!r} of {split.name!r}"
    if not there:
        return f"{place} has no usable prompt{detail}; leave it out."
    return (
        f"prompts_per_category = {asked}, but {place} has {there} to choose from{detail}; "
        f"ask for {there} or fewer."
    )
