"""A summary as plain text for the terminal: verdict, one row per arm, findings. Formats only."""

from __future__ import annotations

import shutil
import textwrap

from specbench.cli._io import table
from specbench.results import Arm, Ratio, Summary


def summary_text(summary: Summary) -> str:
    """The whole answer: the sentence, the tables (pinned acceptance apart), why, and what to doubt.

    TTFT and TPOT are medians over requests; tok/s is output over the whole window, prefill included.
    """
    parts = [_folded(summary.verdict)]
    for title, pinned in (("", False), ("Pinned acceptance (text invalid by design)", True)):
        arms = [arm for arm in summary.arms if arm.pinned == pinned or (pinned and arm.baseline)]
        if any(arm.pinned == pinned for arm in arms):
            parts.append((f"{title}\n" if title else "") + _arms(arms))
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


def _arms(arms: list[Arm]) -> str:
    header = ["method", "conc.", "TTFT ms", "TPOT ms", "tok/s", "speedup", "interval", "AL", "cover", "equal"]
    return table(header, [_row(arm) for arm in arms])


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
