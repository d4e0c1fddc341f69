"""How many drafts the target keeps: marginal survival of drafts, from whatever was measured.

The one quantity is p_j, the chance that the first j drafts of a step are all accepted. A step that drafts k tokens
emits AL = 1 + Σ_{j≤k} p_j, the target's own (bonus) token included (Leviathan et al. 2211.17192; SPEED-Bench). With
one conditional rate a at every position p_j = a^j and AL = (1 − a^(k+1)) / (1 − a). Where only a share `coverage`
of the steps has a draft, AL over all steps is 1 + coverage · Σ p_j.

Boundary: probabilities and expected counts; no bytes, no time. Other names of the same thing: `namings`; trees and
the choice of k: `trees`; the interchange file: `speculation_profile`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from models_roofline.arrays import Counts, Floats
from models_roofline.errors import RooflineError


@dataclass(frozen=True)
class Acceptance:
    """Survival of drafts. Methods take k as an int or an integer array and return its shape.

    Use the constructors (`from_rate`, `from_marginal`, …). Raises RooflineError naming the position where a
    value lies outside [0, 1] or where a marginal rises.
    """

    marginal: tuple[float, ...] = ()
    """p_1 … p_n as measured; empty for a constant rate."""
    tail: float | None = None
    """Conditional rate of every position after the vector; None: those positions are unknown."""
    coverage: float = 1.0
    """Share of the steps that have a draft at all; below 1 for n-gram, suffix and retrieval methods."""
    block: bool = False
    """The drafts are made together as one block, so the vector holds for its own length only."""

    def __post_init__(self) -> None:
        _check_marginals(self.marginal)
        _check_share(self.coverage, "coverage")
        if self.tail is not None:
            _check_share(self.tail, "rate")
        if self.block and self.tail is not None:
            raise RooflineError("acceptance of a block drafter cannot be extended past the measured block.")

    @classmethod
    def from_rate(cls, rate: float) -> Acceptance:
        """The same conditional rate at every position, for any k (α of Leviathan et al.)."""
        return cls(tail=float(rate))

    @classmethod
    def from_marginal(cls, marginal: Iterable[float], *, extend: bool = False) -> Acceptance:
        """p_1 … p_n. `extend` repeats the last conditional rate after them; only right for chain drafters."""
        given = cls(tuple(float(p) for p in marginal))
        if not given.marginal:
            raise RooflineError("acceptance needs at least one marginal.")
        return replace(given, tail=given.conditional[-1]) if extend else given

    @classmethod
    def from_conditional(cls, conditional: Iterable[float], *, extend: bool = False) -> Acceptance:
        """P(draft j accepted | drafts before it accepted) for j = 1 … n."""
        rates = tuple(float(rate) for rate in conditional)
        for position, rate in enumerate(rates, 1):
            _check_share(rate, "conditional rate", f" at position {position}")
        return cls.from_marginal(np.cumprod(rates).tolist(), extend=extend)

    @classmethod
    def from_al(cls, al: float, k: int) -> Acceptance:
        """The constant rate whose AL (bonus included, over the steps with a draft) at k drafts is `al`."""
        drafts = int(checked_drafts(k))
        if not 1 <= al <= drafts + 1:
            raise RooflineError(
                f"an accept length of {al:g} is impossible with k = {drafts}: it counts the bonus token and "
                f"lies in [1, {drafts + 1}]."
            )
        return cls.from_rate(rate_of_al(al, drafts))

    @classmethod
    def from_trace(cls, lengths: Sequence[int] | Mapping[int, int], k: int) -> Acceptance:
        """From the accept lengths (bonus included, 1 … k+1) of steps that each drafted k tokens.

        A list holds one length a step; a mapping is {length: steps} and may leave lengths out (no step had them).
        """
        counts = np.zeros(int(checked_drafts(k)) + 1)
        steps = lengths.items() if isinstance(lengths, Mapping) else ((length, 1) for length in lengths)
        for length, number in steps:
            if length not in range(1, k + 2):
                raise RooflineError(
                    f"accept length {length} lies outside 1 … {k + 1} (k = {k}, bonus included)."
                )
            counts[int(length) - 1] += number
        return cls.from_histogram(counts)

    @classmethod
    def from_histogram(cls, steps: ArrayLike) -> Acceptance:
        """From `steps[j]`, the number of steps with j accepted drafts, j = 0 … k (vLLM's acceptance_histogram)."""
        counts = np.asarray(steps, dtype=float)
        if counts.ndim != 1 or not np.all(np.isfinite(counts)) or np.any(counts < 0) or not counts.sum() > 0:
            raise RooflineError("an acceptance histogram needs one row of counts, none negative, not all 0.")
        if len(counts) < 2:
            raise RooflineError("an acceptance histogram needs k + 1 counts with k at least 1.")
        reached = np.cumsum(counts[::-1])[::-1]
        return cls.from_marginal((reached[1:] / counts.sum()).tolist())

    @classmethod
    def from_profile(cls, path: str | Path, k: int | None = None) -> Acceptance:
        """From a speculation_profile.json, at its own number of drafts or at another it was measured at."""
        from models_roofline.speculation_profile import read_profile

        return read_profile(path).acceptance(k)

    def with_coverage(self, coverage: float) -> Acceptance:
        """The same drafts, made in this share of the steps only."""
        return replace(self, coverage=float(coverage))

    @property
    def conditional(self) -> tuple[float, ...]:
        """p_j / p_{j−1} of the measured positions; 0 where no step came that far."""
        before = (1.0, *self.marginal[:-1])
        return tuple(p / q if q > 0 else 0.0 for p, q in zip(self.marginal, before, strict=True))

    def survival(self, position: ArrayLike) -> Floats:
        """p_j at position j ≥ 0 (p_0 = 1)."""
        j = self._known(position)
        known, beyond = self._split(j)
        return np.asarray(np.array((1.0, *self.marginal))[known] * (self.tail or 0.0) ** beyond)

    def accepted(self, k: ArrayLike) -> Floats:
        """Σ_{j≤k} p_j: accepted drafts a step with a draft, bonus excluded. In [0, k]."""
        known, beyond = self._split(self._known(k))
        sums = np.concatenate(([0.0], np.cumsum(self.marginal)))
        last = self.marginal[-1] if self.marginal else 1.0
        return np.asarray(sums[known] + last * geometric_sum(self.tail or 0.0, beyond))

    def al_drafted(self, k: ArrayLike) -> Floats:
        """Tokens emitted by a step that drafted k tokens, bonus included. In [1, k+1]."""
        return 1.0 + self.accepted(k)

    def al_all(self, k: ArrayLike) -> Floats:
        """Tokens emitted a step over all steps, 1 + coverage · Σ p_j. In [1, k+1]."""
        return 1.0 + self.coverage * self.accepted(k)

    def rate_per_draft(self, k: ArrayLike) -> Floats:
        """Accepted over proposed drafts, Σ p_j / k (vLLM's acceptance rate); NaN at k = 0."""
        drafts = self._known(k)
        return np.where(drafts > 0, self.accepted(drafts) / np.maximum(drafts, 1), np.nan)

    def _split(self, k: Counts) -> tuple[Counts, Counts]:
        """How many of k positions the vector holds, and how many follow it."""
        known = np.minimum(k, len(self.marginal))
        return known, k - known

    def _known(self, k: ArrayLike) -> Counts:
        """k as integers, all within what was measured."""
        drafts = checked_drafts(k)
        length = len(self.marginal)
        if self.block and np.any((drafts != 0) & (drafts != length)):
            wrong = int(drafts[(drafts != 0) & (drafts != length)].flat[0])
            raise RooflineError(
                f"acceptance was measured on blocks of {length} drafts and does not hold for k = {wrong}; "
                f"set k to {length} or measure k = {wrong}."
            )
        if self.tail is None and np.any(drafts > length):
            raise RooflineError(
                f"acceptance is known for {length} positions, not for k = {int(drafts.max())}; give "
                f"{int(drafts.max())} marginals, a constant rate, or a k of at most {length}."
            )
        return drafts


@dataclass(frozen=True)
class AcceptanceByContext:
    """Acceptance measured at several contexts: linear in log(context) between them, flat outside them.

    Acceptance falls with context where the drafter sees less of it than the target, for instance a drafter
    trained on, or with positions for, a shorter text. `contexts` are tokens, ascending, one for each of `points`.
    Methods broadcast k against context.
    """

    contexts: tuple[int, ...]
    points: tuple[Acceptance, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.contexts, self.contexts[1:], strict=False))
        if not self.contexts or len(self.contexts) != len(self.points) or self.contexts[0] < 1 or not rising:
            raise RooflineError("acceptance by context needs ascending contexts, each with its acceptance.")

    def survival(self, position: ArrayLike, context: ArrayLike) -> Floats:
        """p_j at that context."""
        return self._between([point.survival(position) for point in self.points], context)

    def accepted(self, k: ArrayLike, context: ArrayLike) -> Floats:
        """Σ_{j≤k} p_j at that context, bonus excluded."""
        return self._between([point.accepted(k) for point in self.points], context)

    def al_drafted(self, k: ArrayLike, context: ArrayLike) -> Floats:
        """Tokens a step with a draft at that context, bonus included."""
        return self._between([point.al_drafted(k) for point in self.points], context)

    def al_all(self, k: ArrayLike, context: ArrayLike) -> Floats:
        """Tokens a step over all steps at that context, bonus included."""
        return self._between([point.al_all(k) for point in self.points], context)

    def note(self, context: ArrayLike) -> str | None:
        """A sentence where a context lies outside the measured ones; None otherwise."""
        asked = np.asarray(context)
        if np.all((asked >= self.contexts[0]) & (asked <= self.contexts[-1])):
            return None
        return (
            f"acceptance was measured from {self.contexts[0]} to {self.contexts[-1]} tokens of context; "
            "outside, that of the nearest end is used."
        )

    def _between(self, values: list[Floats], context: ArrayLike) -> Floats:
        """Interpolate values[i] (each of k's shape) at contexts[i] to `context`."""
        # A point's place among the measured ones, as 1.25 for a quarter of the way (in the logarithm) past the second.
        place = np.interp(np.log(context), np.log(self.contexts), np.arange(len(self.contexts)))
        below = np.floor(place).astype(int)
        above = np.minimum(below + 1, len(values) - 1)
        return np.asarray(
            _pick(values, below) * (1 - (place - below)) + _pick(values, above) * (place - below)
        )


