"""A GGUF file → its exact architecture, from the tensors that it holds.

A GGUF header lists every tensor with shape and number type, so nothing of a count or a byte is inferred: matrices,
experts and vectors are the tensors themselves, block by block, with the types that a mixed quantisation such as
Q4_K_M gave each block. Metadata adds what shapes do not say: heads, windows, experts per token, recurrent state.
Tensor and key names are those of the `gguf` package; which blocks have a window where no key says so is llama.cpp's
choice for the family (src/models/*.cpp).

Boundary: the header of one model; `gguf_header` reads the bytes. Rotary tables and scales beside quantised weights
are no parameters; rotary tables are left out of bytes too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from models_roofline.architecture import Architecture, Attention, Experts, Layer, Matrix, Split, State
from models_roofline.errors import RooflineError, hint
from models_roofline.families._parts import same
from models_roofline.families.hybrid import DELTA_FLOPS
from models_roofline.families.mamba import MAMBA2_FLOPS, MAMBA_FLOPS
from models_roofline.gguf_header import Header, Tensor, read_header


@dataclass(frozen=True)
class _Windows:
    """Which blocks of a family see a window where the file does not say: all but every `period`-th; 0: all."""

    period: int
    default: int | None = None
    """Tokens of the window where the file does not say; None: then there is none."""
    chunked: bool = False


_NO_WINDOWS = _Windows(1)
_FAMILIES: dict[str, _Windows] = {
    **dict.fromkeys(
        (
            "llama",
            "qwen2",
            "qwen2moe",
            "qwen3",
            "qwen3moe",
            "qwen3next",
            "gemma",
            "gpt2",
            "deepseek2",
            "olmoe",
        ),
        _NO_WINDOWS,
    ),
    **dict.fromkeys(("glm4moe", "nemotron_h", "nemotron_h_moe", "mamba", "mamba2", "smollm3"), _NO_WINDOWS),
    "gemma2": _Windows(2, 4096),
    "gemma3": _Windows(6),
    "gpt-oss": _Windows(2),
    "llama4": _Windows(4, 8192, chunked=True),
    "phi3": _Windows(0),
}
"""By `general.architecture`."""

_STATE_FLOPS = {"mamba": MAMBA_FLOPS, "qwen3next": DELTA_FLOPS}
"""Per element of the recurrent state and token; Mamba 2's in the other families that have one."""

_MATRICES: dict[str, tuple[str, Split]] = {
    "attn_qkv": ("qkv", "column"),
    "attn_q": ("qkv", "column"),
    "attn_k": ("qkv", "column"),
    "attn_v": ("qkv", "column"),
    "attn_gate": ("in_proj", "column"),
    "attn_q_a": ("q_a", "none"),
    "attn_q_b": ("q_b", "column"),
    "attn_kv_a_mqa": ("kv_a", "none"),
    "attn_kv_b": ("kv_b", "column"),
    "attn_k_b": ("kv_b", "column"),
    "attn_v_b": ("kv_b", "column"),
    "attn_output": ("o", "row"),
    "ssm_in": ("in_proj", "column"),
    "ssm_ba": ("in_proj_ba", "column"),
    "ssm_x": ("x_proj", "row"),
    "ssm_dt": ("dt_proj", "column"),
    "ssm_out": ("out_proj", "row"),
    "ffn_gate_inp": ("router", "none"),
    "ffn_latent_down": ("latent_down", "none"),
    "ffn_latent_up": ("latent_up", "none"),
    "ffn_gate": ("gate_up", "column"),
    "ffn_up": ("gate_up", "column"),
    "ffn_down": ("down", "row"),
    "ffn_gate_shexp": ("shared_gate_up", "column"),
    "ffn_up_shexp": ("shared_gate_up", "column"),
    "ffn_down_shexp": ("shared_down", "row"),
    "nextn.eh_proj": ("eh_proj", "none"),
}
"""Matrix and its cut by tensor; tensors of one matrix are one kernel, in this order."""
_EXPERTS: dict[str, tuple[str, Split]] = {
    "ffn_gate_up_exps": ("gate_up", "column"),
    "ffn_gate_exps": ("gate_up", "column"),
    "ffn_up_exps": ("gate_up", "column"),
    "ffn_down_exps": ("down", "row"),
}
"""The same for the stacked tensors of routed experts."""
_VECTORS = frozenset({"ssm_a", "ssm_d", "ssm_norm", "ssm_conv1d"})
"""Tensors of two dimensions that multiply nothing as matrices."""
_MTP_TABLES = frozenset({"nextn.embed_tokens", "nextn.shared_head_head"})
_ROTARY = re.compile(r"(blk\.\d+\.)?(rope_freqs|rope_factors_\w+|attn_rot_embd)\.weight")
_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")


