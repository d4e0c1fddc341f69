"""Meters that this host's devices carry: GPUs by NVML, CPU clocks by cpufreq, CPU energy by powercap (RAPL).

Boundary: each meter reads one device and changes nothing; what the readings say of a window is `telemetry`'s.
Nothing here raises: what cannot be read is None, and the meter's `reasons` say why in the driver's words.

Sources: NVML API reference (power in mW, energy in mJ since the driver was loaded, clocks in MHz); Linux
Documentation/power/powercap/powercap.rst (energy_uj, max_energy_range_uj), admin-guide/pm/cpufreq.rst (kHz).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specbench import device
from specbench.device import Gpu

MOST_PACKAGE_W = 10_000.0
"""No CPU package draws a tenth of it, so a counter that fell by less than a turn at this power was set back."""


class Meter(Protocol):
    """One device. `read` gives columns of `trace.TELEMETRY_SCHEMA`, those it does not measure left out."""

    device: str
    reasons: dict[str, str]
    """Column to why it is (or became) null."""

    def read(self, now_s: float) -> dict[str, Any]:
        """The device now; `now_s` is a monotonic time."""

    def close(self) -> None:
        """Let go of what reading needs."""


@dataclass
class Joules:
    """Energy since the first reading of a counter; unknown for good once its readings make no sense.

    `joules_per_count` is the counter's unit; one that starts again from 0 does so after `wraps_at` counts.
    """

    joules_per_count: float
    wraps_at: int | None = None
    why: str | None = None
    """Why the energy is unknown."""
    _last: int | None = field(default=None, init=False)
    _at_s: float = field(default=0.0, init=False)
    _total: int = field(default=0, init=False)

    def add(self, count: int | None, now_s: float) -> float | None:
        """Take a reading (None where it failed) and give the joules so far. Never negative."""
        if self._last is None and count is None:
            self.why = self.why or "the counter could not be read when the window opened"
        if self.why or count is None:
            return None
        step = 0 if self._last is None else self._step(count - self._last, now_s - self._at_s)
        if step is None:
            self.why = "the counter fell during the window, as after a reload of the driver"
            return None
        self._last, self._at_s, self._total = count, now_s, self._total + step
        return self._total * self.joules_per_count

    def _step(self, step: int, seconds: float) -> int | None:
        if step >= 0:
            return step
        turned = step + (self.wraps_at or 0)
        most = MOST_PACKAGE_W * max(seconds, 1e-3)
        return turned if turned >= 0 and turned * self.joules_per_count <= most else None


# --- GPUs -------------------------------------------------------------------------------------------------

SLOWED = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Bits of NVML's clocks event reasons that mean a clock below what was asked for. Not among them: idle (0x1),
clocks that a person set (0x2, 0x100) and sync boost (0x10)."""

OF_CARD = "MIG is on, and the driver counts the whole card, not the instance"


@dataclass(frozen=True)
class _Question:
    """One call of NVML and what its answer means."""

    call: str
    convert: Callable[[Any], Any]
    argument: str | None = None
    """Name of the library's constant that the call takes after the handle."""
    of: str = "card"
    """Whom to ask where MIG is on: the `card` (its clocks are the instance's), the `instance`, or nobody about
    what is of the `whole` card."""


_QUESTIONS = {
    "power_w": _Question("nvmlDeviceGetPowerUsage", lambda mw: mw / 1e3, of="whole"),
    "energy_j": _Question("nvmlDeviceGetTotalEnergyConsumption", int, of="whole"),
    "sm_clock_mhz": _Question("nvmlDeviceGetClockInfo", int, "NVML_CLOCK_SM"),
    "mem_clock_mhz": _Question("nvmlDeviceGetClockInfo", int, "NVML_CLOCK_MEM"),
    "temperature_c": _Question("nvmlDeviceGetTemperature", int, "NVML_TEMPERATURE_GPU"),
    "utilisation": _Question("nvmlDeviceGetUtilizationRates", lambda u: u.gpu / 100, of="instance"),
    "memory_bytes": _Question("nvmlDeviceGetMemoryInfo", lambda m: int(m.used), of="instance"),
    "throttle_reasons": _Question(
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        lambda bits: [name for name, bit in SLOWED.items() if bits & bit],
    ),
}


