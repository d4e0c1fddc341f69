"""Gemma 1 to 3: wide heads, tied embeddings, and from Gemma 2 on windowed layers and norms on both sides.

Gemma 3's published configs leave out most sizes (they are written as differences to the class defaults), so the
defaults of `Gemma3TextConfig` matter here. Source: the configuration and modelling classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from models_roofline.architecture import Architecture
from models_roofline.families._config import Config
from models_roofline.families._parts import read_heads, windows
from models_roofline.families.dense import gated_decoder


def _gemma(config: Config) -> Architecture:
    heads = read_heads(config, dim=256)
    return gated_decoder(
        config, heads, (None,) * config.layers(), 2 * config.integer("hidden_size"), tied=True
    )


def _gemma2(config: Config) -> Architecture:
    """Layers take turns, the first with a window; four norms a layer."""
    heads = read_heads(config, dim=256)
    seen = windows(config, (i % 2 == 0 for i in range(config.layers())), 4096)
    return gated_decoder(config, heads, seen, 4 * config.integer("hidden_size"), tied=True)


_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}
"""Class defaults of `Gemma3TextConfig`."""


def _gemma3(config: Config) -> Architecture:
    """Five windowed layers to a full one; four norms a layer, and norms on q and k."""
    config = config.with_defaults(_GEMMA3)
    heads = read_heads(config)
    every = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    seen = windows(config, ((i + 1) % every != 0 for i in range(config.layers())), 4096)
    vectors = 4 * config.integer("hidden_size") + 2 * heads.dim
    if config.flag("attention_bias", False):
        vectors += heads.qkv_width + config.integer("hidden_size")
    return gated_decoder(config, heads, seen, vectors, tied=True)


BUILDERS: dict[str, Callable[[Config], Architecture]] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
}
"""By `model_type`."""
