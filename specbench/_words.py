"""The sentences of a summary: the verdict, why, advice on findings, and the environment's labels.

Boundary: every number comes from a record and nothing is computed but the cost of a step that two of them
imply. Whether an arm gained follows from its interval alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from specbench.cell import CellRecord, Note
from specbench.results import Arm, Equality, Group, Ratio, reading
from specbench.validity import Code


def interval(ratio: Ratio) -> str:
    """Such as 1.21× [1.15, 1.27]."""
    return f"{ratio.estimate:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


# --- the verdict ------------------------------------------------------------------------------------------


def verdict(
    arms: Sequence[Arm],
    paid: Mapping[str, Sequence[str]],
    notes: Sequence[Note],
    engines: Mapping[str, str] | None = None,
) -> str:
    """The answer: measured acceptance first, pinned acceptance in a sentence of its own.

    `paid` holds, by `config_id`, the categories on which an arm surely gained; `notes` the run's findings,
    of which an invalid one opens the verdict; `engines`, by `config_id`, the engine's name where there are several.
    """
    arms = _placed(arms, engines)
    if not any(arm.metrics.get("ok") or arm.metrics.get("not_streamed") for arm in arms):
        return "Nothing succeeded, so there is nothing to say about speculative decoding here."
    candidates = [arm for arm in arms if not arm.baseline]
    if not candidates:
        return "Only the baseline was measured, so there is no speedup to report."
    void = [n.advice for n in notes if n.severity == "invalid" and n.code != Code.SPECULATION_INACTIVE]
    sentences = [f"Do not use these figures. {void[0]}"] if void else []
    sentences += _judge([arm for arm in candidates if not arm.pinned], paid)
    pinned = [arm for arm in candidates if arm.pinned and arm.speedup]
    if pinned:
        sentences.append(f"With acceptance pinned by the engine (its text is invalid): {_list(pinned)}.")
    return " ".join(sentences)


def _placed(arms: Sequence[Arm], engines: Mapping[str, str] | None, always: bool = True) -> list[Arm]:
    """The arms with the words for where each ran in the place of its engine: ` on vllm at concurrency 4`.

    `engines` are named where there are several, the concurrency where it differs (or `always`, on one engine).
    """
    said = len({arm.concurrency for arm in arms}) > 1 or (always and not engines)
    return [replace(arm, engine=_place(arm, (engines or {}).get(arm.config_id), said)) for arm in arms]


def _place(arm: Arm, engine: str | None, concurrency: bool) -> str:
    on = f" on {engine}" if engine else ""
    return on + (f" at concurrency {arm.concurrency}" if concurrency else "")


_OPENING = {
    "gain": "Speculative decoding paid here: {arms}.",
    "same": "Speculative decoding made no measurable difference here: {arms}.",
    "loss": "Speculative decoding did not pay here: {arms}.",
    "few": "Too few blocks to tell whether speculative decoding pays here: {arms}.",
}
_FURTHER = {
    "same": "No measurable difference: {arms}.",
    "loss": "A loss: {arms}.",
    "few": "Too few blocks to tell: {arms}.",
}


def _judge(arms: Sequence[Arm], paid: Mapping[str, Sequence[str]]) -> list[str]:
    of = {kind: [arm for arm in arms if reading(arm.speedup) == kind] for kind in _OPENING}
    if of["loss"] and not of["gain"]:
        # One sentence answers the question: an arm whose interval holds 1 did not pay either.
        of = {"loss": of["same"] + of["loss"], "few": of["few"]}
    sentences: list[str] = []
    for kind, mine in of.items():
        if mine:
            words = _FURTHER if sentences else _OPENING
            sentences.append(words[kind].format(arms=_list(mine)))
    sentences += _where_it_paid([arm for arm in arms if reading(arm.speedup) in ("same", "loss")], paid)
    return sentences + _not_compared([arm for arm in arms if arm.speedup is None])


def _list(arms: Iterable[Arm]) -> str:
    """Each method once, the fastest first, with its interval at each concurrency."""
    texts: dict[str, list[str]] = {}
    for arm in sorted(arms, key=lambda arm: -_estimate(arm)):
        if arm.speedup:
            seen = texts.setdefault(arm.label, [])
            seen.append(f"{interval(arm.speedup)}{arm.engine}")
    return "; ".join(f"{label} gave {listed(seen)}" for label, seen in texts.items())


def _estimate(arm: Arm) -> float:
    return arm.speedup.estimate if arm.speedup else 0.0


def _where_it_paid(arms: Iterable[Arm], paid: Mapping[str, Sequence[str]]) -> list[str]:
    """Categories that an arm without a gain on the whole did gain on."""
    found = []
    for arm in arms:
        mine = [g for g in arm.groups if g.category in paid.get(arm.config_id, ()) and g.speedup]
        if mine and len(arm.groups) > 1:
            mine.sort(key=lambda g: -g.speedup.estimate if g.speedup else 0.0)
            names = ", ".join(f"{g.category} ({g.speedup.estimate:.2f}×)" for g in mine[:3] if g.speedup)
            found.append(f"{arm.label} paid on {names}{arm.engine}")
    return [f"Yet {'; '.join(found)}."] if found else []


def _not_compared(arms: Iterable[Arm]) -> list[str]:
    """Arms without a speedup, a sentence for each reason."""
    by_reason: dict[str, list[str]] = {}
    for arm in arms:
        why = arm.reasons.get("speedup", "it has no baseline")
        by_reason.setdefault(why, []).append(f"{arm.label}{arm.engine}")
    return [f"{_some(who)} not compared: {why}." for why, who in by_reason.items()]


def _some(who: Sequence[str]) -> str:
    """Three names at most, with the verb."""
    if len(who) == 1:
        return f"{who[0]} was"
    return f"{listed(who if len(who) <= 3 else [*who[:2], f'{len(who) - 2} more'])} were"


# --- why --------------------------------------------------------------------------------------------------


def explanations(arms: Sequence[Arm], engines: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """One or two sentences an arm: what it kept per step, the bound, what a step cost, best and worst text."""
    arms = _placed(arms, engines, always=False)
    bases = {arm.comparison: arm for arm in arms if arm.baseline}
    lines = (_explain(arm, bases.get(arm.comparison)) for arm in arms if not arm.baseline)
    return tuple(line for line in lines if line)


def _explain(arm: Arm, baseline: Arm | None) -> str | None:
    al_all = arm.metrics.get("al_all")
    if al_all is None:
        return None
    parts = [
        f"{arm.label}{arm.engine}: {al_all:.2f} tokens a step (AL_all){_acceptance(arm)}, which bounds its speedup at {al_all:.2f}×."
    ]
    if arm.speedup and arm.speedup.settled:
        parts.append(_cost(al_all / arm.speedup.estimate, al_all))
    if spread := _spread(arm):
        parts.append(spread)
    if energy := _energy(arm, baseline):
        parts.append(energy)
    return " ".join(parts)


def _acceptance(arm: Arm) -> str:
    coverage, rate = arm.metrics.get("coverage"), arm.metrics.get("acceptance_rate")
    if coverage is None or rate is None:
        return ""
    return f" from drafting in {coverage:.0%} of the steps and keeping {rate:.0%} of the drafted tokens"


def _cost(cost: float, al_all: float) -> str:
    """What a step cost against a baseline step, implied by AL_all / speedup."""
    if cost > al_all:
        return f"A step cost {cost:.2f} baseline steps, more than the {al_all:.2f} tokens it brought."
    return f"A step cost {cost:.2f} baseline steps (drafting, wider verification and overhead)."


def _energy(arm: Arm, baseline: Arm | None) -> str | None:
    """What a token took of the device, where that is known; beside the baseline's of the same device."""
    name = "energy_per_token_j"
    joules, whose = arm.metrics.get(name), arm.reasons.get(name)
    if joules is None:
        return None
    theirs = baseline.metrics.get(name) if baseline and baseline.reasons.get(name) == whose else None
    beside = "" if theirs is None else f", the baseline's {theirs:.3g} J"
    return f"A token took {joules:.3g} J{beside} ({whose})."


