"""Llama 4: chunked attention with a full layer now and then, experts with a shared one beside them.

Layers with rotary positions see their own chunk of `attention_chunk_size` tokens, the others everything.
`intermediate_size` is that of an expert and of the shared expert, `intermediate_size_mlp` that of a dense layer. Norms
on q and k have no weights. Source: transformers' llama4 classes, whose defaults these are.
"""

from __future__ import annotations

from collections.abc import Callable

from models_roofline.architecture import Architecture, Attention, Experts, Layer, Matrix
from models_roofline.families._config import Config
from models_roofline.families._parts import FULL, Block, Mixture, Windows, decoder, read_heads
from models_roofline.quantization import read_storage

CHUNKED = "chunked_attention"
_AT = "feed_forward"


def _llama4(config: Config) -> Architecture:
    hidden, heads, storage = (
        config.integer("hidden_size"),
        read_heads(config, kv=8, dim=128),
        read_storage(config),
    )
    biases = heads.qkv_width + hidden if config.flag("attention_bias", False) else 0
    mixture, sparse = _mixture(config), _sparse_layers(config)
    dense = config.integer("intermediate_size_mlp", default=16384)

    def layer(index: int, chunk: int | None) -> Layer:
        block = Block(storage, f"model.layers.{index}")
        cache = Attention(heads.q, heads.kv, heads.dim, heads.dim, chunk, chunked=chunk is not None)
        rest: tuple[Matrix, ...] = block.gated_mlp(hidden, dense, at=_AT)
        experts = None
        if index in sparse:
            rest = mixture.matrices(block, hidden, f"{_AT}.shared_expert")
            one = block.gated_mlp(hidden, mixture.inner, at=f"{_AT}.experts.0")
            experts = Experts(mixture.number, mixture.top_k, one)
        matrices = (*block.attention(hidden, heads), *rest)
        return block.layer(matrices, 2 * hidden + biases, attention=cache, experts=experts)

    return decoder(config, storage, map(layer, range(config.layers()), _chunks(config)), tied=False)


def _mixture(config: Config) -> Mixture:
    inner = config.integer("intermediate_size")
    mixture = Mixture(
        number=config.integer("num_local_experts", default=16),
        top_k=config.integer("num_experts_per_tok", default=1),
        inner=inner,
        shared=inner,
    )
    mixture.check(config)
    return mixture


def _sparse_layers(config: Config) -> frozenset[int]:
    """Layers with experts: `moe_layers`, or every `interleave_moe_layer_step`-th."""
    if config.has("moe_layers"):
        return frozenset(config.integers("moe_layers"))
    step = config.integer("interleave_moe_layer_step", default=1)
    return frozenset(range(step - 1, config.layers(), step))


def _chunks(config: Config) -> Windows:
    """Chunk of each layer in tokens; None sees everything. A null size says that no layer is chunked."""
    if "attention_chunk_size" in config.fields and not config.has("attention_chunk_size"):
        return (None,) * config.layers()
    size = config.integer("attention_chunk_size", default=8192)
    return tuple(size if chunked else None for chunked in _chunked_layers(config))


def _chunked_layers(config: Config) -> list[bool]:
    """From `layer_types`, else from `no_rope_layers` (1 where a layer has rotary positions, 0 where it has none)."""
    count = config.layers()
    listed = config.layer_types((FULL, CHUNKED), count)
    if listed:
        return [kind == CHUNKED for kind in listed]
    rotary = config.integers("no_rope_layers")
    if not rotary:
        every = config.integer("no_rope_layer_interval", default=4)
        return [(i + 1) % every != 0 for i in range(count)]
    if len(rotary) != count:
        raise config.error(f"{config.field('no_rope_layers')} must list {count} layers, not {len(rotary)}.")
    return [bool(has) for has in rotary]


BUILDERS: dict[str, Callable[[Config], Architecture]] = {"llama4_text": _llama4}
"""By `model_type`."""
