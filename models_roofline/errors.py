"""The one error of this library."""

from __future__ import annotations


class RooflineError(ValueError):
    """Wrong input, in one sentence that names the field or flag and how to mend it."""
