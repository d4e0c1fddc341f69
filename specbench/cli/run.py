"""`specbench run`: measure a plan, or two servers given by their URLs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from runners.run import Runner
    from specbench.plan import Plan


def run(
    plan_file: Annotated[
        Path | None, typer.Argument(metavar="[PLAN.toml]", help="The plan; see examples/.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the run is written (default: runs/NAME).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Finish a run that was cut off; finished blocks stay.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print cells, commands, time and detectable effect.")
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(help="Time to spend from now, such as 20m; decides how many blocks run (at least one)."),
    ] = None,
    blocks: Annotated[int | None, typer.Option(help="Blocks per comparison, instead of the plan's.")] = None,
    cell: Annotated[str | None, typer.Option(help="Run only this cell, by its id from --dry-run.")] = None,
    session: Annotated[
        str | None,
        typer.Option(help="With --cell: cells of one session, run back to back on one host, compare."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="No plan: a running server with speculation.")] = None,
    baseline_url: Annotated[
        str | None, typer.Option(help="No plan: the same server without speculation.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="No plan: a file of prompts (JSONL, ShareGPT, Spec-Bench).")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="No plan: the model name that the servers expect.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="No plan: requests in flight.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="No plan: output tokens per request at most.")] = 128,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure a plan (or two URLs): every method against the baseline, in blocks, with intervals."""
    from specbench.cli._io import duration_s, emit, free_path

    plan = _plan(plan_file, url, baseline_url, prompts, model, concurrency, max_tokens)
    plan = with_repeat(plan, blocks=blocks, budget_s=duration_s(budget, "--budget") if budget else None)
    run_dir = out or (Path("runs") / plan.name if plan_file else free_path(Path("runs") / plan.name))
    if dry_run:
        document = _dry_run(plan, run_dir)
        emit(document) if json_ else print(_dry_text(document))
        return
    runner = make_runner(plan, run_dir, session)
    if cell:
        execute(runner, resume, cell)
        emit({"cell_id": cell, "path": str(run_dir / "cells" / cell)}) if json_ else print(
            run_dir / "cells" / cell
        )
        return
    execute(runner, resume)
    finish(run_dir, json_)


def make_runner(plan: Plan, run_dir: Path, session: str | None = None) -> Runner:
    """A runner that shows its progress and knows this machine's client ceiling."""
    from runners.run import Runner
    from runners.selftest import ceiling
    from specbench import host
    from specbench.cell import digest
    from specbench.cli._io import ProgressLine, note

    runner = Runner(plan, run_dir, report=ProgressLine(), ceiling=lambda: ceiling(quick=True), say=note)
    if runner.split.rejected:
        first = runner.split.rejected[0]
        note(
            f"{plan.workload.file}: {len(runner.split.rejected)} rows refused (line {first.line}: {first.reason}) "
            f"`specbench workloads show` lists them."
        )
    if session:
        # The boot is part of it, so one name on two hosts never joins their cells.
        runner.session_id = digest([session, host.boot_id()])
    return runner


def execute(runner: Runner, resume: bool, cell: str | None = None) -> None:
    """Run to the end, leaving the terminal tidy whatever happens; a scheduler's SIGTERM is taken as Ctrl-C."""
    from specbench.cli._io import sigterm_as_interrupt
    from specbench.errors import Interrupted

    try:
        with sigterm_as_interrupt():
            runner.run_cell(cell) if cell else runner.run(resume)
    except KeyboardInterrupt:
        where = f"interrupted; finished cells are kept in {runner.run_dir}"
        raise Interrupted(f"{where}; the same `specbench run` with --resume goes on.") from None
    finally:
        end = getattr(runner.report, "end", None)
        if end:
            end()


def finish(run_dir: Path, json_: bool, extra: dict[str, Any] | None = None) -> None:
    """Print the verdict (or the JSON document), write the report, and exit 3 where the measurement is invalid."""
    import reports
    from specbench.cli._io import emit
    from specbench.cli.text import summary_text
    from specbench.errors import EXIT_INVALID
    from specbench.results import cells_json
    from specbench.summarise import summary

    result = summary(run_dir)
    pages = reports.write(result, run_dir)
    if json_:
        emit(
            {
                "run": result.run,
                "engine": result.engine,
                "engine_version": result.engine_version,
                "model": result.model,
                "model_sha256": result.model_sha256,
                "verdict": result.verdict,
                "ok": result.ok,
                "cells": cells_json(result),
                "validity": [note.model_dump() for note in result.validity],
                "report": str(pages["html"]),
            }
            | (extra or {})
        )
    else:
        print(summary_text(result))
        print(f"\nReport: {pages['html']}")
    if not result.ok:
        raise typer.Exit(EXIT_INVALID)


