"""`specbench machine`: what this host is, as it will stand in every cell."""

from __future__ import annotations

from typing import Annotated

import typer


def machine(
    json_: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Show this machine as a run records it: processor, cores, memory, GPUs, versions."""
    from specbench import host
    from specbench.cli._io import emit

    found = host.machine().model_dump(mode="json")
    if json_:
        emit(found)
        return
    found["memory"] = f"{found.pop('memory_bytes') / 2**30:.1f} GiB"
    for name, value in found.items():
        shown = ", ".join(value) or "none" if isinstance(value, list) else value
        print(f"{name:>14}  {shown if shown is not None else 'unknown'}")
