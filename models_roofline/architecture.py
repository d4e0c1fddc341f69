"""What a decoder is made of: matrices, attention, recurrent state and experts, layer by layer, with exact counts.

An `Architecture` is built from a Hugging Face config (`families`) or a GGUF header (`gguf_file`); everything else in
this library reads it. Layers that are alike stand together as one `Layer` with a count, matrices are fused as
inference engines fuse them (q, k and v; gate and up), because each is one kernel.

Conventions: `total` counts every parameter of the text model once (a tied head once; multi-token-prediction
modules, vision towers, quantisation scales and rotary buffers apart). `active` is what one token touches, input
embedding included. `streamed` is what one token at batch 1 must read: `active` without the input embedding where
the head is not tied, of which one row is read. Boundary: counts and bytes; no time, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from models_roofline.formats import FORMATS, Format

Split = Literal["column", "row", "none"]
"""How tensor parallelism cuts a matrix: its outputs, its inputs, or not at all."""


@dataclass(frozen=True)
class Matrix:
    """One matrix product of a step, y[m, n] = x[m, k] W, with its stored bytes (scales included)."""

    name: str
    n: int
    k: int
    bytes: int
    compute: str = "bf16"
    split: Split = "none"

    @property
    def params(self) -> int:
        return self.n * self.k


def matrix(name: str, n: int, k: int, fmt: Format = FORMATS["bf16"], split: Split = "none") -> Matrix:
    """A matrix of n outputs and k inputs stored in `fmt`."""
    return Matrix(name, n, k, fmt.matrix_bytes(n, k), fmt.compute, split)


@dataclass(frozen=True)
class Attention:
    """The cache of one layer and what reading it costs."""

    q_heads: int
    kv_heads: int
    key_dim: int
    """Dimensions of a key head; with a latent cache, of the absorbed key (latent and rotary part)."""
    value_dim: int
    window: int | None = None
    """Tokens that a query can see, itself included; None: all."""
    chunked: bool = False
    """The window is a chunk that starts anew at its multiples; counted as full, its largest extent."""
    latent: int | None = None
    """Values cached per token in place of keys and values (MLA); tensor parallelism does not divide them."""

    @property
    def values_per_token(self) -> int:
        """Cached values of one token in this layer."""
        return self.latent if self.latent is not None else self.kv_heads * (self.key_dim + self.value_dim)

    def values_per_device(self, tp: int) -> float:
        """Cached values of one token on one of `tp` devices: heads are divided as far as there are any, a latent
        cache stands on each."""
        return self.values_per_token / (1 if self.latent is not None else min(tp, self.kv_heads))

    @property
    def flops_per_pair(self) -> int:
        """FLOPs of one query token against one cached token: scores and weighted sum, over all query heads."""
        return 2 * self.q_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class State:
    """Recurrent state of one layer and one sequence (linear attention, SSM), with its convolution state."""

    bytes: int
    flops_per_token: int


@dataclass(frozen=True)
class Experts:
    """Routed experts of one layer. `matrices` are those of ONE expert."""

    number: int
    top_k: int
    matrices: tuple[Matrix, ...]
    vectors: int = 0
    """Parameters of one expert that are no matrix (biases)."""
    vector_bytes: int | None = None
    """Their bytes; None: two each (bf16)."""

    @property
    def params_per_expert(self) -> int:
        return sum(m.params for m in self.matrices) + self.vectors

    @property
    def vector_bytes_per_expert(self) -> int:
        return 2 * self.vectors if self.vector_bytes is None else self.vector_bytes

    @property
    def bytes_per_expert(self) -> int:
        return sum(m.bytes for m in self.matrices) + self.vector_bytes_per_expert


@dataclass(frozen=True)
class Layer:
    """`count` layers that are alike. A layer may have attention, a state, experts, or none of them."""

    count: int
    matrices: tuple[Matrix, ...]
    vectors: int
    """Parameters of one layer that are no matrix product: norms, biases, per-head gains, router bias, convolutions."""
    vector_bytes: int
    attention: Attention | None = None
    state: State | None = None
    experts: Experts | None = None

    @property
    def dense_params(self) -> int:
        """Parameters of one layer that every token reads."""
        return sum(m.params for m in self.matrices) + self.vectors

    @property
    def dense_bytes(self) -> int:
        return sum(m.bytes for m in self.matrices) + self.vector_bytes

    @property
    def total_params(self) -> int:
        """Parameters of one layer, all experts included."""
        return self.dense_params + (
            self.experts.number * self.experts.params_per_expert if self.experts else 0
        )

    @property
    def active_params(self) -> int:
        return self.dense_params + (
            self.experts.top_k * self.experts.params_per_expert if self.experts else 0
        )

    @property
    def total_bytes(self) -> int:
        return self.dense_bytes + (self.experts.number * self.experts.bytes_per_expert if self.experts else 0)

    @property
    def active_bytes(self) -> int:
        return self.dense_bytes + (self.experts.top_k * self.experts.bytes_per_expert if self.experts else 0)


@dataclass(frozen=True)
class Architecture:
    """A decoder. All figures are of the text model; see the module for the conventions."""

    name: str
    family: str
    """`model_type` of the config, or `general.architecture` of a GGUF file."""
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    embedding: Matrix
    """Input table, vocab × hidden; n is the vocabulary."""
    head: Matrix
    """Output projection; its bytes are read in every step. The same storage as `embedding` where tied."""
    tied: bool
    final_vectors: int
    """Parameters outside the layers that are read in every step (final norm)."""
    final_vector_bytes: int
    unread_params: int = 0
    """Tables of which a step reads one row (learned positions); in `total` and `active`, not in `streamed`."""
    unread_bytes: int = 0
    max_context: int | None = None
    """Tokens the model was made for, as its config says; None where it says nothing."""
    mtp: tuple[Layer, ...] = ()
    """Multi-token-prediction layers in the checkpoint, outside every total here."""
    mtp_params: int = 0
    vision_params: int | None = None
    """Parameters of a vision tower and its projector, outside every total here; None where there is none."""
    notes: tuple[str, ...] = ()
    """Sentences on what was filled in from the family's documented defaults."""

    @property
    def n_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def total_params(self) -> int:
        head = 0 if self.tied else self.head.params
        body = sum(layer.count * layer.total_params for layer in self.layers)
        return self.embedding.params + head + body + self.final_vectors + self.unread_params

    @property
    def active_params(self) -> int:
        head = 0 if self.tied else self.head.params
        body = sum(layer.count * layer.active_params for layer in self.layers)
        return self.embedding.params + head + body + self.final_vectors + self.unread_params

    @property
    def streamed_params(self) -> int:
        """What one token at batch 1 must read."""
        return (
            sum(layer.count * layer.active_params for layer in self.layers)
            + self.head.params
            + self.final_vectors
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of `total_params` as stored."""
        head = 0 if self.tied else self.head.bytes
        body = sum(layer.count * layer.total_bytes for layer in self.layers)
        return self.embedding.bytes + head + body + self.final_vector_bytes + self.unread_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that one token at batch 1 must read of the weights."""
        return (
            sum(layer.count * layer.active_bytes for layer in self.layers)
            + self.head.bytes
            + self.final_vector_bytes
        )

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts."""
        return sum(
            layer.count * layer.experts.number * layer.experts.params_per_expert
            for layer in self.layers
            if layer.experts
        )

    def kv_bytes_per_token(self, value_bytes: float = 2) -> float:
        """Bytes that one more token adds to a short cache, over all layers. `value_bytes` are those of one value."""
        return self.kv_bytes(1, value_bytes)

    def kv_bytes_per_token_beyond_window(self, value_bytes: float = 2) -> float:
        """The same once every windowed layer is full: only layers that see everything still grow."""
        return (
            sum(
                layer.count * layer.attention.values_per_token
                for layer in self.layers
                if layer.attention and layer.attention.window is None
            )
            * value_bytes
        )

    def kv_bytes(self, context: int, value_bytes: float = 2) -> float:
        """Live bytes of one sequence's cache at `context` tokens; windowed layers keep their window."""
        return (
            sum(
                layer.count
                * layer.attention.values_per_token
                * min(context, layer.attention.window or context)
                for layer in self.layers
                if layer.attention
            )
            * value_bytes
        )

    @property
    def state_bytes(self) -> int:
        """Recurrent state of one sequence, over all layers."""
        return sum(layer.count * layer.state.bytes for layer in self.layers if layer.state)
