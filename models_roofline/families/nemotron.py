"""Nemotron-H and Nemotron 3: one part a layer, in the order of `hybrid_override_pattern`.

`M` is a Mamba 2 mixer, `*` grouped-query attention without positions, `-` an MLP of two matrices (squared ReLU, no
gate), `E` experts of two matrices beside a shared one; with `moe_latent_size` routed experts work in a narrower space
that two projections lead into and out of. Sources: Nemotron-H (arXiv 2504.03624), Nemotron 3 (2512.20856) and
transformers' nemotron_h classes, whose defaults these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from models_roofline.architecture import Architecture, Experts, Layer, Matrix
from models_roofline.families._config import Config
from models_roofline.families._parts import Block, decoder, read_heads, same
from models_roofline.families.hybrid import read_state_bytes
from models_roofline.families.mamba import Mamba2Mixer
from models_roofline.quantization import read_storage

_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Names in `layers_block_type`, old and new, and the pattern's letter for each."""


def _nemotron_h(config: Config) -> Architecture:
    build = _Layers(config)
    parts = _pattern(config, "hybrid_override_pattern", "layers_block_type")
    count = config.optional("num_hidden_layers")
    if count is not None and count != len(parts):
        raise config.error(f"num_hidden_layers is {count}, but the pattern names {len(parts)} layers.")
    layers = [build.layer(f"backbone.layers.{i}", part) for i, part in enumerate(parts)]
    modules = config.layers("num_nextn_predict_layers", default=0, low=0)
    mtp = tuple(build.mtp() for _ in range(modules))
    return decoder(
        config,
        build.storage,
        layers,
        tied=False,
        mtp=same(mtp),
        mtp_params=sum(layer.total_params for layer in mtp),
    )


def _pattern(config: Config, letters: str, names: str, default: str | None = None) -> str:
    """Kinds of layers as letters, from a string of them or from a list of names."""
    listed = config.get(names)
    if listed is None:
        pattern = config.text(letters, default)
    elif isinstance(listed, list) and all(isinstance(name, str) and name in _LETTERS for name in listed):
        pattern = "".join(_LETTERS[name] for name in listed)
    else:
        raise config.error(
            f"{config.field(names)} must list layers of {', '.join(_LETTERS)}, not {listed!r}."
        )
    strange = sorted(set(pattern) - set(_LETTERS.values()))
    if strange or not pattern:
        raise config.error(f"{config.field(letters)} {pattern!r} must be made of M, *, - and E.")
    return pattern