def _spread(arm: Arm) -> str | None:
    known = sorted(
        (g for g in arm.groups if g.speedup and g.speedup.settled),
        key=lambda g: g.speedup.estimate if g.speedup else 0.0,
    )
    if len(known) < 2:
        return None
    return f"Best on {_group(known[-1])}, least on {_group(known[0])}."


def _group(group: Group) -> str:
    al = f", AL_all {group.al_all:.2f}" if group.al_all is not None else ""
    return f"{group.category} ({group.speedup.estimate if group.speedup else 0.0:.2f}×{al})"


# --- advice on findings that need several cells -----------------------------------------------------------


def above_al(ratio: Ratio, al_all: float) -> str:
    """For `speedup-above-al`."""
    return (
        f"A lossless speedup cannot exceed AL_all = {al_all:.2f} at equal batch, and this one is "
        f"{interval(ratio)}: check that both arms ran the same model, batch and prompts."
    )


def small_n(blocks: int) -> str:
    """For `small-n`."""
    return (
        f"The interval rests on {blocks} block{'s' if blocks != 1 else ''} and an assumed least spread of 2 %: "
        "run 8 or more for an exact one (repeat.blocks, or --blocks with --resume)."
    )


def differs(same: Equality) -> str:
    """For `output-differs-from-baseline`."""
    itself = (
        ""
        if same.self_exact_share is None
        else f"; the baseline repeats itself in {same.self_exact_share:.0%}"
    )
    where = (
        "" if same.first_divergence_median is None else f", from character {same.first_divergence_median:.0f}"
    )
    return (
        f"{1 - same.exact_share:.0%} of the greedy replies differ from the baseline's{where}{itself}: "
        "batching numerics can do this; check quality before relying on the speedup."
    )


