"""`specbench report`: a run as one HTML page, as Markdown for a pull request, and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.errors import EXIT_INVALID, SpecbenchError


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories that `specbench run` wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for the files instead of the run's; one below it per run if several."),
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Write report.html, report.md and report.json for each run; exit 3 where a measurement is invalid."""
    import reports
    from specbench.cli._io import emit, note
    from specbench.summarise import summary
    from specbench.trace import load

    written = []
    for run_dir, target in _targets(runs, output):
        result = summary(load(run_dir))
        paths = {kind: str(path) for kind, path in reports.write(result, target).items()}
        written.append({"run": str(run_dir), "ok": result.ok, "verdict": result.verdict, "files": paths})
        note(result.verdict)
        if not json_:
            print("\n".join(paths.values()))
    if json_:
        emit({"reports": written})
    if not all(entry["ok"] for entry in written):
        raise typer.Exit(EXIT_INVALID)


def _targets(runs: list[Path], output: Path | None) -> list[tuple[Path, Path]]:
    """Each run with the directory that its files go to."""
    if output is None:
        return [(run, run) for run in runs]
    if output.exists() and not output.is_dir():
        raise SpecbenchError(f"--output: {output} is a file; give a directory for the report's three files.")
    if len(runs) == 1:
        return [(runs[0], output)]
    names = [run.resolve().name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecbenchError(f"--output: two runs are named {twice}; report them one at a time.")
    return [(run, output / name) for run, name in zip(runs, names, strict=True)]
