"""How a checkpoint stores its weights: `quantization_config` → the number format of each module.

Paths are those of the Hugging Face module tree (`model.layers.3.self_attn.q_proj`). Embedding, router, norms and
biases stay in the config's own type; so does the head, unless the config says otherwise. Sources: the quantisation
pages of transformers (fp8, mxfp4, awq, gptq, bitsandbytes), compressed-tensors' config groups, and the
`quantization_config` that NVIDIA ModelOpt exports.

Boundary: formats of modules; bytes are `formats`' arithmetic. Scales of a whole tensor or channel are left out
(under 0.1 % of a matrix); those of groups, blocks and tiles are in the formats.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from models_roofline.architecture import Architecture, Experts, Layer, Matrix
from models_roofline.errors import RooflineError
from models_roofline.formats import FORMATS, Format, int4

if TYPE_CHECKING:
    from models_roofline.families._config import Config

KEPT_MATRICES = ("router",)
"""Matrices of a layer that quantisation leaves in the base type: their noise would change which experts run."""

_BASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
_TREES = ("", "language_model.", "model.language_model.")
"""What stands before a module's path where the text model is part of a larger one."""


@dataclass(frozen=True)
class Storage:
    """Formats of a model's modules: `kept` paths are `base`, then the first rule that fits, else `base`."""

    base: Format
    rules: tuple[tuple[str, Format], ...] = ()
    kept: tuple[str, ...] = ()

    def format(self, module: str) -> Format:
        """The format in which this module's matrix is stored."""
        if any(_fits(module, pattern) for pattern in self.kept):
            return self.base
        fmt = next((fmt for pattern, fmt in self.rules if _fits(module, pattern)), self.base)
        return dataclasses.replace(fmt, compute=_computed(fmt, self.base.compute))

    @property
    def base_bytes(self) -> int:
        """Bytes of one value that is not quantised."""
        return self.base.block_bits // 8


def _computed(fmt: Format, base: str) -> str:
    """The type of the product: weight-only formats are multiplied in fp16 where the rest of the model is fp16."""
    return "fp16" if fmt.compute == "bf16" and fmt.name != "bf16" and base == "fp16" else fmt.compute


def _fits(module: str, pattern: str) -> bool:
    """Whether a pattern (`re:` regex, or dotted part of a path, `*` allowed) names this module or one above it."""
    expression = _compiled(pattern)
    return any(expression.match(tree + module) for tree in _TREES)


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith("re:"):
        part = ".*".join(re.escape(piece) for piece in pattern.split("*"))
        return re.compile(rf"(?:.*\.)?{part}(?:\..*)?\Z")
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise RooflineError(
            f"quantization_config: {pattern!r} is not a valid regular expression: {error}."
        ) from None


def read_storage(config: Config) -> Storage:
    """Formats that a config asks for. Raises RooflineError for an unknown type or method."""
    base = _base(config)
    quant = config.inherited_section("quantization_config", "compression_config")
    if quant is None:
        return Storage(base)
    method = quant.text("quant_method").lower().replace("_", "-")
    if method not in _METHODS:
        raise config.error(
            f"quantization_config.quant_method {method!r} is not known here; known: {', '.join(_METHODS)}."
        )
    return _METHODS[method](quant, base)


def _base(config: Config) -> Format:
    value = config.inherited("torch_dtype", "dtype")
    if value is None:
        config.assume("torch_dtype", "bfloat16")
        return FORMATS["bf16"]
    name = str(value).removeprefix("torch.")
    if name not in _BASES:
        raise config.error(f"torch_dtype {value!r} is not known here; known: {', '.join(_BASES)}.")
    return FORMATS[_BASES[name]]


def _strings(quant: Config, *keys: str) -> tuple[str, ...]:
    value = quant.get(*keys)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise quant.error(f"{quant.field(keys[0])} must be a list of module names, not {value!r}.")
    return tuple(value)


