"""A `Summary` written by hand for tests of the reports: one comparison of several methods on a small model.

The figures are made, not measured, but they hang together as real ones do: AL_all − 1 = coverage ×
(AL_drafted − 1), speedup ≤ AL_all, and the marginals fall with the position. `demo()` is a whole run,
`make_arm` one arm of it, for the odd cases.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from specbench.cell import Note
from specbench.results import Arm, Distribution, Equality, Group, Position, Ratio, Summary

CATEGORIES = ("coding", "humanities", "math", "qa", "rag", "summarization", "translation", "writing")


def ratio(estimate: float, half: float = 0.04, blocks: int = 10) -> Ratio:
    """A ratio whose interval is `half` wide on both sides of the estimate, on a relative scale."""
    return Ratio(
        estimate=estimate,
        low=estimate / (1 + half),
        high=estimate * (1 + half),
        confidence=0.95,
        blocks=blocks,
        method="wilcoxon" if blocks >= 8 else "welch",
        t_low=estimate / (1 + 1.1 * half),
        t_high=estimate * (1 + 1.1 * half),
    )


def distribution(median_s: float, spread: float, n: int = 220, seed: int = 0) -> Distribution:
    """Log-normal values with a given median, and the percentiles that n supports."""
    rng = random.Random(seed)
    values = sorted(median_s * rng.lognormvariate(0, spread) for _ in range(n))

    def rank(share: float, needs: int) -> float | None:
        return values[min(int(share * n), n - 1)] if n >= needs else None

    return Distribution(
        n=n,
        mean=sum(values) / n if n else None,
        p50=rank(0.5, 1),
        p90=rank(0.9, 29),
        p95=rank(0.95, 59),
        p99=rank(0.99, 299),
        values=tuple(values),
    )


EMPTY = Distribution(n=0, mean=None, p50=None, p90=None, p95=None, p99=None)


def make_arm(label: str = "ngram-simple k=8", **changes: Any) -> Arm:
    """One measured arm: 1.21 times as fast as its baseline, drafting in 42 % of the steps."""
    seed = sum(map(ord, label))
    rng = random.Random(seed)
    speedup = changes.get("speedup", ratio(1.21))
    estimate = speedup.estimate if speedup else 1.0
    al_drafted, coverage = 2.0 + estimate, 0.42
    metrics: dict[str, float | None] = {
        "tpot_s": 0.0146 / estimate,
        "ttft_s": 0.181,
        "output_tps": 61.2 * estimate,
        "al_all": 1 + coverage * (al_drafted - 1),
        "al_drafted": al_drafted,
        "coverage": coverage,
        "acceptance_rate": (al_drafted - 1) / 8,
        "requests": 220.0,
        "ok": 220.0,
        "error_rate": 0.0,
        "ttft_p99_s": None,
    }
    made = Arm(
        config_id=f"{seed:06x}{len(label):06x}",
        comparison="c0ffee",
        engine="llamacpp",
        engine_version="b6814",
        model="smollm2-135m",
        method=label.split()[0],
        label=label,
        k=8,
        concurrency=1,
        baseline=False,
        pinned=False,
        cells=20,
        blocks=10,
        metrics=metrics,
        reasons={"ttft_p99_s": "p99 needs 299 requests, this arm has 220"},
        speedup=speedup,
        speedup_output_tps=estimate * 0.99,
        groups=tuple(
            Group(c, 28, ratio(estimate * rng.uniform(0.8, 1.35), 0.07), 0.0146 / estimate, 1.8, 0.42, 0.24)
            for c in CATEGORIES
        ),
        positions=positions(0.72, 8),
        equality=Equality(220, 0.973, 0.991, 118.0, 1.0, 220),
        tpot_s=distribution(0.0146 / estimate, 0.2, seed=seed),
        ttft_s=distribution(0.181, 0.5, seed=seed + 1),
        validity=(),
    )
    return replace(made, **changes)


def positions(conditional: float, k: int, drafts: int = 4180) -> tuple[Position, ...]:
    """Geometric survival: every position is accepted with the same conditional probability."""
    return tuple(Position(j, drafts, conditional**j, conditional, "server") for j in range(1, k + 1))


def baseline(**changes: Any) -> Arm:
    """The arm that the others are divided by."""
    plain = make_arm(
        "none",
        method="none",
        k=None,
        baseline=True,
        speedup=None,
        speedup_output_tps=None,
        positions=(),
        equality=None,
        tpot_s=distribution(0.0146, 0.12, seed=7),
        ttft_s=distribution(0.18, 0.5, seed=8),
    )
    groups = tuple(replace(g, speedup=None, al_all=1.0, coverage=0.0) for g in plain.groups)
    groups = tuple(replace(g, acceptance_rate=None) for g in groups)
    undrafted = plain.metrics | {"al_all": 1.0, "al_drafted": None, "coverage": 0.0, "acceptance_rate": None}
    reasons = plain.reasons | {"al_drafted": "nothing was drafted", "acceptance_rate": "nothing was drafted"}
    return replace(plain, **{"groups": groups, "metrics": undrafted, "reasons": reasons} | changes)


BUSY = Note(
    code="host-busy",
    severity="warning",
    advice="2 of 10 blocks were dropped because other processes used 14 % of the machine; stop them, or add blocks.",
)
DIFFERS = Note(
    code="output-differs-from-baseline",
    severity="warning",
    advice="Greedy output differs from the baseline's on 2.7 % of the prompts, more than the baseline differs from itself.",
)
SMALL = Note(
    code="percentile-unsupported", severity="note", advice="p99 needs 299 requests; add blocks or prompts."
)


def demo() -> Summary:
    """A run with a gain, a loss, a draw, a pinned arm, two findings and an environment."""
    arms = (
        baseline(),
        make_arm("ngram-simple k=8", validity=(SMALL,)),
        make_arm("ngram-mod k=16", speedup=ratio(1.012), positions=positions(0.5, 16)),
        make_arm(
            "draft-simple k=4 p_min=0.5",
            speedup=ratio(0.61, 0.02),
            positions=positions(0.81, 4),
            equality=Equality(220, 0.973, 0.991, 118.0, 1.0, 220),
            validity=(DIFFERS,),
        ),
        make_arm(
            "draft-simple k=4 pinned=0.8,0.6,0.4",
            pinned=True,
            speedup=ratio(0.74, 0.02),
            positions=(),
            equality=None,
            reasons={"coverage": "the engine forces the acceptance, so drafting is not its own"},
        ),
    )
    return Summary(
        run="ngram-on-smollm2",
        path="runs/ngram-on-smollm2",
        verdict=(
            "Speculative decoding paid with one method of three: ngram-simple k=8 decoded 1.21× [1.16, 1.26] "
            "as fast as plain decoding, ngram-mod k=16 made no measurable difference, and "
            "draft-simple k=4 p_min=0.5 was slower, 0.61× [0.60, 0.62]."
        ),
        ok=True,
        model="smollm2-135m",
        model_sha256="5a1395716f7913741cc51d98581b9b1228d80987a9f7d3664106742eb06bba83",
        engine="llamacpp",
        engine_version="b6814",
        arms=arms,
        validity=(BUSY, DIFFERS),
        environment={
            "CPU": "AMD EPYC 7763 64-Core Processor",
            "Cores": 2,
            "Memory": "8.0 GiB",
            "GPU": None,
            "Operating system": "Linux 6.1.0-26-amd64 (Debian 12)",
            "Threads": 1,
            "Context": "4Ki tokens in 4 slots",
            "Split": {
                "name": "qualitative",
                "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            },
            "Seed": 7,
            "Arguments": [
                "llama-server",
                "--model",
                "SmolLM2-135M-Instruct-Q8_0.gguf",
                "--threads",
                "1",
                "--parallel",
                "4",
                "--ctx-size",
                "16384",
                "--spec-type",
                "ngram-simple",
                "--draft-max",
                "8",
            ],
        },
        dropped_blocks=2,
        blocks=10,
        explanations=(
            "ngram-simple k=8 emitted 1.93 tokens per target step (AL_all), the most that it could have gained; "
            "a step cost 1.60 baseline steps, which leaves 1.21×.",
            "draft-simple k=4 p_min=0.5 emitted 1.68 tokens per step, but each round also ran the draft "
            "model four times: a step cost 2.75 baseline steps, which leaves 0.61×.",
        ),
    )


def many(count: int) -> Summary:
    """A run with a baseline and `count` arms of long, similar names at two concurrencies."""
    arms = [baseline(config_id="base1"), baseline(config_id="base4", concurrency=4, comparison="c0ffe4")]
    for index in range(count):
        label = f"draft-simple k={index + 2} p_min=0.5 draft=smollm2-135m-instruct-q8_0"
        gain = ratio(0.4 * 1.2**index)
        arms.append(
            make_arm(label, config_id=f"arm{index:03d}", speedup=gain, concurrency=1 + 3 * (index % 2))
        )
    return replace(demo(), arms=tuple(arms))
