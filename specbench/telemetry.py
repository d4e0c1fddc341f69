"""What the devices did while a cell was measured: a thread that reads their meters, and what it makes of them.

Boundary: `meters` reads devices; here readings become rows of `telemetry.parquet`, the figures of
`CellRecord.telemetry` and a reason for each that is unknown. Energy is of the window alone, since the first
reading is taken when it opens and the last when it closes: loading and warm-up are before it.

Whose energy it is: of the GPUs that the engine's processes compute on, as the driver names them, else of those
that did any work in the window; a GPU that stood idle is not the engine's. Where no GPU worked it is that of the
CPU packages and their DRAM, with everything else that runs there. Never is one attributed by guess.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from specbench import meters
from specbench.meters import SLOWED, GpuMeter, Meter, PackageMeter

PERIOD_S = 0.2
"""Between readings: the driver's own figures change every 0.02 to 1 s, so more would cost and not tell more."""
GAP_LIMIT_S = 3.0
"""Longest hole in samples of power that are integrated (the rule of InferenceX's aggregate_power.py)."""
LEAST_GPU_S = 2.0
"""Shortest window for a GPU's energy: its counter moves about every 0.1 s (ml.energy, "Thermally Stable
Profiling"), and samples of power are means of up to 1 s (NVML API reference, nvmlDeviceGetPowerUsage)."""

PATIENCE_S = 5.0
"""How long opening the meters, the first reading and the last are each waited for: a driver can hang, and the run
must not."""

HEAT = {"sw_thermal", "hw_thermal"}
POWER = {"sw_power_cap", "hw_power_brake"}

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """What a window left: figures and reasons for `CellRecord`, rows for `telemetry.parquet`."""

    figures: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """`telemetry.<figure>` to why it is unknown; for `energy_j` also whose it is where it is known."""
    rows: list[Row] = field(default_factory=list)
    cpu_s: float = 0.0
    """CPU time that reading took within the window."""


class _Unknown(Exception):
    """A figure that cannot be had; the message is the reason."""


# --- reading ----------------------------------------------------------------------------------------------


class Sampler:
    """`Sampler(pids)` before a window opens its meters, `start()` has the first reading taken, `stop()` the last.

    The devices are asked in a thread of their own only, which is waited for and, where it hangs, left behind. `pids` are the engine's processes; without any (a server that someone else started) nothing here is read,
    because this host's meters say nothing of it. `environ` is what the engine was started with beside ours. On
    a host without meters the thread ends at once.
    """

    def __init__(
        self,
        pids: Collection[int],
        environ: Mapping[str, str] | None = None,
        root: Path = Path("/"),
        period_s: float = PERIOD_S,
    ) -> None:
        self._period_s, self._pids = period_s, _family(pids)
        self._why: list[str] = []
        self._gpus: list[GpuMeter] = []
        self._packages: list[PackageMeter] = []
        self._meters: list[Meter] = []
        self._rows: list[Row] = []
        self._cpu_s = 0.0
        self._hung = False
        self._opened, self._begin, self._begun = (threading.Event() for _ in range(3))
        self._stopped, self._done = threading.Event(), threading.Event()
        opening = (os.environ | dict(environ or {}), root)
        self._thread = threading.Thread(target=self._run, args=opening, name="telemetry", daemon=True)
        if pids:
            self._thread.start()
            self._await(self._opened)
        else:
            self._why.append("the server was not started here, so this host's meters do not measure it")

    def start(self) -> None:
        """Have the first reading taken."""
        self._begin.set()
        if self._meters:
            self._await(self._begun)

    def stop(self, start_ns: int) -> Seen:
        """Take the last reading, let the meters go, and say what was seen; times count from `start_ns`."""
        self._stopped.set()
        if self._meters:
            self._await(self._done)
        if self._hung:
            return Seen(reasons={"telemetry.energy_j": f"a meter did not answer for {PATIENCE_S:.0f} s"})
        if not self._meters:
            return Seen(reasons={"telemetry.energy_j": "; ".join(self._why)})
        self._thread.join(PATIENCE_S)  # it closes them
        window = _Window(self._rows, self._gpus, self._packages, self._why, self._pids)
        figures, reasons = window.figures()
        figures["telemetry_cpu_share"] = self._cpu_s / window.span_s
        rows = [row | {"t_ns": row["t_ns"] - start_ns} for row in self._rows]
        return Seen(figures, {f"telemetry.{k}": why for k, why in reasons.items()}, rows, self._cpu_s)

    def _await(self, step: threading.Event) -> None:
        """Wait for the thread. Where it hangs the window is lost: a reading that comes late is not of it."""
        self._hung = self._hung or not step.wait(PATIENCE_S)

    def _open(self, environ: Mapping[str, str], root: Path) -> None:
        self._gpus, no_gpu = meters.gpu_meters(environ)
        self._packages, no_package = meters.package_meters(root)
        clock = meters.clock_meter(root)
        self._meters = [*self._gpus, *self._packages, *([] if isinstance(clock, str) else [clock])]
        self._why = [why for why in (no_gpu, no_package) if why]

    def _run(self, environ: Mapping[str, str], root: Path) -> None:
        self._open(environ, root)
        self._opened.set()
        if self._meters:
            self._begin.wait()
            self._sample()
            self._begun.set()
            self._until_stopped()
            self._sample()
            self._done.set()
            meters.close_all(self._meters)

    def _until_stopped(self) -> None:
        due, before_s = time.monotonic(), time.thread_time()
        while True:
            due += self._period_s
            # Where a reading takes longer than the period, half of it is still left to others.
            if self._stopped.wait(max(due - time.monotonic(), self._period_s / 2)):
                break
            self._sample()
        self._cpu_s = time.thread_time() - before_s

    def _sample(self) -> None:
        for meter in self._meters:
            now_ns = time.monotonic_ns()
            self._rows.append({"t_ns": now_ns, "device": meter.device} | meter.read(now_ns / 1e9))


