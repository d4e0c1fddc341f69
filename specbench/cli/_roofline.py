"""What the analytic commands share: the model, the device, and numbers in lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    import pandas as pd

    from models_roofline.acceptance import Acceptance
    from models_roofline.architecture import Architecture
    from models_roofline.hardware import Device

MODEL_HELP = (
    "Shipped name (see `models configs`), config.json or its directory, FILE.gguf, or hf:ORG/NAME[@revision]."
)
DEVICE_HELP = "Device id (see `machine --catalogue`); default: this machine's own, where it is known."

MOST_CELLS = 200_000
"""Cells of one call: a gigabyte of memory and 200 MB of JSON."""
LARGEST = 1e12
"""No count of tokens or sequences is near it, and with it no product overflows."""

Weights = Annotated[str | None, typer.Option(help="Layer weights as fp8, int4, …; default: as stored.")]
Kv = Annotated[str, typer.Option("--kv", help="Cache format: bf16, fp8, int8, int4, …")]
Devices = Annotated[Path | None, typer.Option(help="A file of devices that adds to the catalogue.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write every cell, all columns, to a CSV file.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def architecture(model: str, weights: str | None = None) -> Architecture:
    """The model that `--model` names, with its layer weights in the `--weights` format where one is given."""
    from models_roofline.families import load_model, with_weights
    from models_roofline.formats import weight_format

    if model.startswith("hf:"):
        from specbench.models import header

        found = load_model(str(header(model)))
    else:
        found = load_model(model)
    return found if weights is None else with_weights(found, weight_format(weights))


def device(name: str | None, devices: Path | None = None) -> Device:
    """The device that `--device` names; without a name, this machine's own where it is known."""
    from models_roofline.hardware import find_device

    if name or devices:
        return find_device(name or _local().id, extra=devices)
    return _local()


def _local() -> Device:
    """The first GPU that this process may use, else the CPU, where the catalogue knows it."""
    from models_roofline.hardware import identify_cpu
    from specbench import device as gpus
    from specbench.host import machine

    seen = gpus.visible(gpus.read_gpus().gpus)
    found = seen[0] if seen else identify_cpu(machine().cpu)
    if found.device is None:
        raise SpecbenchError(
            "--device: this machine's own device is not known "
            f"({str(found.reason).rstrip('.')}); name one, as in --device H100-SXM5-80GB."
        )
    return found.device


def numbers(text: str, flag: str) -> list[float]:
    """`1,8,64` or `1..5` as numbers. Raises SpecbenchError that names the flag."""
    found: list[float] = []
    for part in text.split(","):
        try:
            found += _range(part, flag) if ".." in part else [_number(part.strip())]
        except ValueError:
            raise SpecbenchError(
                f"{flag}: {part.strip()!r} is not a number; write a list such as 1,8,64, 1..5 or 8Ki (8192)."
            ) from None
    if large := next((value for value in found if abs(value) > LARGEST), None):
        raise SpecbenchError(f"{flag}: {large:g} is beyond {LARGEST:g}, more than anything here can be.")
    return found


def _range(text: str, flag: str) -> range:
    """`1..5`, both ends included. Raises ValueError where the ends are no whole numbers."""
    first, last = (int(end) for end in text.split(".."))
    if last < first:
        raise SpecbenchError(f"{flag}: {text.strip()} runs backwards; write {last}..{first}.")
    check_cells(flag, last - first + 1)
    return range(first, last + 1)


def check_cells(flags: str, *lengths: int) -> None:
    """Refuse lists of these lengths that together make more cells than one call writes."""
    if (count := math.prod(lengths)) > MOST_CELLS:
        raise SpecbenchError(
            f"{flags}: {count:,} cells are more than the {MOST_CELLS:,} that one call writes; shorten a list, or use "
            "models_roofline from Python, which has no limit."
        )


def _number(text: str) -> float:
    """`8192`, `0.5` or `8Ki`. Raises ValueError."""
    value = float(text.removesuffix("Ki")) * (1024 if text.endswith("Ki") else 1)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def whole_numbers(text: str, flag: str) -> list[int]:
    """The same where only whole numbers make sense."""
    found = numbers(text, flag)
    for value in found:
        if value != int(value):
            raise SpecbenchError(f"{flag}: {value:g} is not a whole number.")
    return [int(value) for value in found]


def grid(**axes: Sequence[float]) -> dict[str, Any]:
    """Each list along an axis of its own, so that together they make the whole grid, if it is not too large."""
    from models_roofline import grid as open_grid

    check_cells("--batch, --context, --k, --keep-projection, --keep-kv", *map(len, axes.values()))
    return open_grid(**axes)


def acceptance(text: str | None, coverage: float, ks: list[int]) -> Acceptance | None:
    """What `--acceptance` and `--coverage` say of the drafts, checked against every k asked for."""
    from models_roofline.acceptance import parse_acceptance
    from models_roofline.arrays import at_least

    at_least("--k", ks, 0, "drafted tokens")
    if not 0 <= coverage <= 1:
        raise SpecbenchError(f"--coverage: {coverage:g} is not a share of steps between 0 and 1.")
    return parse_acceptance(text, k=ks).with_coverage(coverage) if text is not None else None


def choice(value: str, flag: str, allowed: Sequence[str]) -> Any:
    """One of a few words. Raises SpecbenchError that lists them."""
    if value not in allowed:
        raise SpecbenchError(f"{flag}: {value!r} is not one of {', '.join(allowed)}.")
    return value


def list_methods(json_: bool) -> None:
    """Print the methods with what each was held against."""
    from models_roofline import METHODS
    from specbench.cli._io import emit, table

    rows = [(row.name, row.about, "yes" if row.lossless else "no", row.validated) for row in METHODS.values()]
    names = ("name", "about", "lossless", "validated")
    if json_:
        emit([dict(zip(names, row, strict=True)) for row in rows])
    else:
        print(table(["method", "what it is", "lossless", "held against"], rows, left=4))


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a table; its directory must be there."""
    try:
        frame.to_csv(path, index=False)
    except OSError as error:
        raise SpecbenchError(f"--csv: {path} cannot be written ({error.strerror or error}).") from None
