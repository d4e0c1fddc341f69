"""The splits that come with the package, and opening any split by name or file.

Boundary: knows where embedded data lies; how rows are read is `loaders`', how prompts are chosen `select`'s.
The embedded prompts were written for this project and carry its licence.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from workloads.loaders import load_file, parse_rows
from workloads.loaders.rows import RawRow, decode_lines
from workloads.prompt import WorkloadError
from workloads.split import Split, find_duplicates

CATEGORIES = (
    "coding",
    "math",
    "humanities",
    "stem",
    "writing",
    "summarization",
    "roleplay",
    "rag",
    "multilingual",
    "reasoning",
    "qa",
)
"""Categories of the qualitative split: the eleven that SPEED-Bench reports (NVIDIA 2026), in its order."""

SPLITS: dict[str, tuple[str, ...]] = {
    "qualitative": tuple(f"qualitative/{category}.jsonl" for category in CATEGORIES),
    "demo": ("demo.jsonl",),
    "warmup": ("warmup.jsonl",),
}
"""Embedded splits by name: their files under workloads/data, in order."""

LICENCE = "Apache-2.0"


def load_split(name: str) -> Split:
    """One embedded split. Raises WorkloadError for an unknown name or an incomplete installation."""
    if name not in SPLITS:
        raise WorkloadError(_unknown(name, "is not an embedded split"))
    rows = [row for file in SPLITS[name] for row in _embedded_rows(file)]
    prompts, rejected = parse_rows(rows, "jsonl")
    if rejected:
        reason = rejected[0].reason.rstrip(".")
        raise WorkloadError(f"split {name!r} is damaged in this installation ({reason}); reinstall.")
    return Split(name, prompts, f"specbench: {name}", LICENCE, (), find_duplicates(prompts))


def open_split(name_or_file: str, format: str | None = None) -> Split:  # noqa: A002 (the field's own word)
    """An embedded split by name, or else a file of prompts (`./demo` for a file named like a split)."""
    if name_or_file in SPLITS:
        return load_split(name_or_file)
    if not Path(name_or_file).exists():
        raise WorkloadError(_unknown(name_or_file, "is neither an embedded split nor a file"))
    return load_file(name_or_file, format)


def _embedded_rows(file: str) -> list[RawRow]:
    place: Traversable = files("workloads.data").joinpath(*file.split("/"))
    try:
        data = place.read_bytes()
    except OSError:
        raise WorkloadError(f"workloads/data/{file} is missing from this installation; reinstall.") from None
    return list(decode_lines(data))


def _unknown(name: str, what: str) -> str:
    near = get_close_matches(name, SPLITS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"{name!r} {what}{hint}; embedded are {', '.join(SPLITS)}."
