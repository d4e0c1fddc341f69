"""From a config's `model_type` to the function that builds its architecture.

A config with a `text_config` (a model that also sees) gives its text model; `vision` counts the tower. To add a
family, write a function `Config -> Architecture` and add its module's `BUILDERS` here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from models_roofline.architecture import Architecture
from models_roofline.errors import hint
from models_roofline.families import classic, dense, gemma, glm, hybrid, llama4, mamba, mla, moe, nemotron
from models_roofline.families._config import Config
from models_roofline.families.vision import vision_params

Builder = Callable[[Config], Architecture]

BUILDERS: dict[str, Builder] = {
    **dense.BUILDERS,
    **gemma.BUILDERS,
    **classic.BUILDERS,
    **moe.BUILDERS,
    **mla.BUILDERS,
    **glm.BUILDERS,
    **llama4.BUILDERS,
    **hybrid.BUILDERS,
    **mamba.BUILDERS,
    **nemotron.BUILDERS,
}
"""`model_type` of the text model → builder."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def from_config(config: Mapping[str, object], name: str) -> Architecture:
    """The architecture of a Hugging Face config (a parsed `config.json`). Raises RooflineError naming the field."""
    root = Config(config, name)
    family = root.text("model_type")
    text = root.section("text_config") if root.has("text_config") else root
    arch = _builder(text, family)(text)
    vision = vision_params(root) if root.has("vision_config") else None
    return dataclasses.replace(arch, name=name, family=family, vision_params=vision, notes=root.notes)


def _builder(text: Config, family: str) -> Builder:
    """A section may leave its `model_type` out; then it is the enclosing one, perhaps with `_text`."""
    own = text.text("model_type", default=f"{family}_text" if f"{family}_text" in BUILDERS else family)
    if own in BUILDERS:
        return BUILDERS[own]
    missing = [text.field(key) for key in _SIZES if not text.has(key)]
    lacks = f" It also lacks {', '.join(missing)}." if missing else ""
    raise text.error(
        f"model_type {own!r} is not a family that is known here; {hint(own, BUILDERS, most=3)}{lacks}"
    )
