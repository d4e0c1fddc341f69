"""`specbench predict`: seconds a token and speedup before anything runs."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli._roofline import DEVICE_HELP, MODEL_HELP, Csv, Devices, Json, Kv, Weights

if TYPE_CHECKING:
    from models_roofline import Prediction


def predict(
    model: Annotated[str, typer.Option("--model", help=MODEL_HELP)] = "",
    device: Annotated[str | None, typer.Option("--device", help=DEVICE_HELP)] = None,
    method: Annotated[
        str, typer.Option(help="none, ngram, draft-model, eagle3, mtp, …; `--method list` shows all.")
    ] = "none",
    k: Annotated[
        str | None, typer.Option("--k", help="Drafted tokens, bonus not counted: 4, 1,3,5 or 1..8.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Sequences, as a list.")] = "1",
    context: Annotated[str, typer.Option(help="Tokens in the cache, as a list; 8Ki is 8192.")] = "1024",
    acceptance: Annotated[
        str | None,
        typer.Option(help="Rate 0.8, marginals 0.8,0.6,0.4, al=2.8, or a speculation_profile.json."),
    ] = None,
    coverage: Annotated[
        float | None, typer.Option(help="Share of steps that have a draft at all; below 1 for lookups.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The drafter's model, named like --model.")] = None,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Output vocabulary of a head, where pruned.")
    ] = None,
    keep_layers: Annotated[
        float | None, typer.Option(help="Share of layers that a self-drafter runs.")
    ] = None,
    kv_budget: Annotated[int | None, typer.Option(help="Cached tokens that a self-drafter reads.")] = None,
    stage_k: Annotated[int, typer.Option(help="Method staged: tokens drafted for the drafter.")] = 0,
    stage_al: Annotated[float, typer.Option(help="Method staged: tokens the drafter keeps a pass.")] = 1.0,
    tree_nodes: Annotated[
        int | None, typer.Option(help="Verify a tree of so many drafts, root apart.")
    ] = None,
    keep_projection: Annotated[
        str, typer.Option(help="Shares of layer weights that a token needs, as a list.")
    ] = "1",
    keep_kv: Annotated[str, typer.Option(help="Shares of the cache read, as a list.")] = "1",
    weights: Weights = None,
    kv: Kv = "bf16",
    tp: Annotated[int, typer.Option("--tp", help="Devices of one tensor-parallel group.")] = 1,
    draft_tp: Annotated[
        int | None, typer.Option(help="Devices of the drafter; default: as the target.")
    ] = None,
    launch: Annotated[
        str, typer.Option(help="graph (captured) or eager (each operation launched).")
    ] = "graph",
    graph_sizes: Annotated[
        str | None, typer.Option(help="Rows of the captured graphs, as a list; beyond the largest: eager.")
    ] = None,
    routing: Annotated[str, typer.Option(help="Experts: independent or balanced.")] = "independent",
    overlap: Annotated[float, typer.Option(help="How far drafts of a request share experts, 0 to 1.")] = 0.0,
    hit_rate: Annotated[float | None, typer.Option(help="Method ssd: share of rounds drafted ahead.")] = None,
    overhead_ms: Annotated[
        float | None, typer.Option(help="Engine's own time in every round with drafts; default: unknown.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Constants of your own (JSON); what the file leaves out is the device's."),
    ] = None,
    devices: Devices = None,
    memory_check: Annotated[
        bool, typer.Option(help="Refuse a grid with cells that do not fit the device.")
    ] = True,
    csv: Csv = None,
    json_: Json = False,
) -> None:
    """Predict time per token, throughput and speedup for every batch, context and k asked for."""
    from models_roofline import DraftOptions, Settings, find_method, load_profile
    from models_roofline import predict as predict_
    from specbench.cli import _roofline as shared
    from specbench.cli._io import emit
    from specbench.errors import SpecbenchError

    if method == "list":
        shared.list_methods(json_)
        return
    if not model:
        raise SpecbenchError("--model: name the model, as in --model llama-3.1-8b.")
    row = find_method(method)
    if k is None and row.name != "none":
        raise SpecbenchError(f"--k: {row.name} drafts tokens; say how many, as in --k 4 or --k 1..8.")
    if hit_rate is not None and row.timing != "hidden":
        raise SpecbenchError(f"--hit-rate: method {row.name} does not use it; it is for ssd.")
    where = shared.device(device, devices)
    target = shared.architecture(model, weights)
    ks = shared.whole_numbers(k or "0", "--k")
    axes = shared.grid(
        batch=shared.whole_numbers(batch, "--batch"),
        context=shared.whole_numbers(context, "--context"),
        k=ks,
        keep_projection=shared.numbers(keep_projection, "--keep-projection"),
        keep_kv=shared.numbers(keep_kv, "--keep-kv"),
    )
    settings = Settings(
        kv=kv, tp=tp, launch=shared.choice(launch, "--launch", ("graph", "eager")), routing=shared.choice(routing, "--routing", ("independent", "balanced")), overlap=overlap,
        draft_tp=draft_tp, graph_sizes=tuple(shared.whole_numbers(graph_sizes, "--graph-sizes")) if graph_sizes is not None else None,
        tree_nodes=tree_nodes, overhead_s=None if overhead_ms is None else overhead_ms / 1e3, check_memory=memory_check,
        **({} if hit_rate is None else {"hit_rate": hit_rate}),
    )  # fmt: skip
    found = predict_(
        target,
        where,
        method=method,
        acceptance=shared.acceptance(acceptance, 1.0 if coverage is None else coverage, ks),
        draft=DraftOptions(
            shared.architecture(draft) if draft is not None else None,
            draft_vocab,
            keep_layers,
            kv_budget,
            stage_k,
            stage_al,
        ),
        profile=load_profile(profile, where) if profile else None,
        settings=settings,
        **axes,
    )
    if csv:
        shared.write_csv(found.frame(), csv)
    remarks = _remarks(found, assumed_coverage=coverage is None and row.lookup_share > 0 and max(ks) > 0)
    if json_:
        emit(_document(found, tp, remarks))
    else:
        print("\n".join([_table(found), "", *_best(found), *(fill(remark, 110) for remark in remarks)]))


def _document(found: Prediction, tp: int, remarks: list[str]) -> dict[str, object]:
    return {
        "model": found.target.name,
        "device": found.device.id,
        "tp": tp,
        "method": found.method.name,
        "lossless": found.method.lossless,
        "validated": found.method.validated,
        "profile": found.basis,
        "notes": remarks,
        "best_k": found.best_k().to_dict("records"),
        "cells": found.cells(),
    }


def _table(found: Prediction) -> str:
    from specbench.cli._io import table

    cells = found.cells()
    sparse = any(cell["keep_projection"] < 1 or cell["keep_kv"] < 1 for cell in cells)
    drafts = found.method.name != "none"
    header = [
        "batch", "context",
        *(["keep W", "keep KV"] if sparse else []),
        *(["k", "AL"] if drafts else []),
        "TPOT ms", "interval", "tok/s", "GiB",
        *(["speedup", "interval", "bound"] if drafts or sparse else []),
    ]  # fmt: skip
    rows = [
        [
            f"{cell['batch']:g}", f"{cell['context']:g}",
            *([f"{cell['keep_projection']:g}", f"{cell['keep_kv']:g}"] if sparse else []),
            *([f"{cell['k']:g}", f"{cell['al']:.2f}"] if drafts else []),
            f"{cell['tpot_s'] * 1e3:.2f}", f"[{cell['tpot_low_s'] * 1e3:.2f}, {cell['tpot_high_s'] * 1e3:.2f}]",
            f"{cell['tokens_per_s']:.0f}",
            f"{cell['memory_bytes'] / 2**30:.1f}" + ("" if cell["fits"] is not False else "!"),
            *([
                f"{cell['speedup']:.2f}×", f"[{cell['speedup_low']:.2f}, {cell['speedup_high']:.2f}]",
                f"{cell['bound']:.2f}×",
            ] if drafts or sparse else []),
        ]
        for cell in cells
    ]  # fmt: skip
    return table(header, rows)


def _best(found: Prediction) -> list[str]:
    """The best of several k, for each batch and context."""
    best = found.best_k()
    if found.k.size < 2 or len(best) > 12:
        return []
    alone = best.context.nunique() == 1
    each = [
        f"{row.k:g} at batch {row.batch:g}"
        + ("" if alone else f" and {row.context:g} tokens")
        + f" ({row.speedup:.2f}×)"
        for row in best.itertuples()
    ]
    return [fill(f"Best k: {', '.join(each)}.", 110)]


def _remarks(found: Prediction, assumed_coverage: bool) -> list[str]:
    row = found.method
    said = [
        f"{found.target.name} on {found.device.id}, {row.name}: {row.about}. Held against: {row.validated}.",
        f"Constants: {found.basis}. Intervals are the held-out errors of the kernels.",
    ]
    if not found.overhead_known and row.name != "none":
        seen = "1.2 ms a round" + (
            ", and 2.1 ms for drafting with an EAGLE head"
            if row.passes != "none" and row.timing == "serial"
            else ""
        )
        said.append(
            f"Kernels only, so an upper estimate; the slow ends hold what vLLM added on H100 ({seen}). Give your "
            "engine's own time a round with --overhead-ms."
        )
    if assumed_coverage:
        said.append(
            "A draft in every step is assumed; lookups have one in some: give their share with --coverage."
        )
    if not row.lossless:
        said.append("This method changes the text: its speedup is not comparable with lossless ones.")
    return said
