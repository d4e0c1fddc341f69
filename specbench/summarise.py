"""How a `Summary` is made: drop busy blocks, take each arm's cells together, pair them inside blocks, judge.

Boundary: reads a run, computes the records of `specbench.results`; the sentences are `specbench._words`'s.
Order matters: a block is dropped for other work on the host before any ratio is read, so that the decision
cannot depend on the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specbench import _words, failures, stats
from specbench._checks import percentile_advice
from specbench._engines import engine_names, several, side_by_side
from specbench._view import Missing
from specbench.cell import CellRecord, Note
from specbench.equality import Texts, equality, texts_of
from specbench.errors import SpecbenchError
from specbench.host import is_busy
from specbench.metrics import METRICS, CellView, compute, request_values
from specbench.plan import check_plan
from specbench.results import Arm, Distribution, Equality, Group, Position, Ratio, Summary
from specbench.trace import Run, load
from specbench.validity import Code, gravest_first, note

if TYPE_CHECKING:
    import pandas as pd

DROPPED_LIMIT = 0.2
"""Share of blocks that may be dropped as busy before the run is void."""
MAX_VALUES = 2000
"""Values of a distribution that are kept for figures."""
AL_SLACK = 1.02
"""A speedup's lower bound above AL_all by more than the least effect worth a word breaks the bound."""

Key = tuple[str, int]
"""A block: comparison and number."""


@dataclass(frozen=True)
class _Cell:
    """One cell with its rows, and what is read from it once."""

    run: Run
    record: CellRecord
    requests: pd.DataFrame

    @property
    def key(self) -> Key:
        return self.record.comparison, self.record.block

    @cached_property
    def view(self) -> CellView:
        return CellView.of(self.record, self.requests)

    def tpot_of(self, category: str | None) -> dict[Any, float]:
        """TPOT by (prompt_id, turn) of one category or of all; of a prompt that came twice, the last."""
        return {key: value for key, (of, value) in self._tpot.items() if category in (None, of)}

    @cached_property
    def _tpot(self) -> dict[Any, tuple[str | None, float]]:
        rows, values = self.view.rows, request_values(self.requests, "tpot_s")
        every = zip(rows["prompt_id"], rows["turn"], rows["category"], values.tolist(), strict=True)
        return {(prompt, turn): (of, value) for prompt, turn, of, value in every if np.isfinite(value)}

    @cached_property
    def texts(self) -> Texts:
        return texts_of(self.requests, self.run.texts(self.record.cell_id))


@dataclass(frozen=True)
class _Passes:
    """One block of an arm and its baseline: both passes of both, all in one session."""

    arm: tuple[_Cell, _Cell]
    baseline: tuple[_Cell, _Cell]


def summary(run: Run | str | Path) -> Summary:
    """Summarise a run, or the run directory of that path.

    Raises SpecbenchError where there is no run or one of its cells cannot be read. A run without cells, or
    in which nothing succeeded, is a summary with `ok` False, not an error.
    """
    run = run if isinstance(run, Run) else load(run)
    cells = _cells(run)
    blocks = {cell.key for cell in cells}
    dropped = {cell.key for cell in cells if is_busy(cell.record.host)}
    made = [_arm(group, cells, dropped) for group in _by_config(cells)]
    arms = tuple(arm for arm, _ in made)
    paid = {arm.config_id: categories for arm, categories in made}
    notes = _run_notes(arms, cells, dropped, len(blocks), _unfinished(run, cells), failures.read(run.path))
    first = cells[0].record if cells else None
    names = engine_names(arms)
    one = not several(arms)
    return Summary(
        run=first.run if first else run.path.name,
        path=str(run.path),
        verdict=_words.verdict(arms, paid, notes, {} if one else names),
        ok=bool(cells) and not any(n.severity == "invalid" for n in notes),
        model=first.config.model if first else "",
        model_sha256=first.facts.model_sha256 if first else None,
        engine=_words.listed(list(dict.fromkeys(names.values()))),
        engine_version=first.facts.engine_version if first and one else None,
        arms=arms,
        validity=notes,
        environment=_words.environment([cell.record for cell in cells]),
        dropped_blocks=len(dropped),
        blocks=len(blocks),
        explanations=_words.explanations(arms, {} if one else names),
        side_by_side=side_by_side(arms, cells),
    )