def with_repeat(plan: Plan, **changes: Any) -> Plan:
    """The plan with flags put over its `[repeat]` table."""
    from specbench.plan import check_plan

    given = {name: value for name, value in changes.items() if value is not None}
    raw = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    raw["repeat"] = raw["repeat"] | given
    return check_plan(raw, "--blocks/--budget") if given else plan


def _plan(
    plan_file: Path | None,
    url: str | None,
    baseline_url: str | None,
    prompts: Path | None,
    model: str | None,
    concurrency: int,
    max_tokens: int,
) -> Plan:
    from specbench.errors import SpecbenchError
    from specbench.plan import check_plan, read_plan

    if plan_file is not None:
        if url or baseline_url or prompts:
            raise SpecbenchError("run: give a plan or --url with --baseline-url, not both.")
        return read_plan(plan_file)
    if not (url and baseline_url):
        raise SpecbenchError("run: give a plan file, or --url and --baseline-url for two running servers.")
    raw = {
        "name": "two-urls",
        "model": model or "served",
        "workload": {"max_tokens": max_tokens}
        | ({"file": str(prompts)} if prompts else {"prompts_per_category": 2}),
        "load": {"concurrency": [concurrency]},
        "repeat": {"restart": "never"},
        "engine": [{"name": "openai", "url": url, "baseline_url": baseline_url}],
        "method": [{"name": "none", "baseline": True}, {"name": "as-served"}],
    }
    return check_plan(raw, "run")


def _dry_run(plan: Plan, run_dir: Path) -> dict[str, Any]:
    from runners.run import Runner
    from specbench.cli.estimate import detectable_effect, run_seconds

    runner = Runner(plan, run_dir)
    jobs = list(runner.all_jobs())
    seconds, basis = run_seconds(runner, jobs)
    return {
        "run": plan.name,
        "out": str(run_dir),
        "cells": [
            {
                "cell_id": job.cell_id,
                "block": job.block,
                "position": job.position,
                "engine": job.arm.config.engine.name,
                "method": job.arm.config.method.label,
                "concurrency": job.arm.config.concurrency,
                "command": list(job.launch.argv) or [f"attach to {job.arm.config.engine.url}"],
            }
            for job in jobs
        ],
        "prompts": len(runner.split.prompts),
        "requests_per_cell": sum(len(prompt.turns) for prompt in runner.split.prompts),
        "estimated_s": seconds,
        "estimate_basis": basis,
        "budget_s": plan.repeat.budget_s,
        "detectable_effect": detectable_effect(plan.repeat.blocks),
    }


def _dry_text(document: dict[str, Any]) -> str:
    import shlex

    from specbench.cli._io import clock, table

    cells = document["cells"]
    several = len({c["engine"] for c in cells}) > 1
    header = ["cell", "block", "position", "concurrency", *(["engine"] if several else []), "method"]
    rows = [
        [c["cell_id"], str(c["block"] + 1), str(c["position"]), str(c["concurrency"])]
        + ([c["engine"]] if several else [])
        + [c["method"]]
        for c in cells
    ]
    commands = {
        (f"{c['engine']}, " if several else "")
        + f"{c['method']}, concurrency {c['concurrency']}": shlex.join(c["command"])
        for c in cells
    }
    effect = document["detectable_effect"]
    lines = [
        table(header, rows),
        "",
        *(f"{arm}:\n  {command}" for arm, command in commands.items()),
        "",
        f"{len(rows)} runs of {document['prompts']} prompts in {document['requests_per_cell']} requests, "
        f"about {clock(document['estimated_s'])} ({document['estimate_basis']}).",
        f"With this many blocks a change of {effect['effect']:.1%} in TPOT can be told from noise "
        f"(80 % power, pair noise {effect['pair_noise']:.0%}).",
    ]
    if document["budget_s"] is not None:
        lines.append(
            f"The budget of {clock(document['budget_s'])} may end the run after fewer blocks: the first block always "
            "runs, and each concurrency in turn takes what is left."
        )
    return "\n".join(lines)
