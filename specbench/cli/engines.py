"""`specbench engines`: which engines are usable here, what they can draft with, and why not."""

from __future__ import annotations

from typing import Annotated

import typer


def engines(
    python: Annotated[str | None, typer.Option(help="Look in this interpreter instead.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show every engine: usable or not, version, methods, and how to install what is missing."""
    from dataclasses import asdict

    from runners.base import Where
    from runners.registry import ENGINES
    from specbench.cli._io import emit

    found = {name: make().probe(Where(python=python)) for name, make in ENGINES.items()}
    if json_:
        emit([{"name": name} | asdict(state) for name, state in found.items()])
        return
    for name, state in found.items():
        if state.ok:
            print(f"{name}  {state.version}\n    methods: {', '.join(state.methods)}")
        else:
            print(f"{name}  not usable: {state.why_not}\n    {state.install or ''}".rstrip())
