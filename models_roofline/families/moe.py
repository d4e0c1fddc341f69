"""Mixtures of experts with grouped-query attention: Mixtral, Qwen 2 and 3 MoE, OLMoE, gpt-oss.

`intermediate_size` is the size of an expert in Mixtral, OLMoE and gpt-oss; in Qwen MoE it is that of the dense
layers, of which most models have none. Source: the configuration and modelling classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from models_roofline.architecture import Architecture
from models_roofline.families._config import Config
from models_roofline.families._parts import Block, Heads, Mixture, Windows, decoder, read_heads, windows
from models_roofline.families.dense import nullable_windows, optional_windows, qwen3_attention_vectors
from models_roofline.quantization import read_storage


def _mixtral(config: Config) -> Architecture:
    hidden, heads = config.integer("hidden_size"), read_heads(config, kv=8)
    mixture = Mixture(
        number=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        inner=config.integer("intermediate_size"),
    )
    return moe_decoder(config, heads, nullable_windows(config, absent=None), 2 * hidden, mixture)


def _olmoe(config: Config) -> Architecture:
    """Norms on q and k run over all heads at once."""
    hidden, heads = config.integer("hidden_size"), read_heads(config)
    mixture = Mixture(
        number=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        inner=config.integer("intermediate_size"),
    )
    vectors = 2 * hidden + heads.q_width + heads.kv_width
    if config.flag("attention_bias", False):
        vectors += heads.qkv_width + hidden
    return moe_decoder(config, heads, (None,) * config.layers(), vectors, mixture)


def _qwen2_moe(config: Config) -> Architecture:
    """A shared expert behind a gate of one output; biases on q, k and v."""
    hidden, heads = config.integer("hidden_size"), read_heads(config)
    mixture = _qwen_mixture(config, config.integer("shared_expert_intermediate_size"))
    vectors = 2 * hidden + heads.qkv_width
    return moe_decoder(config, heads, optional_windows(config), vectors, mixture, qwen_sparse(config))


def _qwen3_moe(config: Config) -> Architecture:
    hidden, heads = config.integer("hidden_size"), read_heads(config, dim=128)
    vectors = 2 * hidden + qwen3_attention_vectors(config, heads, hidden)
    mixture = _qwen_mixture(config, shared=0)
    return moe_decoder(config, heads, optional_windows(config), vectors, mixture, qwen_sparse(config))


def _qwen_mixture(config: Config, shared: int) -> Mixture:
    return Mixture(
        number=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_tok"),
        inner=config.integer("moe_intermediate_size"),
        shared=shared,
        shared_gate=shared > 0,
    )


def qwen_sparse(config: Config) -> Callable[[int], bool]:
    """Which layers have experts: every `decoder_sparse_step`-th that is not in `mlp_only_layers`."""
    step = config.integer("decoder_sparse_step", default=1)
    dense = config.integers("mlp_only_layers")
    return lambda index: index not in dense and (index + 1) % step == 0


def _gpt_oss(config: Config) -> Architecture:
    """Biases on every matrix, one sink a head, layers in turn windowed and full."""
    hidden, heads = config.integer("hidden_size"), read_heads(config, kv=8, dim=64)
    inner, number = config.integer("intermediate_size"), config.integer("num_local_experts", "num_experts")
    mixture = Mixture(
        number=number,
        top_k=config.integer("num_experts_per_tok", "experts_per_token"),
        inner=inner,
        expert_vectors=2 * inner + hidden,
    )
    biases = (heads.qkv_width + hidden if config.flag("attention_bias", True) else 0) + number
    seen = windows(config, (i % 2 == 0 for i in range(config.layers())), 128)
    return moe_decoder(config, heads, seen, 2 * hidden + biases + heads.q, mixture)


def moe_decoder(
    config: Config,
    heads: Heads,
    seen: Windows,
    vectors: int,
    mixture: Mixture,
    sparse: Callable[[int], bool] = lambda index: True,
) -> Architecture:
    """A decoder with experts in the layers that `sparse` names and a gated MLP in the others. `seen` is each layer's
    window, `vectors` the parameters of a layer that are no matrix, those of the experts apart."""
    mixture.check(config)
    hidden, storage = config.integer("hidden_size"), read_storage(config)
    layers = []
    for index, window in enumerate(seen):
        block = Block(storage, f"model.layers.{index}")
        projections = block.attention(hidden, heads)
        if sparse(index):
            matrices = (*projections, *mixture.matrices(block, hidden))
            total, experts = vectors + mixture.vectors(hidden), mixture.experts(block, hidden)
        else:
            mlp = block.gated_mlp(hidden, config.integer("intermediate_size"))
            matrices, total, experts = (*projections, *mlp), vectors, None
        layers.append(block.layer(matrices, total, attention=heads.attention(window), experts=experts))
    return decoder(config, storage, layers, tied=False)


BUILDERS: dict[str, Callable[[Config], Architecture]] = {
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "gpt_oss": _gpt_oss,
}
"""By `model_type`."""