def dropped(count: int, blocks: int) -> str:
    """For `host-busy` of a run."""
    were = "block was" if blocks == 1 else "blocks were"
    return f"{count} of {blocks} {were} dropped because other work ran on the host: run again on a quiet one."


def unfinished(missing: Sequence[str]) -> str:
    """For `unfinished`."""
    what = "; ".join(missing)
    return f"The plan asked for more than was measured ({what}): a larger --budget, or `run` with --resume, fills it."


def block_failed(sentences: Sequence[str]) -> str:
    """For `block-failed`: the first one whole, the others counted."""
    more = f" ({len(sentences) - 1} more failed.)" if len(sentences) > 1 else ""
    return f"{_closed(sentences[0])} Mend it and run with --resume.{more}".replace("block", "Block", 1)


def no_cell(reasons: Sequence[str]) -> str:
    """For `nothing-succeeded` of a run without cells."""
    why = f" Its first block failed: {_closed(reasons[0])}" if reasons else ""
    return f"The run holds no finished cell: finish it with --resume.{why}"


def _closed(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def mixed(blocks: int) -> str:
    """For `mixed-sessions`."""
    return (
        f"{blocks} blocks hold cells of different sessions and give no ratio: run them again with --resume."
    )


# --- environment ------------------------------------------------------------------------------------------


def environment(records: Sequence[CellRecord]) -> dict[str, Any]:
    """Label to value, in display order; what differs between cells is listed, what is unknown left out."""
    found: dict[str, Any] = {}
    for label, read in _ENVIRONMENT.items():
        values = list(dict.fromkeys(value for r in records if (value := read(r)) not in (None, "", ())))
        if values:
            found[label] = values[0] if len(values) == 1 else ", ".join(map(str, values))
    if records:
        found["Started (UTC)"] = min(r.wall_time_utc for r in records)
    several = len({r.config.engine.name for r in records}) > 1
    argv = {
        f"{r.config.method.label} on {r.facts.engine}" if several else r.config.method.label: " ".join(
            r.facts.argv
        )
        for r in records
        if r.facts.argv
    }
    return found | {f"Command ({label})": command for label, command in sorted(argv.items())}


_ENVIRONMENT: dict[str, Any] = {
    "CPU": lambda r: r.machine.cpu,
    "Cores": lambda r: r.machine.cores,
    "Memory": lambda r: f"{r.machine.memory_bytes / 2**30:.1f} GiB",
    "GPU": lambda r: ", ".join(r.machine.gpus),
    "Driver": lambda r: r.machine.driver,
    "System": lambda r: r.machine.os,
    "Python": lambda r: r.machine.python,
    "Engine": lambda r: f"{r.facts.engine} {r.facts.engine_version or '(version unknown)'}",
    "Engine threads": lambda r: r.facts.threads,
    "Slots": lambda r: r.facts.slots,
    "Context per slot (tokens)": lambda r: r.facts.context_tokens,
    "Model": lambda r: r.config.model,
    "Precision": lambda r: r.facts.precision,
    "Model SHA-256": lambda r: r.facts.model_sha256,
    "Draft SHA-256": lambda r: r.facts.draft_sha256,
    "Chat template SHA-256": lambda r: r.facts.template_sha256,
    "Split": lambda r: r.config.workload.file or r.config.workload.split,
    "Split SHA-256": lambda r: r.facts.split_sha256,
    "History of earlier turns": lambda r: r.config.workload.history,
    "History SHA-256": lambda r: r.facts.history_sha256,
    "Output limit (tokens)": lambda r: r.config.workload.max_tokens,
    "Stop": lambda r: r.config.workload.stop,
    "Temperature": lambda r: r.config.sampling.temperature,
    "Seed": lambda r: r.seed,
}
