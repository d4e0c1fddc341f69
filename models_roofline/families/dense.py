"""Llama and the decoders built like it: RMS norms, grouped-query attention, a gated MLP.

They differ in biases (Qwen 2 has them on q, k and v without a field that says so), in norms on q and k (Qwen 3), in
windows (Mistral, Qwen 2, Phi-3) and in defaults. Source: the configuration and modelling classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from models_roofline.architecture import Architecture
from models_roofline.families._config import Config
from models_roofline.families._parts import Block, Heads, Windows, decoder, read_heads, windows
from models_roofline.quantization import read_storage


def _llama(config: Config) -> Architecture:
    hidden, inner, heads = (
        config.integer("hidden_size"),
        config.integer("intermediate_size"),
        read_heads(config),
    )
    vectors = 2 * hidden
    if config.flag("attention_bias", False):
        vectors += heads.qkv_width + hidden
    if config.flag("mlp_bias", False):
        vectors += 2 * inner + hidden
    return gated_decoder(config, heads, (None,) * config.layers(), vectors)


def _mistral(config: Config) -> Architecture:
    """All layers have the window (v0.1), or none has (`null`, from v0.2 on)."""
    heads, seen = read_heads(config, kv=8), nullable_windows(config, absent=4096)
    return gated_decoder(config, heads, seen, 2 * config.integer("hidden_size"))


def _phi3(config: Config) -> Architecture:
    heads, seen = read_heads(config), nullable_windows(config, absent=None)
    return gated_decoder(config, heads, seen, 2 * config.integer("hidden_size"))


def nullable_windows(config: Config, absent: int | None) -> Windows:
    """One window for all layers. Null and absent differ here: null says there is none, absent leaves the default."""
    written = "sliding_window" in config.fields
    slides = config.has("sliding_window") if written else absent is not None
    return windows(config, (slides,) * config.layers(), absent)


def _qwen2(config: Config) -> Architecture:
    heads = read_heads(config)
    vectors = 2 * config.integer("hidden_size") + heads.qkv_width
    return gated_decoder(config, heads, optional_windows(config), vectors)


def _qwen3(config: Config) -> Architecture:
    hidden, heads = config.integer("hidden_size"), read_heads(config, dim=128)
    vectors = 2 * hidden + qwen3_attention_vectors(config, heads, hidden)
    return gated_decoder(config, heads, optional_windows(config), vectors)


def qwen3_attention_vectors(config: Config, heads: Heads, hidden: int) -> int:
    """Norm gains on q and k, one per dimension of a head, and biases where the config asks for them."""
    biases = heads.qkv_width + hidden if config.flag("attention_bias", False) else 0
    return 2 * heads.dim + biases


def optional_windows(config: Config) -> Windows:
    """Qwen: a window only where `use_sliding_window` is set, on the layers from `max_window_layers` up."""
    count = config.layers()
    if not config.flag("use_sliding_window", False):
        return (None,) * count
    first = config.integer("max_window_layers", default=28, low=0)
    return windows(config, (i >= first for i in range(count)), 4096)


def gated_decoder(
    config: Config, heads: Heads, seen: Windows, vectors: int, *, tied: bool = False
) -> Architecture:
    """A decoder with one gated MLP in each layer. `seen` is each layer's window, `vectors` the parameters of a layer
    that are no matrix, `tied` the family's default."""
    hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
    storage = read_storage(config)
    layers = []
    for index, window in enumerate(seen):
        block = Block(storage, f"model.layers.{index}")
        matrices = (*block.attention(hidden, heads), *block.gated_mlp(hidden, inner))
        layers.append(block.layer(matrices, vectors, attention=heads.attention(window)))
    return decoder(config, storage, layers, tied=tied)


BUILDERS: dict[str, Callable[[Config], Architecture]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _mistral,
    "ministral3": _mistral,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen3": _qwen3,
    "qwen3_vl_text": _qwen3,
}
"""By `model_type`; the two `_vl` of Qwen 2 keep the text model's fields at the top."""