def _pick(values: list[Floats], index: Counts) -> Floats:
    shape = np.broadcast_shapes(values[0].shape, index.shape)
    stacked = np.stack([np.broadcast_to(value, shape) for value in values])
    picked: Floats = np.take_along_axis(stacked, np.broadcast_to(index, shape)[np.newaxis], axis=0)[0]
    return picked


def geometric_sum(rate: ArrayLike, terms: ArrayLike) -> Floats:
    """Σ_{j=1…terms} rate^j; exact at rate 1 (terms) and 0 (0). Broadcasts."""
    rates, number = np.broadcast_arrays(np.asarray(rate, dtype=float), np.asarray(terms))
    inner = (rates > 0) & (rates < 1)
    safe = np.where(inner, rates, 0.5)
    # expm1 and log keep the digits that 1 − rate^terms loses for rates near 1.
    closed = -safe * np.expm1(number * np.log(safe)) / (1 - safe)
    return np.where(inner, np.minimum(closed, number), np.where(rates >= 1, number, 0.0))


def rate_of_al(al: float, k: int) -> float:
    """The constant rate whose accept length at k drafts is `al` in [1, k+1]; inverse of 1 + geometric_sum."""
    if al <= 1 or k == 0:
        return 0.0
    if al >= k + 1:
        return 1.0
    return float(brentq(lambda rate: float(geometric_sum(rate, k)) - (al - 1), 0.0, 1.0, xtol=1e-15))


