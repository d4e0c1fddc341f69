"""Seconds a token and speedup of any method over batch, context, draft length and sparsity.

One algebra for every method (`methods`), over one ledger (`ledger`, `timing`):

    T_round = combine(T_draft(k), T_verify(tokens))          tokens = 1 + verified drafts
    AL      = 1 + coverage · Σ p_j                           p_j: first j drafts accepted
    TPOT    = T_round / AL           speedup = AL · T_step / T_round

`combine` adds (serial), takes the larger (overlapped, PEARL 2408.11850) or hides a share (SSD 2603.03251). Where
drafts are sometimes missing (coverage c < 1), a step of `batch` sequences verifies nothing with chance (1 − c)^batch
and otherwise the mean number of drafts, which is exact at batch 1. Upper bounds: AL for a lossless method at equal
batch; with drafts for free, AL · T_step / T_verify; an oracle that has every draft accepted, (k + 1) · T_step / T_round.

In an overlapped round the drafter goes on while the target verifies, so a round whose drafts are all accepted has no
bonus token, and one with a rejection has drafted in vain: the next waits for its drafts. A round is kernels only unless
an engine's overhead is given, so speedups are upper estimates. Intervals are the held-out errors of the kernels; without
an overhead their slow ends hold in addition what was seen in an engine.

Boundary: predicts; it measures nothing. Everything broadcasts as numpy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models_roofline.acceptance import Acceptance, AnyAcceptance, as_acceptance
from models_roofline.architecture import Architecture
from models_roofline.arrays import Floats, at_least, share, share_or_none
from models_roofline.errors import RooflineError
from models_roofline.experts import Routing
from models_roofline.families import load_model
from models_roofline.formats import kv_value_bytes
from models_roofline.hardware import Device, find_device
from models_roofline.ledger import forward
from models_roofline.memory import Footprint, cache_bytes, check_fits
from models_roofline.methods import DraftOptions, Method, find_method
from models_roofline.prediction import Prediction
from models_roofline.profile import Profile, profile_for
from models_roofline.timing import Launch, StepTime, step_time

HIT_RATE = 0.85
"""Share of rounds whose drafts were made ahead for the outcome that came; 80 to 90 % is reported for SSD."""


SEEN_ROUND_S, SEEN_DRAFTING_S = 1.207e-3, 2.135e-3
"""In vLLM on H100 a round took so long beyond its parts, and all drafting with an EAGLE head so long (SpecDecode-Bench,
arXiv 2601.11580)."""


@dataclass(frozen=True)
class Settings:
    """How the model is run; what all cells of one prediction share."""

    kv: str = "bf16"
    tp: int = 1
    launch: Launch = "graph"
    routing: Routing = "independent"
    overlap: float = 0.0
    """How far the drafts of one request use the same experts: 0 independent, 1 all the same."""
    draft_tp: int | None = None
    """Devices of the drafter; None: as many as the target's."""
    hit_rate: float = HIT_RATE
    graph_sizes: tuple[int, ...] | None = None
    """Rows of the captured graphs: a step is padded to the next, and beyond the largest runs eagerly."""
    tree_nodes: int | None = None
    """Drafted tokens of a verification tree, root apart; None: a chain of k."""
    overhead_s: float | None = None
    """What an engine adds to every round with drafts beyond its kernels: sampling, scheduling, host work. None: not
    known, so none, and the slow end of each interval holds `SEEN_ROUND_S` and `SEEN_DRAFTING_S`."""
    check_memory: bool = True


