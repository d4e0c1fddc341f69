"""The tables of the trace, column by column. What each means is said in `docs/trace.md` and in the JSON Schema.

Boundary: names and types only; `trace` stores and loads them. Null is unknown, never 0.
"""

from __future__ import annotations

import pyarrow as pa

_LIST_I64 = pa.list_(pa.int64())
_LIST_I32 = pa.list_(pa.int32())

REQUEST_SCHEMA = pa.schema(
    [
        pa.field("request", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("category", pa.string()),
        pa.field("conversation", pa.int32(), nullable=False),
        pa.field("turn", pa.int16(), nullable=False),
        pa.field("attempt", pa.int16(), nullable=False),
        pa.field("warmup", pa.bool_(), nullable=False),
        # Times are monotonic nanoseconds from the cell's start; null is unknown, never 0.
        pa.field("scheduled_ns", pa.int64()),
        pa.field("sent_ns", pa.int64()),
        pa.field("first_output_ns", pa.int64()),
        pa.field("first_content_ns", pa.int64()),
        pa.field("last_output_ns", pa.int64()),
        pa.field("done_ns", pa.int64()),
        pa.field("frame_ns", _LIST_I64, nullable=False),
        pa.field("frame_tokens", _LIST_I32, nullable=False),
        pa.field("frame_step", _LIST_I32, nullable=False),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("prompt_tokens_from", pa.string()),
        pa.field("cached_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32()),
        pa.field("output_tokens_from", pa.string()),
        pa.field("first_frame_tokens", pa.int32()),
        pa.field("first_frame_tokens_from", pa.string()),
        pa.field("reasoning_tokens", pa.int32()),
        pa.field("steps", pa.int32()),
        pa.field("steps_from", pa.string()),
        pa.field("steps_with_draft", pa.int32()),
        pa.field("drafted", pa.int32()),
        pa.field("accepted_verified", pa.int32()),
        pa.field("accepted_emitted", pa.int32()),
        pa.field("accept_hist", _LIST_I32),
        pa.field("server_queue_ms", pa.float64()),
        pa.field("server_prefill_ms", pa.float64()),
        pa.field("server_decode_ms", pa.float64()),
        pa.field("finish", pa.string(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("http_status", pa.int16()),
        pa.field("error_kind", pa.string()),
        pa.field("error", pa.string()),
        pa.field("prompt_sha256", pa.string()),
        pa.field("output_sha256", pa.string()),
    ]
)
"""One row a request. `frame_ns`, `frame_tokens` and `frame_step` have one entry per output-carrying frame."""

TELEMETRY_SCHEMA = pa.schema(
    [
        pa.field("t_ns", pa.int64(), nullable=False),
        pa.field("device", pa.string(), nullable=False),
        pa.field("power_w", pa.float64()),
        pa.field("energy_j", pa.float64()),
        pa.field("sm_clock_mhz", pa.int32()),
        pa.field("mem_clock_mhz", pa.int32()),
        pa.field("temperature_c", pa.int32()),
        pa.field("utilisation", pa.float64()),
        pa.field("memory_bytes", pa.int64()),
        pa.field("throttle_reasons", pa.list_(pa.string())),
        pa.field("cpu_mhz", pa.float64()),
        pa.field("cpu_fastest_mhz", pa.float64()),
    ]
)
"""One row a reading of one device (`gpu0`, `cpu`, `package-0`, …): what it does not measure is null."""
