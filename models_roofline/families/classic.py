"""GPT-2 and OPT: layer norms with biases, biases everywhere, learned positions, a plain MLP of two matrices.

Source: the configuration and modelling classes of transformers.
"""

from __future__ import annotations

from collections.abc import Callable

from models_roofline.architecture import Architecture, Layer
from models_roofline.families._config import Config
from models_roofline.families._parts import Block, Heads, decoder
from models_roofline.quantization import read_storage

_OPT_OFFSET = 2
"""Rows of OPT's position table before the first position."""


def _gpt2(config: Config) -> Architecture:
    hidden = config.integer("n_embd", "hidden_size")
    inner = config.integer("n_inner", default=4 * hidden, why="4 × n_embd")
    positions = config.integer("n_positions", "n_ctx")
    heads = _heads(config, config.integer("n_head", "num_attention_heads"), hidden)
    storage = read_storage(config)
    layers = [
        _layer(Block(storage, f"transformer.h.{index}"), heads, hidden, inner)
        for index in range(config.layers("n_layer", "num_hidden_layers"))
    ]
    unread = positions * hidden
    return decoder(
        config, storage, layers, tied=True, hidden=hidden, norm=2 * hidden, unread=unread, context=positions
    )


def _opt(config: Config) -> Architecture:
    hidden, positions = config.integer("hidden_size"), config.integer("max_position_embeddings")
    _refuse_opt_variants(config, hidden)
    heads = _heads(config, config.integer("num_attention_heads"), hidden)
    storage, inner = read_storage(config), config.integer("ffn_dim")
    layers = [
        _layer(Block(storage, f"model.decoder.layers.{index}"), heads, hidden, inner)
        for index in range(config.layers())
    ]
    unread = (positions + _OPT_OFFSET) * hidden
    return decoder(config, storage, layers, tied=True, norm=2 * hidden, unread=unread)


def _refuse_opt_variants(config: Config, hidden: int) -> None:
    """OPT-350M projects its embeddings and norms after; nobody drafts with it, so it is refused, not miscounted."""
    if config.integer("word_embed_proj_dim", default=hidden, why="hidden_size") != hidden:
        raise config.error(
            "word_embed_proj_dim differs from hidden_size; such OPT models are not counted here."
        )
    if not config.flag("do_layer_norm_before", True) or not config.flag("enable_bias", True):
        raise config.error(
            "do_layer_norm_before or enable_bias is false; such OPT models are not counted here."
        )


def _heads(config: Config, heads: int, hidden: int) -> Heads:
    if hidden % heads:
        raise config.error(f"hidden size {hidden} is not divisible by {heads} attention heads.")
    return Heads(heads, heads, hidden // heads)


def _layer(block: Block, heads: Heads, hidden: int, inner: int) -> Layer:
    """Two layer norms, and a bias to each of q, k, v, o, up and down."""
    matrices = (
        *block.attention(hidden, heads),
        block.matrix("up", {"mlp.up": inner}, hidden, "column"),
        block.matrix("down", {"mlp.down": hidden}, inner, "row"),
    )
    vectors = 4 * hidden + heads.qkv_width + hidden + inner + hidden
    return block.layer(matrices, vectors, attention=heads.attention())


BUILDERS: dict[str, Callable[[Config], Architecture]] = {"gpt2": _gpt2, "opt": _opt}
"""By `model_type`."""