def predict(
    target: Architecture | str,
    device: Device | str,
    *,
    method: str = "none",
    k: ArrayLike = 0,
    batch: ArrayLike = 1,
    context: ArrayLike = 1024,
    acceptance: AnyAcceptance | str | float | Sequence[float] | None = None,
    draft: DraftOptions | Architecture | str | None = None,
    keep_projection: ArrayLike = 1.0,
    keep_kv: ArrayLike = 1.0,
    profile: Profile | None = None,
    settings: Settings | None = None,
) -> Prediction:
    """Predict every cell of a grid. Models, devices and acceptance may be given by name, as on the command line.

    `k` drafted tokens (bonus not counted), `batch` sequences, `context` cached tokens, `keep_projection` and `keep_kv`
    shares in (0, 1]: scalars or arrays that broadcast against each other, as numpy's do, so lists of one length are
    taken pairwise; `grid` makes every combination. `acceptance` (a rate, marginals, or as `parse_acceptance` reads it)
    is needed where k > 0.
    Raises RooflineError that names the flag: unknown method, no acceptance, a context beyond the model's, memory.
    """
    how, row = settings or Settings(), find_method(method)
    target = load_model(target) if isinstance(target, str) else target
    device = find_device(device) if isinstance(device, str) else device
    kept = as_acceptance(acceptance, k)
    axes = _Axes.of(k, batch, context, keep_projection, keep_kv)
    _check(target, row, axes, kept, how)
    options = _draft_options(draft)
    drafter = row.draft_architecture(target, options) if axes.drafts else None
    if drafter is not None:
        _check_window(drafter, axes)
    need = _footprint(target, drafter, row, axes, how)
    if how.check_memory:
        check_fits(need, axes.batch, axes.context, device, how.tp)
    clock = _Clock(profile or profile_for(device), how, axes)
    rounds = _rounds(target, row, clock, _Yield.of(kept, axes), _Drafter.of(drafter, row, options, clock))
    return Prediction(
        method=row, target=target, device=device, basis=clock.profile.basis,
        batch=axes.batch, context=axes.context, k=axes.k,
        keep_projection=axes.keep_projection, keep_kv=axes.keep_kv,
        prefill_s=clock.prefill_s(target), memory_bytes=need.total(axes.batch),
        overhead_known=how.overhead_s is not None, **rounds,
    )  # fmt: skip


def _draft_options(draft: DraftOptions | Architecture | str | None) -> DraftOptions:
    if draft is None or isinstance(draft, DraftOptions):
        return draft or DraftOptions()
    return DraftOptions(load_model(draft) if isinstance(draft, str) else draft)


# --- one round --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Yield:
    """What a step keeps: tokens over all steps, the share of steps with a draft, and p_k, all of a draft accepted."""

    al: Floats
    coverage: float
    whole: Floats

    @classmethod
    def of(cls, acceptance: AnyAcceptance | None, axes: _Axes) -> _Yield:
        if acceptance is None or not axes.drafts:
            return cls(np.ones_like(axes.k), 1.0, np.ones_like(axes.k))
        if isinstance(acceptance, Acceptance):
            return cls(acceptance.al_all(axes.k), acceptance.coverage, acceptance.survival(axes.k))
        shares = {point.coverage for point in acceptance.points}
        if len(shares) > 1:
            raise RooflineError(
                "--coverage: acceptance by context needs one coverage for all of its contexts."
            )
        at = axes.context
        return cls(acceptance.al_all(axes.k, at), shares.pop(), acceptance.survival(axes.k, at))

    def tokens(self, row: Method, drafts: NDArray[np.bool_]) -> Floats:
        """Tokens a step: an overlapped round that keeps all its drafts has no bonus token."""
        bonus = self.coverage * self.whole if row.timing == "overlapped" else 0.0
        return np.where(drafts, np.maximum(self.al - bonus, 1.0), self.al)