def checked_drafts(k: ArrayLike) -> Counts:
    """k as an integer array. Raises RooflineError where it is negative or no whole number."""
    given = np.asarray(k)
    if given.dtype.kind not in "iuf" or not np.all((np.abs(given) < 2**53) & (given == np.floor(given))):
        raise RooflineError(f"k: the number of drafted tokens is a whole number, not {given.tolist()!r}.")
    if np.any(given < 0):
        raise RooflineError(f"k: {int(given.min())} is below 0; k counts drafted tokens and 0 is none.")
    return given.astype(np.int64)


def parse_acceptance(text: str, *, k: ArrayLike | None = None, flag: str = "--acceptance") -> Acceptance:
    """Read `0.8` (constant rate), `0.8,0.6,0.4` (marginals p_1, p_2, …), `al=2.8` or a profile's .json path.

    `k` is what will be asked: `al=` needs exactly one k above 0, and marginals must reach the largest. Raises
    RooflineError, one sentence that starts with `flag`.
    """
    asked = sorted({int(drafts) for drafts in checked_drafts([] if k is None else k).flat} - {0})
    try:
        acceptance = _read(text.strip(), asked)
        acceptance.accepted(asked)
    except RooflineError as error:
        raise RooflineError(f"{flag}: {error}") from None
    return acceptance


