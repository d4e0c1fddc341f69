"""Multi-head latent attention with experts: DeepSeek V2 and V3, Kimi K2.

Keys and values are low-rank: a token caches `kv_lora_rank` values and a rotary key of `qk_rope_head_dim`, whatever
the number of heads. In decode the up-projection is absorbed into q and o, so attention is one key of both parts and
one value of the latent. Source: DeepSeek-V2 (arXiv 2405.04434), DeepSeek-V3 (2412.19437) and their modelling code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models_roofline.architecture import Architecture, Attention, Layer, Matrix
from models_roofline.families._config import Config
from models_roofline.families._parts import Block, Mixture, decoder, same
from models_roofline.quantization import read_storage


@dataclass(frozen=True)
class LatentHeads:
    """Sizes of multi-head latent attention. `q_rank` None: q is projected directly (V2-Lite)."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    """Dimensions of a key head without rotary positions."""
    rope: int
    """Rotary dimensions of the key, shared by all heads."""
    value: int

    def matrices(self, block: Block, hidden: int) -> tuple[Matrix, ...]:
        """Projections of one layer."""
        width, at = self.heads * (self.nope + self.rope), "self_attn"
        if self.q_rank is None:
            q: tuple[Matrix, ...] = (block.matrix("q", {f"{at}.q_proj": width}, hidden, "column"),)
        else:
            q = (
                block.matrix("q_a", {f"{at}.q_a_proj": self.q_rank}, hidden),
                block.matrix("q_b", {f"{at}.q_b_proj": width}, self.q_rank, "column"),
            )
        expanded = self.heads * (self.nope + self.value)
        return (
            *q,
            block.matrix("kv_a", {f"{at}.kv_a_proj_with_mqa": self.kv_rank + self.rope}, hidden),
            block.matrix("kv_b", {f"{at}.kv_b_proj": expanded}, self.kv_rank, "column"),
            block.matrix("o", {f"{at}.o_proj": hidden}, self.heads * self.value, "row"),
        )

    @property
    def vectors(self) -> int:
        """Norms of the two low-rank parts."""
        return (self.q_rank or 0) + self.kv_rank

    @property
    def attention(self) -> Attention:
        latent = self.kv_rank + self.rope
        return Attention(self.heads, 1, latent, self.kv_rank, latent=latent)


def read_latent_heads(config: Config) -> LatentHeads:
    """Its fields, all required but `q_lora_rank`, whose null means that q is projected directly."""
    return LatentHeads(
        heads=config.integer("num_attention_heads"),
        q_rank=config.optional("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope=config.integer("qk_nope_head_dim"),
        rope=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
    )


def read_mixture(config: Config, shared: int) -> Mixture:
    """Experts under DeepSeek's field names; `shared` is the family's default number of shared experts."""
    inner = config.integer("moe_intermediate_size")
    mixture = Mixture(
        number=config.integer("n_routed_experts", "num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        inner=inner,
        shared=inner * config.integer("n_shared_experts", default=shared, low=0),
    )
    mixture.check(config)
    return mixture


def sparse_layers(config: Config, dense: int) -> Callable[[int], bool]:
    """Which layers have experts: from `first_k_dense_replace` on (`dense` is its default), every `moe_layer_freq`-th."""
    first = config.integer("first_k_dense_replace", default=dense, low=0)
    every = config.integer("moe_layer_freq", default=1)
    return lambda index: index >= first and index % every == 0


def _deepseek_v2(config: Config) -> Architecture:
    return _deepseek(config, _Layers(config, shared=0, dense=0, router_bias=False))


def _deepseek_v3(config: Config) -> Architecture:
    """The router has a bias per expert, kept in fp32, unless `topk_method` names another way to balance."""
    biased = config.text("topk_method", default="noaux_tc") == "noaux_tc"
    return _deepseek(config, _Layers(config, shared=1, dense=3, router_bias=biased))


class _Layers:
    """Makes layers of latent attention, with experts or without."""

    def __init__(self, config: Config, *, shared: int, dense: int, router_bias: bool):
        self.storage = read_storage(config)
        self.hidden = config.integer("hidden_size")
        self.inner = config.integer("intermediate_size")
        self.heads = read_latent_heads(config)
        self.mixture = read_mixture(config, shared)
        self.bias = self.mixture.number if router_bias else 0
        self.has_experts = sparse_layers(config, dense)

    def layer(self, index: int) -> Layer:
        block = Block(self.storage, f"model.layers.{index}")
        return self._experts(block) if self.has_experts(index) else self._dense(block)

    def mtp(self, index: int) -> Layer:
        """A prediction module: a layer with experts behind a projection of two joined inputs, with three more norms."""
        block = Block(self.storage, f"model.layers.{index}")
        joined = block.base_matrix("eh_proj", self.hidden, 2 * self.hidden)
        return self._experts(block, (joined,), 3 * self.hidden)

    def _dense(self, block: Block) -> Layer:
        matrices = (*self.heads.matrices(block, self.hidden), *block.gated_mlp(self.hidden, self.inner))
        return block.layer(matrices, 2 * self.hidden + self.heads.vectors, attention=self.heads.attention)

    def _experts(self, block: Block, before: tuple[Matrix, ...] = (), norms: int = 0) -> Layer:
        shared = self.mixture.matrices(block, self.hidden, "mlp.shared_experts")
        return block.layer(
            (*before, *self.heads.matrices(block, self.hidden), *shared),
            2 * self.hidden + self.heads.vectors + norms,
            fp32_vectors=self.bias,
            attention=self.heads.attention,
            experts=self.mixture.experts(block, self.hidden),
        )


def _deepseek(config: Config, build: _Layers) -> Architecture:
    """`mtp_params` counts what a checkpoint holds: each module has its own copy of the embedding and of the head."""
    if config.get("attention_bias") is True:
        raise config.error("attention_bias is true; biases of latent attention are not counted here.")
    count, modules = config.layers(), config.layers("num_nextn_predict_layers", default=0, low=0)
    mtp = tuple(build.mtp(count + index) for index in range(modules))
    table = config.integer("vocab_size") * build.hidden
    return decoder(
        config,
        build.storage,
        (build.layer(index) for index in range(count)),
        tied=False,
        mtp=same(mtp),
        mtp_params=sum(layer.total_params + 2 * table for layer in mtp),
    )


BUILDERS: dict[str, Callable[[Config], Architecture]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _deepseek_v3,
}
"""By `model_type`."""
