"""What looks wrong in a device's figures: sparse peaks given as dense, ratios that its vendor's parts do not have.

Vendors print peaks for 2:4 sparse matrices, twice the dense ones, and, for consumer cards, peaks with fp16
accumulation, twice those with fp32. Both show in ratios, because fp32 outside the tensor cores has neither. The
ratios are those of the datasheets named in the catalogue.

Boundary: doubts in words; nothing is corrected and nothing refused.
"""

from __future__ import annotations

from typing import NamedTuple

from models_roofline.device import Device

TOLERANCE = 0.03
"""Datasheets round: 1513 against 2 × 756.5, 1299 against 2 × 667."""


class Ratios(NamedTuple):
    """Dense ratios of one architecture; None where it has no such unit or its parts differ."""

    fp8: float | None
    """fp8 to bf16."""
    half: float | None
    """16-bit to fp32, at most; half of it on GeForce cards, which halve the rate with fp32 accumulation."""


RATIOS: dict[str, Ratios] = {
    "Volta": Ratios(None, 8),
    "Turing": Ratios(None, 8),
    "Ampere sm80": Ratios(None, 16),
    "Ampere sm86": Ratios(None, 4),
    "Ampere sm87": Ratios(None, 8),
    "Ada": Ratios(2, 4),
    "Hopper": Ratios(2, 14.8),
    "Blackwell sm100": Ratios(2, 31.3),
    "Blackwell Ultra": Ratios(2, 31.3),
    "Blackwell sm110": Ratios(2, 32),
    "Blackwell sm12": Ratios(2, 4),
    "CDNA2": Ratios(None, 8),
    "CDNA3": Ratios(2, 8),
    "CDNA4": Ratios(2, 16),
    "CDNA": Ratios(None, 8),
    "RDNA3": Ratios(None, 2),
    "Gaudi2": Ratios(2, None),
    "Gaudi3": Ratios(1, None),
    "NeuronCore-v2": Ratios(1, 4),
    "NeuronCore-v3": Ratios(1.95, 3.7),
    "v5p": Ratios(1, None),
    "v6e": Ratios(1, None),
    "v7": Ratios(2, None),
}
"""By the start of the architecture, longer ones first where one starts like another."""


def doubts(device: Device) -> list[str]:
    """Sentences on figures that cannot all be dense figures of one device; none where nothing looks wrong."""
    ratios = next((r for start, r in RATIOS.items() if device.architecture.startswith(start)), None)
    if ratios is None:
        return []
    return [doubt for doubt in (_fp8(device, ratios.fp8), _half(device, ratios.half)) if doubt]


def _fp8(device: Device, expected: float | None) -> str | None:
    found = _ratio(device, "fp8", "bf16")
    if expected is None or found is None or abs(found / expected - 1) <= TOLERANCE:
        return None
    return (
        f"{device.id}: fp8 is {found:.2f} × bf16, and {device.architecture} has {expected:g} ×: is one of the two "
        "a sparse peak?"
    )


def _half(device: Device, most: float | None) -> str | None:
    found = _ratio(device, "bf16", "fp32") or _ratio(device, "fp16", "fp32")
    if most is None or found is None:
        return None
    geforce = any("GeForce" in name for name in device.names)
    limit = most / 2 if geforce else most
    if found <= limit * (1 + TOLERANCE):
        return None
    what = "a sparse peak, or one with fp16 accumulation" if geforce else "a sparse peak"
    return f"{device.id}: 16-bit is {found:.1f} × fp32, and {device.architecture} has at most {limit:g} ×: is it {what}?"


def _ratio(device: Device, above: str, below: str) -> float | None:
    pair = device.figures.get(above), device.figures.get(below)
    return pair[0].value / pair[1].value if pair[0] and pair[1] else None
