"""Typed reading of one row's fields, shared by the formats.

Boundary: a row is a decoded JSON object; each function returns the value or raises WorkloadError with the
reason for which the row is rejected. A key that is absent or null is unknown (None), never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.prompt import WorkloadError

Row = Mapping[str, Any]

ID_KEYS = ("id", "question_id", "prompt_id", "custom_id")
LENGTH_KEYS = ("expected_tokens", "output_tokens", "output_len", "output_length")
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}


def json_name(value: object) -> str:
    """What JSON calls a decoded value, with its article."""
    return _JSON_NAMES.get(type(value), "a number")


def text_field(row: Row, key: str) -> str | None:
    """A string, or None where the key is absent, null or blank."""
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise WorkloadError(f"`{key}` is {json_name(value)}; it must be a string.")
    return value if value and value.strip() else None


def text_list(value: object, key: str) -> tuple[str, ...]:
    """A list of strings."""
    if not isinstance(value, list):
        raise WorkloadError(f"`{key}` is {json_name(value)}; it must be a list of strings.")
    for i, item in enumerate(value):
        if not isinstance(item, str):
            raise WorkloadError(f"`{key}[{i}]` is {json_name(item)}; it must be a string.")
    return tuple(value)


def id_field(row: Row, fallback: str) -> str:
    """The row's own id (a string or a whole number) as text, or `fallback` where it has none."""
    for key in ID_KEYS:
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise WorkloadError(f"`{key}` is {json_name(value)}; it must be a string or a whole number.")
        return str(value)
    return fallback


def length_field(row: Row) -> int | None:
    """Expected output length in tokens under any of its usual names."""
    for key in LENGTH_KEYS:
        value = row.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise WorkloadError(f"`{key}` is {json_name(value)}; it must be a whole number of tokens.")
        return value
    return None
