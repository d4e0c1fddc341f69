"""What is known of one device: figures in SI units, each with its confidence and its source.

Files are in the units that datasheets use; `COLUMNS` is the one place where they become bytes, bytes/s, FLOP/s and W.
Peaks are dense, links are one direction, a device is what the operating system shows as one.

Boundary: the record. Finding a device is `hardware`'s, reading files `device_files`', doubting figures `device_lint`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from models_roofline.errors import RooflineError


class Column(NamedTuple):
    """A figure's column: its factor to SI units and the range in which a value can be what the column says."""

    figure: str
    factor: float
    low: float
    high: float


COLUMNS: dict[str, Column] = {
    "memory_gb": Column("memory", 1e9, 1, 4096),
    "visible_mib": Column("visible_memory", 2**20, 1024, 2**22),
    "mem_bw_gb_s": Column("mem_bw", 1e9, 10, 20_000),
    "fp32_tflops": Column("fp32", 1e12, 0.05, 1_000),
    "tf32_tflops": Column("tf32", 1e12, 0.05, 10_000),
    "fp16_tflops": Column("fp16", 1e12, 0.05, 20_000),
    "bf16_tflops": Column("bf16", 1e12, 0.05, 20_000),
    "fp8_tflops": Column("fp8", 1e12, 0.05, 50_000),
    "int8_tops": Column("int8", 1e12, 0.05, 50_000),
    "fp4_tflops": Column("fp4", 1e12, 0.05, 100_000),
    "l2_mib": Column("l2", 2**20, 0.25, 4096),
    "link_gb_s": Column("link", 1e9, 1, 5_000),
    "pcie_gb_s": Column("pcie", 1e9, 1, 256),
    "power_w": Column("power", 1, 3, 5_000),
    "measured_bw_gb_s": Column("measured_bw", 1e9, 1, 20_000),
    "measured_bf16_tflops": Column("measured_bf16", 1e12, 0.05, 20_000),
}
"""Columns of figures in a device file. The ranges are wide: they catch a wrong unit, not a wrong device."""
TEXTS = (
    *("id", "kind", "vendor", "architecture", "year", "memory_type", "unified", "names"),
    *("confidence", "source", "notes"),
)
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
KINDS = ("gpu", "cpu", "accelerator")
CONFIDENCE = {
    "V": "read in the named source",
    "S": "as drivers report it, in public listings",
    "A": "arithmetic from the named specification",
    "D": "vendor datasheet, from memory, not re-read",
    "E": "estimate or third party",
    "U": "a user's file",
}


class Figure(NamedTuple):
    """One figure in SI units, a letter of `CONFIDENCE`, and where it comes from."""

    value: float
    confidence: str = "U"
    source: str = ""


@dataclass(frozen=True)
class Device:
    """One device. `figures` holds what is known, by the figure names of `COLUMNS`; what is not there is unknown."""

    id: str
    kind: str = "gpu"
    vendor: str = ""
    architecture: str = ""
    year: int | None = None
    memory_type: str = ""
    unified: bool = False
    """Memory is shared with the CPU."""
    names: tuple[str, ...] = ()
    """As drivers and /proc/cpuinfo spell the device."""
    notes: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict, hash=False)

    def figure(self, name: str) -> Figure:
        """Value, confidence and source. Raises RooflineError that lists what is known of this device."""
        try:
            return self.figures[name]
        except KeyError:
            known = ", ".join(self.figures) or "nothing"
            raise RooflineError(
                f"--device: no {name} is known for {self.id}; known: {known}. Give it in --devices."
            ) from None

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Nominal memory bandwidth."""
        return self.figure("mem_bw").value

    @property
    def memory_bytes(self) -> int | None:
        """What the driver shows; where that is unknown the nominal size, read as decimal gigabytes so that a fit
        test errs on the safe side; None where it depends on the machine (CPUs)."""
        known = self._value(self.memory_from)
        return None if known is None else round(known)

    @property
    def memory_from(self) -> str:
        """The figure that `memory_bytes` is: visible_memory or memory (nominal)."""
        return "visible_memory" if "visible_memory" in self.figures else "memory"

    @property
    def l2_bytes(self) -> float | None:
        """Last-level cache."""
        return self._value("l2")

    @property
    def link_bytes_per_s(self) -> float | None:
        """Scale-up link (NVLink, Infinity Fabric, ICI), one direction, all peers together."""
        return self._value("link")

    @property
    def pcie_bytes_per_s(self) -> float | None:
        """Host link, one direction."""
        return self._value("pcie")

    @property
    def power_w(self) -> float | None:
        """Board power limit."""
        return self._value("power")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Number types with a known peak."""
        return tuple(name for name in DTYPES if name in self.figures)

    def peak_flops(self, dtype: str) -> float:
        """Dense peak in FLOP/s. Raises RooflineError that names the number types the device has."""
        if dtype in DTYPES and dtype in self.figures:
            return self.figures[dtype].value
        has = ", ".join(self.dtypes) or "none that is known; name its peaks in --devices"
        raise RooflineError(f"--weights: {self.id} has no {dtype} peak; it has {has}.")

    def ridge(self, dtype: str = "bf16") -> float:
        """FLOP per byte above which a kernel at peak is compute bound."""
        return self.peak_flops(dtype) / self.bandwidth_bytes_per_s

    def _value(self, name: str) -> float | None:
        return self.figures[name].value if name in self.figures else None
