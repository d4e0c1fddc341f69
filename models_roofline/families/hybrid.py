"""Qwen3-Next and Qwen3.5: three layers of gated delta-net linear attention to one of gated full attention.

A linear layer keeps, per value head, a matrix of key_dim × value_dim in fp32 that is read and written for every
token, and the last inputs of a short convolution. Full layers have an output gate, which doubles q. The feed-forward
part is a gated MLP or experts with a gated shared one. Sources: Gated Delta Networks (arXiv 2412.06464); transformers'
qwen3_next, qwen3_5 and qwen3_5_moe classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models_roofline.architecture import Architecture, Experts, Layer, Matrix, State
from models_roofline.families._config import Config
from models_roofline.families._parts import FULL, Block, Mixture, decoder, read_heads, same
from models_roofline.families.dense import qwen3_attention_vectors
from models_roofline.families.moe import qwen_sparse
from models_roofline.quantization import read_storage

LINEAR = "linear_attention"

DELTA_FLOPS = 7
"""Per element of the state and token: decay 1, reading by key 2, rank-one update 2, reading by query 2."""

STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of one value of a recurrent state, by the type that a config names for it."""


def read_state_bytes(config: Config, key: str) -> int:
    """Bytes of one value of the recurrent state; fp32 where the config says nothing, as engines keep it."""
    kind = config.text(key, default="float32")
    if kind not in STATE_BYTES:
        raise config.error(
            f"{config.field(key)} {kind!r} is not known here; known: {', '.join(STATE_BYTES)}."
        )
    return STATE_BYTES[kind]


@dataclass(frozen=True)
class DeltaNet:
    """Sizes of a gated delta-net layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    value_bytes: int

    @property
    def width(self) -> int:
        """Values of all heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What runs through the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.width

    def matrices(self, block: Block, hidden: int, split: bool) -> tuple[Matrix, ...]:
        """Projections. `split`: the checkpoint keeps q, k, v apart from z and b from a (Qwen3.5)."""
        at, qkv, z, gates = "linear_attn", self.channels, self.width, self.value_heads
        wide = {f"{at}.in_proj_qkv": qkv, f"{at}.in_proj_z": z} if split else {f"{at}.in_proj_qkvz": qkv + z}
        narrow = (
            {f"{at}.in_proj_b": gates, f"{at}.in_proj_a": gates} if split else {f"{at}.in_proj_ba": 2 * gates}
        )
        return (
            block.matrix("in_proj", wide, hidden, "column"),
            block.matrix("in_proj_ba", narrow, hidden, "column"),
            block.matrix("out_proj", {f"{at}.out_proj": hidden}, self.width, "row"),
        )

    @property
    def vectors(self) -> int:
        """Convolution without bias, decay and step bias per head, gated norm over a head."""
        return self.channels * self.kernel + 2 * self.value_heads + self.value_dim

    def state(self, base_bytes: int) -> State:
        """The recurrent state, and the convolution's in the base type."""
        size, taps = self.width * self.key_dim, self.channels * self.kernel
        return State(size * self.value_bytes + taps * base_bytes, DELTA_FLOPS * size + 2 * taps)


def _read_delta_net(config: Config) -> DeltaNet:
    net = DeltaNet(
        key_heads=config.integer("linear_num_key_heads", default=16),
        value_heads=config.integer("linear_num_value_heads", default=32),
        key_dim=config.integer("linear_key_head_dim", default=128),
        value_dim=config.integer("linear_value_head_dim", default=128),
        kernel=config.integer("linear_conv_kernel_dim", default=4),
        value_bytes=read_state_bytes(config, "mamba_ssm_dtype"),
    )
    if net.value_heads % net.key_heads:
        raise config.error(
            f"{config.field('linear_num_value_heads')} {net.value_heads} is not a multiple of "
            f"linear_num_key_heads {net.key_heads}."
        )
    return net


def _qwen3_next(config: Config) -> Architecture:
    arch = _decoder(config, _read_mixture(config, 512, 10), qwen_sparse(config), split=False)
    if not arch.mtp:
        config.remark(
            "A Qwen3-Next config does not say whether the checkpoint holds a prediction module (80B-A3B holds one, "
            "Coder-Next none); add mtp_num_hidden_layers = 1 to count it."
        )
    return arch


