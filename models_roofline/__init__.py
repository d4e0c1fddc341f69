"""Analytic cost models of decoding: bytes, FLOPs, time, speedup and crossovers.

    from models_roofline import grid, predict

    axes = grid(batch=[1, 8, 64], k=[1, 3, 5])
    found = predict("llama-3.1-8b", "H100-SXM5-80GB", method="eagle3", acceptance=0.75, **axes)
    found.speedup, found.frame(), found.best_k()

Boundary: a library on its own; it imports no engine, no torch and no command line. Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models_roofline.acceptance import Acceptance, AcceptanceByContext, parse_acceptance
    from models_roofline.architecture import Architecture
    from models_roofline.arrays import grid
    from models_roofline.bounds import Sparsity
    from models_roofline.crossovers import crossover
    from models_roofline.errors import RooflineError
    from models_roofline.families import from_config, load_model, with_weights
    from models_roofline.hardware import Device, find_device, identify
    from models_roofline.ledger import forward
    from models_roofline.methods import METHODS, DraftOptions, find_method
    from models_roofline.prediction import Prediction
    from models_roofline.profile import Profile, load_profile, profile_for
    from models_roofline.speedup import Settings, predict
    from models_roofline.timing import step_time

_HOMES = {
    "Acceptance": "acceptance", "AcceptanceByContext": "acceptance", "parse_acceptance": "acceptance",
    "Architecture": "architecture", "Sparsity": "bounds", "crossover": "crossovers", "RooflineError": "errors",
    "from_config": "families", "load_model": "families", "with_weights": "families",
    "Device": "hardware", "find_device": "hardware", "identify": "hardware",
    "forward": "ledger", "grid": "arrays", "METHODS": "methods", "DraftOptions": "methods", "find_method": "methods",
    "Profile": "profile", "load_profile": "profile", "profile_for": "profile",
    "Prediction": "prediction", "Settings": "speedup", "predict": "speedup", "step_time": "timing",
}  # fmt: skip

__all__ = [
    "METHODS",
    "Acceptance",
    "AcceptanceByContext",
    "Architecture",
    "Device",
    "DraftOptions",
    "Prediction",
    "Profile",
    "RooflineError",
    "Settings",
    "Sparsity",
    "crossover",
    "find_device",
    "find_method",
    "forward",
    "from_config",
    "grid",
    "identify",
    "load_model",
    "load_profile",
    "parse_acceptance",
    "predict",
    "profile_for",
    "step_time",
    "with_weights",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"models_roofline.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'models_roofline' has no attribute {name!r}")