def load_gguf(path: str | Path) -> Architecture:
    """The architecture of a GGUF file, with its real bytes; of a split model, any part leads to all.

    Only the header is read: a file that ends after it will do. `total_params` is the number of elements stored and
    `streamed_bytes` what one step reads of them. Raises RooflineError where the file is damaged or its family unknown.
    """
    return _Model(read_header(Path(path))).architecture()


class _Model:
    """One header, and the questions that an architecture asks of it."""

    def __init__(self, header: Header) -> None:
        self._file = header.file
        self._metadata = header.metadata
        self._family = self._known_family()
        self._top, self._blocks = _by_block(header.tensors.values())
        self._notes: dict[str, None] = {}

    def _error(self, sentence: str) -> RooflineError:
        return RooflineError(f"{self._file}: {sentence}")

    def _unknown(self, name: str) -> RooflineError:
        return self._error(f"the tensor {name} is not known in a {self._family} model.")

    def _known_family(self) -> str:
        family = self._metadata.get("general.architecture")
        if not isinstance(family, str):
            raise self._error("general.architecture is missing; this file describes no model.")
        if family == "clip":
            raise self._error("holds the vision part of a model; name the file of its text model.")
        if family not in _FAMILIES:
            raise self._error(
                f"general.architecture {family!r} is not a family that is known here; "
                f"{hint(family, _FAMILIES, most=3)}"
            )
        return family

    def _key(self, key: str) -> str:
        return f"{self._family}.{key}"

    def _optional(self, key: str, block: int = 0) -> int | None:
        """A whole number of the metadata, that of `block` where the key lists one for each."""
        value = self._metadata.get(self._key(key))
        if isinstance(value, tuple):
            value = value[block] if block < len(value) else None
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._error(f"{self._key(key)} must be a whole number of at least 0, not {value!r}.")
        return value

    def _integer(self, key: str, block: int = 0) -> int:
        value = self._optional(key, block)
        if not value:
            what = "is missing" if value is None else "is 0"
            raise self._error(f"{self._key(key)} {what}; convert the model again.")
        return value

    def _agree(self, tensor: Tensor, size: int, expected: int, keys: str) -> None:
        """Metadata and shapes must tell the same of heads, experts and states."""
        if size != expected:
            named = ", ".join(self._key(key) for key in keys.split())
            raise self._error(
                f"{tensor.name} has shape {list(tensor.shape)}, and {expected} in place of {size} follows from {named}."
            )

    def _needed(self, tensors: Mapping[str, Tensor], name: str, place: str = "") -> Tensor:
        if name not in tensors:
            raise self._error(f"the tensor {place}{name} is missing; this is not a whole model.")
        return tensors[name]

    def architecture(self) -> Architecture:
        table = self._needed(self._top, "token_embd.weight")
        hidden = self._integer("embedding_length")
        final, unread = self._rest_of_top(hidden)
        main, mtp = self._split_blocks()
        return Architecture(
            name=Path(self._file).stem,
            family=self._family,
            hidden=hidden,
            vocab=table.rows,
            layers=same(self._layer(i, hidden) for i in main),
            embedding=_matrix("embedding", "none", [table]),
            head=_matrix("head", "column", [self._top.get("output.weight", table)]),
            tied="output.weight" not in self._top,
            final_vectors=_params(final),
            final_vector_bytes=_bytes(final),
            unread_params=_params(unread),
            unread_bytes=_bytes(unread),
            max_context=self._optional("context_length"),
            mtp=same(self._layer(i, hidden) for i in mtp),
            mtp_params=sum(_params(self._blocks[i].values()) for i in mtp),
            notes=tuple(self._notes),
        )

    def _rest_of_top(self, hidden: int) -> tuple[list[Tensor], list[Tensor]]:
        """What every step reads beside the head, and tables of which a step reads a row."""
        final, unread = [], []
        for name, tensor in self._top.items():
            if name == "position_embd.weight":
                unread.append(tensor)
            elif name in ("token_embd.weight", "output.weight"):
                self._agree(tensor, tensor.shape[0], hidden, "embedding_length")
            elif len(tensor.shape) == 1:
                final.append(tensor)
            else:
                raise self._unknown(name)
        return final, unread

    def _split_blocks(self) -> tuple[list[int], list[int]]:
        """Blocks of the model, and those of multi-token prediction, which stand behind them."""
        count = self._integer("block_count")
        main = count - (self._optional("nextn_predict_layers") or 0)
        if main < 1:
            raise self._error(f"{self._key('nextn_predict_layers')} leaves no block of {count} to the model.")
        missing = next((i for i in range(main) if i not in self._blocks), None)
        beyond = next((i for i in self._blocks if i >= count), None)
        if missing is not None or beyond is not None:
            what = f"no tensor of blk.{missing}" if missing is not None else f"tensors of blk.{beyond}"
            raise self._error(f"has {what}, and {self._key('block_count')} is {count}.")
        return list(range(main)), sorted(i for i in self._blocks if i >= main)

    def _layer(self, i: int, hidden: int) -> Layer:
        block = self._blocks[i]
        matrices, experts, vectors = self._sort(block, f"blk.{i}.")
        return Layer(
            count=1,
            matrices=_fuse(matrices),
            vectors=_params(vectors),
            vector_bytes=_bytes(vectors),
            attention=self._attention(i, block, hidden) if "attn_output.weight" in block else None,
            state=self._state(block, f"blk.{i}.") if "ssm_out.weight" in block else None,
            experts=self._experts(i, experts) if experts else None,
        )

    def _sort(
        self, block: Mapping[str, Tensor], place: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        """The tensors of a block: its matrices by role, those of its experts by name, and vectors."""
        matrices, experts, vectors = {}, {}, []
        for name, tensor in block.items():
            role, _, kind = name.rpartition(".")
            dimensions = len(tensor.shape)
            if role in _EXPERTS and dimensions == {"weight": 3, "bias": 2}.get(kind):
                experts[name] = tensor
            elif dimensions == 1 or (role or name) in _VECTORS:
                vectors.append(tensor)
            elif role in _MATRICES and kind == "weight":
                matrices[role] = tensor
            elif role not in _MTP_TABLES:
                raise self._unknown(place + name)
        if "attn_k_b" in matrices:
            matrices.pop("attn_kv_b", None)  # some converters leave it beside the two that are used
        return matrices, experts, vectors

    def _attention(self, i: int, block: Mapping[str, Tensor], hidden: int) -> Attention:
        heads = self._integer("attention.head_count", i)
        latent = block.get("attn_kv_a_mqa.weight")
        if latent is not None:
            rank = self._integer("attention.kv_lora_rank")
            return Attention(heads, 1, latent.rows, rank, latent=latent.rows)
        grouped = self._optional("attention.head_count_kv", i) is not None
        kv_heads = self._integer("attention.head_count_kv", i) if grouped else heads
        key, value = (self._head_size(which, hidden, heads) for which in ("key", "value"))
        self._check_heads(block, heads, kv_heads, key, value)
        window, chunked = self._window(i), _FAMILIES[self._family].chunked
        return Attention(heads, kv_heads, key, value, window, chunked and window is not None)

    def _head_size(self, which: str, hidden: int, heads: int) -> int:
        """As llama.cpp has it: the width of the model by its heads, where no key says otherwise."""
        size = self._optional(f"attention.{which}_length")
        if size is None and hidden % heads:
            raise self._error(
                f"{self._key(f'attention.{which}_length')} is missing, and"
                f" {self._key('embedding_length')} {hidden} does not divide by {heads} heads."
            )
        return size or hidden // heads

    def _check_heads(
        self, block: Mapping[str, Tensor], heads: int, kv_heads: int, key: int, value: int
    ) -> None:
        counts = "attention.head_count attention.head_count_kv attention.key_length attention.value_length"
        expected = {
            "attn_k.weight": kv_heads * key,
            "attn_v.weight": kv_heads * value,
            "attn_qkv.weight": heads * key + kv_heads * (key + value),
        }
        for name in expected.keys() & block.keys():
            self._agree(block[name], block[name].rows, expected[name], counts)
        output = block["attn_output.weight"]
        self._agree(output, output.shape[0], heads * value, "attention.head_count attention.value_length")

    def _window(self, i: int) -> int | None:
        rule = _FAMILIES[self._family]
        size = self._optional("attention.sliding_window")
        size = rule.default if size is None else size
        if not size:
            return None
        pattern = self._metadata.get(self._key("attention.sliding_window_pattern"))
        if isinstance(pattern, tuple):
            return size if pattern[i % len(pattern)] else None
        if not isinstance(pattern, int):
            pattern = self._assumed_period(rule, size)
        return size if pattern == 0 or i % pattern < pattern - 1 else None

    def _assumed_period(self, rule: _Windows, size: int) -> int:
        if rule is _NO_WINDOWS:
            raise self._error(
                f"{self._key('attention.sliding_window')} is {size}, and no"
                f" {self._key('attention.sliding_window_pattern')} says in which blocks."
            )
        blocks = f"all but one of every {rule.period} blocks" if rule.period else "all blocks"
        self._notes[
            f"A window of {size} tokens in {blocks} is the family's; the file does not say where."
        ] = None
        return rule.period

    def _experts(self, i: int, tensors: Mapping[str, Tensor]) -> Experts:
        number, top_k = self._integer("expert_count", i), self._integer("expert_used_count", i)
        for tensor in tensors.values():
            self._agree(tensor, tensor.shape[-1], number, "expert_count")
        if top_k > number:
            raise self._error(f"{self._key('expert_used_count')} is {top_k}, but there are {number} experts.")
        weights = {name.removesuffix(".weight"): t for name, t in tensors.items() if name.endswith(".weight")}
        biases = [tensor for name, tensor in tensors.items() if name.endswith(".bias")]
        return Experts(
            number, top_k, _fuse(weights, number), _params(biases) // number, _bytes(biases) // number
        )

    def _state(self, block: Mapping[str, Tensor], place: str) -> State:
        """Recurrent state and the last inputs of the convolution, all in fp32 as llama.cpp keeps them."""
        inner, size = self._integer("ssm.inner_size"), self._integer("ssm.state_size")
        kernel = self._integer("ssm.conv_kernel")
        channels = inner + 2 * size * (self._optional("ssm.group_count") or 0)
        output, conv = block["ssm_out.weight"], self._needed(block, "ssm_conv1d.weight", place)
        self._agree(output, output.shape[0], inner, "ssm.inner_size")
        self._agree(
            conv,
            conv.params,
            kernel * channels,
            "ssm.conv_kernel ssm.inner_size ssm.state_size ssm.group_count",
        )
        flops = _STATE_FLOPS.get(self._family, MAMBA2_FLOPS) * inner * size + 2 * kernel * channels
        return State(4 * (inner * size + (kernel - 1) * channels), flops)


def _by_block(tensors: Iterable[Tensor]) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """Tensors outside the blocks by name, and those of each block by their name within it; no rotary tables."""
    top: dict[str, Tensor] = {}
    blocks: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        within = _BLOCK.fullmatch(tensor.name)
        if _ROTARY.fullmatch(tensor.name):
            continue
        if within:
            blocks[int(within[1])][within[2]] = tensor
        else:
            top[tensor.name] = tensor
    return top, blocks


def _fuse(tensors: Mapping[str, Tensor], share: int = 1) -> tuple[Matrix, ...]:
    """Matrices of one block by role, those of one kernel together; `share` experts have them in equal parts."""
    parts: dict[tuple[str, Split], list[Tensor]] = defaultdict(list)
    for role, (name, split) in (_MATRICES | _EXPERTS).items():
        if role in tensors:
            parts[_renamed(role, name, tensors), split].append(tensors[role])
    return tuple(_matrix(name, split, together, share) for (name, split), together in parts.items())


def _renamed(role: str, name: str, tensors: Mapping[str, Tensor]) -> str:
    """Names that depend on the rest of the block: a linear layer, a latent cache, an MLP without a gate."""
    if role == "attn_qkv" and "ssm_out" in tensors:
        return "in_proj"
    if role == "attn_q" and "attn_kv_a_mqa" in tensors:
        return "q"
    if "ffn_up" in role and role.replace("up", "gate") not in tensors:
        down = tensors.get(role.replace("up", "down"))
        if down is None or tensors[role].shape[1] == down.shape[0]:
            return name.replace("gate_up", "up")
    return name


def _matrix(name: str, split: Split, tensors: list[Tensor], share: int = 1) -> Matrix:
    """One product. The multiplier is that of the largest part; inputs are those of the last (of an MLA key and value
    projection the value's, whose transpose llama.cpp keeps for the key)."""
    k = tensors[-1].shape[0]
    params = sum(tensor.params for tensor in tensors)
    compute = max(tensors, key=lambda tensor: tensor.params).format.compute
    return Matrix(name, params // k // share, k, _bytes(tensors) // share, compute, split)


def _params(tensors: Iterable[Tensor]) -> int:
    """Elements; scales beside quantised weights are none."""
    return sum(tensor.params for tensor in tensors if not tensor.name.endswith("scale"))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)
