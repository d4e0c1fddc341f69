"""Any running server that speaks the OpenAI chat stream: attach to its URL, find out what it is, start nothing.

vLLM, SGLang, TensorRT-LLM and llama.cpp are told apart by the owner of their models and by pages that only one of them
has, and are asked and counted as their own adapters do. Of another server only what its replies carry is known; every
other count stays unknown. What may be asked matters: TensorRT-LLM refuses a field that it does not know, SGLang a
streamed chat that asks for token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from runners import attached, counters, sglang, tensorrt_llm
from runners.attached import HttpSession
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts import SPECULATIVE, llama_counts, vllm_counts
from runners.counts_sglang import SPECULATIVE as SGLANG_SPECULATIVE
from runners.counts_sglang import details_of, sglang_counts
from runners.counts_trtllm import PREFIX as TRTLLM
from runners.counts_trtllm import trtllm_counts
from specbench.cell import Config, Facts
from specbench.errors import SpecbenchError, Unsupported

Kind = Literal["vllm", "sglang", "tensorrt_llm", "llamacpp", "other"]

OWNERS: Mapping[str, Kind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt_llm",
    "llamacpp": "llamacpp",
}
"""`owned_by` of the list of models."""
ANY_MODEL = ("served", "default")
"""Names in a plan that mean whatever the server has."""


@dataclass(frozen=True)
class Found:
    """What a URL offers."""

    kind: Kind
    version: str | None = None
    models: tuple[str, ...] = ()
    speculative: bool | None = None
    """Whether the server says that it speculates; None where it does not say."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else it says of itself, for the facts."""


def discover(address: str) -> Found:
    """Ask a server what it is. Raises SpecbenchError where nothing answers as an OpenAI-style server does."""
    models = attached.served(address)
    owner = next((str(model.get("owned_by")) for model in models if model.get("owned_by")), "")
    kind = OWNERS.get(owner) or _kind_by_pages(address)
    seen = {
        key: models[0][key] for key in ("id", "owned_by", "root") if models and _is_text(models[0].get(key))
    }
    return _DETAILS[kind](address, attached.names(models), seen)


def _kind_by_pages(address: str) -> Kind:
    """Told by a page that only one kind has; behind a proxy the list of models may be another's."""
    if sglang.server_info(address) is not None:
        return "sglang"
    metrics = attached.ask(address, "/metrics")
    text = metrics.text if metrics is not None and metrics.status_code == 200 else ""
    if "llamacpp:" in text or isinstance(attached.page(address, "/props"), dict):
        return "llamacpp"
    return "vllm" if "vllm:" in text else "other"


def _sglang(address: str, models: tuple[str, ...], seen: Mapping[str, Any]) -> Found:
    info = sglang.server_info(address) or {}
    says = sglang.said(info)
    on = says["speculative"] if info else None
    return Found("sglang", _text(info.get("version")), models, on, {**seen, **says["extra"]})


def _tensorrt_llm(address: str, models: tuple[str, ...], seen: Mapping[str, Any]) -> Found:
    page = attached.ask(address, "/prometheus/metrics")
    raw = counters.parse(page.text) if page is not None and page.status_code == 200 else {}
    return Found("tensorrt_llm", attached.version(address), models, tensorrt_llm.speculating(raw), seen)


def _llamacpp(address: str, models: tuple[str, ...], seen: Mapping[str, Any]) -> Found:
    props, slots = attached.page(address, "/props"), attached.page(address, "/slots")
    on = any(slot.get("speculative") for slot in slots) if isinstance(slots, list) and slots else None
    build = props.get("build_info") if isinstance(props, dict) else None
    return Found("llamacpp", _text(build), models, on, seen)


def _vllm(address: str, models: tuple[str, ...], seen: Mapping[str, Any]) -> Found:
    page = attached.ask(address, "/metrics")
    text = page.text if page is not None and page.status_code == 200 else ""
    on = "vllm:spec_decode_num_drafts" in text if "vllm:" in text else None
    return Found("vllm", attached.version(address), models, on, seen)


def _other(address: str, models: tuple[str, ...], seen: Mapping[str, Any]) -> Found:
    return Found("other", None, models, None, seen)


_DETAILS: Mapping[Kind, Callable[[str, tuple[str, ...], Mapping[str, Any]], Found]] = {
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
    "llamacpp": _llamacpp,
    "vllm": _vllm,
    "other": _other,
}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# --- the adapter ------------------------------------------------------------------------------------------

