"""A split: a named, hashed, ordered set of prompts, with what was refused on the way in.

Boundary: a record; it reads no file (see `loaders` and `catalogue`) and chooses nothing (see `select`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workloads.prompt import Prompt, canonical_sha256
from workloads.stats import describe


@dataclass(frozen=True)
class Rejection:
    """One row that was not taken: its line in the file (its place, from 1, in a JSON list) and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class Duplicate:
    """A prompt whose text an earlier one has: a prefix cache or a learning drafter would have seen it."""

    id: str
    same_as: str


@dataclass(frozen=True)
class Split:
    """Prompts in order. `licence` is None where the data does not say.

    `duplicates` are among the prompts as loaded; `select` leaves them out and keeps the list.
    """

    name: str
    prompts: tuple[Prompt, ...]
    source: str
    licence: str | None = None
    rejected: tuple[Rejection, ...] = ()
    duplicates: tuple[Duplicate, ...] = ()

    @cached_property
    def sha256(self) -> str:
        """Hash over the content and order of the prompts, wherever they were read from."""
        return canonical_sha256([prompt.content() for prompt in self.prompts])

    @cached_property
    def categories(self) -> tuple[str, ...]:
        """Categories in order of first appearance."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts))

    def summary(self) -> dict[str, Any]:
        """JSON-able description: identity, then the counts of `stats.describe`, then what was refused."""
        identity = {"name": self.name, "source": self.source, "licence": self.licence, "sha256": self.sha256}
        refused = {"rejected": len(self.rejected), "duplicates": len(self.duplicates)}
        return identity | describe(self.prompts) | refused


def find_duplicates(prompts: Iterable[Prompt]) -> tuple[Duplicate, ...]:
    """Every prompt whose text (`Prompt.sha256`) an earlier one already has."""
    first: dict[str, str] = {}
    found = []
    for prompt in prompts:
        earlier = first.setdefault(prompt.sha256, prompt.id)
        if earlier != prompt.id:
            found.append(Duplicate(prompt.id, earlier))
    return tuple(found)
