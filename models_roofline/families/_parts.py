"""What the builders share: heads, attention, gated MLP, experts, windows, and putting layers together.

A builder makes its layers one by one and `decoder` groups those that are equal, so a list of layer types, dense
layers before the experts and modules left unquantised in single layers need no special case.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from models_roofline.architecture import (
    Architecture,
    Attention,
    Experts,
    Layer,
    Matrix,
    Split,
    State,
    matrix,
)
from models_roofline.families._config import Config
from models_roofline.quantization import Storage

FULL, SLIDING = "full_attention", "sliding_attention"
Windows = tuple[int | None, ...]
"""Window of each layer in tokens; None sees everything."""


@dataclass(frozen=True)
class Heads:
    """Query heads, key-value heads and the dimension of each."""

    q: int
    kv: int
    dim: int

    @property
    def q_width(self) -> int:
        return self.q * self.dim

    @property
    def kv_width(self) -> int:
        return self.kv * self.dim

    @property
    def qkv_width(self) -> int:
        """Outputs of q, k and v together; as many biases where they have them."""
        return self.q_width + 2 * self.kv_width

    def attention(self, window: int | None = None) -> Attention:
        """Their cache in one layer."""
        return Attention(self.q, self.kv, self.dim, self.dim, window)


def read_heads(
    config: Config, *, q: int | None = None, kv: int | None = None, dim: int | None = None
) -> Heads:
    """Heads of a config. `q`, `kv`, `dim` are the family's constant defaults; without them key-value heads are as
    many as query heads, and the dimension is hidden_size / num_attention_heads."""
    hidden = config.integer("hidden_size")
    q_heads = config.integer("num_attention_heads", default=q)
    kv_heads = config.integer(
        "num_key_value_heads", default=kv or q_heads, why="" if kv else "as num_attention_heads"
    )
    if q_heads % kv_heads:
        raise config.error(
            f"{config.field('num_attention_heads')} {q_heads} is not a multiple of num_key_value_heads {kv_heads}."
        )
    return Heads(q_heads, kv_heads, _head_dim(config, hidden, q_heads, dim))


def _head_dim(config: Config, hidden: int, heads: int, default: int | None) -> int:
    given = config.optional("head_dim")
    if given is not None:
        return given
    if default is None and hidden % heads:
        raise config.error(
            f"{config.field('head_dim')} is absent and hidden_size {hidden} is not divisible by "
            f"num_attention_heads {heads}; add head_dim."
        )
    return config.integer(
        "head_dim",
        default=default or hidden // heads,
        why="" if default else "hidden_size / num_attention_heads",
    )


@dataclass(frozen=True)
class Block:
    """One layer under construction: its path in the checkpoint and how its modules are stored."""

    storage: Storage
    path: str

    def matrix(self, name: str, outputs: Mapping[str, int], k: int, split: Split = "none") -> Matrix:
        """A product of `k` inputs with the outputs of one module, or of several that engines fuse.

        `outputs` maps a module's path within the layer to its number of outputs. Bytes are those of the parts.
        """
        parts = [(n, self.storage.format(f"{self.path}.{module}")) for module, n in outputs.items()]
        stored = sum(fmt.matrix_bytes(n, k) for n, fmt in parts)
        return Matrix(name, sum(outputs.values()), k, stored, parts[0][1].compute, split)

    def base_matrix(self, name: str, n: int, k: int) -> Matrix:
        """A product that quantisation leaves in the base type (a router)."""
        return matrix(name, n, k, self.storage.base)

    def layer(
        self,
        matrices: Iterable[Matrix],
        vectors: int,
        *,
        fp32_vectors: int = 0,
        attention: Attention | None = None,
        state: State | None = None,
        experts: Experts | None = None,
    ) -> Layer:
        """The finished layer. `vectors` are in the base type, `fp32_vectors` beside them always in fp32."""
        stored = vectors * self.storage.base_bytes + 4 * fp32_vectors
        return Layer(1, tuple(matrices), vectors + fp32_vectors, stored, attention, state, experts)

    def attention(
        self, hidden: int, heads: Heads, *, gated: bool = False, at: str = "self_attn"
    ) -> tuple[Matrix, ...]:
        """Projections of grouped-query attention, q, k and v as one; a gate on the output doubles q."""
        queries = heads.q_width * (2 if gated else 1)
        outputs = {f"{at}.q_proj": queries, f"{at}.k_proj": heads.kv_width, f"{at}.v_proj": heads.kv_width}
        return (
            self.matrix("qkv", outputs, hidden, "column"),
            self.matrix("o", {f"{at}.o_proj": hidden}, heads.q_width, "row"),
        )

    def gated_mlp(
        self, hidden: int, inner: int, *, at: str = "mlp", prefix: str = ""
    ) -> tuple[Matrix, Matrix]:
        """Three matrices of a gated MLP, gate and up as one."""
        return (
            self.matrix(
                f"{prefix}gate_up", {f"{at}.gate_proj": inner, f"{at}.up_proj": inner}, hidden, "column"
            ),
            self.matrix(f"{prefix}down", {f"{at}.down_proj": hidden}, inner, "row"),
        )


@dataclass(frozen=True)
class Mixture:
    """A family's expert layer: gated experts, the router that picks `top_k` of them, perhaps a shared expert."""

    number: int
    top_k: int
    inner: int
    """Size of one expert."""
    shared: int = 0
    """Size of what every token uses beside them, shared experts taken together; 0: none."""
    shared_gate: bool = False
    """Whether a gate of one output scales the shared expert (counted with the vectors)."""
    expert_vectors: int = 0
    """Parameters of one expert that are no matrix."""

    def check(self, config: Config) -> None:
        """Raises RooflineError where a token would use more experts than there are."""
        if self.top_k > self.number:
            raise config.error(
                f"{config.field('num_experts_per_tok')} is {self.top_k}, but there are {self.number} experts."
            )

    def matrices(self, block: Block, hidden: int, shared_at: str = "mlp.shared_expert") -> tuple[Matrix, ...]:
        """What every token reads: the router, and the shared expert."""
        router = block.base_matrix("router", self.number, hidden)
        if not self.shared:
            return (router,)
        return (router, *block.gated_mlp(hidden, self.shared, at=shared_at, prefix="shared_"))

    def vectors(self, hidden: int) -> int:
        """What every token reads and is no matrix."""
        return hidden if self.shared_gate else 0

    def experts(self, block: Block, hidden: int) -> Experts:
        """The routed experts."""
        one = block.gated_mlp(hidden, self.inner, at="mlp.experts.0")
        return Experts(self.number, self.top_k, one, self.expert_vectors)


