"""From bytes to decoded rows, whatever the container: JSON lines, a JSON list, or one JSON object.

Boundary: knows JSON and text encodings, no prompt format. The content decides, not the file's extension.
Lines end at LF only (with an optional CR): U+2028 and its like are allowed inside JSON strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from workloads.prompt import WorkloadError

MAX_LINE_BYTES = 8 * 2**20
"""Longest JSON line decoded (8 MiB): above it a row is no prompt, and decoding it would cost memory."""

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


class RawRow(NamedTuple):
    """One row: its line (or place in the list, from 1) and its value, or the reason why there is none."""

    line: int
    value: Any
    reason: str | None = None


def read_rows(path: Path) -> list[RawRow]:
    """Every row of a file that is not blank. Raises WorkloadError where the file as a whole is unusable."""
    data = _read_text_bytes(path)
    head = data.lstrip()[:1]
    if head == b"[":
        return _list_rows(path, data)
    rows = list(decode_lines(data))
    if head == b"{" and rows[0].reason and (whole := _whole_object(data)) is not None:
        return [RawRow(1, whole)]
    return rows


def decode_lines(data: bytes) -> Iterator[RawRow]:
    """The rows of JSON lines: blank lines are passed over but counted, so line numbers are the file's own."""
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield _decode(number, line)


def _read_text_bytes(path: Path) -> bytes:
    if path.is_dir():
        raise WorkloadError(f"{path} is a directory; give a file of prompts (JSONL or a JSON list).")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read ({error.strerror}); give a file of prompts.") from None
    if data.startswith(_UTF16_BOMS):
        raise WorkloadError(f"{path} is UTF-16; save it as UTF-8.")
    if b"\0" in data[:65536] or data.startswith((b"PAR1", b"\x1f\x8b")):
        raise WorkloadError(f"{path} is a binary file; export the prompts as JSONL (one JSON object a line).")
    data = data.removeprefix(_UTF8_BOM)
    if not data.strip():
        raise WorkloadError(f"{path} is empty; it needs at least one row with a prompt.")
    return data


def _decode(number: int, line: bytes) -> RawRow:
    if len(line) > MAX_LINE_BYTES:
        return RawRow(number, None, f"the line has {len(line):,} bytes; at most {MAX_LINE_BYTES:,} are read.")
    try:
        return RawRow(number, json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return RawRow(
            number, None, f"not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8."
        )
    except json.JSONDecodeError as error:
        return RawRow(number, None, f"not JSON ({error.msg}, column {error.colno}).")
    except (RecursionError, ValueError):
        return RawRow(number, None, "not usable JSON (nested too deeply, or a huge number).")


def _list_rows(path: Path, data: bytes) -> list[RawRow]:
    try:
        value = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not UTF-8 (byte {error.start + 1}); save it as UTF-8.") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise WorkloadError(
            f"{path} starts like a JSON list but is not one ({error.msg}, {where}); "
            "close the list, or write one object a line."
        ) from None
    except (RecursionError, ValueError):
        raise WorkloadError(f"{path} is not usable JSON (nested too deeply, or a huge number).") from None
    if not value:
        raise WorkloadError(f"{path} is an empty list; it needs at least one row with a prompt.")
    return [RawRow(number, item) for number, item in enumerate(value, start=1)]


def _whole_object(data: bytes) -> dict[str, Any] | None:
    """The file as one JSON object written over several lines, or None where it is not that."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
