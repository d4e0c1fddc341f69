"""What every command shares: one JSON document on stdout, everything else on stderr, plain aligned tables."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError


def emit(document: Any) -> None:
    """Print one JSON document on stdout, in UTF-8 whatever the locale. NaN and infinity become null."""
    import orjson

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        text = orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
    except orjson.JSONEncodeError:  # whole numbers past 64 bits, and half characters from a file
        text = json.dumps(document, indent=2)
    print(text)


def note(text: str) -> None:
    """Say something to the person, on stderr."""
    print(text, file=sys.stderr)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Plain text table: the first `left` columns left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def duration_s(text: str, flag: str) -> float:
    """Seconds from `90`, `90s`, `20m` or `1.5h`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not match or float(match[1]) <= 0:
        raise SpecbenchError(f"{flag}: {text!r} is not a time; write it like 90s, 20m or 1.5h.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def free_path(path: Path) -> Path:
    """The first of NAME, NAME.1, NAME.2 … that is not there yet."""
    number, free = 0, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}.{number}")
    return free


def clock(seconds: float) -> str:
    """`3m 05s`, as people read it."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Inside, a scheduler's SIGTERM is taken as Ctrl-C, so that what runs is ended in order."""
    import signal

    def as_interrupt(number: int, frame: object) -> None:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell sets it for `… &`
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, as_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ProgressLine:
    """Progress on stderr: one rewritten line on a terminal, a line per cell elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()

    def __call__(self, progress: Any) -> None:
        """Show where the run stands (`runners.run.Progress`)."""
        left = f" · about {clock(progress.left_s)} left" if progress.left_s is not None else ""
        line = f"[{progress.done + 1}/{progress.total}] {progress.label}{left}"
        if self._live:
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the terminal on a fresh line."""
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