def windows(config: Config, slides: Iterable[bool], default: int | None = None) -> Windows:
    """Window of each layer: `sliding_window` where `layer_types` says so or, without that list, where `slides`.

    `default` is the family's constant for an absent `sliding_window`.
    """
    planned = tuple(slides)
    listed = config.layer_types((FULL, SLIDING), len(planned))
    if listed is not None:
        planned = tuple(kind == SLIDING for kind in listed)
    if not any(planned):
        return (None,) * len(planned)
    window = config.integer("sliding_window", default=default)
    return tuple(window if slide else None for slide in planned)


def same(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Layers that are equal as one with a count, in order of first appearance."""
    return tuple(dataclasses.replace(layer, count=count) for layer, count in Counter(layers).items())


def decoder(
    config: Config,
    storage: Storage,
    layers: Iterable[Layer],
    *,
    tied: bool,
    vocab: int | None = None,
    hidden: int | None = None,
    norm: int | None = None,
    unread: int = 0,
    context: int | None = None,
    mtp: tuple[Layer, ...] = (),
    mtp_params: int = 0,
) -> Architecture:
    """A decoder from its layers.

    `tied` is the family's default for `tie_word_embeddings`, `unread` the parameters of learned positions. `vocab`,
    `hidden`, `norm` (parameters of the final norm) and `context` are for families that name or default them in
    their own way; else they are `vocab_size`, `hidden_size`, as many as that, and `max_position_embeddings`.
    """
    tied = config.flag("tie_word_embeddings", tied)
    vocab = vocab or config.integer("vocab_size")
    hidden = hidden or config.integer("hidden_size")
    final = norm or hidden
    embedding = matrix("embedding", vocab, hidden, storage.base)
    fmt = storage.base if tied else storage.format("lm_head")
    return Architecture(
        name=config.name,
        family="",
        hidden=hidden,
        vocab=vocab,
        layers=same(layers),
        embedding=embedding,
        head=matrix("head", vocab, hidden, fmt, "column"),
        tied=tied,
        final_vectors=final,
        final_vector_bytes=final * storage.base_bytes,
        unread_params=unread,
        unread_bytes=unread * storage.base_bytes,
        max_context=context or config.optional("max_position_embeddings"),
        mtp=mtp,
        mtp_params=mtp_params,
        notes=config.notes,
    )