def _cells(run: Run) -> list[_Cell]:
    rows = dict(iter(run.requests.groupby("cell_id", sort=False))) if run.records else {}
    return [_Cell(run, record, rows.get(record.cell_id, run.requests.iloc[:0])) for record in run.records]


def _by_config(cells: Iterable[_Cell]) -> list[list[_Cell]]:
    """Cells of each arm; comparisons in order of concurrency, each with its baseline first."""
    groups: dict[tuple[str, str], list[_Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.record.comparison, cell.record.config_id), []).append(cell)

    def place(group: list[_Cell]) -> tuple[Any, ...]:
        config, record = group[0].record.config, group[0].record
        where = (config.engine.name, config.model, config.concurrency, record.comparison)
        return (*where, not record.baseline, config.method.pinned is not None, config.method.label)

    return sorted(groups.values(), key=place)


# --- one arm ----------------------------------------------------------------------------------------------


def _arm(group: list[_Cell], cells: Sequence[_Cell], dropped: set[Key]) -> tuple[Arm, tuple[str, ...]]:
    """The arm, and the categories on which it surely gained."""
    kept = [cell for cell in group if cell.key not in dropped] or group
    record, view = group[0].record, CellView.pool([cell.view for cell in kept])
    passes = [] if record.baseline else list(_passes(group, cells, dropped))
    notes = _arm_notes(group, kept, view)
    inactive = any(n.code == Code.SPECULATION_INACTIVE and n.severity == "invalid" for n in notes)
    compared = [] if inactive else passes
    speedup = _speedup(compared)
    values, reasons = compute(view)
    # Texts do not care how busy the host was.
    same = None if record.baseline else _equality(list(_passes(group, cells, set())))
    notes += _comparison_notes(record, speedup, values["al_all"], same)
    if speedup is None and not record.baseline:
        reasons["speedup"] = _why_no_speedup(group, cells, dropped, inactive)
    baseline = [cell for cell in _baseline_of(record, cells) if cell.key not in dropped]
    groups = tuple(_groups(view, compared))
    arm = Arm(
        config_id=record.config_id,
        comparison=record.comparison,
        engine=record.config.engine.name,
        engine_version=record.facts.engine_version,
        model=record.config.model,
        method=record.config.method.name,
        label=record.config.method.label,
        k=record.config.method.k,
        concurrency=record.config.concurrency,
        baseline=record.baseline,
        pinned=record.config.method.pinned is not None,
        cells=len(kept),
        blocks=len({cell.key for cell in kept}) if record.baseline else len(passes),
        metrics=values,
        reasons=reasons,
        speedup=speedup,
        speedup_output_tps=_tps_ratio(values, baseline) if speedup else None,
        groups=groups,
        positions=_positions(kept),
        equality=same,
        tpot_s=_distribution(view, "tpot_s", "tpot"),
        ttft_s=_distribution(view, "ttft_s", "ttft"),
        validity=gravest_first(notes),
    )
    return arm, tuple(_paid(compared, groups))


def _baseline_of(record: CellRecord, cells: Iterable[_Cell]) -> list[_Cell]:
    return [cell for cell in cells if cell.record.baseline and cell.record.comparison == record.comparison]


def _passes(group: Sequence[_Cell], cells: Sequence[_Cell], dropped: set[Key]) -> Iterator[_Passes]:
    """Blocks that count: not dropped, in one session, with both passes of both arms."""
    baseline = _baseline_of(group[0].record, cells)
    for key in sorted({cell.key for cell in group} - dropped):
        arm, base = _two(group, key), _two(baseline, key)
        if arm and base and len({cell.record.session_id for cell in (*arm, *base)}) == 1:
            yield _Passes(arm, base)


def _two(cells: Iterable[_Cell], key: Key) -> tuple[_Cell, _Cell] | None:
    mine = sorted((cell for cell in cells if cell.key == key), key=lambda cell: cell.record.position)
    return (mine[0], mine[1]) if len(mine) == 2 else None


def _speedup(
    blocks: Iterable[_Passes], category: str | None = None, confidence: float = 0.95
) -> Ratio | None:
    """The ratio over blocks, of all prompts or of one category's; None where no prompt is in both arms."""
    data = [_block_datum(block, category) for block in blocks]
    known = [d for d in data if d is not None]
    return stats.ratio(known, confidence) if known else None


