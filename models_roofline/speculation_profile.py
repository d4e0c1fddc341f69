"""speculation_profile.json: the acceptance of one drafter in a file that travels with its checkpoint.

The format is NVIDIA Model-Optimizer's (examples/specdec_bench, schema 1.0): conditional and marginal rates by draft
position, the mean accept length a step (bonus included, so 1 + Σ marginals), a histogram of accept lengths, and
whether the vector says anything about another number of drafts. Dynamo's mocker reads the conditional rates, vLLM's
synthetic acceptance the marginal ones.

Boundary: reads and writes that file and checks that its parts agree; what the numbers mean is in `acceptance`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models_roofline.acceptance import Acceptance
from models_roofline.errors import RooflineError

SCHEMA_VERSION = "1.0"
MEAN_TOLERANCE = 0.02
"""How far 1 + Σ marginals may lie from the mean accept length; the format's own figure."""
RATE_TOLERANCE = 0.005
"""How far a marginal may lie from the product of the conditional rates before it; room for three-digit rounding."""
CHAIN_METHODS = frozenset({"eagle", "eagle1", "eagle2", "eagle3", "draft_model"})
"""Methods whose first drafts do not depend on how many follow, as the format lists them."""


@dataclass(frozen=True)
class SpeculationProfile:
    """One measured drafter. Fields are the file's; the rest of its content is kept in `details`."""

    marginal: tuple[float, ...]
    method: str | None = None
    chain: bool = False
    """Whether the vector also holds for fewer drafts (`chain_analytic`)."""
    max_supported_k: int | None = None
    verification: str = "longest_prefix"
    mean_by_k: Mapping[int, float] = field(default_factory=dict)
    """Mean accept length, bonus included, at each number of drafts that was measured."""
    histogram: Mapping[int, int] | None = None
    """Steps by accept length, bonus included."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """draft_checkpoint, target_model, block_size, per_category, measurement_conditions, …"""
    notes: tuple[str, ...] = ()
    """What the reader had to mend."""

    @property
    def k(self) -> int:
        """Drafts a step of the measurement."""
        return len(self.marginal)

    def acceptance(self, k: int | None = None) -> Acceptance:
        """Acceptance at k drafts (None: those of the measurement).

        Where a block drafter was also measured at another k, only its mean is known there; the vector then has
        the constant rate with that mean.
        """
        if self.chain or k is None or k == self.k:
            return Acceptance(self.marginal, block=not self.chain)
        if k not in self.mean_by_k:
            raise RooflineError(
                f"this profile of {self.method or 'a block drafter'} was measured at k = "
                f"{', '.join(map(str, sorted({self.k, *self.mean_by_k})))} and does not hold for k = {k}."
            )
        constant = Acceptance.from_al(self.mean_by_k[k], k)
        return Acceptance(tuple(constant.survival(range(1, k + 1)).tolist()), block=True)


def profile_from(
    acceptance: Acceptance, k: int, method: str | None = None, **details: Any
) -> SpeculationProfile:
    """A profile of `acceptance` at k drafts. `details` are further keys of the file (draft_checkpoint, …)."""
    if k < 1:
        raise RooflineError(f"k: a profile needs at least one draft, not {k}.")
    marginal = tuple(acceptance.survival(range(1, k + 1)).tolist())
    chain = (method or "").lower() in CHAIN_METHODS and not acceptance.block
    mean = {k: float(acceptance.al_drafted(k))}
    return SpeculationProfile(marginal, method, chain, k, mean_by_k=mean, details=details)


def write_profile(profile: SpeculationProfile, path: str | Path) -> None:
    """Write the file. Rates have six decimals, as the format does. Raises RooflineError where it cannot be written."""
    try:
        text = json.dumps(as_document(profile), indent=2, allow_nan=False)
        Path(path).write_text(text + "\n", encoding="utf-8")
    except ValueError as error:
        raise RooflineError(f"{path}: {error}; a profile holds finite numbers only.") from None
    except OSError as error:
        raise RooflineError(f"{path}: cannot be written ({error.strerror}).") from None


def as_document(profile: SpeculationProfile) -> dict[str, Any]:
    """The file's content as a dict."""
    mean = 1 + math.fsum(profile.marginal)
    histogram = profile.histogram
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": profile.method,
        "num_speculative_tokens": profile.k,
        "max_supported_k": profile.max_supported_k or profile.k,
        "verification_method": profile.verification,
        "conditional_accept_rates": [round(rate, 6) for rate in Acceptance(profile.marginal).conditional],
        "marginal_accept_rates": [round(rate, 6) for rate in profile.marginal],
        "mean_accept_length": round(mean, 6),
        "accept_length_model": "chain_analytic" if profile.chain else "measured_per_k",
        "accept_length_by_k": {str(k): round(mean, 6) for k, mean in profile.mean_by_k.items()},
        "acceptance_length_histogram": histogram and {str(length): n for length, n in histogram.items()},
        **profile.details,
        "validation": {
            "mean_consistency": {
                "implied_mean_accept_length": round(mean, 6),
                "reported_mean_accept_length": round(mean, 6),
                "abs_delta": 0.0,
                "tolerance": MEAN_TOLERANCE,
                "passed": True,
            },
            "marginal_monotonicity": {"passed": True, "violations": []},
        },
    }


