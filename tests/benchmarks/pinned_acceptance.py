"""Does pinned acceptance do what it says? `python -m tests.benchmarks.pinned_acceptance [--drafts 4000]`.

llama.cpp with the small catalogue model as its own draft, k = 3, marginals pinned at 0.8, 0.6 and 0.4, replies fixed at
256 tokens, driven as any plan is. Printed are the marginals over all drafts, as engine and suite define them, and over
whole drafts only: a draft near the token limit is cut to what may still be emitted, which no position beyond the cut
can survive, so a cell's marginals lie a little below the pinned ones. Some minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.run import Runner
from specbench import trace
from specbench.plan import check_plan

RATES = (0.8, 0.6, 0.4)
TOKENS = 256
PER_REPLY = (TOKENS - 1) / (1 + sum(RATES))
"""Drafts of one reply: what is emitted after prefill over the mean tokens of a step."""


CATEGORIES = ("coding", "math", "qa", "reasoning", "roleplay", "stem", "summarization", "writing")


def plan(drafts: int, categories: Sequence[str] = CATEGORIES) -> dict[str, Any]:
    """One block, so two runs of the same prompts, with at least `drafts` drafts in all."""
    prompts = math.ceil(drafts / PER_REPLY / 2 / len(categories) * 1.05)
    return {
        "name": "pinned",
        "seed": 7,
        "model": "smollm2-135m",
        "workload": {
            "split": "qualitative",
            "categories": list(categories),
            "prompts_per_category": prompts,
            "history": "own",
            "max_tokens": TOKENS,
            "stop": "fixed",
            "prompts": "ids",
        },
        "repeat": {"blocks": 1, "restart": "never"},
        "engine": [{"name": "llamacpp"}],
        "method": [
            {"name": "draft-simple", "draft": "smollm2-135m", "k": 3, "acceptance": {"pinned": list(RATES)}}
        ],
    }


@dataclass(frozen=True)
class Draft:
    """One draft: how long it was, and how much of it was accepted."""

    length: int
    accepted: int


def drafts_of(row: Any) -> Iterator[Draft]:
    """The drafts of one reply, from the step of each frame. A draft is cut to what may follow beside the bonus token."""
    steps: dict[int, int] = {}
    for step, tokens in zip(row.frame_step, row.frame_tokens, strict=True):
        steps[int(step)] = steps.get(int(step), 0) + int(tokens)
    left = int(row.output_tokens) - steps.pop(0)
    for emitted in steps.values():
        length = min(len(RATES), left - 1)
        if length:
            yield Draft(length, emitted - 1)
        left -= emitted


def marginals(drafts: Sequence[Draft]) -> list[float]:
    """Share of the drafts in which the first j tokens were accepted, for each j."""
    return [sum(d.accepted >= j for d in drafts) / len(drafts) for j in range(1, len(RATES) + 1)]


def main() -> None:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafts", type=int, default=4000)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        Runner(check_plan(plan(parser.parse_args().drafts), "pinned_acceptance"), out).run()
        _report(trace.load(out))


def _report(run: trace.Run) -> None:
    rows = run.requests[~run.requests["warmup"]]
    counted = sum(r.steps_with_draft or 0 for r in run.records)
    accepted = [_accepted(run, position) for position in range(1, len(RATES) + 1)]
    drafts = [draft for row in rows.itertuples() for draft in drafts_of(row)]
    whole = [draft for draft in drafts if draft.length == len(RATES)]
    print(
        f"{len(rows)} replies, tokens {sorted(set(rows['output_tokens']))}, status {sorted(set(rows['status']))}"
    )
    print(
        f"drafts: {counted} by the server's counters, {len(drafts)} from the frames, {len(whole)} of them whole"
    )
    print(
        f"drafted tokens: {int(rows['drafted'].sum())} by the replies, {sum(d.length for d in drafts)} from the frames"
    )
    print("pinned marginals            " + _line(RATES))
    print("over all drafts (counters)  " + _line([a / counted for a in accepted]))
    print("over whole drafts (frames)  " + _line(marginals(whole)))
    print(
        f"AL_drafted {1 + sum(accepted) / counted:.3f} over all drafts, {1 + sum(marginals(whole)):.3f} over whole ones"
    )
    for name in ("al_all", "al_drafted", "coverage"):
        print(name, [round(r.metrics[name] or math.nan, 4) for r in run.records])
    print("findings:", sorted({note.code for record in run.records for note in record.validity}))


def _accepted(run: trace.Run, position: int) -> int:
    table = run.acceptance
    return int(table[(table["scope"] == "cell") & (table["position"] == position)]["accepted"].sum())


def _line(values: Sequence[float]) -> str:
    return "  ".join(f"{value:.4f}" for value in values)


if __name__ == "__main__":
    main()
