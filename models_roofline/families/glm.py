"""GLM 4.5, 4.6 and 4.7: grouped-query attention over sigmoid-routed experts, after a few dense layers.

The router adds a learned correction per expert when it picks (kept in fp32); one shared expert has no gate. A
prediction module is a whole layer behind a projection of two joined inputs. Source: transformers' glm4_moe classes.
"""

from __future__ import annotations

from collections.abc import Callable

from models_roofline.architecture import Architecture, Layer, Matrix
from models_roofline.families._config import Config
from models_roofline.families._parts import Block, decoder, read_heads, same
from models_roofline.families.mla import read_mixture
from models_roofline.quantization import read_storage


def _glm4_moe(config: Config) -> Architecture:
    build, count = _Layers(config), config.layers()
    first = config.integer("first_k_dense_replace", default=1, low=0)
    modules = config.layers("num_nextn_predict_layers", "num_mtp_layers", default=0, low=0)
    mtp = tuple(build.mtp(count + i) for i in range(modules))
    if mtp:
        config.remark(
            "The prediction module is counted with a copy of embedding and head, as GLM-4.5 stores it; "
            "GLM-4.6, whose config is the same, stores none."
        )
    return decoder(
        config,
        build.storage,
        [build.dense(i) if i < first else build.sparse(i) for i in range(count)],
        tied=False,
        mtp=same(mtp),
        mtp_params=sum(layer.total_params for layer in mtp) + 2 * len(mtp) * build.table,
    )


class _Layers:
    """Makes the layers of one config."""

    def __init__(self, config: Config):
        self.storage = read_storage(config)
        self.hidden = config.integer("hidden_size")
        self.inner = config.integer("intermediate_size")
        self.table = config.integer("vocab_size") * self.hidden
        self.heads = read_heads(config, kv=8)
        self.mixture = read_mixture(config, shared=1)
        biases = self.heads.qkv_width if config.flag("attention_bias", False) else 0
        norms = 2 * self.heads.dim if config.flag("use_qk_norm", False) else 0
        self.vectors = 2 * self.hidden + biases + norms

    def dense(self, index: int) -> Layer:
        block = Block(self.storage, f"model.layers.{index}")
        matrices = (*block.attention(self.hidden, self.heads), *block.gated_mlp(self.hidden, self.inner))
        return block.layer(matrices, self.vectors, attention=self.heads.attention())

    def sparse(self, index: int, joined: tuple[Matrix, ...] = (), norms: int = 0) -> Layer:
        block = Block(self.storage, f"model.layers.{index}")
        shared = self.mixture.matrices(block, self.hidden, "mlp.shared_experts")
        return block.layer(
            (*joined, *block.attention(self.hidden, self.heads), *shared),
            self.vectors + norms,
            fp32_vectors=self.mixture.number,
            attention=self.heads.attention(),
            experts=self.mixture.experts(block, self.hidden),
        )

    def mtp(self, index: int) -> Layer:
        """Norms on both inputs and before the head, and the projection that joins the inputs."""
        block = Block(self.storage, f"model.layers.{index}")
        joined = block.base_matrix("eh_proj", self.hidden, 2 * self.hidden)
        return self.sparse(index, (joined,), 3 * self.hidden)


BUILDERS: dict[str, Callable[[Config], Architecture]] = {"glm4_moe": _glm4_moe}
"""By `model_type`."""