_READ_KEYS = frozenset(as_document(SpeculationProfile((0.0,))))


def read_profile(path: str | Path) -> SpeculationProfile:
    """Read and check a profile. Raises RooflineError, one sentence that starts with the path."""
    try:
        return profile_of(_load(Path(path)))
    except RooflineError as error:
        raise RooflineError(f"{path}: {error}") from None


def profile_of(document: Mapping[str, Any]) -> SpeculationProfile:
    """Check a profile that was already parsed. Marginals come from the histogram where there is one: a writer
    that takes unseen accept lengths for unreached positions leaves 0 before positive entries."""
    _check_version(document)
    if document.get("measured") is not True:
        raise RooflineError("it is a placeholder (measured is not true); measure the drafter first.")
    k = _whole(document, "num_speculative_tokens", least=1)
    ceiling = _whole(document, "max_supported_k", least=k, default=k)
    verification = document.get("verification_method") or "longest_prefix"
    if verification not in ("longest_prefix", "block"):
        raise RooflineError(f"verification_method {verification!r} is unknown; known: longest_prefix, block.")
    histogram = _counts(document, k)
    marginal, notes = _marginals(document, k, histogram)
    _check_mean(document, marginal)
    return SpeculationProfile(
        marginal=marginal,
        method=document.get("method"),
        # Block verification does not keep the longest right prefix, so fewer drafts are another distribution.
        chain=document.get("accept_length_model") == "chain_analytic" and verification == "longest_prefix",
        max_supported_k=ceiling,
        verification=verification,
        mean_by_k=_means(document),
        histogram=histogram,
        details={key: value for key, value in document.items() if key not in _READ_KEYS},
        notes=notes,
    )


