"""The loopback engine: the smallest complete adapter, over a scripted server instead of a model.

It is the example of docs/adding-an-engine.md. An adapter is four answers: what is usable here (`probe`), how
a config becomes a command (`launch`), how the server is started and asked (`start`, `body`), and what its
replies and counters say about drafts (`counts`). Sending, timing and parsing are not its business.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from runners import counters
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts import SPECULATIVE, llama_counts
from runners.loopback_script import FAULTS
from runners.server import serve
from specbench.cell import Config, Facts, Method
from specbench.errors import EngineFailed, Unsupported

VERSION = "1"
"""Of the server's behaviour: raise it where the same script would say or time something else."""

METHODS: dict[str, dict[str, Any]] = {
    "none": {"k": 0},
    "ngram-simple": {"k": 8, "coverage": 0.5, "accept": [0.7]},
    "draft-simple": {"k": 4, "accept": [0.8, 0.7, 0.6], "draft_ms": 0.2},
}
"""Method to script: how many tokens are drafted, how often, how many are kept, at what cost."""

ARGS = ("step_ms", "prefill_ms", "draft_ms", "coverage", "frames", "style", "faults")
"""`engine.args` that are passed to the script. `faults` is text such as `3=reset,5=429`."""


CHOICES = {"frames": ("token", "step"), "style": ("llamacpp", "vllm")}


class LoopbackEngine:
    """Adapter to `runners.loopback_server`."""

    name = "loopback"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"
    ids_path: str | None = "/v1/completions"

    def probe(self, where: Where) -> Availability:
        """Always usable here: it comes with the suite."""
        if where.url is not None:
            why = "engine.url: the loopback engine is always started here"
            return Availability(ok=False, why_not=why, install="Leave engine.url out.")
        return Availability(ok=True, version=VERSION, methods=tuple(METHODS))

    def launch(self, config: Config, version: str) -> Launch:
        """The command that serves this config. Raises Unsupported for what no script can do."""
        if config.engine.url is not None:
            raise Unsupported("engine.url", "the loopback engine is always started here; leave url out")
        script = script_for(config)
        argv, env = command(script)
        facts = Facts(
            engine=self.name, engine_version=version, argv=argv, threads=1, speculative=script["k"] > 0
        )
        return Launch(argv=argv, env=env, facts=facts)

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[LoopbackSession]:
        """Start the server; it ends with the block, and with this process."""
        with serve(launch.argv, launch.env, log, timeout_s=30) as server:
            yield LoopbackSession(launch.facts, server.address, (server.pid,))

    def body(self, request: Request) -> bytes:
        """A chat, or a prompt of ids, that asks for llama.cpp's timings, which hold the token counts."""
        ids = request.prompt_ids
        prompt = {"messages": [dict(m) for m in request.messages]} if ids is None else {"prompt": list(ids)}
        return orjson.dumps(
            prompt
            | {
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "stream": True,
                "stream_options": {"include_usage": True},
                "timings_per_token": True,
            }
        )

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """It counts as llama.cpp does."""
        return llama_counts(streams, before, after)


@dataclass(frozen=True)
class LoopbackSession:
    """A running loopback server."""

    facts: Facts
    address: str
    pids: tuple[int, ...]

    def counters(self) -> Raw:
        """/metrics, and whether it speculates."""
        try:
            with urllib.request.urlopen(f"{self.address}/metrics", timeout=10) as reply:
                raw = counters.parse(reply.read().decode())
        except OSError as error:
            raise EngineFailed(f"the loopback server no longer answers ({error}).") from None
        return raw | {SPECULATIVE: float(bool(self.facts.speculative))}

    def reset(self) -> bool:
        """Nothing is ever learned or cached, so there is nothing to forget."""
        return True


def command(script: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Command line and environment that serve a script (see `loopback_script.Script`)."""
    argv = (sys.executable, "-m", "runners.loopback_server", "--script", orjson.dumps(script).decode())
    root = str(Path(__file__).resolve().parents[1])
    return argv, {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


def script_for(config: Config) -> dict[str, Any]:
    """The script of a config. The text depends on `sampling.seed` alone, so greedy arms agree."""
    method = config.method
    if method.name not in METHODS:
        raise Unsupported("method.name", f"{method.name} is not one of {', '.join(METHODS)}")
    if method.params:
        raise Unsupported(f"method.{min(method.params)}", "the loopback methods have no parameters")
    if unknown := set(config.engine.args) - set(ARGS):
        raise Unsupported(f"engine.args.{min(unknown)}", f"use one of {', '.join(ARGS)}")
    args = dict(config.engine.args)
    faults = _faults(args.pop("faults", ""))
    for name, value in args.items():
        _check_arg(name, value)
    script = METHODS[method.name] | args | _drafting(method)
    return script | {"faults": faults, "seed": config.sampling.seed or 0}


def _check_arg(name: str, value: Any) -> None:
    """Refuse what the server would stumble over, before it is started."""
    if name in CHOICES:
        if value not in CHOICES[name]:
            raise Unsupported(f"engine.args.{name}", f"must be {' or '.join(CHOICES[name])}, not {value!r}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise Unsupported(f"engine.args.{name}", f"must be a number of at least 0, not {value!r}")


def _faults(text: object) -> dict[str, str]:
    """`3=reset,5=429` as request to fault."""
    pairs = [pair.partition("=") for pair in str(text).replace(" ", "").split(",") if pair]
    for index, _, fault in pairs:
        if not index.isdecimal() or fault not in (*FAULTS, "429", "503", "hang", "forget"):
            known = ", ".join((*FAULTS, "429", "503", "hang", "forget"))
            raise Unsupported("engine.args.faults", f"write it like 3=reset,5=429, with one of {known}")
    return {index: fault for index, _, fault in pairs}


def _drafting(method: Method) -> dict[str, Any]:
    """What the method itself asks for: `k`, and pinned marginals as conditionals (p_j / p_j−1)."""
    if method.name == "none":
        if method.k or method.pinned:
            raise Unsupported("method.k", "none drafts nothing; leave k and acceptance out")
        return {}
    asked: dict[str, Any] = {} if method.k is None else {"k": method.k}
    if method.pinned:
        pairs = zip(method.pinned, (1.0, *method.pinned), strict=False)
        asked |= {"accept": [p / before if before else 0.0 for p, before in pairs], "coverage": 1.0}
        asked.setdefault("k", len(method.pinned))
    return asked
