"""The engines by name: a plain dict of makers, each importing its adapter only when asked."""

from __future__ import annotations

from collections.abc import Callable

from runners.base import Engine
from specbench.errors import SpecbenchError
from specbench.plan import nearest


def _llamacpp() -> Engine:
    from runners.llama_cpp import LlamaCppEngine

    return LlamaCppEngine()


def _openai() -> Engine:
    from runners.openai import OpenAIEngine

    return OpenAIEngine()


def _loopback() -> Engine:
    from runners.loopback import LoopbackEngine

    return LoopbackEngine()


ENGINES: dict[str, Callable[[], Engine]] = {
    "llamacpp": _llamacpp,
    "openai": _openai,
    "loopback": _loopback,
}


def get(name: str) -> Engine:
    """The adapter of this name. Raises SpecbenchError that names the ones there are."""
    if name in ENGINES:
        return ENGINES[name]()
    near = nearest(name, ENGINES)
    hint = f"; did you mean {near}?" if near else "."
    raise SpecbenchError(f"engine.name: {name} is not an engine; use one of {', '.join(ENGINES)}{hint}")
