"""llama.cpp: its own server in a child process (`llama_cpp_child`), or one that already runs at a URL.

Method to options is the table `flags/llamacpp.toml`. A server that could not set up its drafter serves on without
it, so speculation is checked in `/slots` at the start.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from runners import adapters, attached, counters, flags, gguf, precision
from runners.adapters import Scalar
from runners.attached import HttpSession
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts import SPECULATIVE, llama_counts
from runners.environments import python_for
from runners.server import last_line, serve
from specbench.cell import Config, Facts, Method
from specbench.errors import SpecbenchError, Unsupported
from specbench.models import ModelFile, resolve

CHILD = Path(__file__).with_name("llama_cpp_child.py")
DISTRIBUTIONS = ("xllamacpp",)
CONTEXT_TOKENS = 4096
MOST = 2**21
"""Of slots, threads or context tokens: beyond it llama.cpp's own sums overflow."""

COMPUTE = "float32"
"""What every operation of ggml gives, whatever the weights are; the server names the weights' type only."""


@dataclass
class LlamaCppSession(HttpSession):
    """A llama.cpp server ready for requests: our child, or one that was there before."""

    learns: bool = False

    def counters(self) -> Raw:
        """`/metrics`, whether `/slots` says that speculation is on, and which process answered."""
        reply = self.get("/metrics")
        if reply.status_code != 200:
            return {}
        raw = counters.parse(reply.text)
        started = reply.headers.get("process-start-time-unix", "")
        if started.isdigit():
            raw[counters.PROCESS_START] = float(started)
        speculative = self.speculative()
        return raw if speculative is None else raw | {SPECULATIVE: float(speculative)}

    def reset(self) -> bool:
        """No prompt is kept from one request to the next; what a drafter learned cannot be forgotten."""
        return not self.learns

    def speculative(self) -> bool | None:
        """What `/slots` says; None where the server does not show its slots."""
        slots = self.json("/slots")
        return any(slot.get("speculative") for slot in slots) if isinstance(slots, list) and slots else None