def _qwen3_5(config: Config) -> Architecture:
    return _decoder(config, None, lambda index: False, split=True)


def _qwen3_5_moe(config: Config) -> Architecture:
    return _decoder(config, _read_mixture(config, 256, 8), lambda index: True, split=True)


def _read_mixture(config: Config, number: int, top_k: int) -> Mixture:
    mixture = Mixture(
        number=config.integer("num_experts", default=number),
        top_k=config.integer("num_experts_per_tok", default=top_k),
        inner=config.integer("moe_intermediate_size", default=512),
        shared=config.integer("shared_expert_intermediate_size", default=512),
        shared_gate=True,
    )
    mixture.check(config)
    return mixture


def _decoder(
    config: Config, mixture: Mixture | None, sparse: Callable[[int], bool], *, split: bool
) -> Architecture:
    """`sparse` says which layers have the `mixture`; a prediction module has it wherever the model has one."""
    build, kinds = _Layers(config, mixture, split), _kinds(config)
    layers = [build.layer(f"model.layers.{i}", kind, sparse(i)) for i, kind in enumerate(kinds)]
    modules = config.layers("mtp_num_hidden_layers", default=0, low=0)
    mtp = tuple(build.mtp(f"mtp.layers.{i}") for i in range(modules))
    if mtp and config.flag("mtp_use_dedicated_embeddings", False):
        raise config.error(
            "mtp_use_dedicated_embeddings is true; such a prediction module is not known here."
        )
    mtp_params = sum(layer.total_params for layer in mtp)
    return decoder(config, build.storage, layers, tied=False, mtp=same(mtp), mtp_params=mtp_params)


def _kinds(config: Config) -> tuple[str, ...]:
    """Kind of each layer: `layer_types`, or every `full_attention_interval`-th is full."""
    count = config.layers()
    listed = config.layer_types((LINEAR, FULL), count)
    if listed:
        return listed
    every = config.integer("full_attention_interval", default=4)
    return tuple(LINEAR if (i + 1) % every else FULL for i in range(count))


class _Layers:
    """Makes the layers of one config."""

    def __init__(self, config: Config, mixture: Mixture | None, split: bool):
        self.config, self.mixture, self.split = config, mixture, split
        self.storage = read_storage(config)
        self.hidden = config.integer("hidden_size")
        self.heads = read_heads(config, kv=2 if mixture else 4, dim=256)
        self.net = _read_delta_net(config)
        self.full_vectors = qwen3_attention_vectors(config, self.heads, self.hidden)
        if self.split and config.get("attn_output_gate") is False:
            raise config.error("attn_output_gate is false; such a model is not known here.")

    def layer(
        self, path: str, kind: str, sparse: bool, joined: tuple[Matrix, ...] = (), norms: int = 0
    ) -> Layer:
        """A layer at that path. `joined` and `norms` are what a prediction module has besides."""
        block = Block(self.storage, path)
        full = kind == FULL
        rest, gate, experts = self._feed_forward(block, sparse)
        mixer = (
            block.attention(self.hidden, self.heads, gated=True)
            if full
            else self.net.matrices(block, self.hidden, self.split)
        )
        return block.layer(
            (*joined, *mixer, *rest),
            2 * self.hidden + (self.full_vectors if full else self.net.vectors) + gate + norms,
            attention=self.heads.attention() if full else None,
            state=None if full else self.net.state(self.storage.base_bytes),
            experts=experts,
        )

    def _feed_forward(self, block: Block, sparse: bool) -> tuple[tuple[Matrix, ...], int, Experts | None]:
        """Matrices that every token reads, parameters that are no matrix, and routed experts."""
        if not sparse or self.mixture is None:
            return block.gated_mlp(self.hidden, self.config.integer("intermediate_size")), 0, None
        matrices = self.mixture.matrices(block, self.hidden)
        return matrices, self.mixture.vectors(self.hidden), self.mixture.experts(block, self.hidden)

    def mtp(self, path: str) -> Layer:
        """A full-attention layer behind a projection of two joined inputs, with three more norms; embedding and head
        are the model's own."""
        joined = Block(self.storage, path).base_matrix("eh_proj", self.hidden, 2 * self.hidden)
        return self.layer(path, FULL, self.mixture is not None, (joined,), 3 * self.hidden)


BUILDERS: dict[str, Callable[[Config], Architecture]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
}
"""By `model_type`."""