def _family(pids: Collection[int]) -> frozenset[int]:
    found = set(pids)
    for pid in pids:
        with suppress(psutil.Error):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return frozenset(found)


# --- what it says -----------------------------------------------------------------------------------------


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share_of(reasons: set[str]) -> Callable[[Sequence[Sequence[Any]]], float]:
    return lambda gpus: _mean([float(bool(reasons.intersection(r))) for gpu in gpus for r in gpu])


_GPU_FIGURES: dict[str, tuple[str, Callable[[Sequence[Sequence[Any]]], float]]] = {
    "gpu_power_w": ("power_w", lambda gpus: sum(_mean(gpu) for gpu in gpus)),
    "gpu_memory_max_bytes": ("memory_bytes", lambda gpus: sum(max(gpu) for gpu in gpus)),
    "gpu_utilisation": ("utilisation", lambda gpus: _mean([_mean(gpu) for gpu in gpus])),
    "gpu_temperature_max_c": ("temperature_c", lambda gpus: max(max(gpu) for gpu in gpus)),
    "sm_clock_mhz": ("sm_clock_mhz", lambda gpus: _mean([_mean(gpu) for gpu in gpus])),
    "sm_clock_min_mhz": ("sm_clock_mhz", lambda gpus: min(min(gpu) for gpu in gpus)),
    "mem_clock_mhz": ("mem_clock_mhz", lambda gpus: _mean([_mean(gpu) for gpu in gpus])),
    "throttled_share": ("throttle_reasons", _share_of(set(SLOWED))),
    "throttled_heat_share": ("throttle_reasons", _share_of(HEAT)),
    "throttled_power_share": ("throttle_reasons", _share_of(POWER)),
}
"""Figure to its column and how it is made of each GPU's readings: power and memory add up over GPUs."""


