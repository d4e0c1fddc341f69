"""specbench: will speculative decoding pay off here, did it, and why not?

`load` opens a run that was measured; `summary` turns it into speedups with intervals, acceptance and validity.
Everything heavy is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbench.summary import summary
    from specbench.trace import load

__version__ = "0.1.0"
__all__ = ["__version__", "load", "summary"]

_HOMES = {"load": "specbench.trace", "summary": "specbench.summary"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        # import_module("specbench.summary") also binds the submodule here under the same name, so the
        # function is set explicitly and wins from then on.
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'specbench' has no attribute {name!r}")
