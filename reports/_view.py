"""What every form of the report shows of a `Summary`: which arms, under which names, in which order.

Boundary: selects, groups and names; all numbers stay fields of the summary, and what an interval
says is `specbench.results.reading`, so that table, figure, headline and verdict agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.cell import Note
from specbench.results import Arm, Equality, Ratio, Reading, Summary, reading

SEVERITIES = ("invalid", "warning", "note")

WORDS: dict[Reading, tuple[str, str]] = {
    "gain": ("▲", "faster"),
    "loss": ("▼", "slower"),
    "same": ("○", "no measurable difference"),
    "few": ("·", "too few blocks to tell"),
    "none": ("–", "not compared"),
}
"""Sign and word of a reading: the sign alone must do in print and for readers who see no colour."""


@dataclass(frozen=True)
class Mark:
    """The headline's sign, its words, and the tone that the style sheet colours."""

    sign: str
    words: str
    tone: Literal["good", "bad", "neutral", "void"]


@dataclass(frozen=True)
class Finding:
    """One validity note with the arms that it is about (none: the whole run)."""

    note: Note
    arms: tuple[str, ...]


@dataclass(frozen=True)
class EqualityRow:
    """One line of the output table: an arm, or a baseline against itself."""

    name: str
    baseline: bool
    compared: int
    exact_share: float | None
    mean_matching_prefix: float | None
    first_divergence_median: float | None


def mark(summary: Summary) -> Mark:
    """The headline's mark, from `ok` and the readings of the measured arms."""
    if not summary.ok:
        return Mark("✕", "Not usable", "void")
    seen = {reading(arm.speedup) for arm in compared(summary)} - {"none"}
    if {"gain", "loss"} <= seen:
        return Mark("▲▼", "Mixed: faster and slower", "neutral")
    if "gain" in seen:
        return Mark("▲", "Faster", "good")
    if seen - {"few"} == {"loss"}:
        return Mark("▼", "Slower", "bad")
    if seen == {"few"}:
        return Mark("·", "Too few blocks to tell", "neutral")
    if seen:
        return Mark("○", "No measurable gain", "neutral")
    return Mark("–", "Not compared", "neutral")


def measured(summary: Summary) -> tuple[Arm, ...]:
    """Arms whose acceptance is real, baselines included, in the summary's order."""
    return tuple(arm for arm in summary.arms if not arm.pinned)


def pinned(summary: Summary) -> tuple[Arm, ...]:
    """Arms with synthetic acceptance, which never share a table with measured ones."""
    return tuple(arm for arm in summary.arms if arm.pinned)


def compared(summary: Summary) -> tuple[Arm, ...]:
    """Measured arms other than the baselines."""
    return tuple(arm for arm in measured(summary) if not arm.baseline)


def names(summary: Summary) -> dict[str, str]:
    """A display name per `config_id`: the method's label, with whatever else varies within the run."""
    arms = summary.arms
    parts = {arm.config_id: [arm.label] for arm in arms}
    for varies, text in (
        (_differ(arm.concurrency for arm in arms), lambda arm: f"concurrency\u00a0{arm.concurrency}"),
        (_differ(arm.engine for arm in arms), lambda arm: arm.engine),
        (_differ(arm.model for arm in arms), lambda arm: arm.model),
    ):
        for arm in arms if varies else ():
            parts[arm.config_id].append(text(arm))
    joined = {key: " · ".join(value) for key, value in parts.items()}
    clashing = {name for name in joined.values() if list(joined.values()).count(name) > 1}
    return {key: f"{name} · {key[:6]}" if name in clashing else name for key, name in joined.items()}


def categories(arms: Sequence[Arm]) -> tuple[str, ...]:
    """Every category that any of the arms has, in order of first appearance."""
    return tuple(dict.fromkeys(group.category for arm in arms for group in arm.groups))


def group_speedup(arm: Arm, category: str) -> Ratio | None:
    """The arm's speedup on one category, if it has one."""
    return next((group.speedup for group in arm.groups if group.category == category), None)


def findings(summary: Summary) -> tuple[Finding, ...]:
    """Every finding once, the gravest first, with the names of the arms that carry it."""
    label = names(summary)
    owners: dict[Note, list[str]] = {note: [] for note in summary.validity}
    for arm in summary.arms:
        for note in arm.validity:
            owners.setdefault(note, []).append(label[arm.config_id])
    ordered = sorted(owners, key=lambda note: SEVERITIES.index(note.severity))
    return tuple(Finding(note, tuple(owners[note])) for note in ordered)


def equality_rows(summary: Summary) -> tuple[EqualityRow, ...]:
    """Per comparison: the baseline against itself first, then each measured arm against the baseline."""
    label, rows = names(summary), []
    for comparison in dict.fromkeys(arm.comparison for arm in measured(summary)):
        arms = [arm for arm in measured(summary) if arm.comparison == comparison]
        known = [arm.equality for arm in arms if arm.equality is not None]
        bases = [label[arm.config_id] for arm in arms if arm.baseline]
        if known and bases:
            rows.append(_self_row(bases[0], known[0]))
        rows += [_arm_row(label[a.config_id], a.equality) for a in arms if a.equality and not a.baseline]
    return tuple(rows)


def _self_row(name: str, equality: Equality) -> EqualityRow:
    share, count = equality.self_exact_share, equality.self_compared
    return EqualityRow(f"{name}, against itself", True, count, share, None, None)


def _arm_row(name: str, equality: Equality) -> EqualityRow:
    return EqualityRow(
        name,
        False,
        equality.compared,
        equality.exact_share,
        equality.mean_matching_prefix,
        equality.first_divergence_median,
    )


def _differ(values: Iterable[object]) -> bool:
    return len(set(values)) > 1
