"""What NVML says of the GPUs, with its faults: a stand-in for the library, because no GPU is needed for this."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from models_roofline.hardware import find_device
from specbench import device, host
from specbench.cli import main
from specbench.device import Gpu, read_gpus, visible

MIB = 2**20


class NVMLError(Exception):
    """As pynvml's: a code and the driver's words."""

    def __init__(self, value: int, words: str) -> None:
        super().__init__(words)
        self.value = value


NOT_SUPPORTED = NVMLError(3, "Not Supported")
NO_PERMISSION = NVMLError(4, "Insufficient Permissions")
NOT_FOUND = NVMLError(6, "Not Found")
DRIVER_NOT_LOADED = NVMLError(9, "Driver Not Loaded")
LIBRARY_NOT_FOUND = NVMLError(12, "NVML Shared Library Not Found")
GPU_IS_LOST = NVMLError(15, "GPU is lost")
MISMATCH = NVMLError(18, "RM has detected an NVML/RM version mismatch.")

Answer = Any
"""A value, or an error to raise."""


@dataclass
class Card:
    """What the driver answers for one handle."""

    name: Answer
    memory_mib: Answer
    uuid: Answer = "GPU-0"
    mig: Answer = field(default_factory=lambda: NOT_SUPPORTED)
    instances: Sequence["Card"] = ()


def answer(value: Answer) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class Nvml:
    """Stands where `pynvml` is imported."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3

    def __init__(self, *cards: Card | NVMLError, init: Answer = None, driver: Answer = "570.1") -> None:
        self.cards, self.init, self.driver = cards, init, driver
        self.open = 0

    def nvmlInit(self) -> None:
        answer(self.init)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return answer(self.driver)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return answer(self.cards[index])

    def nvmlDeviceGetName(self, card: Card) -> Any:
        return answer(card.name)

    def nvmlDeviceGetUUID(self, card: Card) -> Any:
        return answer(card.uuid)

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        return SimpleNamespace(total=answer(card.memory_mib) * MIB)

    def nvmlDeviceGetMigMode(self, card: Card) -> Any:
        return answer(card.mig)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Any:
        if index >= len(card.instances):
            raise NOT_FOUND
        return card.instances[index]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(*cards: Card | NVMLError, **options: Answer) -> Nvml:
        fake = Nvml(*cards, **options)
        monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return fake

    return put