@dataclass(frozen=True)
class _Window:
    """All readings of one window."""

    rows: Sequence[Row]
    gpus: Sequence[GpuMeter]
    packages: Sequence[PackageMeter]
    absent: Sequence[str]
    """Why there is no meter of a kind."""
    pids: frozenset[int]

    @property
    def span_s(self) -> float:
        """First reading to last."""
        return float(self.rows[-1]["t_ns"] - self.rows[0]["t_ns"]) / 1e9

    def figures(self) -> tuple[dict[str, float | None], dict[str, str]]:
        """Figures by name, and reasons by name."""
        gpus, unclear = self._worked()
        makers: dict[str, Callable[[], float]] = {"telemetry_s": lambda: self.span_s}
        if gpus:
            makers |= {name: partial(self._of_gpus, gpus, *how) for name, how in _GPU_FIGURES.items()}
        if any(row["device"] == "cpu" for row in self.rows):
            makers |= {name: partial(self._of_cpu, name) for name in ("cpu_mhz", "cpu_fastest_mhz")}
        if self.packages:
            makers["cpu_energy_j"] = self._of_packages
        found, reasons = _make(makers)
        try:
            found["energy_j"], reasons["energy_j"] = self._energy(gpus, unclear)
        except _Unknown as unknown:
            found["energy_j"], reasons["energy_j"] = None, str(unknown)
        return found, reasons

    def _worked(self) -> tuple[list[GpuMeter], str | None]:
        """The engine's GPUs, or all of them and why it cannot be told."""
        mine = [gpu for gpu in self.gpus if gpu.processes & self.pids]
        if mine:
            return mine, None
        use = {gpu.name: self._known(gpu, "utilisation") for gpu in self.gpus}
        dark = [name for name, shares in use.items() if not shares]
        if dark:
            why = "the driver names no process of the engine and no utilisation, so whose energy it is is unknown"
            return list(self.gpus), f"{', '.join(dark)}: {why}"
        return [gpu for gpu in self.gpus if any(use[gpu.name])], None

    def _known(self, meter: Meter, column: str) -> list[Any]:
        return [v for row in self._of(meter) if (v := row.get(column)) is not None]

    def _of(self, meter: Meter) -> list[Row]:
        return [row for row in self.rows if row["device"] == meter.device]

    def _of_gpus(
        self, gpus: Sequence[GpuMeter], column: str, how: Callable[[Sequence[Sequence[Any]]], float]
    ) -> float:
        known = [self._known(gpu, column) for gpu in gpus]
        for gpu, values in zip(gpus, known, strict=True):
            if not values:
                raise _Unknown(f"{gpu.name}: {gpu.reasons.get(column, 'no reading')}")
        return how(known)

    def _of_cpu(self, column: str) -> float:
        values = [v for row in self.rows if (v := row.get(column)) is not None]
        if not values:
            raise _Unknown("the CPU's clock could not be read")
        return _mean(values)

    # --- energy -------------------------------------------------------------------------------------------

    def _energy(self, gpus: Sequence[GpuMeter], unclear: str | None) -> tuple[float, str]:
        """Joules and whose they are."""
        if unclear:
            raise _Unknown(unclear)
        if gpus:
            parts = [self._of_gpu(gpu) for gpu in gpus]
            return sum(joules for joules, _ in parts), "; ".join(whose for _, whose in parts)
        if self.packages:
            names = ", ".join(meter.device for meter in self.packages)
            return self._of_packages(), f"CPU ({names}) by RAPL, with everything else that ran there"
        idle = [f"{gpu.name} did no work in the window" for gpu in self.gpus]
        raise _Unknown("; ".join([*idle, *self.absent]))

    def _of_packages(self) -> float:
        return sum(self._counted(meter, meter.device) for meter in self.packages)

    def _of_gpu(self, gpu: GpuMeter) -> tuple[float, str]:
        others = len(gpu.processes - self.pids)
        if gpu.processes & self.pids and others:
            raise _Unknown(
                f"{gpu.name}: {others} other processes compute on it, and their energy is in its count"
            )
        if self.span_s < LEAST_GPU_S:
            raise _Unknown(f"{gpu.name}: a window of {self.span_s:.2g} s is too short for its meter")
        if gpu.has_counter:
            return self._counted(gpu, gpu.name), f"{gpu.name} by its energy counter"
        return self._integrated(gpu), f"{gpu.name} by integrating its power, for it has no energy counter"

    def _counted(self, meter: Meter, name: str) -> float:
        joules = self._of(meter)[-1].get("energy_j")
        if joules is None:
            raise _Unknown(f"{name}: {meter.reasons.get('energy_j', 'no reading')}")
        if not joules:
            raise _Unknown(f"{name}: its energy counter did not move")
        return float(joules)

    def _integrated(self, gpu: GpuMeter) -> float:
        """Trapezoids under samples of power."""
        rows = self._of(gpu)
        if any(row.get("power_w") is None for row in rows):
            raise _Unknown(f"{gpu.name}: {gpu.reasons.get('power_w', 'a sample of power is missing')}")
        steps = [
            ((b["t_ns"] - a["t_ns"]) / 1e9, (a["power_w"] + b["power_w"]) / 2) for a, b in pairwise(rows)
        ]
        if max(seconds for seconds, _ in steps) > GAP_LIMIT_S:
            raise _Unknown(f"{gpu.name}: more than {GAP_LIMIT_S:.0f} s passed between two samples of power")
        return float(sum(seconds * watts for seconds, watts in steps))


def _make(makers: Mapping[str, Callable[[], float]]) -> tuple[dict[str, float | None], dict[str, str]]:
    found: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for name, make in makers.items():
        try:
            found[name] = float(make())
        except _Unknown as unknown:
            found[name], reasons[name] = None, str(unknown)
    return found, reasons
