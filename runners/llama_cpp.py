"""llama.cpp: its own server in a child process (`llama_cpp_child`), or one that already runs at a URL.

Method to options is the table `METHODS`; what each entry may do was found by running xllamacpp 2026.10: which
drafters remember earlier requests, which take a draft length, and when a drafter can never draft. A server
that could not set up its drafter serves on without it, so speculation is checked in `/slots` at the start.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson

from runners import counters, gguf
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts import SPECULATIVE, llama_counts
from runners.server import ServerProcess, last_line, serve
from specbench import host
from specbench.cell import Config, Facts, Method
from specbench.errors import SpecbenchError, Unsupported
from specbench.models import ModelFile, resolve

CHILD = Path(__file__).with_name("llama_cpp_child.py")
INSTALL = "Install it with `pip install xllamacpp`, or name an interpreter that has it in engine.python."
CONTEXT_TOKENS = 4096
MOST = 2**21
"""Of slots, threads or context tokens: beyond it llama.cpp's own sums overflow."""
_TIMEOUT_S = 30.0

Scalar = int | float | str | bool


@dataclass(frozen=True)
class Drafter:
    """How one method is asked for: which option takes k, which the parameters, and what else is known."""

    k: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    draft: bool = False
    learns: bool = False
    fixed_k: int | None = None
    k_from: tuple[str, int] | None = None
    """A parameter, and its default, below which k drafts nothing at all."""


_MAP = {"n": "--ngram-size-n", "min_hits": "--ngram-min-hits"}
_MODEL = Drafter(k="--draft-n-max", params={"n_min": "--draft-n-min", "p_min": "--draft-p-min"}, draft=True)

METHODS: dict[str, Drafter] = {
    "none": Drafter(),
    "ngram-simple": Drafter(k="--ngram-size-m", params=_MAP, k_from=("n", 12)),
    "ngram-map-k": Drafter(k="--ngram-size-m", params=_MAP, learns=True),
    "ngram-map-k4v": Drafter(k="--ngram-size-m", params=_MAP, learns=True),
    "ngram-mod": Drafter(
        k="--ngram-mod-n-max",
        params={"n": "--ngram-mod-n-match", "n_min": "--ngram-mod-n-min"},
        learns=True,
    ),
    "ngram-cache": Drafter(
        params={
            name: f"--{name.replace('_', '-')}" for name in ("lookup_cache_static", "lookup_cache_dynamic")
        },
        learns=True,
        fixed_k=8,
    ),
    "draft-simple": _MODEL,
    "draft-eagle3": _MODEL,
    "draft-mtp": _MODEL,
    "draft-dflash": _MODEL,
    "draft-dspark": _MODEL,
}
"""Every speculation type of llama.cpp. Those with `learns` drafted differently when a request was repeated."""


@dataclass
class LlamaCppSession:
    """A llama.cpp server ready for requests: our child, or one that was there before."""

    facts: Facts
    address: str
    pids: tuple[int, ...] = ()
    child: ServerProcess | None = None
    log: Path | None = None

    def counters(self) -> Raw:
        """`/metrics`, whether `/slots` says that speculation is on, and which process answered."""
        reply = self._get("/metrics")
        if reply is None or reply.status_code != 200:
            return {}
        raw = counters.parse(reply.text)
        started = reply.headers.get("process-start-time-unix", "")
        if started.isdigit():
            raw[counters.PROCESS_START] = float(started)
        speculative = self.speculative()
        return raw if speculative is None else raw | {SPECULATIVE: float(speculative)}

    def reset(self) -> bool:
        """llama.cpp cannot forget what a drafter learned: restart it."""
        return False

    def speculative(self) -> bool | None:
        """What `/slots` says; None where the server does not show its slots."""
        slots = self.json("/slots")
        return any(slot.get("speculative") for slot in slots) if isinstance(slots, list) and slots else None

    def json(self, path: str) -> Any:
        """A page as JSON; None where the server does not give it."""
        reply = self._get(path)
        try:
            return orjson.loads(reply.content) if reply is not None and reply.status_code == 200 else None
        except orjson.JSONDecodeError:
            return None

    def _get(self, path: str) -> httpx.Response | None:
        try:
            # Like the load client, straight to the server: a proxy of the environment would be another machine.
            return httpx.get(self.address + path, timeout=_TIMEOUT_S, trust_env=False)
        except httpx.HTTPError as error:
            if self.child is None or self.log is None:
                raise SpecbenchError(f"engine.url: nothing answers at {self.address} ({error}).") from None
            state = (
                "stopped answering" if self.child.poll() is None else f"ended (status {self.child.poll()})"
            )
            raise SpecbenchError(
                f"llama.cpp {state}; its last words: {last_error(self.log)}; see {self.log}."
            ) from None


