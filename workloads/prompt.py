"""One prompt as a record, and the error that every part of this library raises.

Boundary: no file, no format, no engine. A `Prompt` that exists is usable: it has at least one turn, each turn
has text, and all of it can be sent as UTF-8. Loaders turn the refusals made here into rejected rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

MAX_PROMPT_CHARS = 262_144
"""Longest prompt taken, over all its turns: 256 Ki characters, about 64 Ki tokens of English. A longer row
is nearly always a broken export, and one such request would stand for a whole category."""

UNCATEGORISED = "uncategorised"
"""Category of prompts whose data names none."""


class WorkloadError(ValueError):
    """Unusable prompts or selection; the message is one sentence that says what to mend."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation to be driven: the user's turns in order, and what is known about them.

    `expected_tokens` is the length of answer (tokens, all turns together) that the author had in mind, or
    None. `history` holds the assistant's turns that came with the data: entry i answers turn i, and it may
    be shorter than `turns` or empty. Raises WorkloadError where the prompt could not be sent.
    """

    id: str
    category: str = UNCATEGORISED
    sub_category: str | None = None
    turns: tuple[str, ...]
    difficulty: str | None = None
    expected_tokens: int | None = None
    language: str | None = None
    source: str | None = None
    system: str | None = None
    history: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.turns:
            raise WorkloadError("`turns` is empty; a prompt needs at least one turn.")
        for name, text in self._texts():
            _check_text(name, text)
        if len(self.history) > len(self.turns):
            raise WorkloadError("`history` has more answers than there are turns.")
        if self.expected_tokens is not None and self.expected_tokens < 1:
            raise WorkloadError(
                f"the expected length is {self.expected_tokens} tokens; it must be 1 or more."
            )
        self._check_length()

    def _texts(self) -> Iterator[tuple[str, str]]:
        """Every text of the record with its name; optional ones only where they are given."""
        yield from (("id", self.id), ("category", self.category))
        yield from ((f"turns[{i}]", turn) for i, turn in enumerate(self.turns))
        yield from ((f"history[{i}]", answer) for i, answer in enumerate(self.history))
        for name in ("sub_category", "difficulty", "language", "source", "system"):
            if (text := getattr(self, name)) is not None:
                yield name, text

    def _check_length(self) -> None:
        if self.chars > MAX_PROMPT_CHARS:
            raise WorkloadError(
                f"the prompt is too long: {self.chars:,} characters, the most taken is {MAX_PROMPT_CHARS:,}."
            )

    @property
    def multi_turn(self) -> bool:
        """Whether the user speaks more than once."""
        return len(self.turns) > 1

    @property
    def chars(self) -> int:
        """Characters of system text, turns and history: all that a request could carry."""
        return len(self.system or "") + sum(map(len, self.turns)) + sum(map(len, self.history))

    @cached_property
    def sha256(self) -> str:
        """Hash of what the user says (system text and turns), whatever its id: equal texts are one prompt."""
        return canonical_sha256({"system": self.system, "turns": self.turns})

    def content(self) -> dict[str, object]:
        """The fields that a split's hash covers: all but `source`, which may name a place."""
        names = ("id", "category", "sub_category", "turns", "difficulty", "expected_tokens", "language")
        return {name: getattr(self, name) for name in (*names, "system", "history")}


def canonical_sha256(value: object) -> str:
    """Hex SHA-256 of a JSON-able value, independent of key order and of how it was escaped in its file."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_text(name: str, text: str) -> None:
    if not text.strip():
        raise WorkloadError(f"`{name}` is empty; give it text.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WorkloadError(
            f"`{name}` holds half of a surrogate pair (an escape such as \\ud83d alone), "
            "which UTF-8 cannot carry; write the whole character."
        ) from None
