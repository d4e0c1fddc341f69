"""Speculative methods as rows of data: how drafts are made, what a draft costs, how wide verification is.

A round is draft, verify, keep (`speedup`). A row says from where its drafts come and which architecture makes
them; the cost then follows from the one ledger. `validated` names what the row was held against: a published
table, an engine that runs it, or "formula only".

Sources: speculative decoding 2211.17192 and 2302.01318; prompt lookup and n-gram as in vLLM and llama.cpp; suffix
2411.04975; REST 2311.08252; EAGLE 2401.15077, 2406.16858 and 2503.01840; Medusa 2401.10774; MTP 2412.19437;
Draft & Verify 2309.08168; LayerSkip 2404.16710; MagicDec 2408.11049; QuantSpec 2502.10424; DFlash 2602.06036;
PARD 2504.18583; Lookahead 2402.02057; PEARL 2408.11850; SSD 2603.03251; Sequoia 2402.12374.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from models_roofline import drafters
from models_roofline.architecture import Architecture
from models_roofline.arrays import at_least, share
from models_roofline.errors import RooflineError, hint
from models_roofline.formats import FORMATS
from models_roofline.quantization import with_weights

Passes = Literal["none", "each", "once"]
"""Forward passes of the drafter: none, one for each drafted token, one for all of them."""
Timing = Literal["serial", "overlapped", "hidden"]
"""Draft then verify; both at once; drafts made ahead while verification runs, of which a share is of use."""


@dataclass(frozen=True)
class DraftOptions:
    """What a user may choose about the drafter; None takes the method's default."""

    model: Architecture | None = None
    vocab: int | None = None
    """Output vocabulary of a head (vocabulary pruning)."""
    keep_layers: float | None = None
    """Share of the target's layers that a self-drafter runs."""
    kv_budget: int | None = None
    """Cached tokens a layer that a self-drafter reads."""
    stage_k: int = 0
    """Tokens that a first stage (a lookup) drafts for the drafter itself, which verifies them in one pass."""
    stage_al: float = 1.0
    """Tokens that the drafter then keeps in one pass, its own included; in [1, stage_k + 1]."""

    def __post_init__(self) -> None:
        if self.vocab is not None:
            at_least("--draft-vocab", self.vocab, 1, "tokens")
        if self.keep_layers is not None:
            share("--keep-layers", self.keep_layers)
        if self.kv_budget is not None:
            at_least("--kv-budget", self.kv_budget, 1, "tokens")
        at_least("--stage-k", self.stage_k, 0, "drafted tokens")
        if not 1 <= self.stage_al <= self.stage_k + 1:
            raise RooflineError(
                f"--stage-al: a pass over {self.stage_k} drafts (--stage-k) keeps from 1 to {self.stage_k + 1} "
                f"tokens, its own included, not {self.stage_al:g}."
            )


@dataclass(frozen=True)
class Method:
    """One way of drafting. Shares are of one verification or dimensionless."""

    name: str
    about: str
    passes: Passes = "none"
    drafter: Callable[[Architecture, DraftOptions], Architecture] | None = None
    timing: Timing = "serial"
    nodes_per_draft: int = 1
    """Tokens verified for each position of depth; above 1 only where the method verifies several guesses."""
    lookup_share: float = 0.0
    """Time to find drafts without a model, as a share of one verification."""
    shares_weights: bool = False
    """The drafter's weights are the target's own, so they need no memory."""
    head_each: bool = False
    """Each drafted position has a drafter of its own in memory."""
    kv: Literal["own", "shared", "none"] = "own"
    """Whether the drafter keeps a cache of its own, reads the target's, or has none."""
    lossless: bool = True
    validated: str = "formula only"

    def draft_architecture(self, target: Architecture, options: DraftOptions) -> Architecture | None:
        """The architecture that makes the drafts; None where no model does. Raises RooflineError."""
        _check_used(self, options)
        if self.passes == "none":
            return None
        if options.model is not None:
            return options.model
        assert self.drafter is not None
        return self.drafter(target, options)

    def draft_bytes(self, drafter: Architecture) -> int:
        """Weights of the drafter that stand beside the target's; a copy in another format shares its tables."""
        if self.shares_weights:
            return 0
        tables = drafter.embedding.bytes + (0 if drafter.tied else drafter.head.bytes)
        return drafter.weight_bytes - (tables if self.kv == "shared" else 0)


_USED_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "vocab": ("--draft-vocab", ("eagle3", "dflash", "parallel-draft", "medusa", "medusa-typical")),
    "keep_layers": ("--keep-layers", ("layer-skip", "early-exit")),
    "kv_budget": ("--kv-budget", ("sparse-kv-self",)),
    "stage_k": ("--stage-k", ("staged",)),
}
"""Options that only some methods know: field, flag and those methods."""


def _check_used(row: Method, options: DraftOptions) -> None:
    """An option that changes nothing is a mistake."""
    for name, (flag, methods) in _USED_BY.items():
        if getattr(options, name) and row.name not in methods:
            raise RooflineError(f"{flag}: method {row.name} does not use it; it is for {', '.join(methods)}.")
        if getattr(options, name) and options.model is not None and name != "stage_k":
            raise RooflineError(
                f"{flag}: --draft names a drafter that is taken as it is; give one of the two."
            )
    if options.model is not None and row.passes == "none":
        raise RooflineError(f"--draft: method {row.name} drafts without a model; leave it out.")


def _needs_model(target: Architecture, options: DraftOptions) -> Architecture:
    raise RooflineError(
        "--draft: this method drafts with a model of its own; name it, as in --draft llama-3.2-1b."
    )


