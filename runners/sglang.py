"""SGLang: `python -m sglang.launch_server` as a child, in a container, or a server that already runs at a URL.

Not run on the real engine: built to the options, pages and fields of SGLang 0.5.23 (its own `--help` and source) and
tested against a replica of them (`runners.replicas.sglang`). Method to options is data (`flags/sglang.toml`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from runners import adapters, attached, counters, flags, precision
from runners.attached import HttpSession, last_error
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts_sglang import SPECULATIVE, sglang_counts
from runners.environments import interpreter_for
from runners.hf_names import hf_model, with_draft
from runners.server import Health, free_port, serve
from specbench.cell import Config, Facts
from specbench.errors import SpecbenchError, Unsupported

INSTALL = (
    "Install it on a machine with a GPU with `pip install sglang`, name an interpreter that has it in engine.python, "
    "a container in engine.command, or a running server in engine.url."
)
START_S = 1800.0
"""Large weights and captured graphs take minutes."""
ARGS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "slots": ("--max-running-requests", int),
    "context": ("--context-length", int),
    "tp": ("--tensor-parallel-size", int),
    "dtype": ("--dtype", str),
    "mem_fraction": ("--mem-fraction-static", (int, float)),
    "attention_backend": ("--attention-backend", str),
}
"""`engine.args`, the option of each, and its type."""
ALWAYS = ("--host", "127.0.0.1", "--enable-metrics", "--enable-cache-report", "--disable-radix-cache")
"""Counters on; no prompt kept from one request to the next."""
LOSSY = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
"""Below 1 these accept what the target would not have chosen."""


@dataclass
class SglangSession(HttpSession):
    """A SGLang server ready for requests."""

    learns: bool = False

    def counters(self) -> Raw:
        """`/metrics` where it is on, and whether the server says that it speculates."""
        text = self.text("/metrics")
        raw = counters.parse(text) if text is not None else {}
        known = self.facts.speculative
        return raw if known is None else raw | {SPECULATIVE: float(known)}

    def reset(self) -> bool:
        """The prefix cache can be flushed; a trie that learned cannot."""
        return not self.learns and self.post("/flush_cache").status_code == 200


class SglangEngine:
    """SGLang's server."""

    name = "sglang"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"
    ids_path: str | None = "/v1/completions"

    def probe(self, where: Where) -> Availability:
        """The version in the interpreter or container, or what the server at the URL says of itself."""
        if where.url is not None:
            return _probe_url(attached.base(where.url))
        return adapters.installed(self.name, where, ("sglang",), INSTALL)

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve model, method and arguments to the launcher's command; a URL is attached to."""
        if config.engine.url is not None:
            return attached.attach(config, version, k=config.method.k)
        path, revision = hf_model(config.model, self.name)
        adds = flags.resolve(self.name, with_draft(config.method, self.name, "SGLang"), version)
        interpreter = interpreter_for(self.name, config.engine.python, config.engine.command)
        argv: tuple[str, ...] = (*interpreter, "-m", "sglang.launch_server", "--model-path", path)
        argv += ("--revision", revision) if revision else ()
        argv += (*ALWAYS, *_options(config), *adds.argv)
        facts = Facts(
            engine=self.name,
            engine_version=version,
            argv=argv,
            model_path=path,
            slots=adapters.slots(config),
            extra={"method": adds.method, "k": adds.k, "in_container": config.engine.command is not None},
        )
        return Launch(argv=argv, env=adds.env, facts=facts, learns=adds.learns)

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[SglangSession]:
        """Start the launcher, or attach; the facts then also hold what the server says of itself."""
        if launch.facts.url is not None:
            yield checked(SglangSession(launch.facts, attached.base(launch.facts.url), learns=launch.learns))
            return
        port = free_port()
        health = Health(f"http://127.0.0.1:{port}", here=not launch.facts.extra["in_container"])
        argv = (*launch.argv, f"--port={port}")
        with serve(argv, launch.env, log, START_S, why=last_error, health=health) as child:
            yield checked(
                SglangSession(launch.facts, child.address, child, log, last_error, learns=launch.learns)
            )

    def body(self, request: Request) -> bytes:
        """A streamed request. Samplers that a model's own defaults would add are switched off."""
        return orjson.dumps(fields(request))

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Steps and drafts from each reply's record, verified drafts from the server's counters."""
        return sglang_counts(streams, before, after)


def fields(request: Request) -> dict[str, Any]:
    """The fields of a request. A streamed chat gives no token ids; a completion does."""
    ids = request.prompt_ids
    prompt = {"messages": [dict(m) for m in request.messages]} if ids is None else {"prompt": list(ids)}
    always = {
        "model": request.model,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_spec_tokens_details": True,
    }
    optional = {
        "seed": request.seed,
        "ignore_eos": request.ignore_eos or None,
        "return_token_ids": True if ids is not None else None,
    }
    return prompt | always | {name: value for name, value in optional.items() if value is not None}


# --- from a config to options -----------------------------------------------------------------------------


def _options(config: Config) -> Iterator[str]:
    for name, value in config.engine.args.items():
        if name not in ARGS:
            allowed = ", ".join(ARGS)
            raise Unsupported(f"engine.args.{name}", f"sglang does not take it; allowed: {allowed}")
        kind = ARGS[name][1]
        if (
            isinstance(value, bool)
            or not isinstance(value, kind)
            or (not isinstance(value, str) and value <= 0)
        ):
            what = "text" if kind is str else "a number above 0"
            raise Unsupported(f"engine.args.{name}", f"must be {what}, not {value!r}")
    given = {**config.engine.args, "slots": adapters.slots(config)}
    for name, value in sorted(given.items()):
        yield from (ARGS[name][0], str(value))


# --- what a server says of itself -------------------------------------------------------------------------


def server_info(address: str) -> dict[str, Any] | None:
    """The page that only SGLang has; None where the server is another."""
    for path in ("/server_info", "/get_server_info"):
        info = attached.page(address, path)
        if isinstance(info, dict) and "internal_states" in info:
            return info
    return None


def _probe_url(address: str) -> Availability:
    info = server_info(address)
    if info is None:
        return attached.not_available(address, "SGLang", "it has no /server_info")
    return attached.available("sglang", str(info.get("version", "unknown")))


def said(info: Mapping[str, Any]) -> dict[str, Any]:
    """What the server's page adds to the facts."""
    algorithm, tokens = info.get("speculative_algorithm"), info.get("speculative_num_draft_tokens")
    lossy = [
        f"{name}={info[name]:g}"
        for name in LOSSY
        if isinstance(info.get(name), int | float) and info[name] < 1
    ]
    extra = {"algorithm": algorithm, "draft_tokens": tokens, "topk": info.get("speculative_eagle_topk")}
    return {
        "speculative": algorithm is not None,
        "precision": precision.phrase(info.get("dtype"), info.get("quantization")),
        "extra": extra | ({"lossy": lossy} if lossy else {}),
    }


def checked(session: SglangSession) -> SglangSession:
    """Add what the server says of itself. Raises SpecbenchError where it drafts other than was asked for."""
    info = session.json("/server_info")
    says = said(info) if isinstance(info, dict) else {"extra": {}}
    session.check_speculation(says.get("speculative"))
    if session.child is None:
        _check_k(session.address, session.facts.extra.get("k"), says["extra"])
    offered = attached.names(attached.served(session.address))
    update = {name: value for name, value in says.items() if name != "extra"}
    update |= {"extra": session.facts.extra | says["extra"], "served_model": offered[0] if offered else None}
    session.facts = session.facts.model_copy(update=update)
    return session


def _check_k(address: str, k: int | None, says: Mapping[str, Any]) -> None:
    tokens, topk = says.get("draft_tokens"), says.get("topk")
    if k is not None and isinstance(tokens, int) and topk in (None, 1) and tokens - 1 != k:
        raise SpecbenchError(
            f"method.k: the server at {address} drafts {tokens - 1} tokens, not {k}; write that k."
        )
