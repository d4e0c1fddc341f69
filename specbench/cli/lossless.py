"""`specbench lossless`: whether the methods of a plan say what the baseline says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from runners.lossless import Checked


def lossless(
    plan: Annotated[Path, typer.Argument(help="A plan in TOML; its prompts, engines and methods are used.")],
    prompts: Annotated[int, typer.Option(min=1, help="Greedy texts to compare.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens of each text.")] = 64,
    draws: Annotated[
        int,
        typer.Option(min=0, max=1_000_000, help="Short continuations to draw from each arm; 0 draws none."),
    ] = 200,
    temperature: Annotated[float, typer.Option(min=0.01, max=100.0, help="Of the draws.")] = 1.0,
    logs: Annotated[Path | None, typer.Option(help="Directory for the engines' logs.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare each method's greedy texts and samples with the baseline's; exit 1 where a method differs."""
    import tempfile

    from runners.lossless import Ask, Check
    from runners.run import Runner
    from specbench.cli._io import note
    from specbench.plan import read_plan

    if logs:
        _made(logs)
    ask = Ask(prompts=prompts, tokens=tokens, draws=draws, temperature=temperature)
    with tempfile.TemporaryDirectory(prefix="specbench-") as scratch:
        runner = Runner(read_plan(plan), Path(scratch) / "run")
        found = Check(runner, ask, logs or Path(scratch), note).run()
    if json_:
        import orjson

        print(orjson.dumps([_document(arm) for arm in found]).decode())
    else:
        print(_text(found))
    if any(arm.lossless is False and not arm.pinned for arm in found):
        raise typer.Exit(1)


def _made(logs: Path) -> None:
    """The directory for the logs, which is refused before an engine is started."""
    from specbench.errors import SpecbenchError

    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"--logs: {logs} cannot be made ({error.strerror}); give a directory that can be written."
        raise SpecbenchError(why) from None


def _document(arm: Checked) -> dict[str, Any]:
    from dataclasses import asdict

    sampled = arm.sampled and asdict(arm.sampled) | {"p_value": arm.sampled.p_value}
    return asdict(arm) | {"sampled": sampled, "lossless": arm.lossless}


def _text(found: list[Checked]) -> str:
    from specbench.cli._io import table

    header = [
        "engine",
        "method",
        "concurrency",
        "equal texts",
        "first difference",
        "margin",
        "beyond a tie",
        "p",
        "lossless",
    ]
    rows = [
        [
            arm.engine,
            f"{arm.method} again" if arm.baseline else arm.method,
            str(arm.concurrency),
            f"{arm.greedy.equal} of {arm.greedy.prompts}",
            _first(arm),
            _margin(arm),
            "" if arm.greedy.beyond is None else str(arm.greedy.beyond),
            f"{arm.sampled.p_value:.2g}" if arm.sampled else "",
            {True: "yes", False: "no", None: "?"}[arm.lossless],
        ]
        for arm in found
    ]
    return "\n".join([table(header, rows), "", *_notes(found)])


def _first(arm: Checked) -> str:
    """The earliest token at which a text parted."""
    found = [parted.index for parted in arm.greedy.divergences]
    return str(min(found)) if found else ""


def _margin(arm: Checked) -> str:
    """The largest margin, in logits, with which the baseline preferred its own token where texts parted."""
    known = [abs(d.margin) for d in arm.greedy.divergences if d.margin is not None]
    return f"{max(known):.3f}" if known else ""


def _notes(found: list[Checked]) -> list[str]:
    from runners.lossless import TIE_LOGITS

    lines = [
        "margin: logits between the two tokens where texts first part, by the baseline; beyond a tie: tokens that the "
        f"baseline ranks more than {TIE_LOGITS:g} logits below its own choice.",
    ]
    tests = [arm.sampled.prefixes[-1] for arm in found if arm.sampled and arm.sampled.prefixes]
    seen = [test.detectable for test in tests if test.detectable is not None]
    if seen:
        lines.append(
            f"p: chance of samples that differ as much from one distribution; a shift of {max(seen):.0%} of the "
            "probability would have been seen in 4 of 5 such checks."
        )
    if any(arm.pinned for arm in found):
        lines.append("Pinned acceptance is not lossless by design, and is expected to differ.")
    return lines
