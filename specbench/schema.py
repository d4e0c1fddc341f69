"""The trace contract as JSON Schema, for readers in other languages; committed as `trace-v1.schema.json`.

`python -m specbench.schema` writes the file; a test holds it equal to what the code says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from specbench._columns import REQUEST_SCHEMA, TELEMETRY_SCHEMA
from specbench.cell import SCHEMA_VERSION, CellRecord

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
_OF_DEVICE = {
    "t_ns": f"when the device was read; {_NS}",
    "device": "gpu<index>, gpu<index>/<uuid> for a MIG instance, cpu, or a RAPL zone such as package-0/dram",
    "power_w": "the driver's figure, a mean of up to 1 s",
    "energy_j": "counted since the window opened; null from a counter's fall on",
    "utilisation": "share of time with work on the GPU, over the driver's own period",
    "memory_bytes": "in use on the device, by all processes",
    "throttle_reasons": "why clocks are below what was asked for; empty where they are not",
    "cpu_mhz": "mean over the CPUs that the runner may use",
    "cpu_fastest_mhz": "of the fastest of them",
}


def trace_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of `cell.json`, with one row of `requests.parquet` under `$defs/request` and one of
    `telemetry.parquet` under `$defs/reading`."""
    cell = CellRecord.model_json_schema(mode="serialization")
    definitions = cell.pop("$defs", {}) | {
        "request": _row_schema("requests.parquet", REQUEST_SCHEMA, _MEANING),
        "reading": _row_schema("telemetry.parquet", TELEMETRY_SCHEMA, _OF_DEVICE),
    }
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"specbench trace, version {SCHEMA_VERSION}: cell.json",
    }
    return cell | head | {"$defs": definitions}


def _row_schema(file: str, columns: pa.Schema, meaning: dict[str, str]) -> dict[str, Any]:
    properties = {field.name: _property(field, meaning) for field in columns}
    return {
        "title": f"one row of {file}",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": list(properties),
    }


def _property(field: pa.Field, meaning: dict[str, str]) -> dict[str, Any]:
    shape = _type(field.type)
    if field.nullable:
        shape = {"anyOf": [shape, {"type": "null"}]}
    return shape | ({"description": meaning[field.name]} if field.name in meaning else {})


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
