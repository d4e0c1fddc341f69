"""The one error of this library, and the hint with which a sentence on a wrong name ends."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class RooflineError(ValueError):
    """Wrong input, in one sentence that names the field or flag and how to mend it."""


def hint(name: str, known: Collection[str], most: int = 1) -> str:
    """`did you mean a, b?` with the `most` nearest known names; all that are known where none is near."""
    near = get_close_matches(name.lower(), known, n=most)
    return f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(known)}."