class LlamaCppEngine:
    """llama.cpp through the `xllamacpp` package."""

    name = "llamacpp"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"

    def probe(self, where: Where) -> Availability:
        """The version of xllamacpp in the interpreter, or what the server at the URL says of itself."""
        if where.url is not None:
            return _probe_url(where.url)
        version = _version(where.python)
        if where.python is not None and shutil.which(where.python) is None:
            why = f"engine.python: {where.python} is no program that can be run"
            return Availability(ok=False, why_not=why, install="Name a Python that has xllamacpp.")
        if version is None:
            place = where.python or "this environment"
            return Availability(ok=False, why_not=f"{place} has no package xllamacpp", install=INSTALL)
        return Availability(ok=True, version=version, methods=tuple(METHODS))

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve model, method and arguments to the child's command. A URL is attached to, with nothing to start."""
        method, drafter = config.method, _drafter(config.method)
        facts = Facts(engine=self.name, engine_version=version, extra={"method": method.name})
        if config.engine.url is not None:
            if config.engine.args:
                raise Unsupported("engine.args", "a running server has its own settings; leave args out")
            extra = facts.extra | {"drafter_learns": drafter.learns}
            attached = facts.model_copy(update={"url": config.engine.url, "extra": extra})
            return Launch(argv=(), facts=attached, learns=drafter.learns)
        sizes = _sizes(config)
        model = _chat_model(config.model)
        draft = _draft_model(method, drafter)
        files = {"model": model.path} | ({"draft": draft.path} if draft else {})
        python = config.engine.python or sys.executable
        argv: tuple[str, ...] = (python, "-u", str(CHILD), "--model", str(model.path))
        argv += tuple(part for name, value in sizes.items() for part in (f"--{name}", str(value)))
        argv += _speculation(method, drafter, draft)
        known = {
            "argv": argv,
            "slots": sizes["slots"],
            "context_tokens": sizes["context"],
            "threads": sizes["threads"],
            "model_path": str(model.path),
            "model_sha256": model.sha256,
            "draft_sha256": draft.sha256 if draft else None,
            "extra": facts.extra | {"weight_bytes": gguf.weight_bytes(model.path)},
        }
        return Launch(argv=argv, files=files, facts=facts.model_copy(update=known), learns=drafter.learns)

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[LlamaCppSession]:
        """Start the child, or attach; the facts then also hold what the server says of itself."""
        if launch.facts.url is not None:
            address = launch.facts.url.rstrip("/").removesuffix("/v1")
            yield _checked(LlamaCppSession(launch.facts, address))
            return
        with serve(launch.argv, launch.env, log, why=last_error) as child:
            yield _checked(LlamaCppSession(launch.facts, child.address, (child.pid,), child, log))

    def body(self, request: Request) -> bytes:
        """A streamed chat request. Samplers that a default would add to temperature and top_p are switched off."""
        fields: dict[str, Any] = {
            "messages": [dict(message) for message in request.messages],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings_per_token": True,
            "cache_prompt": False,
        }
        optional = {
            "model": request.model or None,
            "seed": request.seed,
            "ignore_eos": request.ignore_eos or None,
        }
        return orjson.dumps(fields | {name: value for name, value in optional.items() if value is not None})

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Steps from the `timings` of each frame, drafts from those and from the server's counters."""
        return llama_counts(streams, before, after)


