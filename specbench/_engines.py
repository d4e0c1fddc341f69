"""Engines side by side: what a run that holds several of them shows beyond each one.

Boundary: cells and arms in, records of `specbench.results` out. A speedup is read within one engine only; no
ratio is taken between engines, whose precision, kernels and threads differ. What is set side by side is each
engine's own speedup, acceptance and step time, and the plain greedy text of one engine against another's,
which says how far they run the same model and nothing about any drafting.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from specbench._words import listed
from specbench.cell import CellRecord
from specbench.equality import Texts, pairs
from specbench.results import Agreement, Arm, EngineFacts, Idea, Side, SideBySide
from specbench.vocabulary import idea

if TYPE_CHECKING:
    import pandas as pd


class Cell(Protocol):
    """What is read of a cell."""

    @property
    def record(self) -> CellRecord:
        """Its `cell.json`."""

    @property
    def requests(self) -> pd.DataFrame:
        """Its rows of requests."""

    @property
    def texts(self) -> Texts:
        """Replies by (prompt_id, turn)."""


def engine_names(arms: Iterable[Arm]) -> dict[str, str]:
    """Arm to its engine's name, with the version where the run holds two of one engine."""
    arms = list(arms)
    versions: dict[str, set[str | None]] = {}
    for arm in arms:
        versions.setdefault(arm.engine, set()).add(arm.engine_version)
    return {
        arm.config_id: f"{arm.engine} {arm.engine_version or ''}".strip()
        if len(versions[arm.engine]) > 1
        else arm.engine
        for arm in arms
    }


def several(arms: Iterable[Arm]) -> bool:
    """Whether arms of more than one engine are there."""
    return len(set(engine_names(arms).values())) > 1


def side_by_side(arms: Sequence[Arm], cells: Sequence[Cell]) -> SideBySide | None:
    """The engines of a run beside each other; None where it holds one."""
    if not several(arms):
        return None
    name_of = engine_names(arms)
    names = list(dict.fromkeys(name_of.values()))
    of = {name: [c for c in cells if name_of[c.record.config_id] == name] for name in names}
    engines = tuple(
        _facts(name, of[name], [a for a in arms if name_of[a.config_id] == name]) for name in names
    )
    return SideBySide(
        engines,
        tuple(_ideas(arms, name_of)),
        tuple(_agreements(of)),
        tuple(_remarks(engines, of)),
    )


def _facts(name: str, cells: Sequence[Cell], arms: Sequence[Arm]) -> EngineFacts:
    def one(field: str) -> Any:
        values = dict.fromkeys(getattr(cell.record.facts, field) for cell in cells)
        known = [value for value in values if value is not None]
        return known[0] if len(known) == 1 else None

    selves = [arm.equality.self_exact_share for arm in arms if arm.equality]
    return EngineFacts(
        name,
        one("engine_version"),
        one("precision"),
        one("threads"),
        one("model_sha256"),
        next((share for share in selves if share is not None), None),
    )


# --- the same idea on each engine -------------------------------------------------------------------------


def _ideas(arms: Sequence[Arm], name_of: Mapping[str, str]) -> Iterable[Idea]:
    """Measured arms by concurrency and idea, plain decoding first; an idea needs no second engine to be listed."""
    groups: dict[tuple[int, bool, str], list[Arm]] = {}
    for arm in arms:
        if not arm.pinned:
            groups.setdefault((arm.concurrency, not arm.baseline, idea(arm.method)), []).append(arm)
    for (concurrency, _, word), group in sorted(groups.items(), key=lambda item: item[0]):
        yield Idea(word, concurrency, tuple(_side(arm, arms, name_of[arm.config_id]) for arm in group))


def _side(arm: Arm, arms: Iterable[Arm], engine: str) -> Side:
    base = next((a for a in arms if a.baseline and a.comparison == arm.comparison), None)
    al_all = arm.metrics.get("al_all")
    return Side(
        config_id=arm.config_id,
        engine=engine,
        detail=arm.label.partition(" ")[2],
        step_s=arm.metrics.get("step_s"),
        baseline_step_s=base.metrics.get("step_s") if base else None,
        step_cost=al_all / arm.speedup.estimate if al_all is not None and arm.speedup else None,
    )


# --- the same model on each engine ------------------------------------------------------------------------


def _agreements(of: Mapping[str, Sequence[Cell]]) -> Iterable[Agreement]:
    """Each pair of engines on the prompts that both answered greedily without drafting, one text a prompt."""
    texts = {name: _plain_texts(cells) for name, cells in of.items()}
    for one, other in itertools.combinations(texts, 2):
        found = pairs(texts[one], texts[other])
        if found:
            differing = [pair.common for pair in found if not pair.equal]
            yield Agreement(
                (one, other),
                len(found),
                sum(pair.equal for pair in found) / len(found),
                sum(pair.share for pair in found) / len(found),
                float(median(differing)) if differing else None,
            )


