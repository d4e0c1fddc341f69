"""`specbench engines`: which engines are usable here and why not, and making an environment for one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from runners.registry import Found

app = typer.Typer(help="Engines: what is usable here, and installing one.", invoke_without_command=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.callback()
def engines(
    context: typer.Context,
    python: Annotated[str | None, typer.Option(help="Look in this interpreter instead.")] = None,
    url: Annotated[str | None, typer.Option(help="Look at the server that runs at this address.")] = None,
    json_: Json = False,
) -> None:
    """Show every engine: usable or not, version, methods, and how to install what is missing."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import asdict

    from runners.base import Where
    from runners.registry import survey
    from specbench._plan_words import is_address
    from specbench.cli._io import emit
    from specbench.errors import SpecbenchError

    if python == "":
        raise SpecbenchError("--python: names no interpreter; give its path, or leave --python out.")
    if url is not None and not is_address(url):
        raise SpecbenchError(
            f"--url: {url!r} is not an address such as http://127.0.0.1:8080; give no user and no query."
        )
    found = survey(Where(python=python, url=url))
    if json_:
        emit([asdict(engine) for engine in found])
        return
    print("\n".join(line for engine in found for line in _lines(engine)))


@app.command()
def install(
    name: Annotated[str, typer.Argument(help="Engine, as `specbench engines` names it.")],
    json_: Json = False,
) -> None:
    """Make an environment of the engine's own in the cache directory; this one is left as it is."""
    from runners import environments, registry
    from specbench.cli._io import emit, note

    registry.check(name)
    place = _undisturbed(name, note)
    recipe = environments.recipe_for(name)
    python = str(environments.installed_python(name))
    if json_:
        version = environments.version_in(python, recipe.distributions)
        log = environments.log_of(name)
        emit({"name": name, "version": version, "path": str(place), "python": python, "log": str(log)})
    else:
        print(place)


def _undisturbed(name: str, say: Callable[[str], None]) -> Path:
    """Install; a Ctrl-C or a scheduler's SIGTERM is one sentence, and what was begun is cleared away."""
    from runners import environments
    from specbench.cli._io import sigterm_as_interrupt
    from specbench.errors import Interrupted

    try:
        with sigterm_as_interrupt():
            return environments.install(name, say)
    except KeyboardInterrupt:
        raise Interrupted(f"engines install: interrupted; nothing of {name} was kept.") from None


_WHERE = {
    "here": "this environment",
    "installed": "its own environment",
    "asked": "the interpreter asked for",
    "url": "a server that runs",
}


def _lines(engine: Found) -> list[str]:
    """One engine for a person."""
    if not engine.ok:
        first = f"{engine.name}  not usable: {engine.why_not}"
        return [first, f"    {engine.install}"] if engine.install else [first]
    where = _WHERE[engine.where] + (f", {engine.python}" if engine.where in ("installed", "asked") else "")
    return [
        f"{engine.name}  {engine.version}",
        f"    methods: {', '.join(engine.methods)}",
        f"    in: {where}",
    ]
