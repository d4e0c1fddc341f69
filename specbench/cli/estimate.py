"""What a run will take and what it can detect, before it is run: estimates for `--dry-run`, labelled as such."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runners.measure import Job
    from runners.run import Runner

PAIR_NOISE = 0.04
"""Spread of one block's log ratio with threads = cores − 1: 3.7 % in a demo run, rounded up (docs/measurements.md)."""
_START_S = 1.0
_PROMPT_CHARACTERS_PER_TOKEN = 4.0
_READ_BYTES_PER_S = 12e9
"""A CPU core streaming weights: the rough end of an estimate that measured cells replace."""
_PREFILL_TOKENS_PER_S = 240.0


def run_seconds(runner: Runner, jobs: Sequence[Job]) -> tuple[float, str]:
    """Seconds that `jobs` will take, and what the figure rests on: cells already here, or a rough model."""
    from specbench import trace

    known = [record.window_s + _START_S for record in trace.read_cells(runner.run_dir)]
    if known:
        return len(jobs) * sum(known) / len(known), f"from {len(known)} cells already measured"
    return sum(
        _rough_s(runner, job) for job in jobs
    ), "rough: from the model's size; a first block tells better"


def _rough_s(runner: Runner, job: Job) -> float:
    config = job.arm.config
    prompts = runner.split.prompts
    requests = sum(len(prompt.turns) for prompt in prompts)
    prompt_tokens = (
        sum(len(turn) for prompt in prompts for turn in prompt.turns) / _PROMPT_CHARACTERS_PER_TOKEN
    )
    path = job.launch.files.get("model")
    step_s = path.stat().st_size / _READ_BYTES_PER_S if path else 0.02
    decode_s = requests * config.workload.max_tokens * step_s / math.sqrt(config.concurrency)
    return _START_S + prompt_tokens / _PREFILL_TOKENS_PER_S + decode_s


def detectable_effect(blocks: int, pair_noise: float = PAIR_NOISE) -> dict[str, Any]:
    """Smallest relative change of TPOT that `blocks` pairs tell from noise (two-sided 5 %, power 80 %)."""
    from scipy import stats

    degrees = max(blocks - 1, 1)
    quantiles = stats.t.ppf(0.975, degrees) + stats.t.ppf(0.8, degrees)
    return {
        "effect": math.expm1(float(quantiles) * pair_noise / math.sqrt(blocks)),
        "pair_noise": pair_noise,
        "blocks": blocks,
    }
