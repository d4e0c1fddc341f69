"""The host of a run: what machine it is, and evidence of other work on it while a cell was measured.

Boundary: reads /proc and asks the driver for names; changes nothing and never raises, because a missing
file is an unknown, not a failure. What is done with a busy cell is decided in `summary`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from specbench import device
from specbench.cell import HostBusy, Machine

# The limits come from llama.cpp with one thread on a 2-core virtual machine, beside threads of other owners;
# median time per token of three rounds, whose level drifted by 8 % between rounds:
#   alone                  7.2 to 7.9 ms    other 0.00   pressure up to 0.01   switches 2 to 3 a second
#   a thread busy for 20 % 7.5 to 8.4 ms    other 0.10   pressure 0.01         11 to 62
#   a thread busy for 50 % 7.3 to 9.0 ms    other 0.25   pressure 0.01 to 0.02 176 to 344
#   one busy thread        7.1 to 8.6 ms    other 0.50   pressure 0.01         308 to 359
#   two busy threads       10.0 to 12.7 ms  other 0.66   pressure 0.51         225 to 280
# So what ruins a measurement is other work that must share the engine's core, which shows as pressure; a free
# core's work is felt by a few per cent at most; and the engine's involuntary switches do not tell the two apart.

OTHER_CPU_LIMIT = 0.25
"""Share of all cores that other processes may use, whether or not anything waited."""

STEAL_LIMIT = 0.03
"""Share of CPU time that the hypervisor may take: near the 4 % spread between paired runs that a quiet host
leaves, and well above the clock tick's 0.002."""

WAITING_LIMIT = 0.10
"""Share of the window in which some runnable task waited for a CPU, while other processes used more than
`OTHER_CPU_SOME`. Half the window waiting cost about half the speed; a tenth stays within a pair's spread."""
OTHER_CPU_SOME = 0.05
"""Below this share, what waits are the engine's own threads and the client."""

PRESSURE_LIMIT = 0.35
"""The same where the share of other processes is unknown: an engine on all cores makes its own pressure
(0.15 was seen), so only much of it counts."""


# --- machine ----------------------------------------------------------------------------------------------


def machine() -> Machine:
    """What this host is. Never raises; what cannot be read is empty or None."""
    found = device.read_gpus()
    return Machine(
        hostname=platform.node(),
        cpu=_cpu_name(),
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        gpus=found.names,
        driver=found.driver,
        boot_id=boot_id(),
    )


def cores() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def boot_id() -> str | None:
    """Names the boot, so that monotonic times of two files can be known to share a clock."""
    text = _read("/proc/sys/kernel/random/boot_id")
    return text.strip() if text else None


def _cpu_name() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


# --- evidence of other work -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reading:
    """Counters at one moment; None is unknown."""

    at_s: float
    busy_s: float | None
    """CPU seconds of everything but idle, I/O wait and steal, over all cores."""
    total_s: float | None
    steal_s: float | None
    pressure_s: float | None
    own_cpu_s: dict[int, float]
    switches: dict[int, int]


class Busy:
    """Evidence over one window: `start(pids)` before it, `stop(pids)` after it.

    `pids` are the engine's processes; they, this process and all their children are not "other" work. A
    process that ended inside the window counts as other work, so engines must outlive it. Without `pids` (a
    server that someone else started) its work cannot be told from other work, whose share is then unknown.
    """

    def start(self, pids: Collection[int] = ()) -> None:
        """Read the counters; cheap enough to call right before a window."""
        self._before = _reading(pids)

    def stop(self, pids: Collection[int] = ()) -> HostBusy:
        """The evidence since `start`; a share that cannot be known is None."""
        before, after = self._before, _reading(pids)
        window_s = max(after.at_s - before.at_s, 1e-9)
        total_s = _minus(after.total_s, before.total_s)
        return HostBusy(
            window_s=window_s,
            cpu_pressure_share=_share(_minus(after.pressure_s, before.pressure_s), window_s),
            steal_share=_share(_minus(after.steal_s, before.steal_s), total_s),
            involuntary_switches_per_s=_grown(before.switches, after.switches) / window_s if pids else None,
            other_cpu_share=_other(before, after, total_s) if pids else None,
        )


def is_busy(host: HostBusy) -> bool:
    """Whether other work disturbed the window, by the limits above; what is unknown does not count."""
    steal, other, waiting = host.steal_share or 0.0, host.other_cpu_share, host.cpu_pressure_share or 0.0
    if steal > STEAL_LIMIT:
        return True
    if other is None:
        return waiting > PRESSURE_LIMIT
    return other > OTHER_CPU_LIMIT or (other > OTHER_CPU_SOME and waiting > WAITING_LIMIT)


def _other(before: _Reading, after: _Reading, total_s: float | None) -> float | None:
    busy_s = _minus(after.busy_s, before.busy_s)
    if busy_s is None or not total_s:
        return None
    own = sum(cpu - before.own_cpu_s.get(pid, 0.0) for pid, cpu in after.own_cpu_s.items())
    return _share(busy_s - own, total_s)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else min(max(part / whole, 0.0), 1.0)


def _minus(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _grown(before: dict[int, int], after: dict[int, int]) -> int:
    return sum(count - before.get(pid, 0) for pid, count in after.items())


def _reading(pids: Iterable[int]) -> _Reading:
    engine = _tree(pids)
    own = {process.pid: process for process in (*_tree([os.getpid()]), *engine)}
    busy_s, total_s, steal_s = _proc_stat()
    return _Reading(
        at_s=time.monotonic(),
        busy_s=busy_s,
        total_s=total_s,
        steal_s=steal_s,
        pressure_s=_pressure(),
        own_cpu_s={pid: cpu for pid, process in own.items() if (cpu := _cpu_s(process)) is not None},
        switches={p.pid: n for p in engine if (n := _involuntary(p.pid)) is not None},
    )


def _tree(pids: Iterable[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def _cpu_s(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _involuntary(pid: int) -> int | None:
    """Involuntary context switches of all threads of a process."""
    total = None
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for line in (_read(f"{task}/status") or "").splitlines():
                if line.startswith("nonvoluntary_ctxt_switches"):
                    total = (total or 0) + int(line.split()[1])
    return total


def _proc_stat() -> tuple[float | None, float | None, float | None]:
    """Busy, total and stolen CPU seconds since boot, over all cores (guest time is within user time)."""
    fields = (_read("/proc/stat") or "").splitlines()[:1]
    if not fields or not fields[0].startswith("cpu "):
        return None, None, None
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, iowait, irq, softirq, steal = (int(v) / tick for v in fields[0].split()[1:9])
    busy = user + nice + system + irq + softirq
    return busy, busy + idle + iowait + steal, steal


def _pressure() -> float | None:
    """Seconds since boot in which some runnable task waited for a CPU."""
    for line in (_read("/proc/pressure/cpu") or "").splitlines():
        if line.startswith("some"):
            return int(line.rpartition("total=")[2]) / 1e6
    return None