H100 = Card("NVIDIA H100 80GB HBM3", 81559, "GPU-00000000-0000-0000-0000-000000000001", [0, 0])
L4 = Card("NVIDIA L4", 23034, "GPU-00000000-0000-0000-0000-000000000002")
SLICED = Card(
    "NVIDIA A100-SXM4-80GB", 81920, "GPU-00000000-0000-0000-0000-000000000003", [1, 1],
    (
        Card("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192, "MIG-00000000-0000-0000-0000-000000000011"),
        Card("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728, "MIG-00000000-0000-0000-0000-000000000012"),
    ),
)  # fmt: skip


def test_a_gpu_is_named_with_its_memory(nvml: Any) -> None:
    fake = nvml(H100, L4)
    found = read_gpus()
    assert found.names == ("NVIDIA H100 80GB HBM3", "NVIDIA L4")
    assert (found.driver, found.reason, fake.open) == ("570.1", None, 0)
    first = found.gpus[0]
    assert first.device is find_device("H100-SXM5-80GB")
    assert (first.memory_bytes, first.memory_from, first.unified) == (81559 * MIB, "driver", False)
    assert (first.mig, found.gpus[1].mig) == (False, None)
    assert first.reason is None


@pytest.mark.parametrize(
    "error", [LIBRARY_NOT_FOUND, NO_PERMISSION, DRIVER_NOT_LOADED, MISMATCH, OSError("no")]
)
def test_without_a_driver_there_is_a_reason_and_no_gpu(nvml: Any, error: Exception) -> None:
    nvml(H100, init=error)
    found = read_gpus()
    assert (found.gpus, found.driver) == ((), None)
    assert str(error) in (found.reason or "")
    assert host.machine().gpus == ()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in (read_gpus().reason or "")


def test_old_libraries_answer_in_bytes(nvml: Any) -> None:
    nvml(Card(b"Tesla T4", 15360, b"GPU-1"), driver=b"470.1")
    found = read_gpus()
    assert (found.driver, found.names) == ("470.1", ("Tesla T4",))
    assert found.gpus[0].device is find_device("T4")
    assert found.gpus[0].uuid == "GPU-1"


def test_old_libraries_lack_functions(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(L4)
    monkeypatch.delattr(Nvml, "nvmlDeviceGetMigMode")
    (gpu,) = read_gpus().gpus
    assert (gpu.device, gpu.mig) == (find_device("L4"), None)


def test_unified_memory_is_the_hosts(nvml: Any) -> None:
    nvml(Card("NVIDIA GB10", NOT_SUPPORTED))
    (gpu,) = read_gpus().gpus
    assert gpu.device is find_device("DGX-Spark-GB10")
    assert (gpu.memory_bytes, gpu.memory_from, gpu.unified) == (psutil.virtual_memory().total, "host", True)
    assert gpu.reason is None


def test_what_cannot_be_read_is_null_with_its_reason(nvml: Any) -> None:
    nvml(Card("NVIDIA L4", NO_PERMISSION, NO_PERMISSION), Card(NO_PERMISSION, 1000), GPU_IS_LOST)
    closed, nameless, lost = read_gpus().gpus
    assert closed.device is find_device("L4")
    assert (closed.memory_bytes, closed.memory_from, closed.uuid) == (None, None, None)
    assert closed.reason == "Its memory cannot be read (Insufficient Permissions)."
    assert (nameless.device, nameless.reason) == (None, "NVML: Insufficient Permissions.")
    assert (lost.index, lost.name, lost.reason) == (2, None, "NVML: GPU is lost.")
    assert read_gpus().names == ("NVIDIA L4", "unknown GPU", "unknown GPU")


def test_mig_instances_stand_beside_their_card(nvml: Any) -> None:
    nvml(SLICED)
    found = read_gpus()
    card, big, small = found.gpus
    assert found.names == ("NVIDIA A100-SXM4-80GB",)
    assert (card.device, card.mig, card.instance) == (None, True, False)
    assert "only its instances compute" in (card.reason or "")
    whole = find_device("A100-SXM4-80GB").bandwidth_bytes_per_s
    assert [g.device.bandwidth_bytes_per_s / whole for g in (big, small) if g.device] == [4 / 8, 1 / 8]
    assert (big.index, big.instance, big.memory_bytes) == (0, True, 40192 * MIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ["H", "L", "A", "3g", "1g"]),
        ("0,1", ["H", "L"]),
        ("1,0", ["L", "H"]),
        ("GPU-00000000-0000-0000-0000-000000000001", ["H"]),
        ("GPU-00000000-0000-0000-0000-000000000002,0", ["L", "H"]),
        ("MIG-00000000-0000-0000-0000-000000000011", ["3g"]),
        ("MIG-GPU-00000000-0000-0000-0000-000000000009/1/0", ["old"]),
        ("1,-1,2", ["L"]),
        ("", []),
        ("-1", []),
        ("9,0", []),
        ("GPU-0000", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices(text: str | None, expected: list[str]) -> None:
    gpus = [
        Gpu(0, "H", "GPU-00000000-0000-0000-0000-000000000001"),
        Gpu(1, "L", "GPU-00000000-0000-0000-0000-000000000002"),
        Gpu(2, "A", "GPU-00000000-0000-0000-0000-000000000003"),
        Gpu(2, "3g", "MIG-00000000-0000-0000-0000-000000000011", instance=True),
        Gpu(2, "1g", "MIG-00000000-0000-0000-0000-000000000012", instance=True),
        Gpu(3, "old", "MIG-GPU-00000000-0000-0000-0000-000000000009/1/0", instance=True),
    ]
    seen = gpus if text is not None else gpus[:5]
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert [gpu.name for gpu in visible(seen, environ)] == expected


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", ["specbench", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    return capsys.readouterr().out


def test_machine_names_the_devices(
    nvml: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    nvml(H100, Card("NVIDIA H100", 81559, "GPU-7"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(host, "_cpu_name", lambda: "AMD EPYC 9654 96-Core Processor")
    document = json.loads(run(["machine", "--json"], monkeypatch, capsys))
    assert document["gpus"] == ["NVIDIA H100 80GB HBM3", "NVIDIA H100"]
    assert document["driver"] == "570.1"
    assert (document["cpu_device"], document["cpu_reason"]) == ("EPYC-9654", None)
    known, bare = document["devices"]
    assert known == {
        "index": 0, "name": "NVIDIA H100 80GB HBM3", "device": "H100-SXM5-80GB", "memory_bytes": 81559 * MIB,
        "memory_from": "driver", "unified": False, "mig": False, "visible": False, "reason": None,
    }  # fmt: skip
    assert (bare["device"], bare["visible"]) == (None, True)
    assert "name the device with --device" in bare["reason"]


def test_machine_in_words(
    nvml: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml(H100, Card("NVIDIA GB10", NOT_SUPPORTED))
    text = run(["machine"], monkeypatch, capsys)
    assert "gpu 0  H100-SXM5-80GB, 79.6 GiB\n" in text
    assert "gpu 1  DGX-Spark-GB10" in text
    assert "of the host's memory" in text
    nvml(init=LIBRARY_NOT_FOUND)
    text = run(["machine"], monkeypatch, capsys)
    assert "none to predict for: NVML: NVML Shared Library Not Found." in text
    assert "cpu device  " in text


def test_errors_of_the_real_library_carry_the_code() -> None:
    pynvml = pytest.importorskip("pynvml")
    error = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert device.is_not_supported(pynvml, error)
    assert not device.is_not_supported(pynvml, pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION))
    assert Nvml.NVML_ERROR_NOT_SUPPORTED == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert all(hasattr(pynvml, name) for name in vars(Nvml) if name.startswith("nvml"))