def _rounds(
    target: Architecture, row: Method, clock: _Clock, kept: _Yield, drafter: _Drafter
) -> dict[str, Any]:
    """The fields of a prediction that a round decides."""
    axes, how = clock.axes, clock.how
    drafts = axes.k > 0
    al = kept.tokens(row, drafts)
    some = 1 - (1 - kept.coverage) ** axes.batch
    share = np.divide(kept.coverage, some, out=np.ones_like(some), where=some > 0)
    dense = clock.step(target, tokens=1, sparse=False)
    step = clock.step(target, tokens=1)
    verify = clock.step(target, tokens=1 + _nodes(row, axes, how) * share)
    t_draft = np.where(drafts, drafter.seconds + row.lookup_share * verify.total_s, 0.0)
    exposed = _exposed(row, t_draft, verify.total_s, kept.whole, how)
    chance = np.where(drafts, some, 0.0)
    idle = np.where(drafts, row.lookup_share * step.total_s, 0.0)
    terms = {name: _mix(chance, verify.terms[name], step.terms[name]) for name in verify.terms} | {
        "draft": _mix(chance, exposed, idle),
        "overhead": chance * (how.overhead_s or 0.0),
    }
    t_round = _mix(chance, verify.total_s + exposed + (how.overhead_s or 0.0), step.total_s + idle)
    error = terms["draft"] * drafter.error
    low = _mix(chance, verify.low_s, step.low_s) + terms["draft"] + terms["overhead"] - error
    high = _mix(chance, verify.high_s, step.high_s) + terms["draft"] + terms["overhead"] + error
    unseen = chance * _unseen(row, drafter, how)
    # Of a speedup only what differs from the plain step can err, and never more than the whole round.
    apart = np.minimum(np.abs(t_round - dense.total_s) / t_round, 1) / t_round
    speedup = al * (dense.total_s / t_round)
    return {
        "al": al, "t_step_s": step.total_s, "t_verify_s": verify.total_s, "t_draft_s": t_draft, "t_round_s": t_round,
        "round_low_s": np.maximum(low, 0), "round_high_s": high + unseen, "terms": terms,
        "bound": al * (dense.total_s / step.total_s),
        "bound_free_draft": al * (dense.total_s / _mix(chance, verify.total_s, step.total_s)),
        "bound_oracle": (1 + axes.k) * (dense.total_s / t_round),
        "speedup": speedup,
        "speedup_low": speedup / (1 + apart * (high - t_round) + unseen / t_round),
        "speedup_high": speedup * (1 + apart * (t_round - low)),
    }  # fmt: skip


def _unseen(row: Method, drafter: _Drafter, how: Settings) -> Floats:
    """Seconds a round that an engine of unknown overhead may add: what was seen in one."""
    if how.overhead_s is not None:
        return np.zeros(())
    drafting = np.maximum(SEEN_DRAFTING_S - drafter.seconds, 0.0)
    return SEEN_ROUND_S + (drafting if row.passes != "none" and row.timing == "serial" else np.zeros(()))


def _mix(chance: Floats, drafted: Floats, plain: Floats) -> Floats:
    """Mean over steps with and without drafts; exactly `plain` where no step drafts."""
    return np.where(chance > 0, plain + chance * (drafted - plain), plain)


def _exposed(row: Method, t_draft: Floats, t_verify: Floats, whole: Floats, how: Settings) -> Floats:
    """The part of drafting that a round waits for: all of it where its drafts could not be made ahead."""
    if row.timing == "serial":
        return t_draft
    ahead = whole if row.timing == "overlapped" else how.hit_rate
    return ahead * np.maximum(t_draft - t_verify, 0.0) + (1 - ahead) * t_draft


def _nodes(row: Method, axes: _Axes, how: Settings) -> Floats:
    if how.tree_nodes is not None:
        return np.where(axes.k > 0, float(how.tree_nodes), 0.0)
    return axes.k * row.nodes_per_draft


@dataclass(frozen=True)
class _Axes:
    k: Floats
    batch: Floats
    context: Floats
    keep_projection: Floats
    keep_kv: Floats

    @classmethod
    def of(
        cls,
        k: ArrayLike,
        batch: ArrayLike,
        context: ArrayLike,
        keep_projection: ArrayLike,
        keep_kv: ArrayLike,
    ) -> _Axes:
        return cls(
            at_least("--k", k, 0, "drafted tokens"),
            at_least("--batch", batch, 1, "sequences"),
            at_least("--context", context, 1, "tokens"),
            share("--keep-projection", keep_projection),
            share("--keep-kv", keep_kv),
        )

    @property
    def drafts(self) -> bool:
        return bool((self.k > 0).any())


@dataclass(frozen=True)
class _Clock:
    """Times a forward pass of an architecture at the axes of the prediction."""

    profile: Profile
    how: Settings
    axes: _Axes

    def step(
        self, arch: Architecture, *, tokens: ArrayLike, sparse: bool = True, tp: int | None = None
    ) -> StepTime:
        ops = forward(
            arch,
            batch=self.axes.batch,
            context=self.axes.context,
            tokens=tokens,
            kv=self.how.kv,
            tp=tp or self.how.tp,
            keep_projection=self.axes.keep_projection if sparse else 1.0,
            keep_kv=self.axes.keep_kv if sparse else 1.0,
            routing=self.how.routing,
            overlap=self.how.overlap,
        )
        return step_time(ops, self.profile, launch=self.how.launch, graph_sizes=self.how.graph_sizes)

    def prefill_s(self, arch: Architecture) -> Floats:
        """Seconds to take in a prompt of `context` tokens, one sequence, kernels launched eagerly as engines do."""
        prompt = self.axes.context
        ops = forward(
            arch, batch=1, context=1, tokens=prompt, head_tokens=1, kv=self.how.kv, tp=self.how.tp,
            routing=self.how.routing,
        )  # fmt: skip
        return step_time(ops, self.profile, launch="eager").total_s


