"""Prompt files of any known format as a `Split`: bad rows are kept as rejections, never dropped in silence.

Boundary: reading only. `FORMATS` is the registry; a format is two functions, `matches(row)` and
`parse(row, fallback_id) -> Prompt`, in a module of its own. Without a format given, each row is read by the
first one that it matches, since public files mix shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from workloads.loaders import jsonl, sharegpt, spec_bench
from workloads.loaders.fields import Row, json_name
from workloads.loaders.rows import RawRow, read_rows
from workloads.prompt import Prompt, WorkloadError
from workloads.split import Rejection, Split, find_duplicates

__all__ = ["FORMATS", "PLACEHOLDER", "Format", "load_file", "parse_rows"]

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""How every prompt of the public SPEED-Bench files begins until its sources have been fetched
(ai-dynamo/aiperf pull 1387: a harness that measured these sentences as prompts)."""


class Format(NamedTuple):
    """How to know a row of this format and how to read it."""

    matches: Callable[[Row], bool]
    parse: Callable[[Row, str], Prompt]


FORMATS: dict[str, Format] = {
    "sharegpt": Format(sharegpt.matches, sharegpt.parse),
    "spec_bench": Format(spec_bench.matches, spec_bench.parse),
    "jsonl": Format(jsonl.matches, jsonl.parse),
}
"""Formats by name, the most particular first; `jsonl` also explains rows that match none."""


class _Placeholder(Exception):
    """A row stands in for data that was never fetched: the whole file is refused."""


def load_file(path: str | Path, format: str | None = None) -> Split:  # noqa: A002 (the field's own word)
    """Load prompts from JSONL, a JSON list, Spec-Bench or ShareGPT, told apart by content.

    `format` forces one of `FORMATS`. Rows that cannot be used are in `Split.rejected` with line and reason;
    prompts that repeat an earlier text are kept and listed in `Split.duplicates`. Raises WorkloadError where
    the file is unreadable, empty or binary, where no row is usable, or where it holds placeholders.
    """
    if format is not None and format not in FORMATS:
        raise WorkloadError(f"format: {format!r} is not known; use one of {', '.join(sorted(FORMATS))}.")
    path = Path(path)
    rows = read_rows(path)
    try:
        prompts, rejected = parse_rows(rows, format)
    except _Placeholder as error:
        raise WorkloadError(
            f"{path}: {error} holds a placeholder instead of a prompt; fetch the SPEED-Bench sources with "
            "its own preparation script first."
        ) from None
    if not prompts:
        raise WorkloadError(_none_usable(path, rejected))
    return Split(path.stem, prompts, path.name, None, rejected, find_duplicates(prompts))


def parse_rows(
    rows: Iterable[RawRow], format_name: str | None = None
) -> tuple[tuple[Prompt, ...], tuple[Rejection, ...]]:
    """Prompts of the usable rows in order, and a rejection for every other; an id is taken once."""
    prompts: list[Prompt] = []
    rejected: list[Rejection] = []
    line_of_id: dict[str, int] = {}
    for row in rows:
        try:
            prompt = _parse(row, format_name)
            if prompt.id in line_of_id:
                earlier = line_of_id[prompt.id]
                raise WorkloadError(f"the id {prompt.id!r} is taken by line {earlier}; give it its own.")
        except WorkloadError as error:
            rejected.append(Rejection(row.line, str(error)))
        else:
            line_of_id[prompt.id] = row.line
            prompts.append(prompt)
    return tuple(prompts), tuple(rejected)


def _parse(row: RawRow, format_name: str | None) -> Prompt:
    if row.reason is not None:
        raise WorkloadError(row.reason)
    if not isinstance(row.value, dict):
        raise WorkloadError(f"the row is {json_name(row.value)}; it must be an object with a prompt.")
    prompt = FORMATS[format_name or _detect(row.value)].parse(row.value, f"row-{row.line}")
    if any(turn.lstrip().startswith(PLACEHOLDER) for turn in prompt.turns):
        raise _Placeholder(f"line {row.line}")
    return prompt


def _detect(row: Row) -> str:
    return next((name for name, known in FORMATS.items() if known.matches(row)), "jsonl")


def _none_usable(path: Path, rejected: tuple[Rejection, ...]) -> str:
    line, reason = rejected[0].line, rejected[0].reason.rstrip(".")
    return (
        f"{path}: no row can be used ({len(rejected)} refused; line {line}: {reason}); "
        "give JSONL with a `prompt` on each line, a JSON list, Spec-Bench or ShareGPT."
    )
