"""`specbench demo`: one command, a real engine on a real model, and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[
        Path, typer.Option(help="Where the run is written; an earlier one there is kept as OUT.1, OUT.2 …")
    ] = Path("runs/demo"),
    budget: Annotated[str, typer.Option(help="Time for measuring; fewer or more blocks fit.")] = "280s",
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure speculative against plain decoding of a small model on this machine and write the report."""
    import time

    from specbench.cli._io import clock, duration_s, note
    from specbench.cli.run import execute, finish, make_runner, with_repeat
    from specbench.models import fetch
    from specbench.plan import check_plan

    budget_s = duration_s(budget, "--budget")
    started = time.monotonic()
    plan = with_repeat(check_plan(DEMO_PLAN, "demo"), budget_s=budget_s)
    fetch(plan.model)
    _set_aside(out)
    note(f"Measuring {plan.model} with llama.cpp on this CPU for up to {clock(budget_s)} …")
    execute(make_runner(plan, out), resume=False)
    finish(out, json_, {"seconds": round(time.monotonic() - started, 1)})


DEMO_PLAN = {
    "schema": 1,
    "name": "demo",
    "seed": 7,
    "model": "smollm2-135m",
    "workload": {"split": "demo", "max_tokens": 64},
    "load": {"concurrency": [1, 4]},
    "repeat": {"blocks": 5, "restart": "run", "budget_s": 280},
    "engine": [{"name": "llamacpp", "args": {"threads": "cores-1"}}],
    "method": [
        {"name": "none", "baseline": True},
        {"name": "ngram-simple", "n": 4, "k": 8},
        {"name": "ngram-mod", "n": 4, "k": 8},
    ],
}
"""Five blocks of three methods, twice each, at concurrency 1; then concurrency 4 as far as the budget goes."""


def _set_aside(out: Path) -> None:
    """Keep an earlier run under the next free number."""
    from specbench.cli._io import free_path

    if out.exists():
        out.rename(free_path(out))
