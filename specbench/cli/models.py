"""`specbench models`: what the catalogue holds, and bringing a model to this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Models: what is known, fetching, and where they are.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Catalogue name, path, or hf:ORG/NAME[@revision][/file.gguf].")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


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


def _show(name: str, json_: bool) -> None:
    from specbench import models
    from specbench.cli._io import emit

    found = models.resolve(name)
    if json_:
        emit({"name": found.name, "path": str(found.path), "sha256": found.sha256})
    else:
        print(found.path)
