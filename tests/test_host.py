"""What the host is, and whether other work is seen: with real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specbench import host
from specbench.cell import HostBusy

# The spinner's parent leaves at once, so that it is nobody's child and so other work.
ORPHAN = (
    "import subprocess, sys\n"
    "print(subprocess.Popen([sys.executable, '-c', 'while True: pass'], stdout=subprocess.DEVNULL,"
    " stderr=subprocess.DEVNULL, start_new_session=True).pid)"
)
LINUX = pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="reads Linux's /proc")


@contextmanager
def child() -> Iterator[int]:
    """A child that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def other_work() -> Iterator[int]:
    """A process that keeps a core busy and is no child of ours."""
    pid = int(
        subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, check=True).stdout
    )
    try:
        yield pid
    finally:
        os.kill(pid, 9)


def evidence(pids: list[int], seconds: float = 1.0) -> HostBusy:
    busy = host.Busy()
    busy.start(pids)
    time.sleep(seconds)
    return busy.stop(pids)


def test_machine_is_filled_and_never_raises() -> None:
    seen = host.machine()
    assert seen.cores == host.cores() >= 1
    assert seen.memory_bytes > 2**28
    assert seen.cpu
    assert seen.python == ".".join(map(str, sys.version_info[:3]))


def test_cores_follow_the_affinity() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from specbench.host import cores; print(cores())"
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this platform has no affinity")
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "1\n"
    )


@LINUX
def test_boot_id_names_the_boot() -> None:
    assert host.boot_id() == host.boot_id() != ""


@LINUX
def test_other_work_is_seen_and_the_engines_own_is_not() -> None:
    cores = os.cpu_count() or 1
    as_engine, as_other = host.Busy(), host.Busy()
    with other_work() as pid:
        as_engine.start([pid])
        as_other.start([os.getpid()])
        time.sleep(1.0)
        seen, own = as_other.stop([os.getpid()]), as_engine.stop([pid])
    assert seen.other_cpu_share is not None
    assert own.other_cpu_share is not None
    # One window, so whatever else runs is in both; a spinner takes a core, or its share of a full machine.
    assert seen.other_cpu_share - own.other_cpu_share > 0.3 / cores
    assert own.involuntary_switches_per_s is not None
    if cores <= 3:
        assert host.is_busy(seen)


@LINUX
def test_children_of_the_client_are_not_other_work() -> None:
    cores = os.cpu_count() or 1
    named, unnamed = host.Busy(), host.Busy()
    with child() as pid:
        named.start([pid])
        unnamed.start([os.getpid()])
        time.sleep(0.5)
        second, first = unnamed.stop([os.getpid()]), named.stop([pid])
    assert first.other_cpu_share is not None
    assert second.other_cpu_share is not None
    assert abs(first.other_cpu_share - second.other_cpu_share) < 0.2 / cores


@LINUX
def test_without_pids_other_work_cannot_be_told_apart() -> None:
    seen = evidence([], 0.05)
    assert seen.other_cpu_share is None
    assert seen.involuntary_switches_per_s is None


def test_processes_that_are_gone_are_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert evidence([gone.pid], 0.02).involuntary_switches_per_s == 0


@pytest.mark.parametrize(
    ("seen", "busy"),
    [
        (HostBusy(window_s=1), False),
        (HostBusy(window_s=1, other_cpu_share=host.OTHER_CPU_LIMIT), False),
        (HostBusy(window_s=1, other_cpu_share=host.OTHER_CPU_LIMIT + 0.01), True),
        (HostBusy(window_s=1, steal_share=host.STEAL_LIMIT + 0.01, other_cpu_share=0.0), True),
        (HostBusy(window_s=1, cpu_pressure_share=host.PRESSURE_LIMIT + 0.01), True),
        # An engine that uses all cores makes its own pressure.
        (HostBusy(window_s=1, cpu_pressure_share=0.9, other_cpu_share=0.02), False),
        # What was measured: a fifth of a thread, one thread and two threads of others beside one of the engine.
        (HostBusy(window_s=3, cpu_pressure_share=0.011, steal_share=0.0, other_cpu_share=0.105), False),
        (HostBusy(window_s=3, cpu_pressure_share=0.013, steal_share=0.0, other_cpu_share=0.50), True),
        (HostBusy(window_s=3, cpu_pressure_share=0.508, steal_share=0.0, other_cpu_share=0.679), True),
        # Short bursts that the engine had to wait for.
        (HostBusy(window_s=3, cpu_pressure_share=0.15, other_cpu_share=0.20), True),
    ],
)
def test_the_rule(seen: HostBusy, busy: bool) -> None:
    assert host.is_busy(seen) == busy
