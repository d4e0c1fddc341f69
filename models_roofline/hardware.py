"""The catalogue of devices, and which of them a name stands for. Never a guess.

The catalogue is `data/devices.csv`; docs/devices.md says what was left out, and why. A user's file adds devices or
replaces single figures of known ones. People's names (`find_device`) are ids or drivers' names in full. Drivers' names
(`identify`) must match, whole, one spelling in the catalogue: `NVIDIA H100 80GB HBM3` is the SXM card and `NVIDIA H100
PCIe` is not, `… Laptop GPU`, `… D` and `…-3e` are other parts, a bare `NVIDIA H100` is unknown. A MIG instance is its
share of the card (shares: NVIDIA's MIG user guide, "Supported MIG Profiles"); a vGPU is a share that its name does
not tell.

Boundary: names and shares; drivers and /proc/cpuinfo are read by the caller, kernel efficiencies are in `profile`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path

from models_roofline.device import DTYPES, Device, Figure
from models_roofline.device_files import read_devices
from models_roofline.errors import RooflineError

__all__ = [
    "Device",
    "Figure",
    "Identity",
    "catalogue",
    "find_device",
    "identify",
    "identify_cpu",
    "load_devices",
    "pool",
]


@cache
def catalogue() -> Mapping[str, Device]:
    """The shipped devices by id."""
    return read_devices(Path(str(resources.files("models_roofline"))) / "data" / "devices.csv", {})


def load_devices(path: Path | str) -> dict[str, Device]:
    """The devices of a user's file by id: CSV, TOML (`[[device]]`) or JSON (a list, or an object with `device`).

    A device that the catalogue has keeps what the file does not name. Raises RooflineError with place and column.
    """
    return read_devices(Path(path), catalogue())


def pool(extra: Path | str | None = None) -> Mapping[str, Device]:
    """The catalogue, with a user's file over it."""
    return {**catalogue(), **load_devices(extra)} if extra else catalogue()


def find_device(name: str, extra: Path | str | None = None) -> Device:
    """The device of that id or driver name; case and separators do not count.

    `H100-SXM5-80GB`, `NVIDIA H100 80GB HBM3` and `H100-SXM5-80GB MIG 3g.40gb` are devices. A part of a name (`H100`)
    is an error that lists what it may be, an unknown one lists the near ones; RooflineError in both cases.
    """
    known = pool(extra)
    card, profile = _split_mig(name)
    device = _exact(card, known)
    if device is None:
        raise _not_found(card, known)
    return _take_slice(device, profile) if profile else device


def _candidates(name: str, known: Mapping[str, Device]) -> list[str]:
    """Ids that hold every word of the name."""
    words = set(_words(name)) - {"nvidia", "amd", "geforce", "instinct", "radeon"}
    return [key for key in known if words and words <= set(_words(key))]


def _exact(name: str, known: Mapping[str, Device]) -> Device | None:
    wanted = "".join(_words(name))
    for device in known.values():
        if wanted in ("".join(_words(own)) for own in (device.id, *device.names)):
            return device
    return None


def _not_found(name: str, known: Mapping[str, Device]) -> RooflineError:
    if may := _candidates(name, known):
        return RooflineError(f"--device: {name} may be {' or '.join(may)}; name it in full.")
    by_key = {key.lower(): key for key in known}
    near = [by_key[key] for key in get_close_matches(name.lower(), by_key, n=4, cutoff=0.4)]
    return RooflineError(
        f"--device: {name!r} is not in the catalogue; near names: {', '.join(near) or 'none'}; "
        "a device of your own goes into --devices FILE."
    )


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9.+]+", text.lower())


# --- what drivers say --------------------------------------------------------------------------------------

VGPU = re.compile(r"^GRID\b|-\d+[ABCQ]$", re.IGNORECASE)
"""`GRID A100X-40C`, `NVIDIA L40S-24C`: a profile of the vGPU software."""

MEMORY_MISFIT = (0.85, 1.15)
"""A driver shows from 0.94 (ECC takes a sixteenth) to 1.07 (ECC off) of the catalogue's figure, or of the nominal
size read as decimal; outside this range the board is another one than its name says."""


@dataclass(frozen=True)
class Identity:
    """The device, or why it cannot be named; exactly one of the two."""

    device: Device | None
    reason: str | None = None


def identify(
    name: str | None, memory_mib: float | None = None, known: Mapping[str, Device] | None = None
) -> Identity:
    """The GPU that NVML calls `name`, with the memory it reports, in MiB, as a check where it is known."""
    known = catalogue() if known is None else known
    text = " ".join((name or "").split())
    if not text:
        return Identity(None, "The driver gives no name; name the device with --device.")
    card, profile = _split_mig(text)
    if VGPU.search(card):
        return Identity(
            None, f"{text} is a virtual GPU, a share of a card that its name does not tell; name --device."
        )
    device = _named(card, known, cpu=False)
    if device is None:
        return Identity(None, _unknown(card, known))
    if profile:
        return _slice_or_reason(device, profile)
    return _checked(device, memory_mib)


