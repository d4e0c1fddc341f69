"""From seeded runs on disk to the answer: ratios inside blocks, findings, words, and what is left out."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specbench
from specbench import _words, trace
from specbench.cell import Acceptance, CellRecord, Method
from specbench.errors import SpecbenchError
from specbench.metrics import METRICS
from specbench.results import Arm, Ratio, Summary, cells_json, reading, to_dict
from specbench.summarise import summary
from tests.make_run import CATEGORIES, PromptSpec, make_run

PINNED = Method(name="draft-simple", k=3, draft="smollm2-135m", pinned=(0.8, 0.6, 0.4))


def change(run: Path, edit: Callable[[CellRecord], dict[str, Any]]) -> Path:
    """Rewrite cells of a run as if they had been measured so."""
    for directory in trace.cell_dirs(run):
        record = trace.read_record(directory)
        changed = record.model_copy(update=edit(record))
        (directory / "cell.json").write_text(changed.model_dump_json())
    return run


def drafting(seen: Summary) -> Arm:
    return next(arm for arm in seen.arms if not arm.baseline)


def codes(seen: Summary) -> set[str]:
    return {note.code for note in seen.validity}


@pytest.fixture(scope="module")
def ten(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    run = make_run(tmp_path_factory.mktemp("runs") / "ten", blocks=10, diverge=0.2)
    return summary(run)


# --- the numbers ------------------------------------------------------------------------------------------


def test_speedup_is_found_again(ten: Summary) -> None:
    arm = drafting(ten)
    assert arm.speedup is not None
    assert arm.speedup.method == "wilcoxon"
    assert arm.speedup.blocks == arm.blocks == 10
    # The builder divides by 1.3 at the median prompt, before noise moves which prompt that is.
    assert arm.speedup.estimate == pytest.approx(1.3, rel=0.04)
    assert arm.speedup.high / arm.speedup.low < 1.06
    assert ten.ok


def test_every_arm_has_every_metric_and_a_reason_for_each_null(ten: Summary) -> None:
    for arm in ten.arms:
        assert set(arm.metrics) == set(METRICS)
        assert all(value is not None or arm.reasons[name] for name, value in arm.metrics.items())


def test_arms_take_their_cells_together(ten: Summary) -> None:
    baseline, arm = ten.arms
    assert (baseline.baseline, arm.baseline) == (True, False)
    assert (arm.cells, arm.metrics["requests"]) == (20, 20 * 22)
    assert arm.tpot_s.n == arm.ttft_s.n == 440
    assert arm.tpot_s.p99 is not None
    assert arm.tpot_s.mean == pytest.approx(arm.metrics["tpot_s"])
    assert len(arm.tpot_s.values) == 440
    assert baseline.metrics["al_all"] == 1.0


def test_identity_of_the_two_lengths_where_no_reply_was_cut(tmp_path: Path) -> None:
    # One step a token after prefill, or a draft of which everything counts: no reply ends inside a draft
    # where nothing is accepted.
    run = make_run(
        tmp_path / "r", methods=("none", Method(name="ngram-simple", k=8, pinned=(0.0,))), blocks=1
    )
    arm = drafting(summary(run))
    assert arm.metrics["al_drafted"] == 1.0
    assert arm.metrics["al_all"] == 1.0


def test_groups_are_the_categories_with_their_own_ratios(ten: Summary) -> None:
    groups = {group.category: group for group in drafting(ten).groups}
    assert set(groups) == set(CATEGORIES)
    assert sum(group.requests for group in groups.values()) == 440
    coding, roleplay = groups["coding"], groups["roleplay"]
    assert coding.speedup is not None
    assert roleplay.speedup is not None
    assert coding.speedup.low > roleplay.speedup.high
    assert coding.acceptance_rate is not None
    assert roleplay.acceptance_rate is not None
    assert coding.acceptance_rate > roleplay.acceptance_rate


def test_positions_fall_and_multiply(ten: Summary) -> None:
    positions = drafting(ten).positions
    assert [p.position for p in positions] == list(range(1, 9))
    marginals = [p.marginal for p in positions]
    assert marginals == sorted(marginals, reverse=True)
    assert positions[0].conditional == positions[0].marginal
    assert math.prod(p.conditional or 0.0 for p in positions) == pytest.approx(marginals[-1])
    # Accepted tokens per draft are the sum of the marginals.
    assert 1 + sum(marginals) == pytest.approx(drafting(ten).metrics["al_drafted"])


def test_positions_use_one_scope_and_missing_depths_count_as_never_accepted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", blocks=1, prompts=(PromptSpec("q-1", "qa"),))

    def table(record: CellRecord) -> dict[str, Any]:
        if record.baseline:
            return {}
        deep = Acceptance(scope="cell", position=2, drafts=10, accepted=4, source="s")
        per_request = Acceptance(scope="request", request=0, position=1, drafts=99, accepted=99, source="q")
        first = Acceptance(scope="cell", position=1, drafts=10, accepted=5, source="s")
        return {"acceptance": (first, per_request, *((deep,) if record.position > 1 else ()))}

    seen = drafting(summary(change(run, table)))
    assert [(p.position, p.drafts, p.marginal) for p in seen.positions] == [(1, 20, 0.5), (2, 20, 0.2)]


def test_equality_against_the_baseline_and_of_the_baseline(ten: Summary) -> None:
    same = drafting(ten).equality
    assert same is not None
    assert (same.compared, same.self_compared, same.self_exact_share) == (440, 220, 1.0)
    assert 0 < same.exact_share < 1
    assert same.exact_share < same.mean_matching_prefix < 1
    assert same.first_divergence_median is not None
    assert "output-differs-from-baseline" in codes(ten)


def test_equal_texts_are_no_finding(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", blocks=1))
    same = drafting(seen).equality
    assert same is not None
    assert (same.exact_share, same.first_divergence_median) == (1.0, None)
    assert "output-differs-from-baseline" not in codes(seen)


# --- blocks -----------------------------------------------------------------------------------------------


def test_drift_between_blocks_does_not_touch_the_ratio(tmp_path: Path) -> None:
    quiet = drafting(summary(make_run(tmp_path / "a", blocks=4, noise=0.0))).speedup
    drifting = drafting(summary(make_run(tmp_path / "b", blocks=4, noise=0.05))).speedup
    assert quiet is not None
    assert drifting is not None
    assert quiet.high / quiet.low < drifting.high / drifting.low


def test_one_busy_block_of_five_is_dropped_before_its_ratio_is_read(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", busy_blocks=(2,)))
    arm = drafting(seen)
    assert (seen.dropped_blocks, seen.blocks, arm.blocks, arm.cells) == (1, 5, 4, 8)
    assert arm.speedup is not None
    assert arm.speedup.blocks == 4
    assert seen.ok
    busy = next(note for note in seen.validity if note.code == "host-busy")
    assert busy.severity == "warning"
    assert "In 2 of 10 cells" in busy.advice


def test_more_than_a_fifth_busy_voids_the_run(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", busy_blocks=(1, 2)))
    assert not seen.ok
    assert seen.validity[0].code == "host-busy"
    assert seen.validity[0].severity == "invalid"
    assert "2 of 5 blocks" in seen.verdict


def test_all_blocks_busy_leaves_latencies_and_no_ratio(tmp_path: Path) -> None:
    arm = drafting(summary(make_run(tmp_path / "r", blocks=2, busy_blocks=(0, 1))))
    assert arm.speedup is None
    assert "other work" in arm.reasons["speedup"]
    assert arm.metrics["tpot_s"] is not None
    assert arm.equality is not None
    assert arm.equality.compared == 88


def test_sessions_are_not_mixed_in_a_ratio(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", blocks=3)
    change(run, lambda r: {"session_id": "later"} if r.block == 1 and r.position == 3 else {})
    seen = summary(run)
    arm = drafting(seen)
    assert arm.speedup is not None
    assert arm.speedup.blocks == 2
    assert "mixed-sessions" in codes(seen)


def test_blocks_of_different_sessions_each_count(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", blocks=4, sessions=2))
    assert drafting(seen).blocks == 4
    assert "mixed-sessions" not in codes(seen)


def test_half_a_block_gives_no_ratio(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", blocks=2)
    last = next(r for r in trace.read_cells(run) if r.block == 1 and r.position == 3)
    trace.supersede(run, last.cell_id)
    arm = drafting(summary(run))
    assert arm.speedup is not None
    assert arm.speedup.blocks == 1


def test_few_blocks_are_called_so(ten: Summary, tmp_path: Path) -> None:
    few = summary(make_run(tmp_path / "r", blocks=2))
    arm = drafting(few)
    assert arm.speedup is not None
    assert arm.speedup.method == "welch"
    assert "small-n" in codes(few)
    assert "small-n" not in codes(ten)


# --- findings of several cells ----------------------------------------------------------------------------


def test_a_speedup_above_the_bound_is_doubted(ten: Summary, tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", blocks=3, speedup=2.5))
    assert "speedup-above-al" in codes(seen)
    assert "speedup-above-al" not in codes(ten)


def test_percentiles_are_judged_on_the_whole_arm(tmp_path: Path) -> None:
    # 22 replies a cell are too few for p90; 44 of one arm are enough.
    assert "percentile-unsupported" not in codes(summary(make_run(tmp_path / "a", blocks=1)))
    one = (PromptSpec("q-1", "qa"),)
    assert "percentile-unsupported" in codes(summary(make_run(tmp_path / "b", blocks=1, prompts=one)))


def test_speculation_that_did_not_run_has_no_speedup(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", blocks=2, speculative=False))
    arm = drafting(seen)
    assert arm.speedup is None
    assert arm.reasons["speedup"] == "speculation did not run"
    assert not seen.ok
    assert seen.verdict == "ngram-simple k=8 n=4 at concurrency 1 was not compared: speculation did not run."


def test_nothing_succeeded_is_no_zero(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", blocks=1, fail=1.0))
    assert not seen.ok
    assert seen.verdict.startswith("Nothing succeeded")
    assert all(arm.metrics["tpot_s"] is None and arm.tpot_s.n == 0 for arm in seen.arms)
    assert "nothing-succeeded" in codes(seen)


def test_run_without_cells(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"schema": 1, "plan": {}}')
    seen = summary(tmp_path)
    assert (seen.ok, seen.arms, seen.blocks) == (False, (), 0)
    assert codes(seen) == {"nothing-succeeded"}


def test_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecbenchError, match="not a run"):
        summary(tmp_path)


def test_failed_requests_show_and_do_not_stop(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", blocks=2, fail=0.1))
    arm = drafting(seen)
    assert "requests-failed" in codes(seen)
    assert arm.speedup is not None
    assert arm.metrics["error_rate"] is not None
    assert 0 < arm.metrics["error_rate"] < 0.3


# --- words ------------------------------------------------------------------------------------------------


def test_gain(ten: Summary) -> None:
    assert ten.verdict.startswith("Speculative decoding paid here: ngram-simple k=8 n=4 gave 1.3")
    assert ten.verdict.endswith("at concurrency 1.")


def test_loss_names_where_it_paid_all_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", methods=("none", "ngram-simple", "draft-simple"), blocks=8, speedup=0.7)
    verdict = summary(run).verdict
    assert verdict.startswith("Speculative decoding did not pay here: ")
    assert "draft-simple k=4 gave 0.7" in verdict
    assert "Yet " in verdict
    assert "paid on coding (1." in verdict


def test_no_difference(tmp_path: Path) -> None:
    one = tuple(PromptSpec(f"q-{i}", "qa") for i in range(12))
    run = make_run(tmp_path / "r", blocks=8, speedup=1.0, noise=0.04, prompts=one, seed=4)
    assert summary(run).verdict.startswith("Speculative decoding made no measurable difference here")


def test_a_baseline_alone_and_an_arm_alone(tmp_path: Path) -> None:
    alone = summary(make_run(tmp_path / "a", methods=("none",), blocks=1))
    assert alone.ok
    assert alone.verdict == "Only the baseline was measured, so there is no speedup to report."
    no_base = summary(make_run(tmp_path / "b", methods=("ngram-simple",), blocks=1))
    assert "the run has no baseline" in no_base.verdict
    assert drafting(no_base).speedup is None


def test_pinned_acceptance_has_its_own_sentence(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "r", methods=("none", "ngram-simple", PINNED), blocks=2, speedup=1.2, diverge=1.0
    )
    seen = summary(run)
    measured, pinned = seen.verdict.split(" With acceptance pinned ")
    assert "ngram-simple" in measured
    assert "pinned" not in measured
    assert "draft-simple k=3 pinned=0.8,0.6,0.4" in pinned
    assert "ngram-simple" not in pinned
    arm = next(arm for arm in seen.arms if arm.pinned)
    assert [round(p.marginal, 1) for p in arm.positions] == [0.8, 0.6, 0.4]
    # Its text is invalid by design, so that it differs is no finding.
    assert "output-differs-from-baseline" not in {note.code for note in arm.validity}


def test_two_concurrencies_are_two_comparisons(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "r", blocks=2, concurrency=(1, 4)))
    assert [(arm.concurrency, arm.baseline) for arm in seen.arms] == [
        (1, True),
        (1, False),
        (4, True),
        (4, False),
    ]
    assert len({arm.comparison for arm in seen.arms}) == 2
    assert seen.blocks == 4
    assert "at concurrency 1" in seen.verdict
    assert "at concurrency 4" in seen.verdict


def test_explanation_is_arithmetic_on_the_record(ten: Summary) -> None:
    arm = drafting(ten)
    al_all = arm.metrics["al_all"]
    assert al_all is not None
    assert arm.speedup is not None
    (line,) = ten.explanations
    assert f"bounds its speedup at {al_all:.2f}×" in line
    assert f"A step cost {al_all / arm.speedup.estimate:.2f} baseline steps" in line
    assert "Best on coding" in line


def test_readings_follow_the_interval_alone(ten: Summary) -> None:
    ratio = drafting(ten).speedup
    assert ratio is not None
    assert reading(replace(ratio, low=1.01, high=1.2)) == "gain"
    assert reading(replace(ratio, low=0.99, high=1.2)) == "same"
    assert reading(replace(ratio, low=0.8, high=0.99)) == "loss"
    assert _words.interval(Ratio(1.213, 1.154, 1.271, 0.95, 10, "wilcoxon")) == "1.21× [1.15, 1.27]"


def test_environment_says_what_was_run(ten: Summary) -> None:
    assert ten.environment["Engine"] == "llamacpp 2026.10.11549"
    assert "--spec-type ngram-simple" in ten.environment["Command (ngram-simple k=8 n=4)"]
    assert ten.environment["Seed"] == 0
    assert "GPU" not in ten.environment


# --- JSON -------------------------------------------------------------------------------------------------


def test_to_dict_holds_no_nan_and_round_trips(ten: Summary) -> None:
    text = json.dumps(to_dict(ten), allow_nan=False)
    back = json.loads(text)
    assert back["arms"][1]["speedup"]["estimate"] == pytest.approx(drafting(ten).speedup.estimate)  # type: ignore[union-attr]
    assert back["validity"][0].keys() == {"code", "severity", "advice"}
    assert to_dict(math.nan) is None
    assert to_dict({"a": (math.inf, 1.0)}) == {"a": [None, 1.0]}


def test_cells_json_is_one_flat_row_an_arm(ten: Summary) -> None:
    baseline, arm = cells_json(ten)
    for name in (
        "method",
        "k",
        "concurrency",
        "output_tps",
        "tpot_s",
        "al_all",
        "coverage",
        "equal_share",
        "validity",
    ):
        assert name in arm
    assert baseline["speedup"] is None
    assert arm["speedup_low"] < arm["speedup"] < arm["speedup_high"]
    assert arm["k"] == 8
    assert arm["validity"] == ["output-differs-from-baseline"]


def test_the_package_offers_it_as_a_function(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", blocks=1)
    assert specbench.summary(specbench.load(run)) == specbench.summary(str(run))
    code = "import sys, specbench; print(specbench.summary(sys.argv[1]).run)"
    first = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert first.stdout == "r\n"
