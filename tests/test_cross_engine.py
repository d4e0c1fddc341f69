"""The plan over four real engines, in a short form: those that are installed here run it and are set side by side."""

from __future__ import annotations

import os
import tomllib
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from runners import registry
from runners.base import Where
from runners.run import Runner
from specbench import trace
from specbench.plan import check_plan
from specbench.results import Summary
from specbench.summarise import summary
from specbench.vocabulary import idea, own_word

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLE = Path(__file__).parent.parent / "examples" / "cross_engine.toml"


def short(raw: dict[str, Any], engines: set[str]) -> dict[str, Any]:
    """One prompt of two categories, few tokens, one block, on the engines that are here."""
    workload = (
        raw["workload"]
        | {
            "categories": ["rag", "writing"],
            "prompts_per_category": 1,
            "max_tokens": 25,  # one by prefill, and six steps of four where every draft is kept: the limit cuts none
        }
    )
    kept = [table for table in raw["engine"] if table["name"] in engines]
    for table in kept:
        if table["name"] == "vllm":  # compiling the model would take most of the time
            table["args"] = table["args"] | {"eager": True}
    return raw | {"workload": workload, "repeat": raw["repeat"] | {"blocks": 1}, "engine": kept}


@pytest.fixture(scope="module")
def usable() -> dict[str, tuple[str, ...]]:
    """Engines of the example that can run here, with the methods each offers."""
    named = [table["name"] for table in tomllib.loads(EXAMPLE.read_text())["engine"]]
    found = {name: registry.get(name).probe(Where()) for name in named}
    here = {name: state.methods for name, state in found.items() if state.ok}
    why = "; ".join(f"{name}: {state.why_not}" for name, state in found.items() if not state.ok)
    if why and os.environ.get("SPECBENCH_ALL_ENGINES"):
        pytest.fail(f"SPECBENCH_ALL_ENGINES is set, and not all engines are here ({why})")
    if len(here) < 2:
        pytest.skip(f"fewer than two engines are usable here ({why})")
    return here


def test_each_engine_knows_every_method_of_the_example(usable: dict[str, tuple[str, ...]]) -> None:
    plan = check_plan(tomllib.loads(EXAMPLE.read_text()), "example")
    for comparison in plan.comparisons():
        for arm in comparison.arms:
            offered = usable.get(arm.config.engine.name)
            assert offered is None or own_word(arm.config.method.name, offered) in offered


@pytest.fixture(scope="module")
def directory(
    usable: dict[str, tuple[str, ...]], model: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The short form, measured."""
    raw = short(tomllib.loads(EXAMPLE.read_text()), set(usable))
    place = tmp_path_factory.mktemp("cross") / "run"
    Runner(check_plan(raw, "example"), place).run()
    return place


@pytest.fixture(scope="module")
def seen(directory: Path) -> Summary:
    """What the report says of it."""
    return summary(directory)


def test_the_engines_stand_side_by_side(usable: dict[str, tuple[str, ...]], seen: Summary) -> None:
    assert seen.side_by_side is not None
    assert {engine.name for engine in seen.side_by_side.engines} == set(usable)
    assert [found.name for found in seen.side_by_side.ideas] == ["none", "draft-model", "ngram"]
    for found in seen.side_by_side.ideas:
        assert {side.engine for side in found.sides} == set(usable)
        assert all(side.step_s and side.step_s > 0 for side in found.sides)


def test_no_engine_had_to_be_started_again_to_forget_a_run(directory: Path) -> None:
    """Two runs of each arm, one start: `restart = "never"`, and none of these drafters learns."""
    runs = [record.config_id for record in trace.read_cells(directory)]
    assert len(runs) == 2 * len(set(runs))
    assert len(list((directory / "logs").glob("*.log"))) == len(set(runs))


def test_all_engines_got_the_same_prompts(seen: Summary) -> None:
    assert seen.side_by_side is not None
    (said,) = (text for text in seen.side_by_side.remarks if text.startswith("Prompts"))
    assert said.startswith("Prompts, sent as token ids: the same number of tokens on all engines in each of ")


def test_the_target_as_its_own_draft_keeps_nearly_all_on_every_engine(seen: Summary) -> None:
    arms = [arm for arm in seen.arms if arm.method == "draft-model"]
    assert arms
    for arm in arms:
        # Three drafted tokens and the bonus: 4 a step at most, less where a reply ends inside a draft.
        assert arm.metrics["al_all"] is not None
        assert 3 < arm.metrics["al_all"] <= 4, arm.engine


def test_tokens_a_step_follow_from_coverage_and_acceptance(usable: dict[str, Any], directory: Path) -> None:
    """AL_all − 1 = coverage × (AL_drafted − 1) for every reply whose end cut no draft; where the engine does not say
    how many steps drafted (prompt lookup of OpenVINO), nothing can be held."""
    held: set[tuple[str, str]] = set()
    for record in trace.read_cells(directory):
        rows = trace.load(directory).requests
        mine = rows[(rows["cell_id"] == record.cell_id) & ~rows["warmup"]]
        for row in mine.to_dict("records"):
            known = [
                row[name] for name in ("steps", "steps_with_draft", "accepted_verified", "accepted_emitted")
            ]
            if any(pd.isna(value) for value in known) or known[1] == 0 or known[2] != known[3]:
                continue
            steps, drafts, verified = map(int, known[:3])
            after_prefill = int(row["output_tokens"]) - int(row["first_frame_tokens"])
            al_all, al_drafted = Fraction(after_prefill, steps), 1 + Fraction(verified, drafts)
            assert al_all - 1 == Fraction(drafts, steps) * (al_drafted - 1), (record.config.engine.name, row)
            held.add((record.config.engine.name, idea(record.config.method.name)))
    assert {engine for engine, method in held if method == "draft-model"} == set(usable)
    assert {engine for engine, method in held if method == "ngram"} == set(usable) - {"openvino"}
