"""The engines by name: a plain dict of makers, each importing its adapter only when asked; and what is usable here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from runners import environments
from runners.base import Availability, Engine, Where
from specbench.errors import SpecbenchError
from specbench.plan import nearest


def _maker(module: str, adapter: str) -> Callable[[], Engine]:
    def make() -> Engine:
        engine: Engine = getattr(import_module(module), adapter)()
        return engine

    return make


ENGINES: dict[str, Callable[[], Engine]] = {
    "llamacpp": _maker("runners.llama_cpp", "LlamaCppEngine"),
    "vllm": _maker("runners.vllm", "VllmEngine"),
    "openvino": _maker("runners.openvino", "OpenVinoEngine"),
    "transformers": _maker("runners.transformers_engine", "TransformersEngine"),
    "sglang": _maker("runners.sglang", "SglangEngine"),
    "tensorrt_llm": _maker("runners.tensorrt_llm", "TensorRtLlmEngine"),
    "openai": _maker("runners.openai", "OpenAIEngine"),
    "loopback": _maker("runners.loopback", "LoopbackEngine"),
}


def get(name: str) -> Engine:
    """The adapter of this name. Raises SpecbenchError that names the ones there are."""
    check(name)
    return ENGINES[name]()


def check(name: str) -> None:
    """Raise SpecbenchError with the nearest name where there is no engine of this one."""
    if name not in ENGINES:
        near = nearest(name, ENGINES)
        hint = f"; did you mean {near}?" if near else "."
        raise SpecbenchError(f"engine.name: {name} is not an engine; use one of {', '.join(ENGINES)}{hint}")


# --- what is usable here ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """One engine as `specbench engines` lists it."""

    name: str
    ok: bool
    version: str | None
    methods: tuple[str, ...]
    driver: str | None
    where: Literal["here", "installed", "asked", "url"]
    """This environment, the engine's own, the interpreter that was asked for, or a running server."""
    python: str | None
    """The interpreter that was looked in; None for a server that runs already."""
    why_not: str | None
    install: str | None
    can_install: bool
    """Whether `specbench engines install` has a recipe for this machine."""


def survey(where: Where) -> list[Found]:
    """Every engine: usable or not, and why not. One adapter that cannot be loaded does not hide the others."""
    return [_find(name, make, where) for name, make in ENGINES.items()]


def _find(name: str, make: Callable[[], Engine], where: Where) -> Found:
    driver = None
    try:
        engine = make()
        driver, state = engine.driver, _probe(engine, where)
    except ImportError as error:
        why = f"its adapter cannot be loaded ({error})"
        state = Availability(ok=False, why_not=why, install="Install specbench again.")
    kind, python = _place(name, where)
    install = state.install or (environments.how_to_install(name) if name in environments.recipes() else None)
    return Found(
        name=name,
        ok=state.ok,
        version=state.version,
        methods=state.methods,
        driver=driver,
        where=kind,
        python=python,
        why_not=state.why_not,
        install=None if state.ok else install,
        can_install=environments.can_install(name),
    )


def _probe(engine: Engine, where: Where) -> Availability:
    if where.url is not None and engine.driver == "worker":
        why = "it runs in a process of its own and is no server to attach to"
        return Availability(ok=False, why_not=why, install="Leave the URL out.")
    return engine.probe(where)


def _place(name: str, where: Where) -> tuple[Literal["here", "installed", "asked", "url"], str | None]:
    if where.url is not None or name == "openai":
        return "url", None
    python = environments.python_for(name, where.python)
    if where.python is not None:
        return "asked", python
    return ("installed" if environments.installed_python(name) else "here"), python
