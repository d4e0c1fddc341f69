"""What every form of the report shows of a `Summary`: which arms, under which names, in which order.

Boundary: selects, groups and names; all numbers stay fields of the summary, and what an interval
says is `specbench.results.reading`, so that table, figure, headline and verdict agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from specbench.cell import Note
from specbench.results import Arm, Equality, Idea, Ratio, Reading, Side, Summary, reading

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


@dataclass(frozen=True)
class SideRow:
    """One line of the tables that set engines side by side."""

    engine: str
    detail: str
    """What this engine alone was asked for."""
    side: Side
    arm: Arm


MAX_DEPTH = 8
"""Draft positions in the table of engines; the table of all positions has the rest."""


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
    """Every kind of finding once, the gravest first, with the names of the arms that carry it.

    Arms often say the same with other figures; the first one's words then stand for all.
    """
    label = names(summary)
    found: dict[tuple[str, str], Finding] = {}
    mine = [(note, (label[arm.config_id],)) for arm in summary.arms for note in arm.validity]
    for note, arms in [*mine, *((note, ()) for note in _of_the_run(summary))]:
        seen = found.get((note.severity, note.code), Finding(note, ()))
        found[note.severity, note.code] = Finding(_for_all(seen.note, note), seen.arms + arms)
    return tuple(sorted(found.values(), key=lambda finding: SEVERITIES.index(finding.note.severity)))


def _of_the_run(summary: Summary) -> Iterator[Note]:
    """What no single arm says."""
    said = {note for arm in summary.arms for note in arm.validity}
    return (note for note in summary.validity if note not in said)


def _for_all(first: Note, other: Note) -> Note:
    also = " Other arms say the same with figures of their own."
    if other.advice == first.advice or first.advice.endswith(also):
        return first
    return first.model_copy(update={"advice": first.advice + also})


def beside(summary: Summary) -> tuple[tuple[str, tuple[SideRow, ...]], ...]:
    """Methods with their arms on each engine, plain decoding first; empty where the run holds one engine."""
    rows: dict[str, list[SideRow]] = {}
    for title, row in _sides(summary):
        rows.setdefault(title, []).append(row)
    return tuple((title, tuple(sides)) for title, sides in rows.items())


def _sides(summary: Summary) -> Iterator[tuple[str, SideRow]]:
    """Method (with its concurrency where that varies) and arm; an engine that comes twice gets its arm's id."""
    seen = summary.side_by_side
    arms = {arm.config_id: arm for arm in summary.arms}
    varies = _differ(arm.concurrency for arm in summary.arms)
    taken: set[tuple[str, str]] = set()
    for idea in seen.ideas if seen else ():
        where = f" · concurrency\u00a0{idea.concurrency}" if varies else ""
        for side, detail, own in _details(idea):
            title, engine = f"{idea.name} {detail}".strip() + where, side.engine
            if (title, engine) in taken:
                engine += f" · {side.config_id[:6]}"
            taken.add((title, engine))
            yield title, SideRow(engine, own, side, arms[side.config_id])


def _details(idea: Idea) -> Iterator[tuple[Side, str, str]]:
    """What an idea's rows were asked for: before all of them, and beside the engine where it alone was.

    An engine that ran the idea in several ways puts each way under a heading of its own.
    """
    parts = {side.config_id: side.detail.split() for side in idea.sides}
    once = not any(n > 1 for n in Counter(side.engine for side in idea.sides).values())
    for side in idea.sides:
        mine = parts[side.config_id]
        shared = [part for part in mine if not once or all(part in each for each in parts.values())]
        yield side, " ".join(shared), " ".join(part for part in mine if part not in shared)


def depths(summary: Summary) -> tuple[int, ...]:
    """Draft positions that any measured arm's engine counted, at most `MAX_DEPTH` of them."""
    deepest = max((p.position for arm in measured(summary) for p in arm.positions), default=0)
    return tuple(range(1, min(deepest, MAX_DEPTH) + 1))


def marginal(arm: Arm, position: int) -> float | None:
    """The arm's marginal acceptance at a position, if its engine counted that far."""
    return next((p.marginal for p in arm.positions if p.position == position), None)


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
