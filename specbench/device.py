"""The GPUs of this host as NVML reports them, and the catalogue's name for each.

Boundary: asks the driver and changes nothing. Nothing here raises: what cannot be read is None with the reason, in
the driver's words, because a run goes on without it. What a name stands for is `models_roofline.hardware`'s.

NVML lists devices in PCI bus order. Indices in CUDA_VISIBLE_DEVICES are in CUDA's order, which is the same where
CUDA_DEVICE_ORDER=PCI_BUS_ID or all GPUs are alike.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil

from models_roofline.hardware import Device, identify

MAX_MIG = 7
"""Instances that a card can have at most, for drivers that do not say."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of it, as the driver reports it."""

    index: int
    name: str | None
    uuid: str | None = None
    memory_bytes: int | None = None
    memory_from: Literal["driver", "host"] | None = None
    """Where the memory figure is from; `host` is the system's memory, which a unified GPU shares."""
    unified: bool = False
    mig: bool | None = None
    """Whether MIG is on; None where the card has none or the driver does not say."""
    instance: bool = False
    """This is a MIG instance; `index` is that of its card."""
    device: Device | None = None
    """The device of the catalogue, a slice for a MIG instance."""
    reason: str | None = None
    """Why `device` or the memory is not known."""


@dataclass(frozen=True)
class Gpus:
    """What NVML said. Without a library, driver or permission there is no GPU, and a reason."""

    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    reason: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the physical GPUs."""
        return tuple(gpu.name or "unknown GPU" for gpu in self.gpus if not gpu.instance)


def read_gpus() -> Gpus:
    """Ask NVML once. Never raises."""
    try:
        import pynvml
    except ImportError:
        return Gpus(reason="The Python package nvidia-ml-py is not installed.")
    try:
        pynvml.nvmlInit()
    except Exception as error:
        # NVML's own error types, or the loader's where the library is broken: no GPU to name either way.
        return Gpus(reason=f"NVML: {error}.")
    try:
        return _Reader(pynvml).all()
    finally:
        with suppress(Exception):
            pynvml.nvmlShutdown()


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves to a process, in its order; all where it is not set.

    Entries are indices, UUIDs or beginnings of them, and MIG UUIDs. As in CUDA, the list ends before the first entry
    that names nothing (`1,-1,2` is GPU 1), and an empty one hides every GPU.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return tuple(gpus)
    found: list[Gpu] = []
    for entry in text.split(","):
        if (gpu := _entry(entry.strip(), gpus)) is None:
            break
        found.append(gpu)
    return tuple(found)


def _entry(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in gpus if gpu.index == int(entry) and not gpu.instance), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    found = [gpu for gpu in gpus if (gpu.uuid or "").startswith(entry)]
    return found[0] if len(found) == 1 else None


class _Reader:
    """One pass over NVML; a call that fails gives None and leaves its words in `failed`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._failed: str | None = None

    def all(self) -> Gpus:
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        count = self._ask("nvmlDeviceGetCount")
        if count is None:
            return Gpus(driver=driver, reason=f"NVML: {self._failed}.")
        return Gpus(tuple(gpu for index in range(count) for gpu in self._card(index)), driver)

    def _ask(self, call: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, call)(*arguments)
        except (self._nvml.NVMLError, AttributeError, UnicodeDecodeError) as error:
            # The driver's answer, a function that an old library lacks, or a name that is no text.
            self._failed = str(error)
            return None

    def _card(self, index: int) -> Iterator[Gpu]:
        handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            yield Gpu(index, None, reason=f"NVML: {self._failed}.")
            return
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        mig = None if mode is None else bool(mode[0])
        card = replace(self._gpu(index, handle), mig=mig)
        if not mig:
            yield card
            return
        yield replace(card, device=None, reason="MIG is on, so only its instances compute: name one of them.")
        most = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or MAX_MIG
        for slot in range(most):
            if (instance := self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)) is not None:
                yield replace(self._gpu(index, instance), mig=True, instance=True)

    def _gpu(self, index: int, handle: Any) -> Gpu:
        name = _text(self._ask("nvmlDeviceGetName", handle))
        unnamed = None if name is not None else f"NVML: {self._failed}."
        uuid = _text(self._ask("nvmlDeviceGetUUID", handle))
        memory, memory_from, unread = self._memory(handle)
        from_driver = memory / 2**20 if memory is not None and memory_from == "driver" else None
        found = identify(name, from_driver)
        return Gpu(
            index=index,
            name=name,
            uuid=uuid,
            memory_bytes=memory,
            memory_from=memory_from,
            unified=memory_from == "host" or bool(found.device and found.device.unified),
            device=found.device,
            reason=" ".join(filter(None, (unnamed or found.reason, unread))) or None,
        )

    def _memory(self, handle: Any) -> tuple[int | None, Literal["driver", "host"] | None, str | None]:
        try:
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total), "driver", None
        except self._nvml.NVMLError as error:
            if is_not_supported(self._nvml, error):
                # A GPU without memory of its own (GB10) has the host's.
                return psutil.virtual_memory().total, "host", None
            return None, None, f"Its memory cannot be read ({error})."


def is_not_supported(nvml: Any, error: BaseException) -> bool:
    """Whether NVML said that this device cannot answer, rather than that it will not or not now."""
    return bool(getattr(error, "value", None) == nvml.NVML_ERROR_NOT_SUPPORTED)


def _text(value: str | bytes | None) -> str | None:
    """Old versions of the library answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