def _block_datum(block: _Passes, category: str | None) -> float | None:
    both = zip(block.arm, block.baseline, strict=True)
    return stats.block_log_ratio([(arm.tpot_of(category), base.tpot_of(category)) for arm, base in both])


def _why_no_speedup(group: list[_Cell], cells: Sequence[_Cell], dropped: set[Key], inactive: bool) -> str:
    if inactive:
        return "speculation did not run"
    if not _baseline_of(group[0].record, cells):
        return "the run has no baseline; mark one method with baseline = true"
    if {cell.key for cell in group} <= dropped:
        return "every block was dropped because other work ran on the host"
    return "no block holds both passes of this arm and of its baseline, in one session, with a TPOT"


def _tps_ratio(values: Mapping[str, float | None], baseline: Sequence[_Cell]) -> float | None:
    mine = values["output_tps"]
    try:
        theirs = METRICS["output_tps"].function(CellView.pool([cell.view for cell in baseline]))
    except Missing:
        return None
    return mine / theirs if mine is not None and isinstance(theirs, float) and theirs > 0 else None


_OF_GROUP = ("tpot_s", "al_all", "coverage", "acceptance_rate")


def _groups(view: CellView, passes: Sequence[_Passes]) -> Iterator[Group]:
    for category in sorted(view.rows["category"].dropna().unique()):
        part = view.only(category)
        values, _ = compute(part, _OF_GROUP)
        yield Group(category, part.count("requests"), _speedup(passes, category), **values)


def _paid(passes: Sequence[_Passes], groups: Sequence[Group]) -> Iterator[str]:
    """Categories with a gain that stands although the best of several was looked for (Bonferroni)."""
    for group in groups:
        if group.speedup and group.speedup.low > 1:
            ratio = _speedup(passes, group.category, 1 - 0.05 / len(groups))
            if ratio and ratio.low > 1:
                yield group.category


def _positions(cells: Iterable[_Cell]) -> tuple[Position, ...]:
    """The acceptance tables of an arm's cells together: the server's where it counts, else the requests'.

    A position that a cell does not list was never accepted there, so its drafts still count.
    """
    rows = [(cell.record.cell_id, row) for cell in cells for row in cell.record.acceptance]
    scope = "cell" if any(row.scope == "cell" for _, row in rows) else "request"
    mine = [(cell_id, row) for cell_id, row in rows if row.scope == scope]
    drafts = {(cell_id, row.request): row.drafts for cell_id, row in mine}
    total = sum(drafts.values())
    accepted: dict[int, int] = {}
    for _, row in mine:
        accepted[row.position] = accepted.get(row.position, 0) + row.accepted
    source = ", ".join(sorted({row.source for _, row in mine}))
    marginals = {0: 1.0} | {j: n / total for j, n in accepted.items() if total}
    return tuple(
        Position(j, total, marginals[j], _conditional(marginals, j), source)
        for j in sorted(accepted)
        if total
    )


def _conditional(marginals: Mapping[int, float], position: int) -> float | None:
    before = marginals.get(position - 1)
    return marginals[position] / before if before else None


def _equality(passes: Sequence[_Passes]) -> Equality | None:
    arm = ((base.texts, cell.texts) for p in passes for base, cell in zip(p.baseline, p.arm, strict=True))
    return equality(arm, ((p.baseline[0].texts, p.baseline[1].texts) for p in passes))


def _distribution(view: CellView, name: str, stem: str) -> Distribution:
    values = request_values(view.requests, name)
    kept = np.sort(values[np.isfinite(values)])
    thin = (
        kept[np.unique(np.linspace(0, len(kept) - 1, min(len(kept), MAX_VALUES)).astype(int))]
        if len(kept)
        else kept
    )
    p50, p90, p95, p99 = (stats.percentile(kept, q) for q in (50, 90, 95, 99))
    mean = float(kept.mean()) if len(kept) else None
    return Distribution(len(kept), mean, p50, p90, p95, p99, tuple(thin.tolist()))


# --- findings ---------------------------------------------------------------------------------------------