class GpuMeter:
    """One GPU or MIG instance. A question that the device cannot answer is asked once."""

    def __init__(self, nvml: Any, gpu: Gpu) -> None:
        self._nvml, self.gpu = nvml, gpu
        self.device = f"gpu{gpu.index}/{gpu.uuid}" if gpu.instance else f"gpu{gpu.index}"
        self.name = f"GPU {gpu.index}" + (" (MIG instance)" if gpu.instance else "")
        self.reasons: dict[str, str] = {}
        self._refused: set[str] = set()
        self._joules = Joules(1e-3)
        nvml.nvmlInit()
        card = self._ask("device", nvml.nvmlDeviceGetHandleByIndex, gpu.index)
        own = self._ask("device", nvml.nvmlDeviceGetHandleByUUID, gpu.uuid) if gpu.instance else card
        self._handles = {"card": card, "instance": own, "whole": None if gpu.instance else card}
        self.processes = self._processes(own)

    @property
    def has_counter(self) -> bool:
        """False where the device has no energy counter (before Volta, or an old library)."""
        return "energy_j" not in self._refused

    def read(self, now_s: float) -> dict[str, Any]:
        row = {name: self._answer(name, question) for name, question in _QUESTIONS.items()}
        row["energy_j"] = self._joules.add(row["energy_j"], now_s)
        if self._joules.why:
            self.reasons.setdefault("energy_j", self._joules.why)
        return row

    def close(self) -> None:
        with suppress(Exception):
            self._nvml.nvmlShutdown()

    def _answer(self, name: str, question: _Question) -> Any:
        handle = self._handles[question.of]
        if handle is None:
            whole = self.gpu.instance and question.of == "whole"
            self.reasons.setdefault(name, OF_CARD if whole else self.reasons.get("device", "no handle"))
        if handle is None or name in self._refused:
            return None
        return self._ask(name, self._put, question, handle)

    def _put(self, question: _Question, handle: Any) -> Any:
        more = () if question.argument is None else (getattr(self._nvml, question.argument),)
        return question.convert(getattr(self._nvml, question.call)(handle, *more))

    def _processes(self, handle: Any) -> frozenset[int]:
        """Processes that compute on it, as far as the driver names them (in a container it does not)."""
        found = self._ask("processes", lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        return frozenset(process.pid for process in found or ())

    def _ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            # The driver's refusal, a function that an old library lacks, or an answer of another kind.
            self.reasons.setdefault(name, f"NVML: {error}")
            if isinstance(error, AttributeError) or device.is_not_supported(self._nvml, error):
                self._refused.add(name)
            return None


def gpu_meters(environ: Mapping[str, str]) -> tuple[list[GpuMeter], str | None]:
    """A meter for each GPU that `environ` leaves visible, or why there is none. Each is to be closed."""
    found = device.read_gpus()
    # Where MIG is on its instances compute, not the card.
    mine = [gpu for gpu in device.visible(found.gpus, environ) if gpu.instance or not gpu.mig]
    if not mine:
        return [], (found.reason or "no GPU is visible").removesuffix(".")
    import pynvml

    return [GpuMeter(pynvml, gpu) for gpu in mine], None


# --- CPU --------------------------------------------------------------------------------------------------


class ClockMeter:
    """Clock of the CPUs that this process may use: mean, and the fastest (an engine's threads may be few).

    Files stay open, because the kernel makes a new answer each time one is read from its start.
    """

    device = "cpu"

    def __init__(self, paths: Iterable[Path]) -> None:
        self.reasons: dict[str, str] = {}
        self._files = [os.open(path, os.O_RDONLY) for path in paths]

    def read(self, now_s: float) -> dict[str, Any]:
        try:
            mhz = [int(os.pread(file, 32, 0)) / 1e3 for file in self._files]
        except (OSError, ValueError) as error:
            self.reasons.setdefault("cpu_mhz", f"cpufreq: {error}")
            return {}
        return {"cpu_mhz": sum(mhz) / len(mhz), "cpu_fastest_mhz": max(mhz)}

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class CpuinfoMeter:
    """The same from /proc/cpuinfo, where there is no cpufreq but the CPU counts its own cycles."""

    device = "cpu"

    def __init__(self, path: Path) -> None:
        self.reasons: dict[str, str] = {}
        self._path = path

    def read(self, now_s: float) -> dict[str, Any]:
        try:
            lines = self._path.read_text().splitlines()
            mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        except (OSError, ValueError) as error:
            self.reasons.setdefault("cpu_mhz", f"/proc/cpuinfo: {error}")
            return {}
        return {"cpu_mhz": sum(mhz) / len(mhz), "cpu_fastest_mhz": max(mhz)}

    def close(self) -> None:
        pass


def clock_meter(root: Path = Path("/"), cpus: Iterable[int] | None = None) -> Meter | str:
    """A meter of the CPUs' clocks, or why there is none."""
    base = root / "sys/devices/system/cpu"
    for name in ("cpuinfo_avg_freq", "scaling_cur_freq"):  # measured by the CPU, where the kernel has it
        paths = [base / f"cpu{cpu}" / "cpufreq" / name for cpu in sorted(_cpus() if cpus is None else cpus)]
        with suppress(OSError):
            if paths and all(path.exists() for path in paths):
                return ClockMeter(paths)
    return _from_cpuinfo(root / "proc/cpuinfo")


def _from_cpuinfo(path: Path) -> Meter | str:
    # Without its cycle counters (x86's aperfmperf) the kernel prints the nominal clock as "cpu MHz".
    text = ""
    with suppress(OSError):
        text = path.read_text()
    counted = any("aperfmperf" in line.split() for line in text.splitlines() if line.startswith("flags"))
    if counted and "cpu MHz" in text:
        return CpuinfoMeter(path)
    return "this kernel shows no measured CPU clock (no cpufreq, and /proc/cpuinfo holds the nominal one)"


def _cpus() -> Iterable[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


class PackageMeter:
    """Energy of one RAPL zone, a CPU package or its DRAM: of everything that runs there."""

    def __init__(self, zone: Path, name: str) -> None:
        self.device = name
        self.reasons: dict[str, str] = {}
        self._file = os.open(zone / "energy_uj", os.O_RDONLY)
        self._joules = Joules(1e-6, _number(zone / "max_energy_range_uj"))

    def read(self, now_s: float) -> dict[str, Any]:
        try:
            count = int(os.pread(self._file, 32, 0))
        except (OSError, ValueError) as error:
            self.reasons.setdefault("energy_j", f"RAPL: {error}")
            count = None
        joules = self._joules.add(count, now_s)
        if self._joules.why:
            self.reasons.setdefault("energy_j", f"RAPL: {self._joules.why}")
        return {"energy_j": joules}

    def close(self) -> None:
        os.close(self._file)


def package_meters(root: Path = Path("/")) -> tuple[list[PackageMeter], str | None]:
    """A meter for each package and its DRAM, all of them or none: with the reason."""
    zones = _zones(root / "sys/class/powercap")
    if not any(name.startswith("package") and "/" not in name for name in zones):
        return [], "no RAPL energy counter of a CPU package (/sys/class/powercap)"
    meters: list[PackageMeter] = []
    try:
        for name, zone in zones.items():
            meters.append(PackageMeter(zone, name))
    except OSError as error:
        for meter in meters:
            meter.close()
        return [], f"RAPL: {error.filename} cannot be read ({error.strerror}); it is for root unless shared"
    return meters, None


def _zones(base: Path) -> dict[str, Path]:
    """Name to directory. `intel-rapl-mmio` shows the same packages a second time, so it is left out; core
    and uncore are within their package; psys holds it."""
    names: dict[str, str] = {}
    found: dict[str, Path] = {}
    for path in sorted(base.glob("intel-rapl:*")):  # a zone sorts before its parts
        parent = names.get(path.name.rpartition(":")[0])
        with suppress(OSError):
            name = (path / "name").read_text().strip()
            names[path.name] = name
            if name.startswith("package") or name == "dram":
                found[f"{parent}/{name}" if parent else name] = path
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def close_all(meters: Sequence[Meter]) -> None:
    """Close each."""
    for meter in meters:
        meter.close()