def _plain_texts(cells: Sequence[Cell]) -> dict[Any, str]:
    """The baseline's first greedy text of each prompt, at the least concurrency that was measured.

    A later turn counts only where earlier answers were replayed: its prompt differs between engines otherwise.
    """
    found: dict[Any, str] = {}
    for cell in _baselines(cells):
        own = cell.record.config.workload.history == "own"
        if cell.record.config.sampling.temperature == 0:
            for key, text in cell.texts.items():
                if not (own and key[1]):
                    found.setdefault(key, text)
    return found


def _baselines(cells: Iterable[Cell]) -> list[Cell]:
    mine = [cell for cell in cells if cell.record.baseline]
    least = min((cell.record.config.concurrency for cell in mine), default=0)
    mine = [cell for cell in mine if cell.record.config.concurrency == least]
    return sorted(mine, key=lambda cell: (cell.record.block, cell.record.position))


def _prompt_tokens(cells: Iterable[Cell]) -> dict[Any, float]:
    """Tokens of each prompt as the engine counted them, of the baseline's first run of it."""
    found: dict[Any, float] = {}
    for cell in _baselines(cells):
        rows = cell.requests[~cell.requests["warmup"].to_numpy(dtype=bool)]
        counts = rows["prompt_tokens"].to_numpy(dtype=float, na_value=np.nan)
        for prompt, turn, count in zip(rows["prompt_id"], rows["turn"], counts, strict=True):
            if np.isfinite(count):
                found.setdefault((prompt, turn), float(count))
    return found


# --- what is matched, in words ----------------------------------------------------------------------------


def _remarks(engines: Sequence[EngineFacts], of: Mapping[str, Sequence[Cell]]) -> list[str]:
    """Differences first, then what is the same; what no engine says is not mentioned."""
    said = [
        _one_or_many(engines, "Precision", lambda e: e.precision,
                     "a step's time is that of an engine with its precision"),
        _one_or_many(engines, "Engine threads", lambda e: e.threads,
                     "absolute times do not compare, speedups within each engine do"),
        _one_or_many(engines, "Model file", lambda e: e.model_sha256 and e.model_sha256[:12],
                     "it is one model in several formats, or several models"),
        _prompts(of),
    ]  # fmt: skip
    found = [remark for remark in said if remark]
    return [text for same, text in sorted(found, key=lambda remark: remark[0])]


def _one_or_many(
    engines: Sequence[EngineFacts], what: str, read: Callable[[EngineFacts], Any], so: str
) -> tuple[bool, str] | None:
    """Whether all engines say the same of a thing, and the sentence about it."""
    values = {engine.name: read(engine) for engine in engines}
    known = {value for value in values.values() if value is not None}
    if not known:
        return None
    if len(known) == 1 and None not in values.values():
        return True, f"{what}: {known.pop()} on all engines."
    by_value: dict[Any, list[str]] = {}
    for name, value in values.items():
        by_value.setdefault("unknown" if value is None else value, []).append(name)
    each = "; ".join(f"{value} on {listed(names)}" for value, names in by_value.items())
    return (
        (False, f"{what} is not the same: {each}; {so}.") if len(known) > 1 else (False, f"{what}: {each}.")
    )


def _prompts(of: Mapping[str, Sequence[Cell]]) -> tuple[bool, str] | None:
    """Whether the engines counted the same number of tokens in each prompt."""
    counts = {name: found for name, cells in of.items() if (found := _prompt_tokens(cells))}
    shared = set.intersection(*(set(found) for found in counts.values())) if counts else set()
    if len(counts) < 2 or not shared:
        return None
    asked = {cell.record.config.workload.prompts for cells in of.values() for cell in cells}
    sent = "sent as token ids" if asked == {"ids"} else "sent as messages, each engine applying its template"
    differing = [key for key in shared if len({found[key] for found in counts.values()}) > 1]
    if not differing:
        whom = "all engines" if len(counts) == len(of) else listed(list(counts))
        return True, f"Prompts, {sent}: the same number of tokens on {whom} in each of {len(shared)}."
    means = {name: sum(found[key] for key in differing) / len(differing) for name, found in counts.items()}
    each = ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())
    return False, (
        f"Prompts, {sent}: {len(differing)} of {len(shared)} differ in tokens between engines "
        f"(means of those: {each}), so the engines do not see the same prompt."
    )
