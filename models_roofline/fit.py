"""Fitting the constants of a profile to published kernel timings, with the error wherever a part is held out.

A set is one kind of kernel on one device in one number format. Its formula is the one that prediction uses (`timing`);
constants are bounded least squares on log(predicted / measured) with a soft L1 loss at 6 %, which keeps outliers (tile
cliffs, kernels that alternate between two speeds) from moving the median. Held out in turn: a shape (gemm), a batch
(attention), a model (experts). The interval of a constant is its range over those refits. Devices without a fit take
medians over the fitted ones, with the error of predicting each device from the median of the others.

`python -m models_roofline.fit` prints docs/constants.md; with `--write` it also rewrites data/profiles/. scipy is
loaded here only. Boundary: kernels; no whole step is fitted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from models_roofline.arrays import Floats
from models_roofline.hardware import find_device
from models_roofline.ledger import Kind, Op
from models_roofline.profile import KERNELS, SCHEMA, Constant, Kernel, Profile, kernels_to_dict
from models_roofline.published import SYSTEMS, usable
from models_roofline.timing import TIMERS

SOFT = 0.06
"""Relative error from which a row counts linearly instead of quadratically."""


@dataclass(frozen=True)
class Free:
    """A constant to fit: its bounds, and starts that bracket what devices show."""

    low: float
    high: float
    starts: tuple[float, float]


FREE: dict[Kind, dict[str, Free]] = {
    "gemm": {
        "floor_s": Free(0, 6e-5, (4e-6, 1e-6)),
        "bandwidth_share": Free(0.1, 1, (0.8, 0.8)),
        "compute_share": Free(0.1, 1, (0.8, 0.6)),
        "sharpness": Free(1, 10, (2.5, 5)),
    },
    "attention": {
        "floor_s": Free(0, 6e-5, (1e-5, 1e-5)),
        "sequence_s": Free(0, 2e-6, (2e-7, 2e-7)),
        "bandwidth_share": Free(0.1, 1, (0.8, 0.8)),
        "sharpness": Free(1, 10, (2, 1.2)),
        "split_s": Free(0, 1e-5, (1e-6, 5e-7)),
    },
    "experts": {
        "floor_s": Free(0, 2e-4, (2e-5, 1e-5)),
        "bandwidth_share": Free(0.1, 1, (0.8, 0.8)),
        "compute_share": Free(0.01, 1, (0.5, 0.8)),
        "sharpness": Free(1, 5, (1.2, 2)),
    },
}
TILES = {"small_tile": 64.0, "tile": 128.0}
"""Rows to which a GPU's matrix kernels round m, up to 64 rows and above: steps that all six gemm sets show."""


@dataclass(frozen=True)
class Set:
    """Measured calls of one kind of kernel. Arrays of `op`, `seconds` and `group` have one entry a row."""

    device: str
    kind: Kind
    variant: str
    op: Op
    seconds: Floats
    group: NDArray[np.str_]
    """What is held out together."""

    def only(self, rows: NDArray[np.bool_]) -> Set:
        picked = {
            name: getattr(self.op, name)[rows] for name in ("bytes", "flops", "tokens", "batch", "context")
        }
        return replace(
            self, op=replace(self.op, **picked), seconds=self.seconds[rows], group=self.group[rows]
        )


@dataclass(frozen=True)
class Fit:
    """Constants of one set, with the errors |predicted / measured − 1| of all its rows."""

    set: Set
    kernel: Kernel
    """Its errors are those held out."""
    error: Floats
    held_out: Floats


# --- what was measured ------------------------------------------------------------------------------------


def sets() -> list[Set]:
    """Every set of the published tables, exclusions applied."""
    return [*_gemm_sets(), *_attention_sets(), *_expert_sets()]


def _by_format(table: pd.DataFrame, column: str) -> list[tuple[str, str, pd.DataFrame]]:
    return [
        (SYSTEMS[str(system)], str(form), rows) for (system, form), rows in table.groupby(["system", column])
    ]


def _floats(column: pd.Series[Any]) -> Floats:
    return column.to_numpy(float)


def _op(kind: Kind, compute: str, rows: pd.DataFrame, size: Floats, flops: Floats, **more: Any) -> Op:
    one = np.ones(len(rows))
    fields: dict[str, Any] = {"tokens": one, "batch": one, "context": one} | more
    return Op("dense", kind, 1, size, flops, compute, **fields)


def _gemm_sets() -> list[Set]:
    found = []
    for device, form, rows in _by_format(usable("aiconfigurator_gemm_ms"), "dtype"):
        m, n, k = (_floats(rows[name]) for name in ("m_tokens", "n", "k"))
        compute, weight_bytes = ("bf16", 2) if form == "bfloat16" else ("fp8", 1)
        op = _op("gemm", compute, rows, n * k * weight_bytes + 2 * m * (n + k), 2 * m * n * k, tokens=m)
        shape = (rows.n.astype(str) + " × " + rows.k.astype(str)).to_numpy(str)
        found.append(Set(device, "gemm", compute, op, _floats(rows.latency_ms) * 1e-3, shape))
    return found


