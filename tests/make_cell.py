"""One cell by hand, for tests: rows of the request table from a few figures, and the record around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench import cell, trace
from specbench.metrics import CellView


def row(
    request: int = 0,
    times_s: Sequence[float] = (),
    tokens: Sequence[int | None] | None = None,
    *,
    sent_s: float = 0.0,
    **changes: Any,
) -> dict[str, Any]:
    """A streamed reply whose frames arrive at `times_s`; everything unknown but what is given."""
    frame_ns = [round(t * 1e9) for t in times_s]
    output: dict[str, Any] = {}
    if frame_ns:
        output = {
            "first_output_ns": frame_ns[0],
            "first_content_ns": frame_ns[0],
            "last_output_ns": frame_ns[-1],
            "done_ns": frame_ns[-1],
        }
    return {
        "request": request,
        "prompt_id": f"p{request}",
        "category": "qa",
        "conversation": request,
        "turn": 0,
        "attempt": 0,
        "warmup": False,
        "sent_ns": round(sent_s * 1e9),
        "frame_ns": frame_ns,
        "frame_tokens": [None] * len(frame_ns) if tokens is None else list(tokens),
        "frame_step": [None] * len(frame_ns),
        "finish": "stop",
        "status": "ok",
        "http_status": 200,
    } | output | changes  # fmt: skip


def failed(request: int = 0, **changes: Any) -> dict[str, Any]:
    """A request that ended in an error 20 ms after it was sent."""
    return row(request, status="failed", finish="none", done_ns=20_000_000, error="reset by peer") | changes


def view(*rows: dict[str, Any], concurrency: int = 1, **totals: Any) -> CellView:
    """The view of one cell with those rows, and the server's totals."""
    return CellView(trace.request_table(rows), concurrency, **totals)


def record(method: cell.Method | str = "ngram-simple", **changes: Any) -> cell.CellRecord:
    """A record in which nothing is wrong; `concurrency`, `args` and any field may be given."""
    if isinstance(method, str):
        method = cell.Method(name=method, k=None if method == "none" else 8)
    config = cell.Config(
        engine=cell.EngineAsk(name="llamacpp", args=changes.pop("args", {})),
        model="smollm2-135m",
        method=method,
        workload=changes.pop("workload", cell.Workload()),
        concurrency=changes.pop("concurrency", 1),
    )
    machine = cell.Machine(
        hostname="h", cpu="c", cores=2, memory_bytes=2**33, os="Linux", python="3.11", boot_id="b"
    )
    fields: dict[str, Any] = {
        "cell_id": "c0",
        "config_id": config.config_id,
        "run": "r",
        "comparison": cell.comparison_id(config),
        "block": 0,
        "position": 0,
        "baseline": method.name == "none",
        "session_id": "s",
        "wall_time_utc": "2026-05-04T10:00:00Z",
        "start_ns": 0,
        "window_s": 10.0,
        "seed": 0,
        "config": config,
        "facts": cell.Facts(engine="llamacpp", threads=1, speculative=method.name != "none"),
        "machine": machine,
        "host": cell.HostBusy(window_s=10.0, other_cpu_share=0.01, steal_share=0.0),
        "client": cell.ClientUse(
            frames=100, cpu_s=0.01, ceiling_frames_per_cpu_s=150_000.0, frames_per_s=10.0
        ),
    }
    return cell.CellRecord(**fields | changes)
