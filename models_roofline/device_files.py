"""Device files: CSV, TOML (`[[device]]`) and JSON (a list, or an object with `device`), all with the same columns.

A row may be laid over a known device, of which it then replaces what it names. Every error says file, place and
column. Boundary: files to records.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from models_roofline.device import COLUMNS, CONFIDENCE, KINDS, TEXTS, Device, Figure
from models_roofline.errors import RooflineError, hint

PARSERS: dict[str, Callable[[str], Any]] = {
    ".csv": str.splitlines,
    ".toml": tomllib.loads,
    ".json": json.loads,
}


def read_devices(path: Path, base: Mapping[str, Device]) -> dict[str, Device]:
    """The devices of a file by id, laid over those of `base`. Raises RooflineError with file, place and column."""
    found: dict[str, Device] = {}
    for place, row in _rows(path):
        where = f"{path.name}, {place}"
        _check_columns(row, where)
        device = _device(row, base.get(str(row.get("id") or "").strip()), where)
        if device.id in found:
            raise RooflineError(f"{where}: id {device.id} stands twice; keep one.")
        found[device.id] = device
    if not found:
        raise RooflineError(f"{path.name}: holds no device; docs/devices.md shows the columns.")
    return found


def _rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each device with its place in the file, for errors."""
    if path.suffix not in PARSERS:
        raise RooflineError(f"--devices: {path.name} must end in {', '.join(PARSERS)}.")
    try:
        document = PARSERS[path.suffix](path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RooflineError(f"--devices: {path} cannot be read ({error.strerror or error}).") from None
    except (ValueError, RecursionError) as error:  # JSON, TOML or encoding
        raise RooflineError(
            f"--devices: {path.name} is not readable as {path.suffix[1:]}: {error}."
        ) from None
    if path.suffix == ".csv":
        yield from _csv_rows(document, path.name)
        return
    listed = document.get("device") if isinstance(document, dict) else document
    if not isinstance(listed, list) or not all(isinstance(row, dict) for row in listed):
        raise RooflineError(
            f"{path.name}: devices must be a list: [[device]] in TOML, a list of objects in JSON."
        )
    for number, row in enumerate(listed, start=1):
        yield f"device {number}", row


def _csv_rows(lines: list[str], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    header: list[str] | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            cells = next(csv.reader([line]))
        except csv.Error as error:
            raise RooflineError(f"{name}, line {number}: is not CSV: {error}.") from None
        if header is None:
            header = [cell.strip() for cell in cells]
            if twice := next((column for column in header if header.count(column) > 1), None):
                raise RooflineError(f"{name}, line {number}: column {twice} stands twice; keep one.")
        elif len(cells) != len(header):
            raise RooflineError(
                f"{name}, line {number}: {len(cells)} cells under {len(header)} columns; quote cells with commas."
            )
        else:
            yield f"line {number}", dict(zip(header, cells, strict=True))


def _check_columns(row: Mapping[str, Any], where: str) -> None:
    for column in row:
        if column not in COLUMNS and column not in TEXTS:
            raise RooflineError(f"{where}: unknown column {column!r}; {hint(column, [*COLUMNS, *TEXTS])}")


def _device(row: Mapping[str, Any], base: Device | None, where: str) -> Device:
    texts = {name: str(row[name]).strip() for name in TEXTS if row.get(name) not in (None, "", [])}
    if "id" not in texts:
        raise RooflineError(f"{where}: id is missing; every device needs one.")
    device = replace(base or Device(texts["id"]), **_described(row, texts, where))
    given = _figures(row, texts, where)
    # A new size of the memory also replaces what the driver showed of the old one.
    kept = {k: v for k, v in device.figures.items() if k != "visible_memory" or "memory" not in given}
    device = replace(device, figures={**kept, **given})
    if "mem_bw" not in device.figures:
        raise RooflineError(f"{where}: mem_bw_gb_s of {device.id} is missing; every device needs it.")
    return device


def _described(row: Mapping[str, Any], texts: Mapping[str, str], where: str) -> dict[str, Any]:
    """The fields that are no figures, as far as the row gives them."""
    given: dict[str, Any] = {
        name: texts[name] for name in ("vendor", "architecture", "memory_type", "notes") if name in texts
    }
    if "kind" in texts:
        given["kind"] = _one_of(texts["kind"], "kind", KINDS, where)
    if "unified" in texts:
        word = _one_of(texts["unified"].lower(), "unified", ("yes", "no", "true", "false"), where)
        given["unified"] = word in ("yes", "true")
    if "year" in texts:
        given["year"] = int(_number(texts["year"], "year", where, 1990, 2100))
    if "names" in texts:
        listed = row["names"] if isinstance(row["names"], list) else texts["names"].split("|")
        given["names"] = tuple(str(name).strip() for name in listed)
    return given


def _one_of(word: str, name: str, allowed: tuple[str, ...], where: str) -> str:
    if word not in allowed:
        raise RooflineError(f"{where}: {name} {word!r} is not one of {', '.join(allowed)}.")
    return word


def _figures(row: Mapping[str, Any], texts: Mapping[str, str], where: str) -> dict[str, Figure]:
    letter, letters = _letters(texts.get("confidence", "U"), where)
    sources = _sources(texts.get("source", ""))
    found: dict[str, Figure] = {}
    for name, column in COLUMNS.items():
        if (cell := row.get(name)) is None or str(cell).strip() == "":
            continue
        value = _number(str(cell), name, where, column.low, column.high) * column.factor
        own = letters.get(column.figure, letter)
        found[column.figure] = Figure(value, own, sources.get(own) or sources.get("", where))
    if stray := set(letters) - set(found):
        raise RooflineError(
            f"{where}: confidence names {', '.join(sorted(stray))}, which the row does not give."
        )
    return found


def _letters(text: str, where: str) -> tuple[str, dict[str, str]]:
    """`D; V mem_bw bf16` as the row's letter and those of single figures."""
    default, *exceptions = [part.split() for part in text.split(";")]
    parts = [default, *exceptions]
    if len(default) != 1 or not all(part and part[0] in CONFIDENCE for part in parts):
        raise RooflineError(
            f"{where}: confidence {text!r} is not a letter of {', '.join(CONFIDENCE)}, then `; V mem_bw bf16` "
            "for single figures."
        )
    return default[0], {figure: part[0] for part in exceptions for figure in part[1:]}


def _sources(text: str) -> dict[str, str]:
    """`D https://…; V https://…` by letter; text without a letter stands under the empty one."""
    lettered = rf"[{''.join(CONFIDENCE)}]\s"
    if not re.match(lettered, text):
        return {"": text} if text else {}
    return {part[0]: part[2:] for part in re.split(rf";\s+(?={lettered})", text)}


def _number(text: str, name: str, where: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise RooflineError(f"{where}: {name} {text!r} is not a number; leave it empty if unknown.") from None
    if not low <= value <= high:
        raise RooflineError(f"{where}: {name} {value:g} is not within {low:g} to {high:g}; check the unit.")
    return value