def _everything(base: Format, fmt: Format, kept: tuple[str, ...], head: bool = False) -> Storage:
    """Every linear module in one format; the head only where said."""
    return Storage(base, (("*", fmt),), kept if head else (*kept, "lm_head"))


def _integers(bits: int, group: int | None, *, zero_point: bool, compute: str = "bf16") -> Format:
    """Integer weights with one fp16 scale per group; without groups, per row (not counted)."""
    if not group or group < 0:
        return Format(f"int{bits}", 1, bits, compute)
    if bits == 4 and zero_point and compute == "bf16":
        return int4(group)
    offset = bits if zero_point else 0
    return Format(f"int{bits}-g{group}", group, bits * group + 16 + offset, compute)


def _fp8(quant: Config, base: Format) -> Storage:
    block = quant.integers("weight_block_size")
    if block and (len(block) != 2 or block[0] != block[1]):
        raise quant.error(f"quantization_config.weight_block_size must be a square tile, not {list(block)}.")
    fmt = _tiled(block[0]) if block else FORMATS["fp8"]
    return _everything(base, fmt, _strings(quant, "modules_to_not_convert", "ignored_layers"))


def _tiled(side: int) -> Format:
    return dataclasses.replace(FORMATS["fp8_block"], tile=side)


def _mxfp4(quant: Config, base: Format) -> Storage:
    """Of mxfp4 checkpoints only the routed experts are converted."""
    return Storage(base, (("experts", FORMATS["mxfp4"]),), _strings(quant, "modules_to_not_convert"))


def _group_size(quant: Config, *keys: str) -> int | None:
    """Group size; -1 means a whole row, given as None."""
    value = quant.get(*keys)
    return None if value == -1 else quant.integer(*keys)


def _awq(quant: Config, base: Format) -> Storage:
    fmt = _integers(
        quant.integer("bits", "w_bit"), _group_size(quant, "group_size", "q_group_size"), zero_point=True
    )
    return _everything(base, fmt, _strings(quant, "modules_to_not_convert"))


def _gptq(quant: Config, base: Format) -> Storage:
    fmt = _integers(quant.integer("bits"), _group_size(quant, "group_size"), zero_point=True)
    return _everything(base, fmt, _strings(quant, "modules_to_not_convert"), quant.get("lm_head") is True)


def _bitsandbytes(quant: Config, base: Format) -> Storage:
    """nf4 and fp4: an fp32 scale per 64 values, eight bits of it where scales are quantised too (QLoRA)."""
    kept = _strings(quant, "llm_int8_skip_modules")
    if quant.get("load_in_8bit", "_load_in_8bit") is True:
        return _everything(base, FORMATS["int8"], kept)
    if quant.get("load_in_4bit", "_load_in_4bit") is not True:
        raise quant.error("quantization_config names bitsandbytes but neither load_in_4bit nor load_in_8bit.")
    scale = 8 if quant.get("bnb_4bit_use_double_quant") is True else 32
    return _everything(base, Format("bnb-4bit", 64, 4 * 64 + scale, "bf16"), kept)


def _compressed_tensors(quant: Config, base: Format) -> Storage:
    """A group is a scheme for the modules it targets; a target `Linear` is every module, head included."""
    groups = quant.section("config_groups")
    rules = []
    for key in groups.fields:
        group = groups.section(key)
        fmt = _scheme(group)
        targets = _strings(group, "targets") or ("Linear",)
        rules += [("*" if target == "Linear" else target, fmt) for target in targets]
    # Named modules win over the class `Linear`, whatever the order of the groups.
    rules.sort(key=lambda rule: rule[0] == "*")
    return Storage(base, tuple(rules), _strings(quant, "ignore"))