def last_error(log: Path) -> str:
    """The last error that llama.cpp logged, without its time stamp; else the last line."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [text for line in lines if (text := line.partition(" E ")[2]) and "exiting due to" not in text]
    return " ".join(errors[-1].split()) if errors else last_line(log)


# --- probing ----------------------------------------------------------------------------------------------

_ASK_VERSION = "import importlib.metadata as m; print(m.version('xllamacpp'))"


def _version(python: str | None) -> str | None:
    """Version of xllamacpp in this interpreter or another; None where it has none."""
    try:
        if python is None:
            return importlib.metadata.version("xllamacpp")
        command = [python, "-c", _ASK_VERSION]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError, importlib.metadata.PackageNotFoundError):
        return None
    return done.stdout.strip() or None


def _probe_url(url: str) -> Availability:
    session = LlamaCppSession(Facts(engine="llamacpp", url=url), url.rstrip("/").removesuffix("/v1"))
    try:
        props = session.json("/props")
    except (SpecbenchError, httpx.InvalidURL) as error:
        return Availability(
            ok=False, why_not=str(error).rstrip("."), install="Start the server, or mend engine.url."
        )
    if not isinstance(props, dict):
        why = f"engine.url: the server at {url} is not llama.cpp (it has no /props)"
        return Availability(ok=False, why_not=why, install="Use the engine `openai` for other servers.")
    return Availability(ok=True, version=str(props.get("build_info", "unknown")), methods=tuple(METHODS))


def _checked(session: LlamaCppSession) -> LlamaCppSession:
    """Add what the server says of itself. Raises SpecbenchError where speculation is not what was asked for."""
    asked = session.facts.extra["method"]
    speculative = session.speculative()
    if speculative is not None and speculative != (asked != "none"):
        if session.log is not None:
            raise SpecbenchError(
                f"method.name: llama.cpp could not set up {asked} and serves without it; its last words: "
                f"{last_error(session.log)}."
            )
        does = "speculates" if speculative else "does not speculate"
        raise SpecbenchError(
            f"method.name: {asked} was asked for, but the server at {session.address} {does}; "
            "name the method that it was started with, or another engine.url."
        )
    props = session.json("/props") or {}
    template = props.get("chat_template")
    says = {
        "speculative": speculative,
        "precision": props.get("model_ftype"),
        "template_sha256": hashlib.sha256(template.encode()).hexdigest()
        if isinstance(template, str)
        else None,
        "slots": session.facts.slots or props.get("total_slots"),
        "context_tokens": session.facts.context_tokens
        or props.get("default_generation_settings", {}).get("n_ctx"),
        "model_path": session.facts.model_path or props.get("model_path"),
    }
    session.facts = session.facts.model_copy(update=says)
    return session


# --- from a config to options -----------------------------------------------------------------------------


def _drafter(method: Method) -> Drafter:
    """The table's row, after checking that the method asks for nothing that it cannot do."""
    drafter = METHODS.get(method.name)
    if drafter is None:
        raise Unsupported("method.name", f"llamacpp has no {method.name}; use one of {', '.join(METHODS)}")
    for name in method.params:
        if name not in drafter.params:
            allowed = ", ".join(drafter.params) or "none"
            raise Unsupported(f"method.{name}", f"{method.name} does not take it; allowed: {allowed}")
    _check_k(method, drafter)
    _check_pinned(method, drafter)
    return drafter


def _k(method: Method) -> int | None:
    """Drafted tokens asked for; pinned acceptance has one rate for each. None leaves the engine's default."""
    return method.k or (len(method.pinned) if method.pinned else None)


