"""How weights are stored: bytes of a matrix under a number format, scales included, and what multiplies it.

Block sizes of the GGUF types are the `gguf` package's; MXFP4 is OCP Microscaling (32 four-bit values and one
eight-bit scale), NVFP4 has an eight-bit scale per 16 values, block fp8 one fp32 scale per 128 × 128 tile
(DeepSeek-V3), int4 one fp16 scale and a four-bit zero point per group (AWQ, GPTQ).

Boundary: arithmetic on shapes; no file is read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from models_roofline.errors import RooflineError


@dataclass(frozen=True)
class Format:
    """A number format. `block` weights along a row share `block_bits`, their scale included."""

    name: str
    block: int
    block_bits: int
    compute: str
    """Number type in which the product is taken (a column of peaks in the device catalogue): bf16, fp16, fp32,
    fp8, int8 or fp4. Weight-only formats are multiplied in bf16."""
    tile: int = 0
    """Side of the square tile that shares one fp32 scale; 0 where there is none."""

    @property
    def bits_per_weight(self) -> float:
        """Mean bits of a weight in a large matrix."""
        return self.block_bits / self.block + (32 / self.tile**2 if self.tile else 0)

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a rows × columns matrix whose blocks lie along the columns."""
        bits = rows * -(-columns // self.block) * self.block_bits
        tiles = -(-rows // self.tile) * -(-columns // self.tile) if self.tile else 0
        return -(-bits // 8) + 4 * tiles


def _plain(name: str, bits: int, compute: str) -> Format:
    return Format(name, 1, bits, compute)


def int4(group: int = 128) -> Format:
    """Four-bit weights with an fp16 scale and a four-bit zero point per `group`, multiplied in bf16."""
    return Format(f"int4-g{group}", group, 4 * group + 20, "bf16")


FORMATS: dict[str, Format] = {
    fmt.name: fmt
    for fmt in (
        _plain("fp32", 32, "fp32"),
        _plain("bf16", 16, "bf16"),
        _plain("fp16", 16, "fp16"),
        _plain("fp8", 8, "fp8"),
        Format("fp8_block", 1, 8, "fp8", tile=128),
        _plain("int8", 8, "int8"),
        replace(int4(), name="int4"),
        Format("mxfp4", 32, 4 * 32 + 8, "bf16"),
        Format("nvfp4", 16, 4 * 16 + 8, "fp4"),
    )
}
"""By the names that `--weights` takes. `int4` is groups of 128; `int4(32)` and others are made by `int4`."""


def weight_format(name: str) -> Format:
    """The format that `--weights` names, in any case. Raises RooflineError that lists the known ones."""
    known = WEIGHT_ALIASES.get(name.lower(), name.lower())
    if known not in FORMATS:
        _check_known("--weights", name, "a number format", FORMATS)
    return FORMATS[known]


WEIGHT_ALIASES = {
    "awq": "int4", "gptq": "int4", "w4a16": "int4", "w8a8": "int8",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32",
}  # fmt: skip
"""As engines write them."""


KV_BYTES: dict[str, float] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "int8": 1, "int4": 0.5}
"""Bytes of one cached value, by the names that `--kv` takes."""


def kv_value_bytes(name: str) -> float:
    """Bytes of one cached value in the format that `--kv` names. Raises RooflineError that lists the known ones."""
    _check_known("--kv", name, "a cache format", KV_BYTES)
    return KV_BYTES[name]


def _check_known(flag: str, name: str, what: str, known: Collection[str]) -> None:
    if name not in known:
        raise RooflineError(f"{flag}: {name!r} is not {what}; known: {', '.join(known)}.")
