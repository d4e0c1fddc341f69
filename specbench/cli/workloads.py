"""`specbench workloads`: which prompts there are, and what exactly a plan would send.

Boundary: shows records of the `workloads` library; reads files through its loaders and changes nothing.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.cli import _io

if TYPE_CHECKING:
    from workloads import Prompt, Split

PROMPTS_SHOWN = 20
REJECTED_SHOWN = 20
_NARROWEST_PREVIEW = 30
_NAME_COLUMNS = 24
_HASH_CHARS = 12

app = typer.Typer(
    help="Prompts that come with specbench, and what a file of your own holds.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.command("list")
def list_splits(json: Json = False) -> None:
    """List the embedded splits with counts, categories and hashes."""
    from workloads import SPLITS, load_split

    summaries = [load_split(name).summary() for name in SPLITS]
    if json:
        return _io.emit({"splits": summaries})
    header = ("split", "prompts", "turns", "multi-turn", "categories", "~tokens", "sha256")
    print(_io.table(header, [_list_row(summary) for summary in summaries]))
    for summary in summaries:
        names = ", ".join(f"{name} {counts['prompts']}" for name, counts in summary["categories"].items())
        print(_wrapped(f"{summary['name']} ({summary['licence']}): {names}"))
    return None


@app.command("show")
def show(
    name_or_file: Annotated[str, typer.Argument(help="An embedded split, or a file of prompts.")],
    category: Annotated[list[str] | None, typer.Option(help="Only this category; may be repeated.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most prompts shown: 20, or all with --json.")
    ] = None,
    data_format: Annotated[str | None, typer.Option("--format", help="Read the file as this format.")] = None,
    json: Json = False,
) -> None:
    """Show prompts as a run would send them, and every row of a file that was refused, with the reason."""
    from workloads import open_split, select

    split = select(open_split(name_or_file, data_format), category or None)
    if json:
        return _io.emit(_document(split, split.prompts[:limit]))
    for line in _show_lines(split, split.prompts[: limit or PROMPTS_SHOWN]):
        print(line)
    return None


def _list_row(summary: dict[str, Any]) -> list[str]:
    counts = [f"{summary[key]:,}" for key in ("prompts", "turns", "multi_turn")]
    expected = summary["expected_tokens"]
    length = "unknown" if expected is None else f"{expected:,}"
    return [
        summary["name"],
        *counts,
        str(len(summary["categories"])),
        length,
        summary["sha256"][:_HASH_CHARS],
    ]


def _document(split: Split, shown: tuple[Prompt, ...]) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "split": split.summary(),
        "prompts": [asdict(prompt) | {"sha256": prompt.sha256} for prompt in shown],
        "rejected": [asdict(rejection) for rejection in split.rejected],
        "duplicates": [asdict(duplicate) for duplicate in split.duplicates],
    }


def _show_lines(split: Split, shown: tuple[Prompt, ...]) -> Iterator[str]:
    total = len(split.prompts)
    digest = split.sha256[:_HASH_CHARS]
    groups = _count(len(split.categories), "category", "categories")
    yield f"{_clean(split.name)}: {_count(total, 'prompt', 'prompts')} in {groups}, sha256 {digest}"
    yield ""
    yield from _prompt_lines(shown)
    if len(shown) < total:
        yield f"… {total - len(shown):,} more; --limit {total} shows all."
    if split.duplicates:
        yield "\nPrompts left out of runs, because an earlier one has the same text:"
        yield from (
            f"  {_clean(d.id)} repeats {_clean(d.same_as)}" for d in split.duplicates[:REJECTED_SHOWN]
        )
    if split.rejected:
        yield f"\nRefused: {_count(len(split.rejected), 'row', 'rows')} (line in the file, or place in a JSON list)"
        yield from (_wrapped(f"  {r.line}: {_clean(r.reason)}") for r in split.rejected[:REJECTED_SHOWN])
    if max(len(split.rejected), len(split.duplicates)) > REJECTED_SHOWN:
        yield f"Only the first {REJECTED_SHOWN} are listed; --json lists all."


def _prompt_lines(prompts: tuple[Prompt, ...]) -> Iterator[str]:
    """A table, with the start of each prompt beside it, or below it where the terminal is narrow.

    `~tokens` is the expected length of the answers.
    """
    header = ("id", "category", "turns", "difficulty", "~tokens")
    head, *lines = _io.table(header, [_prompt_row(prompt) for prompt in prompts]).splitlines()
    room = _columns() - max(map(len, [head, *lines])) - 2
    beside = room >= _NARROWEST_PREVIEW
    yield f"{head}  prompt" if beside else head
    for line, prompt in zip(lines, prompts, strict=True):
        text = _clean(prompt.turns[0])
        yield f"{line}  {_clipped(text, room)}" if beside else f"{line}\n    {_clipped(text, _columns() - 4)}"


def _prompt_row(prompt: Prompt) -> list[str]:
    names = [_clipped(_clean(text), _NAME_COLUMNS) for text in (prompt.id, prompt.category)]
    return [
        *names,
        str(len(prompt.turns)),
        _clean(prompt.difficulty or "-"),
        str(prompt.expected_tokens or "-"),
    ]


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _columns() -> int:
    return max(40, shutil.get_terminal_size((100, 24)).columns)


def _wrapped(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(text, _columns(), subsequent_indent=f"{indent}  ", break_on_hyphens=False)


def _clean(text: str) -> str:
    """One line without control characters: the text of a data file must not drive the terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _clipped(text: str, columns: int) -> str:
    """The start of a text that fits, counting wide East Asian characters as two columns."""
    from unicodedata import east_asian_width

    used = 0
    for i, char in enumerate(text):
        used += 2 if east_asian_width(char) in "WF" else 1
        if used > columns:
            return text[: max(0, i - 2)].rstrip() + "…"
    return text
