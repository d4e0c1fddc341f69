"""TensorRT-LLM: `trtllm-serve` as a child, in a container, or a server that already runs at a URL.

Not run on the real engine: built to the options, settings, pages and fields of its source and documentation (1.0 to
1.2) and tested against a replica of them (`runners.replicas.tensorrt_llm`). Method to settings is data
(`flags/tensorrt_llm.toml`); the settings go into a file, named by its content, in the cache directory.

/metrics hands each iteration's record out once, from a queue. In older versions /prometheus/metrics is fed from the
same queue (with `return_perf_metrics`), so a record that /metrics took would be missing there: that page is read first,
once it has settled.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from runners import adapters, attached, counters, flags
from runners.attached import HttpSession, last_error
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts_trtllm import SPECULATIVE, iteration_sums, perf_raw, trtllm_counts
from runners.environments import python_for
from runners.hf_names import hf_model, with_draft
from runners.server import Health, free_port, serve
from specbench import trace
from specbench.cell import Config, Facts, digest
from specbench.errors import Unsupported
from specbench.models import cache_dir

INSTALL = (
    "Install it on a machine with an NVIDIA GPU with `pip install tensorrt-llm`, name an interpreter that has it in "
    "engine.python, a container in engine.command, or a running server in engine.url."
)
DISTRIBUTIONS = ("tensorrt-llm", "tensorrt_llm")
START_S = 3600.0
"""An engine may be built before the first token."""
SETTLE_S = 0.7
"""Its counters follow a finished request by up to half a second."""
KEPT = 10_000
"""Requests whose figures /perf_metrics keeps."""
ITERATIONS_KEPT = 1_000_000
"""Iterations that /metrics keeps between two readings; 1000 by itself."""
ARGS: Mapping[str, str] = {
    "slots": "--max_batch_size",
    "context": "--max_seq_len",
    "max_num_tokens": "--max_num_tokens",
    "tp": "--tp_size",
}
"""`engine.args` that are whole numbers, and the option of each."""
_INFO = "trtllm_speculative_config_info"


@dataclass
class TrtllmSession(HttpSession):
    """A TensorRT-LLM server ready for requests, and the sums of what was read away."""

    sums: dict[str, float] = field(default_factory=dict)
    learns: bool = False

    def counters(self) -> Raw:
        """Totals, sums over iterations, the figures of each request since the last reading, and whether on."""
        raw = counters.parse(
            self._settled() or ""
        )  # before /metrics, which may take what this page still counts
        self.sums = iteration_sums(self.json("/metrics"), self.sums)
        raw |= self.sums | perf_raw(self.json("/perf_metrics"))
        on = self.facts.speculative if self.facts.speculative is not None else speculating(raw)
        return raw if on is None else raw | {SPECULATIVE: float(on)}

    def _settled(self) -> str | None:
        """/prometheus/metrics once two readings agree; None where it is off."""
        before = self.text("/prometheus/metrics")
        for _ in range(5):
            if before is None:
                return None
            time.sleep(SETTLE_S)
            after = self.text("/prometheus/metrics")
            if counters.parse(after or "") == counters.parse(before):
                return after
            before = after
        return before

    def reset(self) -> bool:
        """Blocks of earlier prompts are not reused (`settings_of`); a shared pool of n-grams cannot be cleared."""
        return not self.learns


def speculating(raw: Raw) -> bool | None:
    """What the page says of its configuration; None where it does not."""
    for key in raw:
        if key.startswith(_INFO):
            return 'spec_enabled="true"' in key.casefold()
    return None


class TensorRtLlmEngine:
    """TensorRT-LLM's server."""

    name = "tensorrt_llm"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"
    ids_path: str | None = "/v1/completions"

    def probe(self, where: Where) -> Availability:
        """The version in the interpreter or container, or what the server at the URL says of itself."""
        if where.url is not None:
            return _probe_url(attached.base(where.url))
        return adapters.installed(self.name, where, DISTRIBUTIONS, INSTALL)

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve model, method and arguments to a command and a file of settings; a URL is attached to."""
        if config.engine.url is not None:
            return attached.attach(config, version)
        path, revision = hf_model(config.model, self.name)
        adds = flags.resolve(self.name, with_draft(config.method, self.name, "TensorRT-LLM"), version)
        settings = settings_of(config, adds)
        file = write_settings(settings)
        argv: tuple[str, ...] = (*_program(config), path, "--host", "127.0.0.1", "--backend", "pytorch")
        argv += ("--revision", revision) if revision else ()
        argv += (*_options(config), "--extra_llm_api_options", str(file))
        facts = Facts(
            engine=self.name,
            engine_version=version,
            argv=argv,
            model_path=path,
            slots=adapters.slots(config),
            speculative="speculative_config" in settings,
            extra=_extra(adds, settings, config),
        )
        return Launch(argv=argv, env=adds.env, files={"settings": file}, facts=facts, learns=learns(adds))

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[TrtllmSession]:
        """Start the server, or attach; the facts then also hold what it says of itself."""
        if launch.facts.url is not None:
            yield checked(TrtllmSession(launch.facts, attached.base(launch.facts.url)))
            return
        port = free_port()
        health = Health(f"http://127.0.0.1:{port}", here=not launch.facts.extra["in_container"])
        argv = (*launch.argv, f"--port={port}")
        with serve(argv, launch.env, log, START_S, why=last_error, health=health) as child:
            yield checked(
                TrtllmSession(launch.facts, child.address, child, log, last_error, learns=launch.learns)
            )

    def body(self, request: Request) -> bytes:
        """A streamed request of fields that it knows: any other is refused."""
        return orjson.dumps(fields(request))

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Steps from the mean tokens per iteration of each reply, drafts from the server's records."""
        return trtllm_counts(streams, before, after)


