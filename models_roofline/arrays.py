"""Arrays of numbers, and the checks that numeric arguments pass on their way in.

Boundary: types, shapes and ranges; what a number means is its caller's. Every error names the flag, the first wrong
value and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from models_roofline.errors import RooflineError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def at_least(flag: str, values: ArrayLike, least: float, what: str) -> Floats:
    """Finite floats of at least `least`, in the shape of `values`; `what` is what they count, in the plural."""
    return _checked(flag, values, lambda v: v >= least, f"a number of {what}, {least:g} or more")


def above_zero(flag: str, values: ArrayLike, what: str) -> Floats:
    """Finite floats above 0, in the shape of `values`; `what` is what they count, in the plural."""
    return _checked(flag, values, lambda v: v > 0, f"a number of {what} above 0")


def share(flag: str, values: ArrayLike) -> Floats:
    """Shares in (0, 1], in the shape of `values`."""
    return _checked(flag, values, lambda v: (v > 0) & (v <= 1), "a share in (0, 1]")


def share_or_none(flag: str, values: ArrayLike) -> Floats:
    """Shares in [0, 1], in the shape of `values`."""
    return _checked(flag, values, lambda v: (v >= 0) & (v <= 1), "a share in [0, 1]")


def _checked(flag: str, values: ArrayLike, rule: Callable[[Floats], NDArray[np.bool_]], what: str) -> Floats:
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise RooflineError(f"{flag}: {values!r} is not {what}.") from None
    wrong = found[~(np.isfinite(found) & rule(found))]
    if wrong.size:
        raise RooflineError(f"{flag}: {wrong[0]:g} is not {what}.")
    return found


def grid(**axes: ArrayLike) -> dict[str, Floats]:
    """Every combination of lists, for `predict(..., **grid(batch=[1, 8], k=[1, 3, 5]))`: each list as an array along an
    axis of its own, in the order given. Nothing is expanded until results are read."""
    opened = np.ix_(*(np.atleast_1d(np.asarray(values, float)) for values in axes.values()))
    return dict(zip(axes, opened, strict=True))