@dataclass(frozen=True)
class _Drafter:
    """Seconds that a drafter's passes take in one round, and their relative error."""

    seconds: Floats
    error: Floats

    @classmethod
    def of(cls, arch: Architecture | None, row: Method, options: DraftOptions, clock: _Clock) -> _Drafter:
        if arch is None:
            return cls(np.zeros(()), np.zeros(()))
        k = clock.axes.k
        once = row.passes == "once"
        tokens = np.maximum(k, 1) if once else np.asarray(1.0 + options.stage_k)
        one = clock.step(arch, tokens=tokens, sparse=False, tp=clock.how.draft_tp)
        passes = np.where(k > 0, 1.0 if once else np.maximum(k / options.stage_al, 1.0), 0.0)
        return cls(passes * one.total_s, one.high_s / one.total_s - 1)


# --- what is refused --------------------------------------------------------------------------------------


def _check(
    target: Architecture, row: Method, axes: _Axes, acceptance: AnyAcceptance | None, how: Settings
) -> None:
    at_least("--overhead-ms", (how.overhead_s or 0) * 1e3, 0, "milliseconds")
    share_or_none("--hit-rate", how.hit_rate)
    at_least("--tp", how.tp, 1, "devices")
    if how.draft_tp is not None:
        at_least("--draft-tp", how.draft_tp, 1, "devices")
    if how.graph_sizes is not None:
        at_least("--graph-sizes", how.graph_sizes or 0, 1, "rows")
    if how.tree_nodes is not None and at_least("--tree-nodes", how.tree_nodes, 1, "nodes") < axes.k.max():
        raise RooflineError(
            f"--tree-nodes: a tree that is {int(axes.k.max())} deep (--k) has at least as many nodes, "
            f"not {how.tree_nodes}."
        )
    kv_value_bytes(how.kv)
    if axes.drafts and row.name == "none":
        raise RooflineError("--k: method none drafts nothing; use --k 0 or name a --method.")
    if axes.drafts and acceptance is None:
        raise RooflineError("--acceptance: needed where --k is above 0, as in --acceptance 0.8 or al=2.8.")
    _check_window(target, axes)


def _check_window(arch: Architecture, axes: _Axes) -> None:
    window = arch.max_context
    if window and (reach := float((axes.context + axes.k).max())) > window:
        raise RooflineError(
            f"--context: {int(reach)} tokens (drafts included) are beyond the {window} that {arch.name} was made for."
        )


def _footprint(
    target: Architecture, drafter: Architecture | None, row: Method, axes: _Axes, how: Settings
) -> Footprint:
    reach = axes.context + axes.k
    need = Footprint(target.weight_bytes / how.tp, cache_bytes(target, reach, how.kv, how.tp))
    # A drafter that runs while the target does has a device of its own.
    if drafter is None or row.timing != "serial":
        return need
    tp = how.draft_tp or how.tp
    copies = axes.k.max() if row.head_each else 1
    cache = cache_bytes(drafter, reach, how.kv, tp) if row.kv == "own" else 0.0
    return Footprint(need.weights + float(copies * row.draft_bytes(drafter)) / tp, need.per_sequence + cache)


def ceilings(prediction: Prediction) -> dict[str, Floats]:
    """What no schedule of drafting can pass where every step drafts: overlapping gains at most 2 over serial rounds,
    and a round of at most k + 1 tokens takes at least its drafts, so speedup ≤ (k + 1) T_step / T_draft(k) (derived
    from PEARL's round, 2408.11850)."""
    per_token = prediction.t_draft_s / (prediction.k + 1)
    serial = prediction.t_draft_s + prediction.t_verify_s
    overlapped = np.maximum(prediction.t_draft_s, prediction.t_verify_s)
    with np.errstate(divide="ignore"):
        return {"overlap_gain": serial / overlapped, "draft_rate": prediction.t_step_s / per_token}