def _attention_sets() -> list[Set]:
    found = []
    for device, form, rows in _by_format(usable("aiconfigurator_decode_attention_ms"), "kv_dtype"):
        batch, context = _floats(rows.batch_size), _floats(rows.context_tokens)
        flops = batch * context * _floats(4 * rows.q_heads * rows.head_dim)
        kv_heads = float(rows.kv_heads.iloc[0])
        op = _op(
            "attention", "bf16", rows, _floats(rows.kv_bytes), flops,
            tokens=batch, batch=batch, context=context, kv_heads=kv_heads,
        )  # fmt: skip
        variant = "bf16" if form == "bfloat16" else "fp8"
        label = rows.batch_size.to_numpy(str)
        found.append(Set(device, "attention", variant, op, _floats(rows.latency_ms) * 1e-3, label))
    return found


EXPERT_FORMATS = {
    "bfloat16": ("bf16", "bf16", 2.0),
    "fp8": ("fp8", "fp8", 1.0),
    "fp8_block": ("fp8_block", "fp8", 1.0),
    "w4a16_mxfp4": ("mxfp4", "bf16", 4.25 / 8),
}
"""Of the table: variant, what multiplies, bytes of a weight."""


def _expert_sets() -> list[Set]:
    found = []
    for device, form, rows in _by_format(usable("aiconfigurator_moe_layer_ms"), "dtype"):
        variant, compute, weight_bytes = EXPERT_FORMATS[form]
        m, hidden, inner = (_floats(rows[name]) for name in ("num_tokens", "hidden", "moe_inter"))
        routed = m * _floats(rows.top_k)
        weights = _floats(rows.distinct) * 3 * hidden * inner * weight_bytes
        size = weights + 2 * routed * (2 * hidden + 3 * inner)
        op = _op("experts", compute, rows, size, 6 * routed * hidden * inner, tokens=m)
        label = rows.model.to_numpy(str)
        found.append(Set(device, "experts", variant, op, _floats(rows.latency_ms) * 1e-3, label))
    return found


# --- fitting ----------------------------------------------------------------------------------------------


def fit(each: Set) -> Fit:
    """Constants of one set on all its rows, and the errors of every group predicted from the others."""
    values = solve(each)
    held_out, refits = np.zeros(len(each.seconds)), []
    for group in np.unique(each.group):
        out = each.group == group
        refits.append(solve(each.only(~out), values))
        held_out[out] = errors(each.only(out), refits[-1])
    constants = {name: _constant(each, name, value, refits) for name, value in values.items()}
    kernel = Kernel(constants, *_summary(held_out))
    return Fit(each, kernel, errors(each, values), held_out)


def solve(each: Set, start: Mapping[str, float] | None = None) -> dict[str, float]:
    """The constants of a set by bounded least squares, from `start` or the best of the usual starts."""
    from scipy.optimize import least_squares

    free = FREE[each.kind]
    scale = np.array([item.starts[0] for item in free.values()])
    starts = [list(start.values())] if start else [[item.starts[i] for item in free.values()] for i in (0, 1)]
    low, high = (
        np.array([getattr(item, side) for item in free.values()]) / scale for side in ("low", "high")
    )

    def residuals(scaled: Floats) -> Floats:
        values = dict(zip(free, scaled * scale, strict=True))
        return np.asarray(np.log(seconds(each, values) / each.seconds))

    runs = [
        least_squares(residuals, np.array(x) / scale, bounds=(low, high), loss="soft_l1", f_scale=SOFT)
        for x in starts
    ]
    best = min(runs, key=lambda run: float(run.cost))
    return {name: float(value) for name, value in zip(free, best.x * scale, strict=True)}


def seconds(each: Set, values: Mapping[str, float]) -> Floats:
    """Predicted seconds of every row of a set, by the formula of `timing`."""
    fixed = TILES if each.kind == "gemm" else {"compute_share": 1.0} if each.kind == "attention" else {}
    constants = {name: Constant(value, value, value, "") for name, value in {**fixed, **values}.items()}
    return TIMERS[each.kind](each.op, Kernel(constants, 0, 0), _rates(each.device), None)


def errors(each: Set, values: Mapping[str, float]) -> Floats:
    """|predicted / measured − 1| of every row."""
    return np.asarray(np.abs(seconds(each, values) / each.seconds - 1))


@cache
def _rates(name: str) -> Profile:
    device = find_device(name)
    peaks = {dtype: device.peak_flops(dtype) for dtype in device.dtypes}
    return Profile(name, "", device.bandwidth_bytes_per_s, peaks, None, {})