class LlamaCppEngine:
    """llama.cpp through the `xllamacpp` package."""

    name = "llamacpp"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"
    ids_path: str | None = "/v1/completions"
    """It gives timings with each token, usage and finish as the chat route does; `/completion` would also give the
    ids, but of a character of several tokens only the last."""

    def probe(self, where: Where) -> Availability:
        """The version of xllamacpp in the interpreter, or what the server at the URL says of itself."""
        if where.url is not None:
            return _probe_url(attached.base(where.url))
        if where.python is not None and shutil.which(where.python) is None:
            why = f"engine.python: {where.python} is no program that can be run"
            return Availability(ok=False, why_not=why, install="Name a Python that has xllamacpp.")
        return adapters.installed(self.name, Where(python=where.python), DISTRIBUTIONS)

    def launch(self, config: Config, version: str) -> Launch:
        """Resolve model, method and arguments to the child's command. A URL is attached to, with nothing to start."""
        if config.engine.command is not None:
            why = (
                "llamacpp runs in an interpreter (engine.python) or at a URL (engine.url); leave command out"
            )
            raise Unsupported("engine.command", why)
        if config.engine.url is not None:
            return attached.attach(config, version)
        asked = flags.resolve(self.name, config.method, version)
        sizes = _sizes(config)
        model = _chat_model(config.model)
        draft = _draft_model(config.method)
        files = {"model": model.path} | ({"draft": draft.path} if draft else {})
        python = python_for(self.name, config.engine.python)
        argv: tuple[str, ...] = (python, "-u", str(CHILD), "--model", str(model.path))
        argv += tuple(part for name, value in sizes.items() for part in (f"--{name}", str(value)))
        method = config.method.model_copy(update={"draft": str(draft.path) if draft else None})
        argv += flags.flags_for(self.name, method, version)
        facts = Facts(
            engine=self.name,
            engine_version=version,
            argv=argv,
            slots=sizes["slots"],
            context_tokens=sizes["context"],
            threads=sizes["threads"],
            model_path=str(model.path),
            model_sha256=model.sha256,
            draft_sha256=draft.sha256 if draft else None,
            extra={"method": asked.method, "weight_bytes": gguf.weight_bytes(model.path)},
        )
        return Launch(argv=argv, files=files, facts=facts, learns=asked.learns)

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[LlamaCppSession]:
        """Start the child, or attach; the facts then also hold what the server says of itself."""
        if launch.facts.url is not None:
            yield _checked(LlamaCppSession(launch.facts, attached.base(launch.facts.url)))
            return
        with serve(launch.argv, launch.env, log, why=last_error) as child:
            yield _checked(
                LlamaCppSession(launch.facts, child.address, child, log, last_error, learns=launch.learns)
            )

    def body(self, request: Request) -> bytes:
        """A streamed request, a chat or a prompt of ids. Samplers that a default would add to temperature and
        top_p are switched off."""
        ids = request.prompt_ids
        prompt = {"messages": [dict(m) for m in request.messages]} if ids is None else {"prompt": list(ids)}
        fields: dict[str, Any] = prompt | {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
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


def _probe_url(address: str) -> Availability:
    props = attached.page(address, "/props")
    if not isinstance(props, dict):
        return attached.not_available(address, "llama.cpp", "it has no /props")
    return attached.available("llamacpp", str(props.get("build_info", "unknown")))


def _checked(session: LlamaCppSession) -> LlamaCppSession:
    """Add what the server says of itself. Raises SpecbenchError where speculation is not what was asked for."""
    speculative = session.speculative()
    session.check_speculation(speculative)
    props = session.json("/props") or {}
    template, weights = props.get("chat_template"), props.get("model_ftype")
    says = {
        "speculative": speculative,
        "precision": precision.phrase(COMPUTE, weights) if isinstance(weights, str) else None,
        "template_sha256": hashlib.sha256(template.encode()).hexdigest()
        if isinstance(template, str)
        else None,
        "slots": session.facts.slots or props.get("total_slots"),
        "context_tokens": session.facts.context_tokens
        or props.get("default_generation_settings", {}).get("n_ctx"),
        "model_path": session.facts.model_path or props.get("model_path"),
        "extra": session.facts.extra | {"weight_type": weights},
    }
    session.facts = session.facts.model_copy(update=says)
    return session


# --- from a config to options -----------------------------------------------------------------------------


def _chat_model(name: str) -> ModelFile:
    """The target's file. Requests are chats, so a model without a chat template is refused."""
    model = resolve(name)
    if gguf.has_chat_template(model.path) is False:
        raise SpecbenchError(
            f"model: {name} has no chat template, so it is a base model and llama.cpp would guess one; "
            "name an instruct model."
        )
    return model


def _draft_model(method: Method) -> ModelFile | None:
    """The drafter's file, after the table has said whether the method has one."""
    if method.draft is None:
        return None
    try:
        return resolve(method.draft)
    except SpecbenchError as error:
        raise SpecbenchError(str(error).replace("model:", "method.draft:", 1)) from None


def _sizes(config: Config) -> dict[str, int]:
    """Slots, context tokens per slot and threads, from `engine.args` or their defaults."""
    args = config.engine.args
    for name in args:
        if name not in ("slots", "context", "threads"):
            raise Unsupported(
                f"engine.args.{name}", "llamacpp does not take it; allowed: slots, context, threads"
            )
    slots = max(config.concurrency, _count(args, "slots", 1))
    return {
        "slots": slots,
        "context": _count(args, "context", CONTEXT_TOKENS),
        "threads": adapters.threads(args, MOST),
    }


def _count(args: Mapping[str, Scalar], name: str, default: int) -> int:
    value = args.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        why = f"must be a whole number of at least 1 and at most {MOST}, not {value!r}"
        raise Unsupported(f"engine.args.{name}", why)
    return value