def identify_cpu(model_name: str | None, known: Mapping[str, Device] | None = None) -> Identity:
    """The CPU of that `model name` in /proc/cpuinfo. Its figures are those of one whole socket."""
    known = catalogue() if known is None else known
    text = " ".join((model_name or "").split())
    device = _named(text, known, cpu=True) if text else None
    if device is not None:
        return Identity(device)
    said = f"{text} is not a CPU of the catalogue" if text else "The CPU's model name is unknown"
    return Identity(None, f"{said}; name the nearest with --device, or measure its bandwidth.")


def _slice_or_reason(card: Device, profile: str) -> Identity:
    try:
        return Identity(_take_slice(card, profile))
    except RooflineError as error:
        return Identity(None, str(error))


def _named(text: str, known: Mapping[str, Device], cpu: bool) -> Device | None:
    wanted = _bare(text)
    for device in known.values():
        if (device.kind == "cpu") == cpu and wanted in map(_bare, device.names):
            return device
    return None


def _bare(name: str) -> str:
    """Old drivers leave out the vendor: `A100-SXM4-40GB`."""
    return name.lower().removeprefix("nvidia ")


def _unknown(card: str, known: Mapping[str, Device]) -> str:
    near = _candidates(card, known)
    may = f" (it may be {', '.join(near)})" if near else ""
    return f"{card} is not a name of the catalogue{may}; name the device with --device."


def _checked(device: Device, memory_mib: float | None) -> Identity:
    expected = device.memory_bytes
    if memory_mib is None or expected is None or device.unified:
        return Identity(device)
    low, high = MEMORY_MISFIT
    if low <= memory_mib * 2**20 / expected <= high:
        return Identity(device)
    return Identity(
        None,
        f"The driver says {device.names[0]} with {memory_mib:.0f} MiB, and {device.id} has about "
        f"{expected / 2**20:.0f}: another board under the same name; name the device with --device.",
    )


# --- MIG --------------------------------------------------------------------------------------------------

MIG = re.compile(r"\s+MIG\s+(?P<profile>(?:\d+c\.)?\d+g\.\d+gb\S*)$", re.IGNORECASE)
PROFILE = re.compile(r"(?:(\d+)c\.)?(\d+)g\.(\d+)gb")
SLICES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("A100", "A800", "H100", "H800", "H20", "H200", "GH200"), (7, 8)),
    **dict.fromkeys(("B200", "GB200", "B300", "GB300"), (7, 8)),
    **dict.fromkeys(("A30", "RTX-PRO-6000-Blackwell"), (4, 4)),
}
"""Compute and memory slices of the cards that can be cut, by the start of their id."""


def _split_mig(name: str) -> tuple[str, str | None]:
    """Card and MIG profile of a name: `NVIDIA H200 MIG 1g.18gb` gives `NVIDIA H200` and `1g.18gb`."""
    found = MIG.search(name)
    return (name[: found.start()], found["profile"]) if found else (name, None)


def _take_slice(card: Device, profile: str) -> Device:
    """A MIG instance as a device: compute by its share of SMs; bandwidth, cache and memory by its share of memory.

    `3g.40gb` of an A100 80GB has 3/7 of the SMs and 4/8 of the memory; `1c.3g.40gb` has one of those three compute
    slices. Links and power are the card's and not the slice's. An A100's 7 slices are 98 of its 108 SMs, so compute
    is an upper bound. Raises RooflineError where the card cannot be cut like that.
    """
    compute, memory = _shares(card, profile)
    share = dict.fromkeys((*DTYPES, "measured_bf16"), compute)
    share |= dict.fromkeys(("mem_bw", "l2", "measured_bw", "memory", "visible_memory"), memory)
    figures = {
        name: Figure(figure.value * share[name], "A", f"{share[name]:.3g} of {card.id}: {figure.source}")
        for name, figure in card.figures.items()
        if name in share
    }
    return replace(card, id=f"{card.id} MIG {profile}", names=(), figures=figures)


def _shares(card: Device, profile: str) -> tuple[float, float]:
    slices = next((count for start, count in SLICES.items() if f"{card.id}-".startswith(f"{start}-")), None)
    found = PROFILE.match(profile.lower())
    nominal = card.figures.get("memory")
    if slices is None or found is None or nominal is None:
        raise RooflineError(f"--device: {card.id} has no MIG profile {profile}; name the whole card.")
    computes, memories = slices
    c, g, gb = (int(part or 0) for part in found.groups())
    parts = memories if g == computes else max(round(memories * gb * 1e9 / nominal.value), 1)
    if not 1 <= g <= computes or c > g or parts > memories:
        raise RooflineError(
            f"--device: {card.id} cannot be cut into {profile}; it has {computes} compute slices."
        )
    return (c or g) / computes, parts / memories