def _constant(each: Set, name: str, value: float, refits: Sequence[Mapping[str, float]]) -> Constant:
    around = [value, *(refit[name] for refit in refits)]
    source = f"fitted to {len(each.seconds)} {each.kind} timings of aiconfigurator @095f58a; range with a part held out"
    return Constant(_short(value), _short(min(around)), _short(max(around)), source)


def _short(value: float) -> float:
    """Four digits: more than the data bear, few enough to read."""
    return float(f"{value:.4g}")


def _summary(error: Floats) -> tuple[float, float]:
    return _short(float(np.median(error))), _short(float(np.quantile(error, 0.9)))


# --- profiles ---------------------------------------------------------------------------------------------


def device_kernels(fits: Sequence[Fit], device: str) -> dict[str, dict[str, Kernel]]:
    """The fitted kernels of a device, with the constants that no table can tell."""
    own = [each for each in fits if each.set.device == device]
    compute = next(
        each.kernel.constants["compute_share"]
        for each in own
        if (each.set.kind, each.set.variant) == ("gemm", "bf16")
    )
    found: dict[str, dict[str, Kernel]] = {}
    for each in own:
        constants = {**each.kernel.constants, **_told_elsewhere(each.set.kind, compute)}
        kernel = replace(each.kernel, constants=constants)
        found.setdefault(each.set.kind, {})[each.set.variant] = kernel
    return found


def _told_elsewhere(kind: str, compute: Constant) -> dict[str, Constant]:
    if kind == "gemm":
        source = "rows at which the published timings step"
        return {name: Constant(value, value, value, source) for name, value in TILES.items()}
    if kind == "attention":
        source = "assumed: as the bf16 gemm of the device; the timings hold one query a sequence and are never compute bound"
        return {"compute_share": replace(compute, source=source)}
    return {}


def default_kernels(fits: Sequence[Fit]) -> dict[str, dict[str, Kernel]]:
    """Medians over the fitted devices with their range, and the error of each device from the others' median."""
    devices = sorted({each.set.device for each in fits})
    fitted = {device: device_kernels(fits, device) for device in devices}
    found: dict[str, dict[str, Kernel]] = {}
    for kind in FREE:
        error = _summary(np.concatenate([travelled(each, fits) for each in fits if each.set.kind == kind]))
        for variant in KERNELS[kind][0]:
            having = [
                fitted[device][kind][variant] for device in devices if variant in fitted[device].get(kind, {})
            ]
            if having:
                found.setdefault(kind, {})[variant] = Kernel(_medians(kind, having), *error)
    return found


def _medians(kind: str, having: Sequence[Kernel]) -> dict[str, Constant]:
    found = {}
    for name in KERNELS[kind][1]:
        values = [kernel[name] for kernel in having]
        low = min(kernel.constants[name].low for kernel in having)
        high = max(kernel.constants[name].high for kernel in having)
        found[name] = Constant(
            _short(float(np.median(values))), low, high, f"median of {len(values)} fitted devices"
        )
    return found


def travelled(each: Fit, fits: Sequence[Fit]) -> Floats:
    """Errors of a set under the median constants of the other devices; empty where no other has such a set."""
    others = [
        other.kernel
        for other in fits
        if (other.set.kind, other.set.variant) == (each.set.kind, each.set.variant)
        and other.set.device != each.set.device
    ]
    if not others:
        return np.zeros(0)
    medians = {name: float(np.median([kernel[name] for kernel in others])) for name in FREE[each.set.kind]}
    return errors(each.set, medians)


def write(fits: Sequence[Fit], folder: Path) -> None:
    """Rewrites the profiles of the fitted devices and the defaults in `folder`."""
    for device in sorted({each.set.device for each in fits}):
        basis = "fitted to kernel timings of this device (docs/constants.md)"
        _write(folder, device, basis, device_kernels(fits, device))
    basis = "defaults: medians of A100, H100 and L40S fits (docs/constants.md)"
    _write(folder, "default", basis, default_kernels(fits))


def _write(folder: Path, name: str, basis: str, kernels: Mapping[str, Mapping[str, Kernel]]) -> None:
    content = {"schema": SCHEMA, "device": name, "basis": basis, "kernels": kernels_to_dict(kernels)}
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models_roofline.fit", description="Refit and print the constants."
    )
    parser.add_argument("--write", action="store_true", help="rewrite data/profiles/ of this package")
    wanted = parser.parse_args()
    fits = [fit(each) for each in sets()]
    if wanted.write:
        write(fits, Path(str(resources.files("models_roofline"))) / "data" / "profiles")
    from models_roofline.fit_report import page

    print(page(fits))


if __name__ == "__main__":
    main()
