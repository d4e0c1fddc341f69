"""A summary as plain text for the terminal: verdict, one row per arm, findings. Formats only."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

from specbench.cli._io import table
from specbench.results import Agreement, Arm, Idea, Ratio, Side, SideBySide, Summary

POSITIONS = 4
"""Draft positions that fit a terminal; the report shows all."""
BESIDE = (
    "Engines side by side. A speedup is within one engine. Step: time of a target step, drafting included; plain: "
    "that of the engine's baseline; cost: baseline steps that a step cost, AL / speedup; p1 …: drafts accepted up to "
    "a position."
)


def summary_text(summary: Summary) -> str:
    """The whole answer: the sentence, the tables (pinned acceptance apart), why, and what to doubt.

    TTFT and TPOT are medians over requests; tok/s is output over the whole window, prefill included.
    """
    parts = [_folded(summary.verdict)]
    several = summary.side_by_side is not None
    for title, pinned in (("", False), ("Pinned acceptance (text invalid by design)", True)):
        arms = [arm for arm in summary.arms if arm.pinned == pinned or (pinned and arm.baseline)]
        if any(arm.pinned == pinned for arm in arms):
            parts.append((f"{title}\n" if title else "") + _arms(arms, several))
    if summary.side_by_side:
        parts.append(_side_by_side(summary.side_by_side, {arm.config_id: arm for arm in summary.arms}))
    if summary.explanations:
        parts.append("\n".join(_folded(line, "  ") for line in summary.explanations))
    if summary.validity:
        parts.append("\n".join(_folded(f"{n.severity}: {n.code}: {n.advice}") for n in summary.validity))
    return "\n\n".join(parts)


def _folded(text: str, indent: str = "") -> str:
    """The text on lines that fit the terminal, continuations set in."""
    width = min(shutil.get_terminal_size((110, 24)).columns, 110)
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def _arms(arms: list[Arm], several: bool) -> str:
    header = ["method", "conc.", "TTFT ms", "TPOT ms", "tok/s", "speedup", "interval", "AL", "cover", "equal"]
    if not several:
        return table(header, [_row(arm) for arm in arms])
    rows = [[arm.engine, *_row(arm)] for arm in arms]
    return table(["engine", *header], rows, left=2)


def _side_by_side(seen: SideBySide, arms: dict[str, Arm]) -> str:
    """Each idea of drafting on every engine that ran it, then what is matched between the engines."""
    positions = min(max((len(arm.positions) for arm in arms.values()), default=0), POSITIONS)
    header = ["method", "conc.", "engine", "speedup", "step ms", "plain ms", "cost", "AL", "cover"]
    header += [f"p{j}" for j in range(1, positions + 1)]
    rows = [
        _beside(idea, side, arms[side.config_id], positions) for idea in seen.ideas for side in idea.sides
    ]
    parts = [_folded(BESIDE), table(header, rows, left=3), *(_folded(text, "  ") for text in seen.remarks)]
    return "\n".join(parts + ([_folded(_agreements(seen.agreements), "  ")] if seen.agreements else []))


def _beside(idea: Idea, side: Side, arm: Arm, positions: int) -> list[str]:
    marginals = {position.position: position.marginal for position in arm.positions}
    return [
        f"{idea.name} {side.detail}".strip(),
        str(idea.concurrency),
        side.engine,
        "baseline" if arm.baseline else _ratio(arm.speedup),
        _number(side.step_s, 1e3, 2),
        _number(side.baseline_step_s, 1e3, 2),
        _number(side.step_cost, 1, 2),
        _number(arm.metrics.get("al_all"), 1, 2),
        _number(arm.metrics.get("coverage"), 1, 2),
        *(_number(marginals.get(j), 1, 2) for j in range(1, positions + 1)),
    ]


def _agreements(found: Sequence[Agreement]) -> str:
    each = ", ".join(
        f"{' and '.join(pair.engines)} on {pair.exact_share:.0%} of {pair.compared}" for pair in found
    )
    return f"Plain greedy text, engine against engine, is equal for {each} prompts."


def _row(arm: Arm) -> list[str]:
    return [
        arm.label,
        str(arm.concurrency),
        _number(arm.ttft_s.p50, 1e3, 0),
        _number(arm.tpot_s.p50, 1e3, 2),
        _number(arm.metrics.get("output_tps"), 1, 1),
        "baseline" if arm.baseline else _ratio(arm.speedup),
        _interval(arm.speedup),
        _number(arm.metrics.get("al_all"), 1, 2),
        _number(arm.metrics.get("coverage"), 1, 2),
        _number(arm.equality.exact_share if arm.equality else None, 1, 2),
    ]


def _ratio(ratio: Ratio | None) -> str:
    return f"{ratio.estimate:.2f}×" if ratio else "–"


def _interval(ratio: Ratio | None) -> str:
    return f"[{ratio.low:.2f}, {ratio.high:.2f}]" if ratio else "–"


def _number(value: float | None, scale: float, digits: int) -> str:
    return "–" if value is None else f"{value * scale:.{digits}f}"
