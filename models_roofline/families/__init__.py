"""Hugging Face configs → exact architectures, a module per kind of decoder.

`registry` maps a `model_type` to its builder; `_config` reads fields with errors in words; `_parts` holds what
builders share; `load` finds configs by name or path. Boundary: counts; no weights are read.
"""

from models_roofline.families.load import catalogue, load_config, load_model
from models_roofline.families.registry import BUILDERS, from_config
from models_roofline.quantization import with_weights

__all__ = ["BUILDERS", "catalogue", "from_config", "load_config", "load_model", "with_weights"]
