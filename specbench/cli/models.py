"""`specbench models`: what the catalogue holds, and bringing a model to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.cli._roofline import MODEL_HELP, Json, Kv, Weights

app = typer.Typer(help="Models: what is known, fetching, and where they are.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Catalogue name, path, or hf:ORG/NAME[@revision][/file.gguf].")]


@app.command("list")
def list_(json_: Json = False) -> None:
    """Show the catalogue and what of it is on this machine."""
    from dataclasses import asdict

    from specbench import models
    from specbench.cli._io import emit, table
    from specbench.errors import SpecbenchError

    where: dict[str, str | None] = {}
    for name in models.CATALOGUE:
        try:
            where[name] = str(models.resolve(name).path)
        except SpecbenchError:
            where[name] = None
    known = models.CATALOGUE.items()
    if json_:
        emit([{"name": name, "path": where[name]} | asdict(entry) for name, entry in known])
        return
    rows = [
        [name, entry.about, f"{entry.size_bytes / 1e6:.0f} MB", entry.licence, where[name] or "not fetched"]
        for name, entry in known
    ]
    print(table(["name", "what", "size", "licence", "where"], rows))


@app.command()
def fetch(name: Name, json_: Json = False) -> None:
    """Bring a model to this machine, once, and check its hash."""
    from specbench import models
    from specbench.cli._io import note

    models.fetch(name, note)
    _show(name, json_)


@app.command()
def path(name: Name, json_: Json = False) -> None:
    """Say where a model is on this machine."""
    _show(name, json_)


@app.command()
def configs(json_: Json = False) -> None:
    """List the models whose shapes are shipped, for `show`, `predict` and `crossover`; no weights."""
    from models_roofline.families import catalogue, load_model
    from specbench.cli._io import emit, table

    found = [load_model(name) for name in catalogue()]
    if json_:
        emit([
            {"name": arch.name, "family": arch.family, "total_params": arch.total_params,
             "active_params": arch.active_params, "kv_bytes_per_token": arch.kv_bytes_per_token(),
             "max_context": arch.max_context}
            for arch in found
        ])  # fmt: skip
        return
    rows = [
        [arch.name, arch.family, f"{arch.total_params:,}", f"{arch.active_params:,}",
         f"{arch.kv_bytes_per_token():,.0f}", f"{arch.max_context or '–'}"]
        for arch in found
    ]  # fmt: skip
    print(table(["name", "family", "parameters", "active", "cache B/token", "context"], rows, left=2))


@app.command()
def show(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    context: Annotated[
        str, typer.Option(help="Contexts at which the cache is counted; 8Ki is 8192.")
    ] = "1024,8192",
    weights: Weights = None,
    kv: Kv = "bf16",
    json_: Json = False,
) -> None:
    """Count a model: parameters, bytes of weights and of the cache, layer by layer."""
    from models_roofline.arrays import at_least
    from models_roofline.formats import kv_value_bytes
    from specbench.cli import _roofline as shared
    from specbench.cli._io import emit
    from specbench.cli._show import document, text

    contexts = shared.whole_numbers(context, "--context")
    at_least("--context", contexts, 1, "tokens")
    found = document(shared.architecture(model, weights), contexts, kv_value_bytes(kv))
    if json_:
        emit(found)
    else:
        print(text(found))


def _show(name: str, json_: bool) -> None:
    from specbench import models
    from specbench.cli._io import emit

    found = models.resolve(name)
    if json_:
        emit({"name": found.name, "path": str(found.path), "sha256": found.sha256})
    else:
        print(found.path)