def _load(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RooflineError(f"cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError):
        raise RooflineError("is no JSON document; a speculation_profile.json was expected.") from None
    if not isinstance(document, dict):
        raise RooflineError("is no speculation profile: its JSON is not an object.")
    return document


def _check_version(document: Mapping[str, Any]) -> None:
    version = document.get("schema_version")
    major = str(version).partition(".")[0]
    if not major.isascii() or not major.isdigit() or len(major) > 9:
        raise RooflineError(
            "is no speculation profile: schema_version is missing or no version number like 1.0."
        )
    if int(major) > int(SCHEMA_VERSION.partition(".")[0]):
        raise RooflineError(
            f"schema_version {version} is newer than {SCHEMA_VERSION}, which this version reads; update "
            "specbench, or give the marginals themselves."
        )


def _whole(document: Mapping[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = document.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RooflineError(f"{name} must be a whole number of at least {least}, not {value!r}.")
    return value


def _rates(document: Mapping[str, Any], name: str, k: int) -> list[float] | None:
    """A vector of k numbers; None where the key is absent or null."""
    values = document.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or not all(map(_is_number, values)):
        raise RooflineError(f"{name} must be a list of numbers.")
    if len(values) != k:
        raise RooflineError(f"{name} has {len(values)} entries and num_speculative_tokens is {k}.")
    return [float(value) for value in values]


def _counts(document: Mapping[str, Any], k: int) -> dict[int, int] | None:
    """Steps by accept length; None where the file has none."""
    name = "acceptance_length_histogram"
    given = document.get(name)
    if not given:
        return None
    if not isinstance(given, dict) or not all(str(length).isdecimal() for length in given):
        raise RooflineError(f"{name} must map accept lengths (bonus included) to numbers of steps.")
    if not all(_is_number(steps) and steps >= 0 and steps == int(steps) for steps in given.values()):
        raise RooflineError(f"{name} must hold whole numbers of steps, none negative.")
    counts = {int(length): int(steps) for length, steps in given.items()}
    beyond = [length for length, steps in counts.items() if steps and not 1 <= length <= k + 1]
    if beyond:
        raise RooflineError(
            f"{name} holds accept length {max(beyond)}, outside 1 … {k + 1} for num_speculative_tokens = {k}; "
            "correct the one that is wrong."
        )
    return {length: steps for length, steps in counts.items() if steps} or None


def _marginals(
    document: Mapping[str, Any], k: int, histogram: Mapping[int, int] | None
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """The marginals and what was mended, from histogram, marginal or conditional rates, in this order."""
    marginal = _rates(document, "marginal_accept_rates", k)
    conditional = _rates(document, "conditional_accept_rates", k)
    if histogram:
        counted = Acceptance.from_trace(histogram, k).marginal
        return counted, _differences(marginal, counted)
    implied = None if conditional is None else Acceptance.from_conditional(conditional).marginal
    given = implied if marginal is None else Acceptance.from_marginal(marginal).marginal
    if given is None:
        raise RooflineError("has neither marginal_accept_rates nor conditional_accept_rates nor a histogram.")
    if implied is not None and np.max(np.abs(np.subtract(given, implied))) > RATE_TOLERANCE:
        raise RooflineError(
            "marginal_accept_rates are not the products of conditional_accept_rates; correct the vector that is wrong."
        )
    return given, ()


def _differences(marginal: list[float] | None, counted: tuple[float, ...]) -> tuple[str, ...]:
    if marginal is None or np.max(np.abs(np.subtract(marginal, counted))) <= RATE_TOLERANCE:
        return ()
    position = int(np.argmax(np.abs(np.subtract(marginal, counted))))
    return (
        f"marginal_accept_rates disagree with the histogram (position {position + 1}: {marginal[position]:g} "
        f"against {counted[position]:g}); the histogram was used.",
    )


def _check_mean(document: Mapping[str, Any], marginal: tuple[float, ...]) -> None:
    mean = document.get("mean_accept_length")
    if mean is None:
        return
    implied = 1 + math.fsum(marginal)
    if not _is_number(mean) or abs(mean - implied) > MEAN_TOLERANCE:
        raise RooflineError(
            f"mean_accept_length is {mean} but the rates imply {implied:.4f} (1 + sum of marginals, tolerance "
            f"{MEAN_TOLERANCE}); the vector may be cut short or the mean be one over requests."
        )


def _means(document: Mapping[str, Any]) -> dict[int, float]:
    given = document.get("accept_length_by_k") or {}
    if not isinstance(given, dict) or not all(
        str(k).isdecimal() and int(k) > 0 and _is_number(mean) and 1 <= mean <= int(k) + 1
        for k, mean in given.items()
    ):
        raise RooflineError("accept_length_by_k must map each k to a mean accept length in [1, k+1].")
    return {int(k): float(mean) for k, mean in given.items()}


def _is_number(value: object) -> bool:
    """A finite number that fits a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