def fields(request: Request) -> dict[str, Any]:
    """The fields of a request. `top_k` 0 and `min_p` 0 switch those samplers off."""
    ids = request.prompt_ids
    prompt = {"messages": [dict(m) for m in request.messages]} if ids is None else {"prompt": list(ids)}
    always = {
        "model": request.model,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    optional = {"seed": request.seed, "ignore_eos": request.ignore_eos or None}
    return prompt | always | {name: value for name, value in optional.items() if value is not None}


# --- from a config to a command and settings --------------------------------------------------------------


def settings_of(config: Config, adds: flags.Flags) -> dict[str, Any]:
    """The settings: records and counters on, no prompt kept from one request to the next, and the method's."""
    own: dict[str, Any] = {
        "return_perf_metrics": True,
        "perf_metrics_max_requests": KEPT,
        "enable_iter_perf_stats": True,
        "iter_stats_max_iterations": ITERATIONS_KEPT,
        "kv_cache_config": {"enable_block_reuse": False},
    }
    overlap = config.engine.args.get("overlap")
    return own | dict(adds.config) | ({} if overlap is None else {"disable_overlap_scheduler": not overlap})


def learns(adds: flags.Flags) -> bool:
    """A pool of n-grams that all requests share remembers; one of each request's own does not."""
    return adds.learns and bool((adds.config.get("speculative_config") or {}).get("is_public_pool", True))


def write_settings(settings: Mapping[str, Any]) -> Path:
    """Put the settings where the server finds them: JSON, which YAML takes as it stands. Same content, same file."""
    path = cache_dir() / "tensorrt_llm" / f"{digest(settings, 16)}.yaml"
    if not path.is_file():
        trace.write_atomic(path, orjson.dumps(settings, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    return path


def _program(config: Config) -> tuple[str, ...]:
    """`trtllm-serve` of a container, or the one beside the interpreter."""
    ask = config.engine
    if ask.command is not None:
        return (*shlex.split(ask.command), "trtllm-serve")
    return (str(Path(python_for("tensorrt_llm", ask.python)).parent / "trtllm-serve"),)


def _extra(adds: flags.Flags, settings: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """What else a reader of the cell needs: the settings, and whether drafts are accepted loosely."""
    loose = (settings.get("speculative_config") or {}).get("use_relaxed_acceptance_for_thinking")
    extra = {
        "method": adds.method,
        "settings": dict(settings),
        "in_container": config.engine.command is not None,
    }
    return extra | ({"lossy": ["use_relaxed_acceptance_for_thinking"]} if loose else {})


def _options(config: Config) -> Iterator[str]:
    for name, value in config.engine.args.items():
        if name == "overlap":
            if not isinstance(value, bool):
                raise Unsupported("engine.args.overlap", f"must be true or false, not {value!r}")
        elif name not in ARGS:
            allowed = ", ".join([*ARGS, "overlap"])
            raise Unsupported(f"engine.args.{name}", f"tensorrt_llm does not take it; allowed: {allowed}")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Unsupported(f"engine.args.{name}", f"must be a whole number of at least 1, not {value!r}")
    given = {**config.engine.args, "slots": adapters.slots(config)}
    for name in sorted(set(given) & set(ARGS)):
        yield from (ARGS[name], str(given[name]))


# --- what a server says of itself -------------------------------------------------------------------------


def is_trtllm(address: str) -> bool:
    """Whether the server names its maker in its list of models."""
    listed = attached.page(address, "/v1/models")
    models = listed.get("data") if isinstance(listed, dict) else None
    return isinstance(models, list) and any(
        isinstance(m, dict) and m.get("owned_by") == "tensorrt_llm" for m in models
    )


def _probe_url(address: str) -> Availability:
    if not is_trtllm(address):
        return attached.not_available(address, "TensorRT-LLM", "its models are another's")
    return attached.available("tensorrt_llm", attached.version(address) or "unknown")


def checked(session: TrtllmSession) -> TrtllmSession:
    """Add the name that requests must carry, and whether speculation is on where the server says so."""
    offered = attached.names(attached.served(session.address))
    says: dict[str, Any] = {"served_model": offered[0] if offered else None}
    if session.facts.speculative is None:
        says["speculative"] = speculating(counters.parse(session.text("/prometheus/metrics") or ""))
    session.facts = session.facts.model_copy(update=says)
    return session
