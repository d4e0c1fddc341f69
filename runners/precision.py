"""Precision in one phrase for every engine, so that phrases can be compared (docs/trace.md says what it means).

Boundary: an engine's own words for types in, one phrase out; and of which type most weights of a file are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from xml.etree import ElementTree

from models_roofline.errors import RooflineError
from models_roofline.gguf_header import read_header

_TORCH = {
    **dict.fromkeys(("f32", "fp32", "float"), "float32"),
    **dict.fromkeys(("f16", "fp16", "half"), "float16"),
    "bf16": "bfloat16",
}
"""Torch's word by others' words."""
_BITS = re.compile(r"(?:u|i|uint|int|nf)(\d)(?:_t)?|[it]?q(\d).*")
_UNSAID = ("", "auto", "none")


def phrase(compute: str | None, weights: str | None = None) -> str | None:
    """`float32`, or `float32, 4-bit weights` where the weights are of another type; None where `compute` is unknown."""
    of, kept = word(compute), word(weights)
    if of is None:
        return None
    return of if kept in (None, of) else f"{of}, {kept} weights"


def word(name: str | None) -> str | None:
    """The one word for a type: torch's, or `4-bit` for whole numbers and for blocks of a GGUF file.

    What is neither (`awq`, `fp8`) stays as it is; what names no type is None.
    """
    plain = (name or "").lower().removeprefix("torch.").removeprefix("all ").split(" ")[0]
    if plain in _UNSAID:
        return None
    if bits := _BITS.fullmatch(plain):
        return f"{bits[1] or bits[2]}-bit"
    return _TORCH.get(plain, plain)


def of_gguf(path: Path) -> str | None:
    """The type of most weights of a GGUF file, in its own words; None where its header cannot be read."""
    try:
        tensors = read_header(path).tensors.values()
    except RooflineError:
        return None
    return _most((tensor.format.name, tensor.params) for tensor in tensors)


def of_ir(path: Path) -> str | None:
    """The type of most weights of an OpenVINO model's XML file, in its own words; None where it cannot be read."""
    try:
        tree = ElementTree.parse(path)
    except (OSError, ElementTree.ParseError):
        return None
    constants = (layer.find("data") for layer in tree.iter("layer") if layer.get("type") == "Const")
    return _most(
        (data.get("element_type", ""), prod(int(side) for side in data.get("shape", "").split(",") if side))
        for data in constants
        if data is not None
    )


def _most(sizes: Iterable[tuple[str, int]]) -> str | None:
    """The type with most values."""
    sums: Counter[str] = Counter()
    for name, values in sizes:
        sums[name] += values
    return sums.most_common(1)[0][0] if sums else None