class _Layers:
    """Makes the layers of one config; fields of a kind of layer are read when the first of that kind comes."""

    def __init__(self, config: Config):
        self.config = config
        self.storage = read_storage(config)
        self.hidden = config.integer("hidden_size")
        self.mlp_bias = config.flag("mlp_bias", False)
        self.kinds = {"M": self._mamba, "*": self._attention, "-": self._mlp, "E": self._experts}

    def layer(self, path: str, part: str) -> Layer:
        return self.kinds[part](Block(self.storage, path))

    def _mamba(self, block: Block) -> Layer:
        config = self.config
        mixer = Mamba2Mixer(
            heads=config.integer("mamba_num_heads", default=128),
            head_dim=config.integer("mamba_head_dim", default=64),
            groups=config.integer("n_groups", "mamba_n_groups", "mamba_num_groups", default=8),
            state_size=config.integer("ssm_state_size", "mamba_state_dim", default=128),
            kernel=config.integer("conv_kernel", "mamba_d_conv", default=4),
            conv_bias=config.flag("use_conv_bias", True),
            bias=config.flag("use_bias", False),
            value_bytes=read_state_bytes(config, "mamba_ssm_cache_dtype"),
        )
        return block.layer(
            mixer.matrices(block, self.hidden),
            self.hidden + mixer.vectors(self.hidden),
            state=mixer.state(self.storage.base_bytes),
        )

    def _attention(self, block: Block) -> Layer:
        config = self.config
        heads = read_heads(config, q=32, kv=8, dim=config.optional("attention_head_dim") or 128)
        biases = heads.qkv_width + self.hidden if config.flag("attention_bias", False) else 0
        matrices = block.attention(self.hidden, heads, at="mixer")
        return block.layer(matrices, self.hidden + biases, attention=heads.attention())

    def _mlp(self, block: Block) -> Layer:
        inner = self.config.integer("intermediate_size", default=21504)
        biases = (inner + self.hidden) * self.mlp_bias
        return block.layer(self._two(block, inner, "mixer"), self.hidden + biases)

    def _experts(self, block: Block) -> Layer:
        """Router and its fp32 correction, latent projections, shared expert, routed experts."""
        config, hidden = self.config, self.hidden
        if self.mlp_bias:
            raise config.error("mlp_bias is true; biases of experts are not counted here.")
        number = config.integer("n_routed_experts", "num_local_experts")
        top_k, inner = config.integer("num_experts_per_tok"), config.integer("moe_intermediate_size")
        if top_k > number:
            raise config.error(f"num_experts_per_tok is {top_k}, but there are {number} experts.")
        latent, shared = (
            config.optional("moe_latent_size"),
            config.integer("moe_shared_expert_intermediate_size"),
        )
        matrices = (
            block.base_matrix("router", number, hidden),
            *self._latent(block, latent),
            *self._two(block, shared, "mixer.shared_experts", "shared_"),
        )
        one = self._two(block, inner, "mixer.experts.0", width=latent)
        return block.layer(matrices, hidden, fp32_vectors=number, experts=Experts(number, top_k, one))

    def _latent(self, block: Block, latent: int | None) -> tuple[Matrix, ...]:
        if latent is None:
            return ()
        return (
            block.matrix("latent_down", {"mixer.fc1_latent_proj": latent}, self.hidden),
            block.matrix("latent_up", {"mixer.fc2_latent_proj": self.hidden}, latent),
        )

    def _two(
        self, block: Block, inner: int, at: str, prefix: str = "", width: int | None = None
    ) -> tuple[Matrix, Matrix]:
        """The two matrices of an MLP without a gate, between `width` (the hidden size where None) and `inner`."""
        width = width or self.hidden
        return (
            block.matrix(f"{prefix}up", {f"{at}.up_proj": inner}, width, "column"),
            block.matrix(f"{prefix}down", {f"{at}.down_proj": width}, inner, "row"),
        )

    def mtp(self) -> Layer:
        """A prediction module as one layer: its parts, the projection that joins two inputs, three norms."""
        pattern = _pattern(self.config, "mtp_hybrid_override_pattern", "mtp_layers_block_type", "*E")
        block = Block(self.storage, "mtp.layers.0")
        joined = block.base_matrix("eh_proj", self.hidden, 2 * self.hidden)
        parts = [self.layer(f"mtp.layers.{i}", part) for i, part in enumerate(pattern)]
        return _as_one(self.config, [block.layer((joined,), 3 * self.hidden), *parts])


def _as_one(config: Config, parts: Sequence[Layer]) -> Layer:
    """Parts that run one after another as one layer, which can hold one of each kind."""
    attention = [part.attention for part in parts if part.attention]
    states = [part.state for part in parts if part.state]
    experts = [part.experts for part in parts if part.experts]
    if max(len(attention), len(states), len(experts)) > 1:
        raise config.error(
            "mtp_hybrid_override_pattern names a kind of layer twice; such a module is not known here."
        )
    return Layer(
        count=1,
        matrices=tuple(each for part in parts for each in part.matrices),
        vectors=sum(part.vectors for part in parts),
        vector_bytes=sum(part.vector_bytes for part in parts),
        attention=next(iter(attention), None),
        state=next(iter(states), None),
        experts=next(iter(experts), None),
    )


BUILDERS: dict[str, Callable[[Config], Architecture]] = {"nemotron_h": _nemotron_h}
"""By `model_type`."""
