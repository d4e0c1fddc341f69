"""What meters say of a window and whose energy it is: NVML by a stand-in, Linux's files as trees of a directory.

A stand-in is needed because no GPU is; its faults are those that users published (`data/nvml`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import orjson
import psutil
import pyarrow.parquet as pq
import pytest

import specbench
from reports import html
from runners.run import Runner
from specbench import meters, schema, telemetry, trace
from specbench.device import Gpu, read_gpus, visible
from specbench.meters import Joules
from specbench.metrics import METERED, METRICS, CellView, compute
from specbench.plan import check_plan
from specbench.telemetry import Sampler, Seen
from specbench.validity import check_cell
from tests.make_cell import record, row
from tests.make_run import make_run
from tests.test_device import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    MIB,
    MISMATCH,
    NO_PERMISSION,
    NOT_SUPPORTED,
    Card,
    Nvml,
    NVMLError,
    answer,
)
from tests.test_validity import replies

DATA = Path(__file__).parent / "data" / "nvml"
NOT_READY = NVMLError(27, "System is not in ready state")
UNKNOWN = NVMLError(999, "Unknown Error")
NOWHERE = Path("/nowhere")
ME = os.getpid()


@dataclass
class Busy(Card):
    """A card at work. A sequence is answered one by one, its last for ever."""

    power_mw: Any = 300_000
    energy_mj: Any = (5_000_000, 5_123_456)
    sm_mhz: Any = 1980
    temperature: Any = 61
    busy_percent: Any = 97
    used_mib: Any = 1024
    bits: Any = 0
    pids: Any = (ME,)
    asked: dict[str, int] = field(default_factory=dict)

    def next(self, name: str) -> Any:
        value, index = getattr(self, name), self.asked.get(name, 0)
        self.asked[name] = index + 1
        return answer(value[min(index, len(value) - 1)] if isinstance(value, tuple | list) else value)


class WorkingNvml(Nvml):
    """NVML as far as telemetry asks it."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        cards = [card for card in self.cards if isinstance(card, Card)]
        return next(i for card in cards for i in card.instances if i.uuid == uuid)

    def nvmlDeviceGetPowerUsage(self, card: Busy) -> Any:
        return card.next("power_mw")

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Busy) -> Any:
        return card.next("energy_mj")

    def nvmlDeviceGetClockInfo(self, card: Busy, which: int) -> Any:
        return card.next("sm_mhz") if which == self.NVML_CLOCK_SM else 2619

    def nvmlDeviceGetTemperature(self, card: Busy, sensor: int) -> Any:
        return card.next("temperature")

    def nvmlDeviceGetUtilizationRates(self, card: Busy) -> Any:
        return SimpleNamespace(gpu=card.next("busy_percent"), memory=0)

    def nvmlDeviceGetMemoryInfo(self, card: Busy) -> Any:
        total = answer(card.memory_mib)
        return SimpleNamespace(total=total * MIB, used=card.next("used_mib") * MIB)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Busy) -> Any:
        return card.next("bits")

    def nvmlDeviceGetComputeRunningProcesses(self, card: Busy) -> Any:
        pids = answer(card.pids)
        return [SimpleNamespace(pid=pid) for pid in pids]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., WorkingNvml]:
    def put(*cards: Card | NVMLError, **options: Any) -> WorkingNvml:
        fake = WorkingNvml(*cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(telemetry, "LEAST_GPU_S", 0.0)
        return fake

    return put


def h100(**answers: Any) -> Busy:
    return Busy("NVIDIA H100 80GB HBM3", 81559, "GPU-1", **answers)


def window(root: Path = NOWHERE, seconds: float = 0.05, **given: Any) -> Seen:
    """A window with nothing in it, read every 10 ms."""
    sampler = Sampler(**({"pids": [ME]} | given), root=root, period_s=0.01)
    sampler.start()
    time.sleep(seconds)
    return sampler.stop(0)


def energy(seen: Seen) -> tuple[float | None, str]:
    return seen.figures.get("energy_j"), seen.reasons["telemetry.energy_j"]


# --- a GPU at work ----------------------------------------------------------------------------------------


def test_a_gpus_energy_is_its_counters_growth_in_joules(nvml: Any) -> None:
    fake = nvml(h100())
    seen = window()
    assert energy(seen) == (pytest.approx(123.456), "GPU 0 by its energy counter")
    assert fake.open == 0
    figures = seen.figures
    assert (figures["sm_clock_mhz"], figures["mem_clock_mhz"]) == (1980, 2619)
    assert (figures["gpu_power_w"], figures["gpu_temperature_max_c"]) == (300, 61)
    assert (figures["gpu_utilisation"], figures["gpu_memory_max_bytes"]) == (pytest.approx(0.97), 1024 * MIB)
    assert figures["throttled_share"] == 0
    assert set(seen.reasons) == {"telemetry.energy_j"}


def test_rows_are_readings_in_order_and_fit_the_tables_columns(nvml: Any) -> None:
    nvml(h100())
    seen = window()
    assert [r["t_ns"] for r in seen.rows] == sorted(r["t_ns"] for r in seen.rows)
    assert all(set(r) <= set(trace.TELEMETRY_SCHEMA.names) for r in seen.rows)
    assert [r["energy_j"] for r in seen.rows[:2]] == [0.0, pytest.approx(123.456)]


def test_a_thread_reads_until_the_window_closes(nvml: Any) -> None:
    fake = nvml(card := h100())
    before, sampler = threading.active_count(), Sampler([ME], root=NOWHERE, period_s=0.001)
    sampler.start()
    deadline = time.monotonic() + 30
    while card.asked["power_mw"] < 10 and time.monotonic() < deadline:
        time.sleep(0.001)
    seen = sampler.stop(1000)
    assert threading.active_count() == before
    assert len(seen.rows) == card.asked["power_mw"] >= 10
    assert 0 < seen.cpu_s < (seen.figures["telemetry_s"] or 0)
    assert fake.open == 0


def test_a_driver_that_hangs_does_not_hold_the_run(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(card := h100())
    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.05)
    hung, free = threading.Event(), threading.Event()

    def hang(fake: WorkingNvml, card: Busy) -> Any:
        if card.next("power_mw") and card.asked["power_mw"] > 1:
            hung.set()
            free.wait(30)
        return 300_000

    monkeypatch.setattr(WorkingNvml, "nvmlDeviceGetPowerUsage", hang)
    sampler = Sampler([ME], root=NOWHERE, period_s=0.001)
    sampler.start()
    assert hung.wait(30)
    seen = sampler.stop(0)
    free.set()
    assert (seen.figures, seen.rows) == ({}, [])
    assert "did not answer" in energy(seen)[1]
    assert card.asked["power_mw"] == 2


def test_a_driver_that_hangs_in_the_first_or_last_reading_does_not_hold_the_run_either(
    nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.05)
    free = threading.Event()
    monkeypatch.setattr(WorkingNvml, "nvmlDeviceGetTemperature", lambda *_: free.wait(30) and 61)
    nvml(h100())
    started = time.monotonic()
    first = window(seconds=0)
    free.set()
    sampler = Sampler([ME], root=NOWHERE, period_s=1000)
    sampler.start()
    free.clear()
    last = sampler.stop(0)
    assert time.monotonic() - started < 20, "it waited until the driver answered"
    free.set()
    for seen in (first, last):
        assert (seen.figures, seen.rows, seen.cpu_s) == ({}, [], 0.0)
        assert "did not answer" in energy(seen)[1]


def test_a_driver_that_hangs_when_it_is_opened_or_closed_does_not_hold_the_run(
    nvml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.05)
    free, real = threading.Event(), meters.gpu_meters
    hanging = lambda environ: (free.wait(30), real(environ))[1]  # noqa: E731
    nvml(h100())
    started = time.monotonic()
    monkeypatch.setattr(meters, "gpu_meters", hanging)
    opened = window(seconds=0)
    assert (opened.figures, opened.rows) == ({}, [])
    assert "did not answer" in energy(opened)[1]
    monkeypatch.setattr(meters, "gpu_meters", real)
    monkeypatch.setattr(meters.GpuMeter, "close", lambda meter: free.wait(30))
    closed = window()
    assert time.monotonic() - started < 20, "it waited until the driver answered"
    free.set()
    assert energy(closed)[0] == pytest.approx(123.456), "all was read by then"


def test_a_reading_that_comes_late_is_not_of_the_window(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.05)
    nvml(card := h100())
    free = threading.Event()
    monkeypatch.setattr(WorkingNvml, "nvmlDeviceGetTemperature", lambda *_: free.wait(30) and 61)
    sampler = Sampler([ME], root=NOWHERE, period_s=0.001)
    sampler.start()
    free.set()
    deadline = time.monotonic() + 30
    while card.asked["power_mw"] < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    monkeypatch.setattr(telemetry, "PATIENCE_S", 5.0)
    assert "did not answer" in energy(sampler.stop(0))[1]


def test_power_and_energy_of_several_gpus_add_up(nvml: Any) -> None:
    nvml(h100(), h100(energy_mj=(7, 1007)))
    joules, whose = energy(seen := window())
    assert joules == pytest.approx(124.456)
    assert whose == "GPU 0 by its energy counter; GPU 1 by its energy counter"
    assert seen.figures["gpu_power_w"] == 600


def test_throttling_is_a_share_of_readings_with_its_causes(nvml: Any) -> None:
    # Idle, clocks set by a person and sync boost are no throttling; 0x4 is a power limit, 0x28 heat.
    nvml(h100(bits=(0x4, 0x28, 0x13, 0x0)))
    seen = window()
    count, figures = len(seen.rows), seen.figures
    assert seen.rows[1]["throttle_reasons"] == ["hw_slowdown", "sw_thermal"]
    assert figures["throttled_share"] == pytest.approx(2 / count)
    assert figures["throttled_heat_share"] == figures["throttled_power_share"] == pytest.approx(1 / count)
    (found,) = check_cell(record(telemetry=figures), trace.request_table(replies()), [])
    assert found.code == "throttled"
    assert "heat in" in found.advice


# --- whose energy -----------------------------------------------------------------------------------------


def test_an_idle_gpu_beside_the_engines_is_not_counted(nvml: Any) -> None:
    nvml(h100(), h100(pids=(), busy_percent=0))
    assert energy(window()) == (pytest.approx(123.456), "GPU 0 by its energy counter")


def test_where_the_driver_names_no_process_those_that_worked_count(nvml: Any) -> None:
    """In a container the list is empty."""
    nvml(h100(pids=()), h100(pids=(), busy_percent=(0, 0, 0)))
    assert energy(window()) == (pytest.approx(123.456), "GPU 0 by its energy counter")


def test_an_engine_on_the_cpu_is_not_given_an_idle_gpus_energy(nvml: Any) -> None:
    nvml(h100(pids=(), busy_percent=0))
    joules, why = energy(seen := window())
    assert joules is None
    assert "GPU 0 did no work in the window" in why
    assert "gpu_power_w" not in seen.figures
    assert {r["device"] for r in seen.rows} == {"gpu0"}


def test_without_processes_and_utilisation_nobody_knows_whose_it_is(nvml: Any) -> None:
    nvml(h100(pids=NO_PERMISSION, busy_percent=NOT_SUPPORTED))
    joules, why = energy(seen := window())
    assert joules is None
    assert "whose energy it is is unknown" in why
    assert seen.figures["sm_clock_mhz"] == 1980
    assert seen.reasons["telemetry.gpu_utilisation"] == "GPU 0: NVML: Not Supported"


def test_a_gpu_that_others_compute_on_has_no_energy_of_the_engine(nvml: Any) -> None:
    nvml(h100(pids=(ME, 1)))
    joules, why = energy(window())
    assert joules is None
    assert "1 other processes compute on it" in why


def test_only_gpus_that_the_engine_may_see_are_read(nvml: Any) -> None:
    nvml(h100(), h100())
    seen = window(environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert {r["device"] for r in seen.rows} == {"gpu1"}


def test_a_server_elsewhere_is_refused_and_no_meter_is_touched(nvml: Any) -> None:
    card = h100()
    fake = nvml(card)
    before = threading.active_count()
    sampler = Sampler([])
    sampler.start()
    assert threading.active_count() == before
    seen = sampler.stop(0)
    assert (seen.figures, seen.rows, card.asked, fake.open) == ({}, [], {}, 0)
    assert "was not started here" in seen.reasons["telemetry.energy_j"]


def test_a_window_shorter_than_the_counters_step_has_no_gpu_energy(nvml: Any) -> None:
    nvml(h100())
    telemetry.LEAST_GPU_S = 2.0  # the fixture restores it
    joules, why = energy(window())
    assert joules is None
    assert "too short for its meter" in why


# --- faults that users published --------------------------------------------------------------------------


def no_gpu(error: Exception) -> Callable[[Any], None]:
    def check(nvml: Any) -> None:
        nvml(h100(), init=error)
        seen = window()
        assert (seen.figures, seen.rows) == ({}, [])
        assert str(error) in energy(seen)[1]

    return check


def energy_unknown(because: str, **answers: Any) -> Callable[[Any], None]:
    def check(nvml: Any) -> None:
        nvml(h100(**answers))
        joules, why = energy(seen := window())
        assert joules is None
        assert because in why
        assert seen.figures["sm_clock_mhz"] == 1980
        assert all(r["energy_j"] is None or r["energy_j"] >= 0 for r in seen.rows)

    return check


def integrated(nvml: Any) -> None:
    nvml(h100(energy_mj=NOT_SUPPORTED))
    joules, whose = energy(seen := window())
    assert joules == pytest.approx(300 * (seen.figures["telemetry_s"] or 0))
    assert "by integrating its power" in whose


def millijoules(nvml: Any) -> None:
    nvml(h100(energy_mj=(0, 2500)))
    assert energy(window())[0] == 2.5


def unified(nvml: Any) -> None:
    nvml(Busy("NVIDIA GB10", NOT_SUPPORTED, "GPU-1"))
    (gpu,) = read_gpus().gpus
    assert (gpu.memory_bytes, gpu.unified) == (psutil.virtual_memory().total, True)
    seen = window()
    assert seen.figures["gpu_memory_max_bytes"] is None
    assert "Not Supported" in seen.reasons["telemetry.gpu_memory_max_bytes"]


def sliced() -> Busy:
    slice_ = Busy("NVIDIA H100 MIG 3g.40gb", 40192, "MIG-11", busy_percent=NOT_SUPPORTED)
    return Busy("NVIDIA H100 80GB HBM3", 81559, "GPU-1", [1, 1], (slice_,))


def no_utilisation_of_a_slice(nvml: Any) -> None:
    nvml(sliced())
    seen = window()
    assert {r["device"] for r in seen.rows} == {"gpu0/MIG-11"}
    assert seen.figures["gpu_utilisation"] is None
    assert (seen.figures["sm_clock_mhz"], seen.figures["gpu_memory_max_bytes"]) == (1980, 1024 * MIB)


def no_power_of_a_slice(nvml: Any) -> None:
    card = sliced()
    nvml(card)
    joules, why = energy(seen := window())
    assert (joules, seen.figures["gpu_power_w"]) == (None, None)
    assert "counts the whole card" in why
    assert not {"power_mw", "energy_mj"} & {*card.asked, *card.instances[0].asked}  # type: ignore[attr-defined]


def names_in_bytes(nvml: Any) -> None:
    nvml(Busy(b"Tesla T4", 15360, b"GPU-1"))
    assert read_gpus().names == ("Tesla T4",)
    assert energy(window())[0] == pytest.approx(123.456)


def a_uuid_is_no_number(nvml: Any) -> None:
    nvml(sliced())
    assert {r["device"] for r in window(environ={"CUDA_VISIBLE_DEVICES": "MIG-11"}).rows} == {"gpu0/MIG-11"}


FAULTS: dict[tuple[str, str], Callable[[Any], None]] = {
    ("nvmlInit", "NVML_ERROR_LIBRARY_NOT_FOUND"): no_gpu(LIBRARY_NOT_FOUND),
    ("nvmlInit", "NVML_ERROR_NO_PERMISSION"): no_gpu(NO_PERMISSION),
    ("nvmlInit", "NVML_ERROR_DRIVER_NOT_LOADED / LIB_RM_VERSION_MISMATCH"): no_gpu(MISMATCH),
    ("nvmlDeviceGetTotalEnergyConsumption", "NVML_ERROR_NOT_SUPPORTED"): integrated,
    ("nvmlDeviceGetTotalEnergyConsumption", "NVML_ERROR_NOT_READY ('System is not in ready state')"):
        energy_unknown("not in ready state", energy_mj=NOT_READY),
    ("nvmlDeviceGetTotalEnergyConsumption", "value decreases (driver reload)"):
        energy_unknown("fell during the window", energy_mj=(5_000_000, 5_001_000, 12)),
    ("nvmlDeviceGetTotalEnergyConsumption", "unit is millijoule"): millijoules,
    ("nvmlDeviceGetMemoryInfo", "NVML_ERROR_NOT_SUPPORTED (GB10)"): unified,
    ("nvmlDeviceGetUtilizationRates on MIG", "NVML_ERROR_NOT_SUPPORTED"): no_utilisation_of_a_slice,
    ("nvmlDeviceGetName", "bytes object (old pynvml)"): names_in_bytes,
    ("int(CUDA_VISIBLE_DEVICES)", "ValueError on 'MIG-…'"): a_uuid_is_no_number,
    ("parent-GPU power on MIG", "whole-card watts"): no_power_of_a_slice,
}  # fmt: skip


@pytest.mark.parametrize(
    "fault", json.loads((DATA / "nvml_faults.json").read_text()), ids=lambda f: f["call"] + " " + f["returns"]
)
def test_a_published_fault_is_null_with_its_reason(fault: dict[str, str], nvml: Any) -> None:
    FAULTS[fault["call"], fault["returns"]](nvml)


MORE_FAULTS = {
    "driver not loaded": no_gpu(DRIVER_NOT_LOADED),
    "a broken library": no_gpu(OSError("libnvidia-ml.so.1: file too short")),
    "lost in the window": energy_unknown("GPU is lost", energy_mj=(5_000_000, GPU_IS_LOST)),
    "not ready at first": energy_unknown("not in ready state", energy_mj=(NOT_READY, 5_000_000)),
    "a counter that stands still": energy_unknown("did not move", energy_mj=5_000_000),
    "no counter and no power": energy_unknown("Permissions", energy_mj=NOT_SUPPORTED, power_mw=NO_PERMISSION),
}


@pytest.mark.parametrize("check", MORE_FAULTS.values(), ids=MORE_FAULTS)
def test_further_faults(check: Callable[[Any], None], nvml: Any) -> None:
    check(nvml)


def test_old_libraries_lack_functions(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(h100())
    for name in ("TotalEnergyConsumption", "CurrentClocksThrottleReasons", "ComputeRunningProcesses"):
        monkeypatch.delattr(WorkingNvml, f"nvmlDeviceGet{name}")
    seen = window()
    assert "by integrating its power" in energy(seen)[1]
    assert seen.figures["throttled_share"] is None
    assert "nvmlDeviceGetCurrentClocksThrottleReasons" in seen.reasons["telemetry.throttled_share"]


def test_a_hole_in_samples_of_power_is_not_bridged(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(h100(energy_mj=NOT_SUPPORTED))
    monkeypatch.setattr(telemetry, "GAP_LIMIT_S", 0.001)
    joules, why = energy(window())
    assert joules is None
    assert "between two samples of power" in why


SAID = {
    "[N/A]": NOT_SUPPORTED,
    "[Not Supported]": NOT_SUPPORTED,
    "[Insufficient Permissions]": NO_PERMISSION,
    "[Unknown Error]": UNKNOWN,
}
"""What nvidia-smi prints for an answer of NVML."""


def printed(text: str) -> Any:
    return SAID.get(text) or float(text.split()[0])


def smi_rows() -> list[list[Any]]:
    lines = (DATA / "nvidia_smi_queries.txt").read_text().splitlines()
    table = [line.split(", ") for line in lines if line.startswith("NVIDIA")]
    return [[name, *map(printed, cells)] for name, *cells in table]


@pytest.mark.parametrize("cells", smi_rows(), ids=lambda cells: cells[0])
def test_what_nvidia_smi_could_not_say_is_null(cells: list[Any], nvml: Any) -> None:
    name, total, used, busy, watts, heat, clock = cells
    milliwatts = watts if isinstance(watts, Exception) else watts * 1e3
    nvml(Busy(name, total, "GPU-1", power_mw=milliwatts, sm_mhz=clock, temperature=heat, busy_percent=busy,
              used_mib=used))  # fmt: skip
    seen = window()
    expected = {
        "gpu_power_w": watts,
        "gpu_temperature_max_c": heat,
        "sm_clock_mhz": clock,
        "gpu_utilisation": busy if isinstance(busy, Exception) else busy / 100,
        "gpu_memory_max_bytes": total if isinstance(total, Exception) else used * MIB,
    }
    for figure, wanted in expected.items():
        if isinstance(wanted, Exception):
            assert seen.figures[figure] is None
            assert str(wanted) in seen.reasons[f"telemetry.{figure}"]
        else:
            assert seen.figures[figure] == pytest.approx(wanted)


def test_every_form_of_cuda_visible_devices_is_read() -> None:
    text = (DATA / "nvidia_smi_queries.txt").read_text()
    forms = text.partition("forms that must parse\n")[2].splitlines()
    gpus = (
        Gpu(0, "first", "GPU-00000000-0000-0000-0000-000000000001"),
        Gpu(1, "second", "GPU-00000000-0000-0000-0000-000000000002"),
        Gpu(2, "third", "GPU-00000000-0000-0000-0000-000000000003"),
        Gpu(3, "slice", "MIG-00000000-0000-0000-0000-000000000011", instance=True),
        Gpu(4, "old slice", "MIG-GPU-00000000-0000-0000-0000-000000000001/1/0", instance=True),
    )
    seen = [
        [gpu.name for gpu in visible(gpus, {"CUDA_VISIBLE_DEVICES": "" if form.startswith("(") else form})]
        for form in forms
    ]
    assert seen == [["first", "second"], ["first"], ["slice"], ["old slice"], ["second"], []]


# --- the CPU ----------------------------------------------------------------------------------------------


def put(root: Path, path: str, text: object) -> Path:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"{text}\n")
    return place


def zone(root: Path, name: str, label: str, energy_uj: int, most: int | None = 262_143_328_850) -> Path:
    base = f"sys/class/powercap/{name}"
    put(root, f"{base}/name", label)
    if most is not None:
        put(root, f"{base}/max_energy_range_uj", most)
    return put(root, f"{base}/energy_uj", energy_uj)


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def test_packages_and_their_memory_count_once(tmp_path: Path, no_nvml: None) -> None:
    """The same package shows again as `mmio`, cores are within it, and psys holds it."""
    package, dram = (
        zone(tmp_path, "intel-rapl:0", "package-0", 10**9),
        zone(tmp_path, "intel-rapl:0:2", "dram", 5),
    )
    others = [
        zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:1", "psys", 0),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    sampler = Sampler([ME], root=tmp_path, period_s=0.01)
    sampler.start()
    package.write_text(f"{10**9 + 7_500_000}\n")
    dram.write_text("1500005\n")
    for path in others:
        path.write_text("99000000\n")
    seen = sampler.stop(0)
    assert {r["device"] for r in seen.rows} == {"package-0", "package-0/dram"}
    joules, whose = energy(seen)
    assert joules == seen.figures["cpu_energy_j"] == pytest.approx(7.5 + 1.5)
    assert whose == "CPU (package-0, package-0/dram) by RAPL, with everything else that ran there"


def test_a_counter_that_is_for_root_is_a_reason(
    tmp_path: Path, no_nvml: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    really = os.open

    def refuse(path: Any, flags: int) -> int:
        if str(path).endswith("energy_uj"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    found, why = meters.package_meters(tmp_path)
    assert found == []
    assert why is not None
    assert "energy_uj cannot be read (Permission denied)" in why


def test_a_counter_turns_over_and_is_never_negative() -> None:
    joules = Joules(1e-6, wraps_at=1_000_000_000)
    readings = (999_000_000, 999_900_000, 400_000, 999_999_999, 99_999_999)
    found = [joules.add(count, 0.2 * i) for i, count in enumerate(readings)]
    # 0.9 J, then 0.1 + 0.4 J over the turn, …
    assert found[:3] == [0.0, pytest.approx(0.9), pytest.approx(1.4)]
    assert found[3] == pytest.approx(1.4 + 999.599999)
    assert found[4] == pytest.approx(found[3] + 100.0)


def test_a_counter_that_was_set_back_is_unknown_for_good() -> None:
    # Taken for a turn it would be 262 kJ in 0.2 s: a megawatt.
    joules = Joules(1e-6, wraps_at=262_143_328_850)
    assert [joules.add(count, 0.2 * i) for i, count in enumerate((5_000_000, 1_000_000, 9_000_000))] == [
        0,
        None,
        None,
    ]
    assert "fell" in (joules.why or "")
    without = Joules(1e-3)
    assert [without.add(count, 1.0 * i) for i, count in enumerate((10, 9, 20))] == [0.0, None, None]


def test_one_missing_reading_of_a_counter_loses_nothing() -> None:
    joules = Joules(1e-3)
    assert [joules.add(count, 1.0 * i) for i, count in enumerate((10, None, 2010))] == [0.0, None, 2.0]


def test_clocks_of_the_cpus_that_may_be_used(tmp_path: Path) -> None:
    for cpu, khz in enumerate((800_000, 3_600_000, 5_000_000)):
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", khz)
    meter = meters.clock_meter(tmp_path, (0, 1))
    assert not isinstance(meter, str)
    assert meter.read(0.0) == {"cpu_mhz": 2200.0, "cpu_fastest_mhz": 3600.0}
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", 1_000_000)
    assert meter.read(0.0)["cpu_mhz"] == 2300.0
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", "<unknown>")
    assert meter.read(0.0) == {}
    assert "cpufreq" in meter.reasons["cpu_mhz"]
    meter.close()


def test_a_measured_clock_comes_before_the_one_that_was_set(tmp_path: Path) -> None:
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", 1_000_000)
    put(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_avg_freq", 3_000_000)
    meter = meters.clock_meter(tmp_path, (0,))
    assert not isinstance(meter, str)
    assert meter.read(0.0)["cpu_mhz"] == 3000.0
    meter.close()


CPUINFO = "processor\t: {}\nflags\t\t: fpu {}\ncpu MHz\t\t: {}\n\n"


def test_cpuinfo_counts_only_where_the_cpu_counts_its_cycles(tmp_path: Path) -> None:
    """Else the kernel prints the nominal clock, which says nothing of the window."""
    path = put(tmp_path, "proc/cpuinfo", CPUINFO.format(0, "tsc", 2596.122))
    assert "nominal" in str(meters.clock_meter(tmp_path, (0,)))
    path.write_text(CPUINFO.format(0, "aperfmperf", 2000.0) + CPUINFO.format(1, "aperfmperf", 3000.5))
    meter = meters.clock_meter(tmp_path, (0,))
    assert not isinstance(meter, str)
    assert meter.read(0.0) == {"cpu_mhz": 2500.25, "cpu_fastest_mhz": 3000.5}
    path.unlink()
    assert meter.read(0.0) == {}


def test_this_host_as_it_is() -> None:
    """Whatever it has: figures that are numbers, or none and the reason."""
    before = threading.active_count()
    sampler = Sampler([ME], period_s=0.02)
    sampler.start()
    time.sleep(0.1)
    seen = sampler.stop(0)
    assert threading.active_count() == before
    assert seen.reasons["telemetry.energy_j"]
    if seen.rows:
        assert 0 <= (seen.figures["telemetry_cpu_share"] or 0) < 0.5
    else:
        assert seen.figures == {}
    assert (seen.figures.get("cpu_mhz") is not None) == any("cpu_mhz" in r for r in seen.rows)


# --- in a cell --------------------------------------------------------------------------------------------


@pytest.fixture
def metered_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_nvml: None) -> Iterator[None]:
    """A host whose one package takes about 50 W by its counter."""
    counter = zone(tmp_path / "root", "intel-rapl:0", "package-0", 0)
    done = threading.Event()

    def tick() -> None:
        with counter.open(
            "r+b", buffering=0
        ) as file:  # one write of one length: a reader sees a whole number
            while not done.wait(0.005):
                os.pwrite(file.fileno(), b"%020d" % int(time.monotonic() * 50e6), 0)

    counter.write_bytes(b"%020d" % int(time.monotonic() * 50e6))
    thread = threading.Thread(target=tick)
    thread.start()
    monkeypatch.setattr(telemetry, "Sampler", partial(Sampler, root=tmp_path / "root", period_s=0.02))
    yield
    done.set()
    thread.join()


def loopback(tmp_path: Path) -> trace.Run:
    raw = {
        "name": "r",
        "model": "script",
        "workload": {"categories": ["qa"], "prompts_per_category": 6, "max_tokens": 20, "history": "own"},
        "repeat": {"blocks": 1, "restart": "run"},
        "engine": [{"name": "loopback", "args": {"step_ms": 2, "prefill_ms": 10}}],
        "method": [{"name": "none", "baseline": True}],
    }
    Runner(check_plan(raw, "test"), tmp_path / "r").run()
    return trace.load(tmp_path / "r")


def test_a_cell_keeps_its_window_and_nothing_before_it(tmp_path: Path, metered_host: None) -> None:
    run = loopback(tmp_path)
    cell = run.records[0]
    seen, rows = run.telemetry[run.telemetry["cell_id"] == cell.cell_id], run.requests
    rows = rows[rows["cell_id"] == cell.cell_id]
    assert seen["t_ns"].min() >= rows.loc[rows["warmup"], "done_ns"].max()
    assert seen["t_ns"].min() <= rows.loc[~rows["warmup"], "sent_ns"].min()
    assert seen["t_ns"].max() >= rows["done_ns"].max()
    spent, seconds = cell.telemetry["energy_j"], cell.telemetry["telemetry_s"]
    assert spent is not None
    assert seconds is not None
    assert seconds >= cell.window_s
    assert spent == seen["energy_j"].iloc[-1] > 0
    assert (seen["energy_j"].diff().dropna() >= 0).all()
    assert cell.metrics["power_mean_w"] == pytest.approx(spent / seconds)
    tokens = cell.metrics["output_tokens"]
    assert tokens == 20 * (cell.metrics["requests"] or 0)
    assert cell.metrics["energy_per_token_j"] == pytest.approx(spent / tokens)
    assert cell.metrics["tokens_per_j"] == pytest.approx(tokens / spent)
    assert "by RAPL" in cell.reasons["energy_j"]
    assert trace.read_record(run.path / "cells" / cell.cell_id) == cell


def test_a_host_without_meters_leaves_cells_as_they_were(
    tmp_path: Path, no_nvml: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "Sampler", partial(Sampler, root=tmp_path))
    run = loopback(tmp_path)
    cell = run.path / "cells" / run.records[0].cell_id
    assert {path.name for path in cell.iterdir()} == {"cell.json", "requests.parquet", "texts.jsonl.zst"}
    assert run.telemetry.empty
    assert run.records[0].telemetry == {}
    assert run.records[0].metrics["tokens_per_j"] is None
    assert "nvidia-ml-py is not installed; no RAPL" in run.records[0].reasons["tokens_per_j"]


def test_readings_are_written_read_back_and_fit_the_schema(nvml: Any, tmp_path: Path) -> None:
    nvml(h100(bits=0x4))
    seen = window()
    place = trace.write_cell(
        tmp_path, record(telemetry=seen.figures, reasons=seen.reasons), [], [], seen.rows
    )
    back = pq.read_table(place / "telemetry.parquet").to_pylist()
    assert [r["energy_j"] for r in back] == [r["energy_j"] for r in seen.rows]
    assert back[0]["cpu_mhz"] is None
    document = orjson.loads(schema.PATH.read_bytes())
    for reading in back:
        jsonschema.validate(reading, {**document["$defs"]["reading"], "$defs": document["$defs"]})
    jsonschema.validate(orjson.loads((place / "cell.json").read_bytes()), document)


# --- metrics and reports ----------------------------------------------------------------------------------


def metered(joules: float | None, note: str = "GPU 0 by its energy counter", tokens: int = 10) -> CellView:
    about = record(telemetry={"energy_j": joules, "telemetry_s": 4.0}, reasons={"telemetry.energy_j": note})
    return CellView.of(about, trace.request_table([row(0, (0.1, 0.5), output_tokens=tokens)]))


def of(view: CellView, name: str) -> tuple[float | None, str | None]:
    values, reasons = compute(view, [name])
    return values[name], reasons.get(name)


def test_energy_is_summed_over_cells_before_it_is_divided() -> None:
    both = CellView.pool([metered(20.0), metered(40.0, tokens=5)])
    assert of(both, "energy_j") == (60.0, "GPU 0 by its energy counter")
    assert of(both, "energy_per_token_j")[0] == pytest.approx(60 / 15)
    assert of(both, "tokens_per_j")[0] == pytest.approx(15 / 60)
    assert of(both, "power_mean_w")[0] == pytest.approx(60 / 8)


def test_unknown_energy_of_one_cell_is_unknown_of_all() -> None:
    both = CellView.pool([metered(20.0), metered(None, "the counter fell")])
    for name in ("energy_j", "power_mean_w", "energy_per_token_j", "tokens_per_j"):
        assert of(both, name) == (None, "the counter fell")


def test_energy_of_a_token_is_undefined_without_tokens_and_for_a_part() -> None:
    assert of(metered(20.0, tokens=0), "energy_per_token_j") == (None, "no token was produced")
    assert of(metered(20.0, tokens=0), "tokens_per_j") == (None, "no token was produced")
    assert of(metered(20.0), "energy_j")[0] == 20.0
    assert "for a whole cell" in str(of(metered(20.0).only("qa"), "energy_j")[1])
    assert of(CellView.of(record(), trace.request_table([row()])), "energy_j") == (None, "no meter was read")


def rewritten(run_dir: Path, joules: Sequence[float]) -> specbench.Summary:
    """The run with energy in its cells: of the baseline's, then of the others."""
    for place in trace.cell_dirs(run_dir):
        cell = trace.read_record(place)
        told = {"energy_j": joules[not cell.baseline], "telemetry_s": 1.0}
        cell = cell.model_copy(update={"telemetry": told, "reasons": {"telemetry.energy_j": "GPU 0"}})
        (place / "cell.json").write_bytes(orjson.dumps(cell.model_dump(mode="json")))
    return specbench.summary(run_dir)


def test_a_report_shows_energy_only_where_it_is_known(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", blocks=3)
    metric_names = [name for name, metric in METRICS.items() if METERED in metric.needs]
    assert len(metric_names) == 4
    page = html.render(specbench.summary(run_dir))
    table = page.partition('id="metrics"')[2].partition('id="terms"')[0]
    assert not any(f">{name}<" in table for name in metric_names)
    found = rewritten(run_dir, (500.0, 250.0))
    table = html.render(found).partition('id="metrics"')[2].partition('id="terms"')[0]
    assert all(f">{name}<" in table for name in metric_names)
    tokens = found.arms[0].metrics["output_tokens"]
    assert tokens is not None
    # Three blocks, two cells each.
    each = [6 * 500 / tokens, 6 * 250 / tokens]
    assert f"A token took {each[1]:.3g} J, the baseline's {each[0]:.3g} J (GPU 0)." in found.explanations[0]
