"""Turns results into pages: HTML, Markdown and JSON. Computes nothing; every number comes from `specbench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.results import Summary

__all__ = ["write"]


def write(summary: Summary, run_dir: Path) -> dict[str, Path]:
    """Write `report.html`, `report.md` and `report.json` into a directory and return their paths.

    The keys are `html`, `md` and `json`. Each file is replaced whole: a reader sees the old or the new one.
    Raises OSError where the disk refuses.
    """
    import orjson

    from reports import html, markdown
    from specbench.results import to_dict
    from specbench.trace import write_atomic

    contents = {
        "html": html.render(summary).encode(),
        "md": markdown.render(summary).encode(),
        "json": orjson.dumps(to_dict(summary), option=orjson.OPT_INDENT_2) + b"\n",
    }
    paths = {kind: run_dir / f"report.{kind}" for kind in contents}
    for kind, path in paths.items():
        write_atomic(path, contents[kind])
    return paths