def _scheme(group: Config) -> Format:
    """The format of one scheme: weights' type, bits and grouping; activations decide the product's type."""
    weights = group.section("weights")
    kind, bits = weights.text("type", default="int"), weights.integer("num_bits")
    activations = group.get("input_activations")
    if (kind, bits) == ("float", 8):
        fmt = _float8(weights)
        return fmt if activations else dataclasses.replace(fmt, name=f"{fmt.name}-w", compute="bf16")
    if (kind, bits) == ("float", 4):
        fmt = FORMATS["nvfp4" if _group_size(weights, "group_size") == 16 else "mxfp4"]
        return fmt if activations else dataclasses.replace(fmt, name=f"{fmt.name}-w", compute="bf16")
    if kind == "int":
        compute = "int8" if bits == 8 and activations else "bf16"
        group_size = _group_size(weights, "group_size") if weights.has("group_size") else None
        return _integers(bits, group_size, zero_point=weights.get("symmetric") is False, compute=compute)
    raise weights.error(
        f"{weights.field('type')} {kind!r} with {bits} bits is not a number format known here."
    )


def _float8(weights: Config) -> Format:
    block = weights.integers("block_structure")
    return _tiled(block[0]) if block else FORMATS["fp8"]


_ALGORITHMS = {"NVFP4": FORMATS["nvfp4"], "FP8": FORMATS["fp8"], "FP8_PB_WO": FORMATS["fp8_block"]}
"""ModelOpt's `quant_algo`."""


def _modelopt(quant: Config, base: Format) -> Storage:
    algorithm = quant.text("quant_algo", default="NVFP4" if quant.has("config_groups") else "")
    if algorithm.upper() not in _ALGORITHMS:
        raise quant.error(
            f"quantization_config.quant_algo {algorithm!r} is not known here; known: {', '.join(_ALGORITHMS)}."
        )
    kept = _strings(quant, "ignore", "exclude_modules")
    return _everything(base, _ALGORITHMS[algorithm.upper()], kept)


_METHODS: dict[str, Callable[[Config, Format], Storage]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "mxfp4": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}


def with_weights(arch: Architecture, fmt: Format) -> Architecture:
    """The same model with its layers stored in `fmt`: what `--weights int4` means.

    Every matrix of a layer and of an expert changes; embedding, head, router, norms and biases stay as they were,
    as weight-only quantisation leaves them. In fp16 or bf16 those of them in the other 16-bit type change too, which
    makes a bf16 model fit for a device without bf16.
    """
    if fmt.name in _HALVES:
        arch = _halved(arch, fmt.name)
    return dataclasses.replace(
        arch,
        layers=tuple(_with_format(layer, fmt) for layer in arch.layers),
        mtp=tuple(_with_format(layer, fmt) for layer in arch.mtp),
    )


_HALVES = ("bf16", "fp16")


def _halved(arch: Architecture, compute: str) -> Architecture:
    """The model with its 16-bit embedding, head and routers multiplied in this 16-bit type; as many bytes."""

    def other(matrix: Matrix) -> Matrix:
        plain = matrix.compute in _HALVES and matrix.bytes == 2 * matrix.params
        return dataclasses.replace(matrix, compute=compute) if plain else matrix

    def layers(of: tuple[Layer, ...]) -> tuple[Layer, ...]:
        return tuple(dataclasses.replace(each, matrices=tuple(map(other, each.matrices))) for each in of)

    return dataclasses.replace(
        arch,
        layers=layers(arch.layers),
        mtp=layers(arch.mtp),
        embedding=other(arch.embedding),
        head=other(arch.head),
    )


def _with_format(layer: Layer, fmt: Format) -> Layer:
    experts: Experts | None = layer.experts
    if experts:
        experts = dataclasses.replace(experts, matrices=tuple(_stored(m, fmt) for m in experts.matrices))
    return dataclasses.replace(
        layer, matrices=tuple(_stored(m, fmt) for m in layer.matrices), experts=experts
    )


def _stored(matrix: Matrix, fmt: Format) -> Matrix:
    if matrix.name in KEPT_MATRICES:
        return matrix
    compute = _computed(fmt, matrix.compute)
    return dataclasses.replace(matrix, bytes=fmt.matrix_bytes(matrix.n, matrix.k), compute=compute)
