"""The many names of acceptance, as one table: what each engine and paper prints, and the way to and from AL.

The pivot is AL: tokens that a step with a draft emits, bonus included, at k drafts. A name whose value depends on
more than AL (the rate at the first position, the constant rate) is converted as if the conditional rate were the same
at every position, and says so. Formulas: AL = 1 + k · rate; σ = AL / (k + 1) (MoESD 2505.19645, whose text needs the
bonus in σ); AL = (1 − α^(k+1)) / (1 − α) (Leviathan et al. 2211.17192).

Boundary: numbers to numbers. AL over all steps needs the share of steps with a draft: `al_of_all_steps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models_roofline.acceptance import geometric_sum, rate_of_al
from models_roofline.errors import RooflineError


@dataclass(frozen=True)
class Naming:
    """One name: its value for AL at k, AL for its value, who uses it."""

    name: str
    meaning: str
    from_al: Callable[[float, int], float]
    to_al: Callable[[float, int], float]
    used_by: str
    assumes_constant_rate: bool = False


def _al_of_rate(rate: float, k: int) -> float:
    return 1 + float(geometric_sum(rate, k))


NAMINGS: dict[str, Naming] = {
    naming.name: naming
    for naming in (
        Naming(
            "accept_length",
            "tokens per step, bonus included (AL, τ)",
            lambda al, k: al,
            lambda value, k: value,
            "vLLM mean_acceptance_length; SGLang spec_accept_length; TensorRT-LLM acceptance length; llama.cpp "
            "mean len; Spec-Bench mean accepted tokens; SPEED-Bench, EAGLE, DSpark",
        ),
        Naming(
            "accepted_length",
            "accepted drafts per step, bonus excluded (MAL, E[accepted])",
            lambda al, k: al - 1,
            lambda value, k: value + 1,
            "llama.cpp #3649; batch speculation (2310.18813)",
        ),
        Naming(
            "acceptance_rate",
            "accepted over proposed drafts",
            lambda al, k: (al - 1) / k,
            lambda value, k: 1 + k * value,
            "vLLM draft_acceptance_rate; SGLang spec_accept_rate; llama.cpp draft_n_accepted / draft_n; SpecKV",
        ),
        Naming(
            "accepted_per_position",
            "accepted drafts over verified positions (drafts and root)",
            lambda al, k: (al - 1) / (k + 1),
            lambda value, k: 1 + (k + 1) * value,
            "papers that divide by the width of the verification",
        ),
        Naming(
            "sigma",
            "emitted tokens over the largest possible, k + 1",
            lambda al, k: al / (k + 1),
            lambda value, k: value * (k + 1),
            "MoESD",
        ),
        Naming(
            "alpha",
            "constant conditional rate; also accepted over tested drafts, up to the first rejection",
            rate_of_al,
            _al_of_rate,
            "Leviathan et al.; llama.cpp synthetic acceptance by mean length",
            assumes_constant_rate=True,
        ),
        Naming(
            "first_position_rate",
            "P(first draft accepted), p_1",
            rate_of_al,
            _al_of_rate,
            "entry 0 of vLLM's and llama.cpp's per-position rates; DeepSeek-V3 second-token acceptance",
            assumes_constant_rate=True,
        ),
    )
}
"""By name. Fractions, not percent; vLLM's benchmark file prints acceptance_rate in percent."""


def convert(value: float, source: str, target: str, k: int) -> float:
    """The value under another name, for k ≥ 1 drafts.

    Raises RooflineError for an unknown name and where the value is impossible (AL outside [1, k+1]).
    """
    if k < 1:
        raise RooflineError(f"k: a conversion needs at least one draft, not {k}.")
    al = _naming(source).to_al(value, k)
    # A billionth is allowed for what conversion itself rounds.
    if not 1 - 1e-9 <= al <= (k + 1) * (1 + 1e-9):
        raise RooflineError(
            f"{source} = {value:g} is impossible with k = {k}: it means {al:g} tokens per step, outside [1, {k + 1}]."
        )
    return _naming(target).from_al(min(max(al, 1.0), k + 1.0), k)


def al_of_all_steps(al_drafted: float, coverage: float) -> float:
    """AL over all steps from that over the steps with a draft, 1 + coverage · (AL − 1)."""
    return 1 + coverage * (al_drafted - 1)


def al_of_drafted_steps(al_all: float, coverage: float) -> float:
    """Inverse of `al_of_all_steps`. Raises RooflineError where no step has a draft."""
    if not 0 < coverage <= 1:
        raise RooflineError(f"coverage: {coverage:g} lies outside (0, 1]; with no draft there is no such AL.")
    return 1 + (al_all - 1) / coverage


DRAFT_LENGTHS: dict[str, int] = {
    "vllm.num_speculative_tokens": 0,
    "sglang.speculative_num_steps": 0,
    "sglang.speculative_num_draft_tokens": -1,
    "tensorrt_llm.max_draft_len": 0,
    "llama_cpp.spec_draft_n_max": 0,
    "openvino.num_assistant_tokens": 0,
    "transformers.num_assistant_tokens": 0,
    "dflash.block_size": -1,
    "dspark.block_size": 0,
    "specdecode_bench.tree_k": -1,
    "leviathan.gamma": 0,
}
"""What to add to an engine's or paper's setting to get k, the drafts without root or bonus (SGLang: chains only)."""


def drafts_of(setting: str, value: int) -> int:
    """k for an engine's setting, such as `sglang.speculative_num_draft_tokens`."""
    if setting not in DRAFT_LENGTHS:
        raise RooflineError(f"{setting!r} is no known draft length; known: {', '.join(DRAFT_LENGTHS)}.")
    return value + DRAFT_LENGTHS[setting]


def _naming(name: str) -> Naming:
    if name not in NAMINGS:
        raise RooflineError(f"{name!r} is no name of acceptance; known: {', '.join(NAMINGS)}.")
    return NAMINGS[name]