def _eagle(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.eagle_head(target)


def _eagle3(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.eagle3_head(target, options.vocab)


def _p_eagle(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.p_eagle_head(target, options.vocab)


def _dflash(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.dflash_head(target, options.vocab)


def _medusa(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.medusa_head(target, options.vocab)


def _mtp(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.mtp_module(target)


def _skip(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.skipped_layers(target, 0.5 if options.keep_layers is None else options.keep_layers)


def _exit(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.skipped_layers(target, 0.25 if options.keep_layers is None else options.keep_layers)


def _quantized(target: Architecture, options: DraftOptions) -> Architecture:
    return with_weights(target, FORMATS["int4"])


def _sparse_kv(target: Architecture, options: DraftOptions) -> Architecture:
    return drafters.windowed(target, options.kv_budget or 512)


_NGRAM_SHARE = 0.005875
"""n-gram drafting takes 0.5875 % of a verification (SpecDecode-Bench 2601.11580, Llama-3.1-8B on H100)."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("none", "autoregressive decoding", validated="ByteCross A100 dense steps; errors in docs/constants.md"),
        Method(
            "ngram",
            "prompt lookup: drafts copied from the text so far; coverage below 1",
            lookup_share=_NGRAM_SHARE,
            kv="none",
            validated="formula only; llama.cpp runs it",
        ),
        Method(
            "suffix", "suffix-tree lookup over earlier output; coverage below 1", lookup_share=_NGRAM_SHARE, kv="none"
        ),
        Method("retrieval", "drafts from a datastore (REST); coverage below 1", lookup_share=_NGRAM_SHARE, kv="none"),
        Method(
            "draft-model",
            "a smaller model drafts token by token",
            "each",
            _needs_model,
            validated="SPEED-Bench table 10 (t_sd/t_ar), errors in docs/prediction.md",
        ),
        Method("eagle", "EAGLE head: one layer, the target's vocabulary", "each", _eagle,
               validated="SpecDecode-Bench's fitted costs; errors in docs/prediction.md"),
        Method(
            "eagle3",
            "EAGLE-3 head: one layer on three hidden states, pruned vocabulary",
            "each",
            _eagle3,
            validated="SPEED-Bench table 10 (t_sd/t_ar), errors in docs/prediction.md",
        ),
        Method("medusa", "Medusa heads: one head a position", "each", _medusa, head_each=True, kv="none"),
        Method("mtp", "the checkpoint's own multi-token-prediction layer", "each", _mtp),
        Method("layer-skip", "self-drafting with half of the layers", "each", _skip, shares_weights=True, kv="shared"),
        Method(
            "early-exit", "self-drafting with the first quarter of the layers", "each", _exit,
            shares_weights=True, kv="shared",
        ),
        Method("quantized-self", "self-drafting with int4 layer weights", "each", _quantized, kv="shared"),
        Method(
            "sparse-kv-self", "self-drafting over a few cached tokens (MagicDec)", "each", _sparse_kv,
            shares_weights=True, kv="shared",
        ),
        Method("dflash", "block diffusion: one pass of a drafter proposes all tokens", "once", _dflash),
        Method("parallel-draft", "PARD, P-EAGLE: one pass of a drafter trained to fill k positions", "once", _p_eagle),
        Method(
            "lookahead", "Jacobi windows and guesses from them, W = G = 15", nodes_per_draft=30, kv="none"
        ),
        Method("pearl", "a smaller model drafts while the target verifies", "each", _needs_model, "overlapped"),
        Method("ssd", "drafts made ahead for likely outcomes, on a device of their own", "each", _needs_model, "hidden"),
        Method("staged", "a drafter that is itself sped up by lookup (cascades)", "each", _needs_model),
        Method(
            "mtp-relaxed", "MTP with relaxed acceptance: the text changes", "each", _mtp, lossless=False
        ),
        Method(
            "medusa-typical", "Medusa with typical acceptance: the text changes", "each", _medusa,
            head_each=True, kv="none", lossless=False,
        ),
    )
}  # fmt: skip

ALIASES = {
    "ar": "none", "autoregressive": "none", "prompt-lookup": "ngram", "ngram-simple": "ngram", "ngram-mod": "ngram",
    "rest": "retrieval", "draft": "draft-model", "draft_model": "draft-model", "eagle2": "eagle", "eagle-3": "eagle3",
    "nextn": "mtp", "magicdec": "sparse-kv-self", "layerskip": "early-exit", "pard": "parallel-draft",
    "p-eagle": "parallel-draft", "diffusion": "dflash",
}  # fmt: skip
"""Other names of the same row, as engines and papers write them."""


def find_method(name: str) -> Method:
    """The method of that name or alias. Raises RooflineError with the nearest name."""
    known = ALIASES.get(name.lower(), name.lower())
    if known in METHODS:
        return METHODS[known]
    raise RooflineError(f"--method: {name!r} is not a method here; {hint(name, [*METHODS, *ALIASES])}")


def markdown() -> str:
    """The table of methods in docs/prediction.md."""
    lines = [
        "| method | what it is | passes of a drafter | lossless | held against |",
        "|---|---|---|---|---|",
    ]
    for row in METHODS.values():
        passes = {"none": "none", "each": "one a token", "once": "one a round"}[row.passes]
        lossless = "yes" if row.lossless else "no"
        lines.append(f"| `{row.name}` | {row.about} | {passes} | {lossless} | {row.validated} |")
    return "\n".join(lines)