STANDARD: Mapping[str, Any] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
ASKED: Mapping[Kind, Mapping[str, Any]] = {
    "vllm": {"return_token_ids": True, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    "sglang": {"return_spec_tokens_details": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "tensorrt_llm": {"top_k": 0, "min_p": 0.0},
    "llamacpp": {
        "timings_per_token": True,
        "cache_prompt": False,
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
    },
    "other": {},
}
"""What is asked of a kind beyond the standard: its counts, and that no sampler of the model's defaults joins in."""


class OpenAIEngine:
    """Attach-only adapter: `engine.url` says where."""

    name = "openai"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"
    ids_path: str | None = None

    def __init__(self) -> None:
        self._found: dict[str, Found] = {}

    def probe(self, where: Where) -> Availability:
        """Usable where a URL is given and a server answers there."""
        if where.url is None:
            why = "it attaches to a running server and no url was given"
            return Availability(ok=False, why_not=why, install="Set engine.url.")
        try:
            found = self._at(where.url)
        except SpecbenchError as error:
            return Availability(ok=False, why_not=str(error).rstrip("."))
        version = "attached" if found.kind == "other" else f"{found.kind} {found.version or 'unknown'}"
        return Availability(ok=True, version=version, methods=("none", "as-served"))

    def launch(self, config: Config, version: str) -> Launch:
        """Nothing to start; the method is whatever the server at the URL does."""
        if config.engine.url is None:
            raise Unsupported(
                "engine.url", "give the address of the running server, such as http://127.0.0.1:8000"
            )
        if config.method.name not in ("none", "as-served"):
            raise Unsupported(
                "method.name", "a running server decides its own method; use none (baseline) or as-served"
            )
        if config.method.k or config.method.draft or config.method.params or config.method.pinned:
            raise Unsupported(
                "method", "a running server decides its own method; give it no k, draft or others"
            )
        if config.engine.args:
            raise Unsupported("engine.args", "a running server has its own settings; leave args out")
        found = self._at(config.engine.url)
        name = _request_name(attached.base(config.engine.url), config.model, found.models)
        extra = {"kind": found.kind, **found.extra}
        facts = Facts(
            engine=self.name,
            engine_version=version,
            url=config.engine.url,
            served_model=name,
            speculative=found.speculative,
            extra=extra,
        )
        return Launch(argv=(), facts=facts)

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[AttachedSession]:
        """Attach: look again at what is there, since it may have been restarted."""
        self._found.pop(attached.base(str(launch.facts.url)), None)
        found = self._at(str(launch.facts.url))
        extra = {**launch.facts.extra, "kind": found.kind, **found.extra}
        facts = launch.facts.model_copy(update={"speculative": found.speculative, "extra": extra})
        yield AttachedSession(facts, attached.base(str(launch.facts.url)))

    def _at(self, url: str) -> Found:
        """What is at a URL, asked once until a session opens there."""
        address = attached.base(url)
        if address not in self._found:
            self._found[address] = discover(address)
        return self._found[address]

    def body(self, request: Request) -> bytes:
        """Chat request with what every server met so far takes; a lone kind is asked for all that it has."""
        fields = {
            "model": request.model,
            "messages": [dict(message) for message in request.messages],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            **STANDARD,
            **self._asked(),
        }
        optional = {"seed": request.seed, "ignore_eos": request.ignore_eos or None}
        return orjson.dumps(fields | {name: value for name, value in optional.items() if value is not None})

    def _asked(self) -> Mapping[str, Any]:
        """What the kinds met have in common: with two URLs a request does not say which it is for."""
        kinds = [ASKED[found.kind] for found in self._found.values()] or [ASKED["other"]]
        first, *others = kinds
        return {name: value for name, value in first.items() if all(o.get(name) == value for o in others)}

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Counts as the server's own kind defines them, told by what its replies and counters carry."""
        if any("timings" in stream.tail for stream in streams):
            return llama_counts(streams, before, after)
        if SGLANG_SPECULATIVE in after or any(details_of(stream) for stream in streams):
            return sglang_counts(streams, before, after)
        if any(key.startswith(TRTLLM) for key in after) or any(_says_iterations(s) for s in streams):
            return trtllm_counts(streams, before, after)
        return vllm_counts(streams, before, after)


def _says_iterations(stream: Stream) -> bool:
    return "avg_decoded_tokens_per_iter" in (stream.tail.get("choice") or {})


def _request_name(address: str, model: str, offered: Sequence[str]) -> str | None:
    """The name that requests carry: the plan's where the server has it; one that it has not is refused by name."""
    named = model not in ANY_MODEL
    return attached.request_name(address, model, offered, asked=named)


@dataclass
class AttachedSession(HttpSession):
    """A server that was there before us and stays after us; its counters are read as its kind has them."""

    def __post_init__(self) -> None:
        makers: dict[str, type[sglang.SglangSession] | type[tensorrt_llm.TrtllmSession]] = {
            "sglang": sglang.SglangSession,
            "tensorrt_llm": tensorrt_llm.TrtllmSession,
        }
        maker = makers.get(str(self.facts.extra.get("kind")))
        self._own = maker(self.facts, self.address) if maker else None

    def counters(self) -> Raw:
        """The kind's pages, or nothing where the server has none. Raises EngineFailed where it answers no more."""
        if self._own is not None:
            return self._own.counters()
        text = self.text("/metrics")
        raw = counters.parse(text) if text is not None else {}
        if self.facts.extra.get("kind") == "llamacpp" and self.facts.speculative is not None:
            raw[SPECULATIVE] = float(self.facts.speculative)
        return raw

    def reset(self) -> bool:
        """An attached server is not ours to clear or restart."""
        return False
