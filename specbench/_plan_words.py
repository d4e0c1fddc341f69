"""What is wrong with a plan, as one sentence: the field, what is allowed there, and the nearest name.

Boundary: reads pydantic's findings and raw TOML values; the tables themselves are `specbench.plan`'s.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError


def not_json(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """What TOML can say and a record cannot hold, with its field: infinity, dates, NUL, numbers beyond 64 bits."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from not_json(inner, f"{field}.{key}" if field else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from not_json(inner, f"{field}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield field, f"must be a finite number, not {value}"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield field, "the number is too large"
    elif isinstance(value, str) and "\0" in value:
        yield field, "holds a NUL character; take it out"
    elif not isinstance(value, str | int | float | None):
        yield field, f"must be text or a number, not {value}"


def is_address(text: str) -> bool:
    """Whether a text is an address that a server can have, to which paths can be added and no more is to be sent."""
    try:
        url = urlsplit(text)
        (url.hostname or "").encode("idna")  # raises where a label is empty or too long
        more = any(sign in text for sign in "?#") or "@" in url.netloc or text.split() != [text]
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0 and not more
    except ValueError:
        return False


def sentence(error: ValidationError, root: type[BaseModel]) -> str:
    """The first mistake as `field: what is wrong; allowed values; nearest one`."""
    # An unknown key first: a misspelt name usually also leaves its field missing.
    first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    location = [
        part for part in first["loc"] if part not in ("int", "float", "str", "bool") and "[" not in str(part)
    ]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)[1:]
    kind = first["type"]
    if kind == "extra_forbidden":
        return f"{field}: unknown key; {choices(str(location[-1]), _keys_at(root, location[:-1]))}"
    if kind == "literal_error":
        allowed = [part.strip(" '") for part in str(first["ctx"]["expected"]).replace(" or ", ",").split(",")]
        return f"{field}: {first['input']!r} is not allowed; {choices(str(first['input']), allowed)}"
    if kind == "missing":
        return f"{field}: missing; add it to the plan."
    message = str(first["msg"]).removeprefix("Value error, ")
    given = "" if kind == "value_error" else f", not {first['input']!r}"
    said = f"{field}: {message}{given}" if field else message
    return said if said.endswith(("?", ".")) else f"{said}."


def choices(given: str, allowed: Iterable[str]) -> str:
    """The end of a sentence about a wrong name: what is allowed, and what was probably meant."""
    names = sorted(allowed)
    near = nearest(given, names)
    return f"allowed: {', '.join(names)}" + (f"; did you mean {near}?" if near else ".")


def nearest(given: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None where nothing is close."""
    found = difflib.get_close_matches(given, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def _keys_at(root: type[BaseModel], location: list[Any]) -> list[str]:
    """The keys that are allowed in the table at a location of the plan."""
    table: Any = root
    for part in location:
        if isinstance(part, str) and isinstance(table, type) and issubclass(table, BaseModel):
            table = _table_of(table.model_fields[part].annotation)
    return [field.alias or name for name, field in table.model_fields.items()]


def _table_of(annotation: Any) -> Any:
    """The table class inside an annotation such as `tuple[MethodTable, ...]` or `Pinned | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = [_table_of(part) for part in getattr(annotation, "__args__", ())]
    return next((part for part in inner if part is not None), None)