AnyAcceptance = Acceptance | AcceptanceByContext


def as_acceptance(
    value: AnyAcceptance | str | float | Sequence[float] | None, k: ArrayLike
) -> AnyAcceptance | None:
    """An acceptance from what a caller may have at hand: a rate, marginals, or text as `parse_acceptance` reads it."""
    if value is None or isinstance(value, AnyAcceptance):
        return value
    if isinstance(value, str | float | int):
        return parse_acceptance(str(value), k=k)
    return parse_acceptance(",".join(str(float(p)) for p in value), k=k)


FORMS = "a rate (0.8), marginals (0.8,0.6,0.4), an accept length (al=2.8) or a profile (file.json)"


def _read(text: str, asked: list[int]) -> Acceptance:
    if not text:
        raise RooflineError(f"nothing was given; give {FORMS}.")
    if text.lower().endswith(".json"):
        return Acceptance.from_profile(text, asked[0] if len(asked) == 1 else None)
    if text.lower().startswith("al="):
        return _read_al(text[3:], asked)
    numbers = [_number(part) for part in text.split(",")]
    if len(numbers) > 1:
        return Acceptance.from_marginal(numbers)
    if numbers[0] > 1:
        raise RooflineError(f"{text} is above 1 and no rate; for an accept length write al={text}.")
    return Acceptance.from_rate(numbers[0])


def _read_al(text: str, asked: list[int]) -> Acceptance:
    al = _number(text)
    if len(asked) != 1:
        what = f"k = {', '.join(map(str, asked))} were" if asked else "no k was"
        raise RooflineError(
            f"al={text} belongs to one k and {what} asked; name one k, or give a rate or marginals."
        )
    return Acceptance.from_al(al, asked[0])


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise RooflineError(f"{text.strip()!r} is no number; give {FORMS}.") from None
    if not math.isfinite(value):
        raise RooflineError(f"{text.strip()!r} is no finite number; give {FORMS}.")
    return value


def _check_share(value: float, name: str, where: str = "") -> None:
    if not 0 <= value <= 1:
        raise RooflineError(f"{name} {value:g}{where} lies outside [0, 1].")


def _check_marginals(marginal: tuple[float, ...]) -> None:
    before = 1.0
    for position, p in enumerate(marginal, 1):
        _check_share(p, "marginal", f" at position {position}")
        if p > before:
            raise RooflineError(
                f"marginal {p:g} at position {position} is above {before:g} before it; marginals count the "
                "steps where all drafts so far were accepted and never rise (conditional rates may)."
            )
        before = p
