"""The trace contract as JSON Schema, for readers in other languages; committed as `trace-v1.schema.json`.

`python -m specbench.schema` writes the file; a test holds it equal to what the code says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from specbench.cell import SCHEMA_VERSION, CellRecord
from specbench.trace import REQUEST_SCHEMA

PATH = Path(__file__).with_name(f"trace-v{SCHEMA_VERSION}.schema.json")

_NS = "monotonic nanoseconds from the cell's start"
_MEANING = {
    "scheduled_ns": f"when the load said to send; {_NS}",
    "sent_ns": f"when the request was written to a checked socket; {_NS}",
    "first_output_ns": f"first frame with output on any channel; {_NS}",
    "first_content_ns": f"first frame with answer content (not reasoning); {_NS}",
    "last_output_ns": f"last frame with output; {_NS}",
    "done_ns": f"the reply was complete; {_NS}",
    "frame_ns": f"one entry per output-carrying frame: the socket read that completed it; {_NS}",
    "frame_tokens": "tokens in each frame; null where the server does not say",
    "frame_step": "step that produced each frame, 0 for prefill; null where unknown",
    "steps": "target forward passes after prefill",
    "steps_with_draft": "steps that verified at least one drafted token",
    "accepted_verified": "the engine's own count, which may run past the end of the reply",
    "accepted_emitted": "emitted tokens minus steps",
    "accept_hist": "entry j: drafts of which exactly j tokens were accepted",
}


def trace_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `cell.json`, with one row of `requests.parquet` under `$defs/request`."""
    cell = CellRecord.model_json_schema(mode="serialization")
    definitions = cell.pop("$defs", {}) | {"request": _request_schema()}
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"specbench trace, version {SCHEMA_VERSION}: cell.json",
    }
    return cell | head | {"$defs": definitions}


def _request_schema() -> dict[str, Any]:
    properties = {field.name: _property(field) for field in REQUEST_SCHEMA}
    return {
        "title": "one row of requests.parquet",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(properties),
    }


def _property(field: pa.Field) -> dict[str, Any]:
    shape = _type(field.type)
    if field.nullable:
        shape = {"anyOf": [shape, {"type": "null"}]}
    return shape | ({"description": _MEANING[field.name]} if field.name in _MEANING else {})


def _type(arrow: pa.DataType) -> dict[str, Any]:
    if pa.types.is_list(arrow):
        return {"type": "array", "items": {"anyOf": [_type(arrow.value_type), {"type": "null"}]}}
    if pa.types.is_boolean(arrow):
        return {"type": "boolean"}
    if pa.types.is_integer(arrow):
        return {"type": "integer"}
    return {"type": "number"} if pa.types.is_floating(arrow) else {"type": "string"}


def _write() -> None:
    PATH.write_bytes(orjson.dumps(trace_schema(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS) + b"\n")


if __name__ == "__main__":
    _write()
