"""Constants that turn bytes and FLOPs into time on one device, each with its interval and its source.

A profile holds the device's rates (datasheet peaks from the catalogue, or measured ones) and, per kind of operation,
the constants of the time formulas in `timing`. Shares are of those rates. Shipped constants are fitted to published
kernel timings by `python -m models_roofline.fit` (table and errors: docs/constants.md); a device without a fit takes
the medians over the fitted ones, with the interval over them and the error of predicting a device from the others. A
user's own profile is a JSON file of the same shape as `Profile.to_dict`.

Boundary: data and its reading. No formula, no fitting.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from models_roofline.errors import RooflineError

if TYPE_CHECKING:
    from models_roofline.hardware import Device

SCHEMA = 1
Kernels = dict[str, dict[str, "Kernel"]]
"""By kind of operation and variant."""

KERNELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gemm": (
        ("bf16", "fp8", "weight_only"),
        ("floor_s", "bandwidth_share", "compute_share", "sharpness", "small_tile", "tile"),
    ),
    "attention": (
        ("bf16", "fp8"),
        ("floor_s", "sequence_s", "bandwidth_share", "sharpness", "split_s", "compute_share"),
    ),
    "experts": (
        ("bf16", "fp8", "fp8_block", "mxfp4"),
        ("floor_s", "bandwidth_share", "compute_share", "sharpness"),
    ),
    "state": (("any",), ("floor_s", "bandwidth_share", "compute_share")),
    "comm": (("any",), ("floor_s", "bandwidth_share")),
    "host": (("any",), ("floor_s",)),
}
"""Per kind of operation: its variants (by number format) and the constants each of them has. A
profile without `weight_only` has it made from bf16."""


@dataclass(frozen=True)
class Constant:
    """A number with the range it may lie in and where it comes from."""

    value: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Kernel:
    """The constants of one kind of operation, and how far its times were off where it was held out."""

    constants: Mapping[str, Constant]
    error_median: float
    """|predicted / measured − 1|, median over held-out rows."""
    error_p90: float

    def __getitem__(self, name: str) -> float:
        return self.constants[name].value


@dataclass(frozen=True)
class Profile:
    """Rates of a device and constants of its kernels."""

    device: str
    basis: str
    """In words: what the constants were fitted on, or that they are defaults."""
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    """FLOP/s by number type."""
    link_bytes_per_s: float | None
    """One direction, to all peers together; PCIe where the device has no link of its own, None where neither is known."""
    kernels: Mapping[str, Mapping[str, Kernel]]
    widens: bool = False
    """The device computes a number type that it lacks in fp32, as CPUs do."""

    def peak(self, compute: str) -> float:
        """FLOP/s in that number type. Raises RooflineError that lists those the device has."""
        if compute in self.peak_flops:
            return self.peak_flops[compute]
        if self.widens and "fp32" in self.peak_flops:
            return self.peak_flops["fp32"]
        if not self.peak_flops:
            raise RooflineError(
                f"--device: no compute peak is known for {self.device}, so products cannot be priced; give one, such as "
                "fp32_tflops or bf16_tflops, in a --devices file."
            )
        half = (
            " (--weights fp16 runs a bf16 model there)"
            if compute == "bf16" and "fp16" in self.peak_flops
            else ""
        )
        raise RooflineError(
            f"--weights: {self.device} has no {compute} peak; it has {', '.join(self.peak_flops)}{half}."
        )

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON values; `profile_from_dict` reads it back."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "basis": self.basis,
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "peak_flops": dict(self.peak_flops),
            "link_bytes_per_s": self.link_bytes_per_s,
            "widens": self.widens,
            "kernels": kernels_to_dict(self.kernels),
        }


def profile_for(device: Device) -> Profile:
    """The shipped profile of a device: its own fit, that of a device of its architecture, or defaults."""
    cpu = device.kind == "cpu"
    layers = [_shipped("assumed"), _shipped("cpu" if cpu else "default")]
    fitted = _fitted(device)
    if fitted:
        layers.append(_shipped(fitted))
    kernels = _kernels(_overlaid(*(layer["kernels"] for layer in layers)), "kernels")
    basis = str(layers[-1]["basis"])
    if fitted and fitted != device.id:
        basis = f"fitted on {fitted}, of the same architecture ({device.architecture})"
        kernels = _with_errors(
            kernels, _kernels(_overlaid(*(layer["kernels"] for layer in layers[:2])), "kernels")
        )
    elif not fitted and not cpu:
        kernels["gemm"] = {variant: _untiled(kernel) for variant, kernel in kernels["gemm"].items()}
    return Profile(
        device=device.id,
        basis=basis,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        peak_flops={name: device.peak_flops(name) for name in device.dtypes},
        link_bytes_per_s=device.link_bytes_per_s or device.pcie_bytes_per_s,
        kernels=kernels,
        widens=cpu,
    )


FITTED = {
    "A100-SXM4-80GB": "Ampere sm80",
    "H100-SXM5-80GB": "Hopper sm90",
    "L40S": "Ada sm89",
}
"""Devices whose kernels were fitted, and the architecture whose other devices take their constants."""


def _fitted(device: Device) -> str | None:
    return next((name for name, arch in FITTED.items() if device.architecture == arch), None)


def _with_errors(kernels: Kernels, others: Kernels) -> Kernels:
    """The same constants with the errors of `others`: what a fit is off by on a device that it was not made on."""
    return {
        kind: {
            name: replace(
                kernel,
                error_median=max(kernel.error_median, others[kind][name].error_median),
                error_p90=max(kernel.error_p90, others[kind][name].error_p90),
            )
            for name, kernel in variants.items()
        }
        for kind, variants in kernels.items()
    }


def _untiled(kernel: Kernel) -> Kernel:
    """Without the fitted kernels' tiles of 64 and 128 rows, which belong to their devices and formats: elsewhere
    a product of few rows runs as matrix-vector products, or in tiles of 16 rows at most."""
    source = "assumed: no tile is known"
    tiles = {"small_tile": Constant(1, 1, 64, source), "tile": Constant(16, 1, 128, source)}
    return replace(kernel, constants={**kernel.constants, **tiles})


WEIGHT_ONLY_ERROR = 0.5
"""At the same bytes three int4 kernels took 17, 45 and 59 ms a step on L4 (arXiv 2605.30571): a guess at a good one."""


def _weight_only(kernel: Kernel) -> Kernel:
    """Products of weights that are widened on the way: as plain ones, but of no known tile, and less sure."""
    return replace(_untiled(kernel), error_p90=max(kernel.error_p90, WEIGHT_ONLY_ERROR))


def load_profile(path: Path, device: Device | None = None) -> Profile:
    """A profile from a JSON file; what the file leaves out is taken from the shipped profile of `device`.

    Raises RooflineError that names the file and the field to mend.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RooflineError(f"--profile: there is no file {path}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RooflineError(f"--profile: {path} cannot be read as JSON: {error}.") from None
    try:
        return profile_from_dict(_completed(raw, device) if device else raw)
    except RooflineError as error:
        raise RooflineError(f"--profile: {path}: {error}") from None


def _completed(raw: Any, device: Device) -> dict[str, Any]:
    fields, base = _mapping(raw, "the profile"), profile_for(device).to_dict()
    kernels = _overlaid(base["kernels"], _mapping(fields.get("kernels", {}), "kernels"))
    return base | {"schema": fields.get("schema")} | dict(fields) | {"kernels": kernels}


def _overlaid(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Kernels by kind and variant, later layers over earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for kind, variants in layer.items():
            merged[kind] = merged.get(kind, {}) | dict(_mapping(variants, f"kernels.{kind}"))
    return merged


def profile_from_dict(raw: Any) -> Profile:
    """A profile from `Profile.to_dict`'s shape. Raises RooflineError naming the field."""
    fields = _mapping(raw, "the profile")
    if fields.get("schema") != SCHEMA:
        raise RooflineError(f"schema is {fields.get('schema')!r}; this version reads {SCHEMA}.")
    link = fields.get("link_bytes_per_s")
    peaks = _mapping(_get(fields, "peak_flops"), "peak_flops")
    return Profile(
        device=str(_get(fields, "device")),
        basis=str(_get(fields, "basis")),
        bandwidth_bytes_per_s=_number(
            _get(fields, "bandwidth_bytes_per_s"), "bandwidth_bytes_per_s", above=0
        ),
        peak_flops={name: _number(value, f"peak_flops.{name}", above=0) for name, value in peaks.items()},
        link_bytes_per_s=None if link is None else _number(link, "link_bytes_per_s", above=0),
        kernels=_kernels(_get(fields, "kernels"), "kernels"),
        widens=bool(fields.get("widens", False)),
    )


def kernels_to_dict(kernels: Mapping[str, Mapping[str, Kernel]]) -> dict[str, Any]:
    """Kernels as JSON values."""
    return {
        kind: {
            variant: {
                "error_median": kernel.error_median,
                "error_p90": kernel.error_p90,
                **{name: vars(constant) for name, constant in kernel.constants.items()},
            }
            for variant, kernel in variants.items()
        }
        for kind, variants in kernels.items()
    }


def _kernels(raw: Any, where: str) -> Kernels:
    kinds = _mapping(raw, where)
    _check_known(kinds, KERNELS, where)
    return {kind: _complete(kind, _get(kinds, kind, where)) for kind in KERNELS}


def _complete(kind: str, raw: Any) -> dict[str, Kernel]:
    variants = _variants(kind, raw)
    if kind == "gemm" and "bf16" in variants:
        variants.setdefault("weight_only", _weight_only(variants["bf16"]))
    for name in KERNELS[kind][0]:
        _get(variants, name, f"kernels.{kind}")
    return variants


def _variants(kind: str, raw: Any) -> dict[str, Kernel]:
    where = f"kernels.{kind}"
    variants = _mapping(raw, where)
    _check_known(variants, KERNELS[kind][0], where)
    return {name: _kernel(kind, value, f"{where}.{name}") for name, value in variants.items()}


def _check_known(fields: Iterable[str], known: Collection[str], where: str) -> None:
    for name in fields:
        if name not in known:
            raise RooflineError(f"{where}.{name} is unknown; known: {', '.join(known)}.")


def _kernel(kind: str, raw: Any, where: str) -> Kernel:
    fields = _mapping(raw, where)
    return Kernel(
        constants={
            name: _constant(_get(fields, name, where), f"{where}.{name}") for name in KERNELS[kind][1]
        },
        error_median=_number(_get(fields, "error_median", where), f"{where}.error_median"),
        error_p90=_number(_get(fields, "error_p90", where), f"{where}.error_p90"),
    )


def _constant(raw: Any, where: str) -> Constant:
    fields = _mapping(raw, where)
    value, low, high = (
        _number(_get(fields, name, where), f"{where}.{name}") for name in ("value", "low", "high")
    )
    if not low <= value <= high:
        raise RooflineError(f"{where}: value {value:g} lies outside its interval {low:g} to {high:g}.")
    positive = where.rsplit(".", 1)[1] in (
        "bandwidth_share",
        "compute_share",
        "sharpness",
        "small_tile",
        "tile",
    )
    if positive and value < 1e-30:
        raise RooflineError(f"{where}: must be above 0.")
    return Constant(value, low, high, str(fields.get("source", "")))


def _number(raw: Any, where: str, above: float | None = None) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not 0 <= raw <= 1e30:
        raise RooflineError(f"{where}: {raw!r} is not a number of 0 or more.")
    if above is not None and raw < max(above, 1e-30):  # with less a time overflows
        raise RooflineError(f"{where}: must be above {above:g}.")
    return float(raw)


def _mapping(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise RooflineError(f"{where}: expected an object with fields, not {raw!r}.")
    return cast(Mapping[str, Any], raw)


def _get(fields: Mapping[str, Any], name: str, where: str = "") -> Any:
    if name not in fields:
        raise RooflineError(f"{f'{where}.' if where else ''}{name} is missing.")
    return fields[name]


def _shipped_path(name: str) -> Path:
    return Path(str(resources.files("models_roofline"))) / "data" / "profiles" / f"{name}.json"


def _shipped(name: str) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(_shipped_path(name).read_text(encoding="utf-8")))