def _check_k(method: Method, drafter: Drafter) -> None:
    k = _k(method)
    if method.k is not None and drafter.k is None and k != drafter.fixed_k:
        why = f"always drafts up to {drafter.fixed_k}" if drafter.fixed_k else "drafts nothing"
        raise Unsupported("method.k", f"{method.name} {why} in llamacpp; leave k out")
    if k is not None and drafter.k_from is not None:
        name, default = drafter.k_from
        least = method.params.get(name, default)
        if isinstance(least, int) and k < least:
            raise Unsupported(
                "method.k",
                f"{method.name} drafts nothing when k ({k}) is below {name} ({least}); raise k or lower {name}",
            )


def _check_pinned(method: Method, drafter: Drafter) -> None:
    rates = method.pinned
    if rates is None:
        return
    if drafter.k is None and drafter.fixed_k is None:
        raise Unsupported(
            "method.acceptance", f"{method.name} drafts nothing, so no acceptance can be pinned"
        )
    want = method.k or drafter.fixed_k or len(rates)
    if len(rates) != want:
        raise Unsupported(
            "method.acceptance", f"give one pinned rate for each of k = {want} positions, not {len(rates)}"
        )


def _chat_model(name: str) -> ModelFile:
    """The target's file. Requests are chats, so a model without a chat template is refused."""
    model = resolve(name)
    if gguf.has_chat_template(model.path) is False:
        raise SpecbenchError(
            f"model: {name} has no chat template, so it is a base model and llama.cpp would guess one; "
            "name an instruct model."
        )
    return model


def _draft_model(method: Method, drafter: Drafter) -> ModelFile | None:
    if not drafter.draft:
        if method.draft is not None:
            raise Unsupported("method.draft", f"{method.name} uses no draft model; leave draft out")
        return None
    if method.draft is None:
        raise Unsupported("method.draft", f"{method.name} needs a draft model; name it as you name model")
    try:
        return resolve(method.draft)
    except SpecbenchError as error:
        raise SpecbenchError(str(error).replace("model:", "method.draft:", 1)) from None


def _speculation(method: Method, drafter: Drafter, draft: ModelFile | None) -> tuple[str, ...]:
    options: dict[str, Scalar | None] = {"--spec-type": method.name}
    options["--draft-model"] = str(draft.path) if draft else None
    options |= {drafter.params[name]: value for name, value in sorted(method.params.items())}
    if drafter.k is not None:
        options[drafter.k] = _k(method)
    options["--synth-rates"] = ",".join(f"{rate:g}" for rate in method.pinned) if method.pinned else None
    return tuple(part for name, value in options.items() if value is not None for part in (name, str(value)))


def _sizes(config: Config) -> dict[str, int]:
    """Slots, context tokens per slot and threads, from `engine.args` or their defaults."""
    args = config.engine.args
    for name in args:
        if name not in ("slots", "context", "threads"):
            raise Unsupported(
                f"engine.args.{name}", "llamacpp does not take it; allowed: slots, context, threads"
            )
    slots = max(config.concurrency, _count(args, "slots", 1))
    return {"slots": slots, "context": _count(args, "context", CONTEXT_TOKENS), "threads": _threads(args)}


def _count(args: Mapping[str, Scalar], name: str, default: int) -> int:
    value = args.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        why = f"must be a whole number of at least 1 and at most {MOST}, not {value!r}"
        raise Unsupported(f"engine.args.{name}", why)
    return value


def _threads(args: Mapping[str, Scalar]) -> int:
    """One core is left to the client unless the config says otherwise."""
    cores = host.cores()
    value = args.get("threads", "cores-1")
    named = {"cores": cores, "cores-1": max(cores - 1, 1)}
    if isinstance(value, str):
        if value not in named:
            raise Unsupported("engine.args.threads", f'must be a number, "cores" or "cores-1", not {value!r}')
        return named[value]
    return _count(args, "threads", 1)
