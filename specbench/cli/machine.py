"""`specbench machine`: what this host is, as it will stand in every cell, and which devices of the catalogue it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.cli._roofline import Devices, Json
from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from models_roofline.hardware import Device
    from specbench.device import Gpu

PEAKS = ("bf16", "fp8", "fp4")
"""Number types whose peaks the list of devices shows."""


def machine(
    catalogue: Annotated[bool, typer.Option("--catalogue", help="List the devices to predict for.")] = False,
    devices: Devices = None,
    json_: Json = False,
) -> None:
    """Show this machine as a run records it, and what the analytic side knows it as."""
    if devices and not catalogue:
        raise SpecbenchError("--devices: is listed with --catalogue; give both.")
    if catalogue:
        _catalogue(devices, json_)
    else:
        _machine(json_)


def _catalogue(devices: Path | None, json_: bool) -> None:
    from models_roofline.hardware import pool
    from specbench.cli._io import emit, table

    known = list(pool(devices).values())
    if json_:
        emit([_figures(device) for device in known])
        return
    rows = [
        [
            device.id, device.kind, f"{device.bandwidth_bytes_per_s / 1e9:,.0f}",
            *(f"{device.peak_flops(kind) / 1e12:,.4g}" if kind in device.dtypes else "–" for kind in PEAKS),
            f"{device.memory_bytes / 2**30:.1f}" if device.memory_bytes else "–",
        ]
        for device in known
    ]  # fmt: skip
    print(table(["device", "kind", "GB/s", *(f"{kind} TFLOP/s" for kind in PEAKS), "GiB"], rows))


def _figures(device: Device) -> dict[str, Any]:
    figures = {name: figure._asdict() for name, figure in device.figures.items()}
    return {"id": device.id, "kind": device.kind, "vendor": device.vendor, "figures": figures}


def _machine(json_: bool) -> None:
    from models_roofline.hardware import identify_cpu
    from specbench import device, host
    from specbench.cli._io import emit

    found = host.machine().model_dump(mode="json")
    read = device.read_gpus()
    cpu = identify_cpu(found["cpu"])
    if json_:
        shown = device.visible(read.gpus)
        found["devices"] = [_row(gpu, gpu in shown) for gpu in read.gpus]
        found["gpu_reason"] = read.reason
        found["cpu_device"] = cpu.device.id if cpu.device else None
        found["cpu_reason"] = cpu.reason
        emit(found)
        return
    found["memory"] = f"{found.pop('memory_bytes') / 2**30:.1f} GiB"
    for name, value in found.items():
        text = ", ".join(value) or "none" if isinstance(value, list) else value
        _line(name, text if text is not None else "unknown")
    for gpu in read.gpus:
        _line(f"gpu {gpu.index}", _sentence(gpu))
    if read.reason and not read.gpus:
        _line("gpu", f"none to predict for: {read.reason}")
    _line("cpu device", f"{cpu.device.id}, as one whole socket" if cpu.device else str(cpu.reason))


def _line(name: str, text: object) -> None:
    print(f"{name:>14}  {text}")


def _row(gpu: Gpu, visible: bool) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "name": gpu.name,
        "device": gpu.device.id if gpu.device else None,
        "memory_bytes": gpu.memory_bytes,
        "memory_from": gpu.memory_from,
        "unified": gpu.unified,
        "mig": gpu.mig,
        "visible": visible,
        "reason": gpu.reason,
    }


def _sentence(gpu: Gpu) -> str:
    memory = f", {gpu.memory_bytes / 2**30:.1f} GiB" if gpu.memory_bytes else ""
    shared = " of the host's memory" if gpu.unified else ""
    what = gpu.device.id if gpu.device else "unknown device"
    return f"{what}{memory}{shared}" + (f": {gpu.reason}" if gpu.reason else "")
