"""Mamba and Mamba 2: selective state spaces in place of attention; no cache that grows, one state per layer.

A layer is a norm and a mixer. Mamba keeps d_inner × d_state values per sequence and decays each on its own; Mamba 2
keeps heads × head_dim × d_state and decays by head. Both keep the last inputs of a short convolution. Sources: Mamba
(arXiv 2312.00752), Mamba 2 (2405.21060) and transformers' classes, whose defaults these are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from models_roofline.architecture import Architecture, Matrix, State
from models_roofline.families._config import Config
from models_roofline.families._parts import Block, decoder
from models_roofline.quantization import read_storage

MAMBA_FLOPS = 6
"""Per element of the state and token: step × decay rate 1, decay 1, input 1, sum 1, reading 2 (exponentials apart)."""

MAMBA2_FLOPS = 5
"""The same without the first: the decay is one number per head."""

FP32_BYTES = 4


@dataclass(frozen=True)
class Mamba2Mixer:
    """Sizes of a Mamba 2 mixer; also the one of Nemotron-H."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    kernel: int
    conv_bias: bool
    bias: bool
    value_bytes: int = FP32_BYTES

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What runs through the convolution: the input, and B and C of each group."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def projected(self) -> int:
        """Outputs of the input projection: gate, convolution and time steps."""
        return self.inner + self.channels + self.heads

    def matrices(self, block: Block, hidden: int) -> tuple[Matrix, ...]:
        return (
            block.matrix("in_proj", {"mixer.in_proj": self.projected}, hidden, "column"),
            block.matrix("out_proj", {"mixer.out_proj": hidden}, self.inner, "row"),
        )

    def vectors(self, hidden: int) -> int:
        """Convolution, decay, skip and step bias of each head, gated norm, biases."""
        convolution = self.channels * (self.kernel + self.conv_bias)
        return convolution + 3 * self.heads + self.inner + (self.projected + hidden) * self.bias

    def state(self, base_bytes: int) -> State:
        """The recurrent state, and the convolution's in the base type."""
        size, taps = self.inner * self.state_size, self.channels * self.kernel
        return State(size * self.value_bytes + taps * base_bytes, MAMBA2_FLOPS * size + 2 * taps)


def _mamba(config: Config) -> Architecture:
    hidden, storage = config.integer("hidden_size", default=768), read_storage(config)
    inner = hidden * config.integer("expand", default=2)
    size, kernel = config.integer("state_size", default=16), config.integer("conv_kernel", default=4)
    rank = _time_step_rank(config, hidden)
    conv_bias, bias = config.flag("use_conv_bias", True), config.flag("use_bias", False)
    # A norm, the convolution, decay rates (one per element of the state), skip, step bias, and biases if any.
    vectors = hidden + inner * (kernel + conv_bias) + inner * (size + 2) + (2 * inner + hidden) * bias
    state = State(
        inner * size * FP32_BYTES + inner * kernel * storage.base_bytes,
        MAMBA_FLOPS * inner * size + 2 * inner * kernel,
    )
    layers = []
    for index in range(config.layers()):
        block = Block(storage, f"backbone.layers.{index}")
        matrices = (
            block.matrix("in_proj", {"mixer.in_proj": 2 * inner}, hidden, "column"),
            block.matrix("x_proj", {"mixer.x_proj": rank + 2 * size}, inner, "row"),
            block.matrix("dt_proj", {"mixer.dt_proj": inner}, rank, "column"),
            block.matrix("out_proj", {"mixer.out_proj": hidden}, inner, "row"),
        )
        layers.append(block.layer(matrices, vectors, state=state))
    return decoder(config, storage, layers, tied=True)


def _time_step_rank(config: Config, hidden: int) -> int:
    """`auto` is a sixteenth of the hidden size, rounded up."""
    if config.get("time_step_rank") in (None, "auto"):
        return -(-hidden // 16)
    return config.integer("time_step_rank")


def _mamba2(config: Config) -> Architecture:
    hidden, storage = config.integer("hidden_size"), read_storage(config)
    mixer = Mamba2Mixer(
        heads=config.integer("num_heads", default=128),
        head_dim=config.integer("head_dim", default=64),
        groups=config.integer("n_groups", default=8),
        state_size=config.integer("state_size", default=128),
        kernel=config.integer("conv_kernel", default=4),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
    )
    if mixer.inner != hidden * config.integer("expand", default=2):
        raise config.error(
            f"num_heads {mixer.heads} × head_dim {mixer.head_dim} is not expand × hidden_size {hidden}; "
            "one of them is wrong."
        )
    layers = []
    for index in range(config.layers()):
        block = Block(storage, f"backbone.layers.{index}")
        vectors, state = hidden + mixer.vectors(hidden), mixer.state(storage.base_bytes)
        layers.append(block.layer(mixer.matrices(block, hidden), vectors, state=state))
    return decoder(config, storage, layers, tied=False)


BUILDERS: dict[str, Callable[[Config], Architecture]] = {"mamba": _mamba, "mamba2": _mamba2}
"""By `model_type`."""
