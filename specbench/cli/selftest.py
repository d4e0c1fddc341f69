"""`specbench selftest`: how fast this machine's load client is, so that a run can be told from its client."""

from __future__ import annotations

from typing import Annotated

import typer


def selftest(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="About a second instead of several.")] = False,
) -> None:
    """Measure what the load client can time here, and remember it for later runs."""
    from dataclasses import asdict

    from runners.selftest import SelfTest, remember, run_selftest

    result = run_selftest(quick)
    remember(result)
    if json_:
        import orjson

        print(orjson.dumps(asdict(result)).decode())
        return

    def line(value: str, what: str) -> None:
        print(f"{value:>12}  {what}")

    def show(r: SelfTest) -> None:
        each = f"draining a backlog, {r.frames_per_read:.1f} frames a read (parsing included)"
        line(f"{r.frames_per_cpu_s:,.0f}", f"frames per client CPU-second, {each}")
        line(f"{r.frames_per_cpu_s_single:,.0f}", "the same with one frame a write")
        line(f"{r.frames_per_cpu_s_paced:,.0f}", "the same at 128 streams of 50 frames/s: a run's ceiling")
        line(f"{r.reads_per_cpu_s:,.0f}", "socket reads per client CPU-second, one frame a write")
        line(f"{r.stamp_error_p50_s * 1e3:.3f} ms", "from the server's write to the client's stamp, median")
        line(f"{r.stamp_error_p99_s * 1e3:.3f} ms", "the same, 99th percentile")
        line(
            f"{r.server_lateness_p99_s * 1e3:.3f} ms",
            "lateness of the loopback server itself, 99th percentile",
        )
        print(f"Python {r.python}, uvloop {r.uvloop or 'absent'}, {r.cores} cores, {r.duration_s:.1f} s.")

    show(result)
