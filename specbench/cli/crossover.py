"""`specbench crossover`: from which context KV sparsity saves more than activation sparsity, and what each can gain."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.cli._roofline import MODEL_HELP, Csv, Json, Kv, Weights

if TYPE_CHECKING:
    from models_roofline.architecture import Architecture
    from models_roofline.bounds import Sparsity
    from models_roofline.crossovers import Crossover


def crossover(
    model: Annotated[str, typer.Option("--model", help=MODEL_HELP)],
    keep_projection: Annotated[
        str, typer.Option(help="Share of layer weights that activation sparsity reads, as a list.")
    ] = "1",
    keep_kv: Annotated[str, typer.Option(help="Share of the cache that KV sparsity reads, as a list.")] = "1",
    kv_budget: Annotated[
        int | None, typer.Option(help="Cached tokens read whatever the context, instead of --keep-kv.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences, as a list.")] = "1",
    ffn_only: Annotated[
        bool, typer.Option("--ffn-only", help="Only feed-forward matrices and experts are sparse.")
    ] = False,
    union: Annotated[
        str, typer.Option(help="Share of weights that a batch needs: independent, measured, or a fraction.")
    ] = "independent",
    context: Annotated[
        str | None, typer.Option(help="Tokens at which bounds are taken; default: the model's window.")
    ] = None,
    weights: Weights = None,
    kv: Kv = "bf16",
    csv: Csv = None,
    json_: Json = False,
) -> None:
    """Say from which context KV sparsity saves more than activation sparsity, and the most that each can gain.

    Lists give every combination. With one combination the JSON document is its cell, with several {"cells": [...]}.
    """
    from specbench.cli import _roofline as shared
    from specbench.cli._io import emit

    arch = shared.architecture(model, weights)
    at = _one(shared.whole_numbers(context, "--context"), "--context") if context is not None else None
    axes = (
        shared.numbers(keep_projection, "--keep-projection"),
        shared.numbers(keep_kv, "--keep-kv"),
        shared.whole_numbers(batch, "--batch"),
    )
    shared.check_cells("--keep-projection, --keep-kv, --batch", *(len(axis) for axis in axes))
    cells = []
    for keep, kept_kv, sequences in product(*axes):
        sparsity = _sparsity(keep, kept_kv, kv_budget, ffn_only, union, sequences)
        asked = {"weights": weights or "as stored", "kv": kv, "union": union}
        cells.append(asked | _cell(arch, sparsity, sequences, kv, at))
    if csv:
        _write(cells, csv)
    if json_:
        emit(cells[0] if len(cells) == 1 else {"cells": cells})
    else:
        print(_text(cells))


def _one(values: list[Any], flag: str) -> Any:
    from specbench.errors import SpecbenchError

    if len(values) != 1:
        raise SpecbenchError(f"{flag}: give one value, not {len(values)}.")
    return values[0]


def _sparsity(
    keep: float, keep_kv: float, budget: float | None, ffn_only: bool, union: str, batch: int
) -> Sparsity:
    from models_roofline.bounds import Sparsity, measured_union
    from specbench.cli._roofline import numbers
    from specbench.errors import SpecbenchError

    if union == "independent":
        needed = None
    elif union == "measured":
        needed = float(measured_union(keep, batch))
    else:
        try:
            needed = _one(numbers(union, "--union"), "--union")
        except SpecbenchError:
            raise SpecbenchError(
                f"--union: {union!r} is neither independent, measured nor a fraction such as 0.92."
            ) from None
    return Sparsity(keep, keep_kv, budget, ffn_only, needed)


def _cell(arch: Architecture, sparsity: Sparsity, batch: int, kv: str, context: int | None) -> dict[str, Any]:
    from models_roofline import crossovers
    from models_roofline.bounds import bounds

    found = crossovers.crossover(arch, sparsity, batch, kv)
    at, where = _bounds_context(arch, found, context)
    limit = bounds(arch, sparsity, batch, context=at, kv=kv) if at is not None else None
    return {
        "model": arch.name,
        "batch": batch,
        "keep_projection": sparsity.keep_projection,
        "keep_kv": sparsity.keep_kv if sparsity.kv_budget is None else None,
        "kv_budget_tokens": sparsity.kv_budget,
        "ffn_only": sparsity.ffn_only,
        "union_overestimated": sparsity.union is None and batch > 1,
        "crossover_tokens": found.tokens,
        "crossover_ki": found.tokens / 1024 if found.tokens is not None else None,
        "reason": found.reason,
        "max_context": arch.max_context,
        "beyond_window": found.beyond_window,
        "context": at,
        "context_from": where,
        "bound_projection": float(limit.projection) if limit else None,
        "bound_kv": float(limit.kv) if limit else None,
        "bound_both": float(limit.both) if limit else None,
        "kv_equals_block_weights_tokens": _known(crossovers.kv_equals_weights(arch, batch, kv)),
        "kv_equals_weights_with_head_tokens": _known(
            crossovers.kv_equals_weights(arch, batch, kv, head=True)
        ),
    }


def _bounds_context(
    arch: Architecture, found: Crossover, context: int | None
) -> tuple[float | None, str | None]:
    """Where the bounds are taken: as asked, else at the model's window, else at the crossover (there they are equal)."""
    if context is not None:
        return context, "given"
    if arch.max_context:
        return arch.max_context, "window"
    return (found.tokens, "crossover") if found.tokens else (None, None)


def _known(tokens: Any) -> float | None:
    import math

    return None if math.isnan(tokens) else float(tokens)


def _write(cells: list[dict[str, Any]], path: Path) -> None:
    import pandas as pd

    from specbench.cli._roofline import write_csv

    write_csv(pd.DataFrame(cells), path)


def _text(cells: list[dict[str, Any]]) -> str:
    from specbench.cli._io import table

    header = [
        "keep projection",
        "keep KV",
        "batch",
        "crossover",
        "bound projection",
        "bound KV",
        "bound both",
    ]
    remarks = dict.fromkeys(remark for cell in cells for remark in _remarks(cell))
    return "\n".join([table(header, [_row(cell) for cell in cells]), "", *remarks])


_WHERE = {"given": "as given", "window": "the model's window", "crossover": "the crossover"}


def _row(cell: dict[str, Any]) -> list[str]:
    kept = (
        f"{cell['keep_kv']:g}" if cell["kv_budget_tokens"] is None else f"{cell['kv_budget_tokens']:g} tokens"
    )
    where = "never" if cell["crossover_tokens"] is None else f"{cell['crossover_tokens']:,.0f}"
    if cell["crossover_tokens"] and cell["crossover_tokens"] >= 1024:
        where += f" ({cell['crossover_ki']:.1f} Ki)"
    limits = [cell[key] for key in ("bound_projection", "bound_kv", "bound_both")]
    return [
        f"{cell['keep_projection']:g}",
        kept,
        str(cell["batch"]),
        where + (" beyond the window" if cell["beyond_window"] else ""),
        *("-" if limit is None else f"{limit:.2f}×" for limit in limits),
    ]


def _remarks(cell: dict[str, Any]) -> list[str]:
    said = []
    if cell["context"] is not None:
        said.append(f"Bounds at {cell['context']:,.0f} tokens, {_WHERE[cell['context_from']]}.")
    if cell["reason"]:
        said.append(f"No crossover: {cell['reason']}")
    if cell["beyond_window"]:
        said.append(f"{cell['model']} was made for {cell['max_context']:,} tokens.")
    if cell["union_overestimated"]:
        said.append(
            "Sequences of a batch are taken to need weights independently, which overestimates their union."
        )
    return said