def _arm_notes(group: Sequence[_Cell], kept: Sequence[_Cell], view: CellView) -> list[Note]:
    """The cells' findings, each once with the number of cells; percentiles are judged on the whole arm."""
    # Busy cells are gone from `kept`, but that they were there must show.
    found = [n for cell in group for n in cell.record.validity if n.code == Code.HOST_BUSY]
    found += [n for cell in kept for n in cell.record.validity if n.code != Code.HOST_BUSY]
    times = Counter(n.code for n in found)
    notes = [_of_arm(n, times[n.code], len(group)) for n in gravest_first(found)]
    notes = [n for n in notes if n.code != Code.PERCENTILE_UNSUPPORTED]
    advice = percentile_advice(int(np.isfinite(request_values(view.requests, "tpot_s")).sum()))
    return [*notes, note(Code.PERCENTILE_UNSUPPORTED, advice)] if advice else notes


def _of_arm(found: Note, times: int, cells: int) -> Note:
    """A cell's finding as its arm's: a drafter that idled in some cells only still ran."""
    if cells == 1:
        return found
    some = found.code == Code.SPECULATION_INACTIVE and times < cells
    severity = "warning" if some else found.severity
    return Note(code=found.code, severity=severity, advice=f"{found.advice} (In {times} of {cells} cells.)")


def _comparison_notes(
    record: CellRecord, speedup: Ratio | None, al_all: float | None, same: Equality | None
) -> list[Note]:
    """Findings that need the baseline beside the arm."""
    notes: list[Note] = []
    if speedup and al_all is not None and speedup.low > al_all * AL_SLACK:
        notes.append(note(Code.SPEEDUP_ABOVE_AL, _words.above_al(speedup, al_all)))
    if speedup and speedup.method == "welch":
        notes.append(note(Code.SMALL_N, _words.small_n(speedup.blocks)))
    greedy = record.config.sampling.temperature == 0 and record.config.method.pinned is None
    if (
        same
        and greedy
        and same.exact_share < (1.0 if same.self_exact_share is None else same.self_exact_share)
    ):
        notes.append(note(Code.OUTPUT_DIFFERS, _words.differs(same)))
    return notes


def _run_notes(
    arms: Sequence[Arm],
    cells: Sequence[_Cell],
    dropped: set[Key],
    blocks: int,
    unfinished: str | None,
    failed: Sequence[failures.BlockFailure],
) -> tuple[Note, ...]:
    """Every arm's findings and the run's own."""
    notes = [n for arm in arms for n in arm.validity]
    if unfinished:
        notes.append(note(Code.UNFINISHED, unfinished))
    if failed:
        notes.append(note(Code.BLOCK_FAILED, _words.block_failed([f.sentence for f in failed])))
    if not cells:
        notes.append(note(Code.NOTHING_SUCCEEDED, _words.no_cell([f.reason for f in failed])))
    if blocks and len(dropped) / blocks > DROPPED_LIMIT:
        notes.append(note(Code.HOST_BUSY, _words.dropped(len(dropped), blocks), "invalid"))
    sessions: dict[Key, set[str]] = {}
    for cell in cells:
        sessions.setdefault(cell.key, set()).add(cell.record.session_id)
    mixed = sum(len(ids) > 1 for ids in sessions.values())
    if mixed:
        notes.append(note(Code.MIXED_SESSIONS, _words.mixed(mixed)))
    return gravest_first(notes)


def _unfinished(run: Run, cells: Sequence[_Cell]) -> str | None:
    """What the plan asked for and the run does not hold, because of a budget or an interruption."""
    try:
        plan = check_plan(run.manifest["plan"], "run.json")
    except (KeyError, SpecbenchError):
        return None  # not a plan of this version: then nothing is claimed
    asked = plan.repeat.blocks
    counts = Counter(cell.key for cell in cells)
    missing, engines = [], len({table.name for table in plan.engine})
    for comparison in plan.comparisons():
        whole = sum(n == 2 * len(comparison.arms) for (of, _), n in counts.items() if of == comparison.id)
        if whole < asked:
            where = f" of {comparison.arms[0].config.engine.name}" if engines > 1 else ""
            missing.append(f"{whole} of {asked} blocks{where} at concurrency {comparison.concurrency}")
    return _words.unfinished(missing) if missing else None
