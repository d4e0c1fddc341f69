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
    model: Annotated[str, typer.Option("--model", help=MODEL_HELP)],
    device: Annotated[str | None, typer.Option("--device", help=DEVICE_HELP)] = None,
    method: Annotated[
        str, typer.Option(help="How tokens are drafted; a wrong name lists the known ones.")
    ] = "none",
    k: Annotated[str, typer.Option("--k", help="Drafted tokens, bonus not counted: 4, 1,3,5 or 1..8.")] = "0",
    batch: Annotated[str, typer.Option(help="Sequences, as a list.")] = "1",
    context: Annotated[str, typer.Option(help="Tokens in the cache, as a list; 8Ki is 8192.")] = "1024",
    acceptance: Annotated[
        str | None,
        typer.Option(help="Rate 0.8, marginals 0.8,0.6,0.4, al=2.8, or a speculation_profile.json."),
    ] = None,
    coverage: Annotated[float, typer.Option(help="Share of steps that have a draft at all.")] = 1.0,
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
    overhead_ms: Annotated[float, typer.Option(help="Engine's own time in every round with drafts.")] = 0.0,
    profile: Annotated[
        Path | None,
        typer.Option(help="Constants of your own (JSON); what the file leaves out is the device's."),
    ] = None,
    devices: Devices = None,
    memory_check: Annotated[bool, typer.Option(help="Refuse what does not fit the device.")] = True,
    csv: Csv = None,
    json_: Json = False,
) -> None:
    """Predict time per token, throughput and speedup for every batch, context and k asked for."""
    from models_roofline import DraftOptions, Settings, find_method, load_profile
    from models_roofline import predict as predict_
    from specbench.cli import _roofline as shared
    from specbench.cli._io import emit
    from specbench.errors import SpecbenchError

    if hit_rate is not None and find_method(method).timing != "hidden":
        raise SpecbenchError(f"--hit-rate: method {method} does not use it; it is for ssd.")
    where = shared.device(device, devices)
    target = shared.architecture(model, weights)
    ks = shared.whole_numbers(k, "--k")
    axes = shared.grid(
        shared.whole_numbers(batch, "--batch"),
        shared.whole_numbers(context, "--context"),
        ks,
        shared.numbers(keep_projection, "--keep-projection"),
        shared.numbers(keep_kv, "--keep-kv"),
    )
    settings = Settings(
        kv=kv, tp=tp, launch=shared.choice(launch, "--launch", ("graph", "eager")), routing=shared.choice(routing, "--routing", ("independent", "balanced")), overlap=overlap,
        draft_tp=draft_tp, graph_sizes=tuple(shared.whole_numbers(graph_sizes, "--graph-sizes")) if graph_sizes is not None else None,
        tree_nodes=tree_nodes, overhead_s=overhead_ms / 1e3, check_memory=memory_check,
        **({} if hit_rate is None else {"hit_rate": hit_rate}),
    )  # fmt: skip
    found = predict_(
        target,
        where,
        method=method,
        batch=axes[0],
        context=axes[1],
        k=axes[2],
        keep_projection=axes[3],
        keep_kv=axes[4],
        acceptance=shared.acceptance(acceptance, coverage, ks),
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
    )
    if csv:
        shared.write_csv(found.frame(), csv)
    if json_:
        emit(_document(found, tp))
    else:
        print(_text(found))


def _document(found: Prediction, tp: int) -> dict[str, object]:
    return {
        "model": found.target.name,
        "device": found.device.id,
        "tp": tp,
        "method": found.method.name,
        "lossless": found.method.lossless,
        "validated": found.method.validated,
        "cells": found.cells(),
    }


def _text(found: Prediction) -> str:
    from specbench.cli._io import table

    header = ["batch", "context", "k", "TPOT ms", "tok/s", "AL", "speedup", "interval", "bound"]
    rows = [
        [
            f"{cell['batch']:g}", f"{cell['context']:g}", f"{cell['k']:g}", f"{cell['tpot_s'] * 1e3:.2f}",
            f"{cell['tokens_per_s']:.0f}", f"{cell['al']:.2f}", f"{cell['speedup']:.2f}×",
            f"[{cell['speedup_low']:.2f}, {cell['speedup_high']:.2f}]", f"{cell['bound']:.2f}×",
        ]
        for cell in found.cells()
    ]  # fmt: skip
    return "\n".join([table(header, rows), "", *_remarks(found)])


def _remarks(found: Prediction) -> list[str]:
    row = found.method
    said = [
        f"{found.target.name} on {found.device.id}, {row.name}: {row.about}. Held against: {row.validated}. "
        "Intervals are the held-out errors of the kernels."
    ]
    if found.overhead_free and row.name != "none":
        said.append(
            "Kernels only, so an upper estimate: engines add time to every round (--overhead-ms). In vLLM on H100 a "
            "round took 1.2 ms beyond its parts, and drafting with an EAGLE head 2.1 ms."
        )
    if not row.lossless:
        said.append("This method changes the text: its speedup is not comparable with lossless ones.")
    return [fill(sentence, 110) for sentence in said]
