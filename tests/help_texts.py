"""Whether an engine's own help text knows every flag that its table can emit, and its settings every key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from runners import flags

HELP = Path(__file__).parent / "data" / "help"


def assert_flags_known(engine: str, help_text: str, version: str | None = None) -> None:
    """Every flag of the rows that hold for the version (all rows without one) stands in the help text as a word."""
    found = Version(version) if version else None
    rows = [row for row in flags.table(engine) if row.holds(found)]
    assert rows, f"{engine} has no row for {version}"
    known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", help_text))
    unknown = flags.flags_in(rows) - known
    assert not unknown, (
        f"the help text of {engine} {version or ''} does not know {', '.join(sorted(unknown))}"
    )


def settings(engine: str) -> dict[str, Any]:
    """The names of an engine's settings by where they go, as tests/data/help/README.md says."""
    (path,) = HELP.glob(f"{engine}-*.settings.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def emitted_settings(engine: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and settings of every row, the templates as they stand; what goes to no table of its own is at `""`."""
    for row in flags.table(engine):
        inner = {name: value for name, value in row.adds.config.items() if isinstance(value, dict)}
        yield "", {name: value for name, value in row.adds.config.items() if name not in inner}
        yield from inner.items()
