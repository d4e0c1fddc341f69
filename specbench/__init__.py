"""specbench: will speculative decoding pay off here, did it, and why not?

`load` opens a run that was measured; `summary` turns it into speedups with intervals, acceptance and validity.
`predict` and `crossover` say beforehand what bytes and FLOPs allow (`models_roofline` has the rest).
Everything heavy is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models_roofline import crossover, predict
    from specbench.summarise import summary
    from specbench.trace import load

__version__ = "0.1.0"
__all__ = ["__version__", "crossover", "load", "predict", "summary"]

# No module may bear a name that is offered here: importing it would bind it over the function.
_HOMES = {
    "crossover": "models_roofline",
    "load": "specbench.trace",
    "predict": "models_roofline",
    "summary": "specbench.summarise",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'specbench' has no attribute {name!r}")
