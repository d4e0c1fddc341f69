"""Any running server that speaks the OpenAI chat stream: attach to its URL, start nothing.

What it is (llama.cpp, vLLM, other) shows in its replies and counters, and acceptance is read accordingly;
where a server says nothing about speculation, every count stays unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import orjson

from runners import counters
from runners.base import Availability, Counts, Launch, Raw, Request, Stream, Where
from runners.counts import llama_counts, vllm_counts
from specbench.cell import Config, Facts
from specbench.errors import SpecbenchError, Unsupported

_TIMEOUT_S = 10.0


class OpenAIEngine:
    """Attach-only adapter: `engine.url` says where."""

    name = "openai"
    driver: Literal["sse", "worker"] = "sse"
    path = "/v1/chat/completions"

    def probe(self, where: Where) -> Availability:
        """Usable where a URL is given and a server answers there with its models."""
        if where.url:
            try:
                _served(_base(where.url))
            except SpecbenchError as error:
                return Availability(ok=False, why_not=str(error).rstrip("."))
            return Availability(ok=True, version="attached", methods=("none", "as-served"))
        return Availability(
            ok=False,
            why_not="it attaches to a running server and no url was given",
            install="Set engine.url.",
        )

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
        if config.engine.args:
            raise Unsupported("engine.args", "a running server has its own settings; leave args out")
        facts = Facts(engine=self.name, engine_version=version, url=config.engine.url)
        return Launch(argv=(), facts=facts)

    @contextmanager
    def start(self, launch: Launch, log: Path) -> Iterator[AttachedSession]:
        """Attach: ask what is served, and keep that with the facts."""
        address = _base(str(launch.facts.url))
        served = _served(address)
        extra = {key: served[key] for key in ("id", "owned_by", "root") if isinstance(served.get(key), str)}
        facts = launch.facts.model_copy(update={"served_model": served.get("id"), "extra": extra})
        yield AttachedSession(facts, address)

    def body(self, request: Request) -> bytes:
        """Chat request. Fields beyond the standard ask vLLM and llama.cpp for counts; others ignore them."""
        fields: dict[str, Any] = {
            "model": request.model,
            "messages": [dict(message) for message in request.messages],
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "timings_per_token": True,
            "return_token_ids": True,
            "cache_prompt": False,
        }
        optional = {"seed": request.seed, "ignore_eos": request.ignore_eos or None}
        return orjson.dumps(fields | {name: value for name, value in optional.items() if value is not None})

    def counts(self, streams: Sequence[Stream], before: Raw, after: Raw) -> Counts:
        """Counts as the server's own kind defines them, told by what its replies carry."""
        if any("timings" in stream.tail for stream in streams):
            return llama_counts(streams, before, after)
        return vllm_counts(streams, before, after)


@dataclass(frozen=True)
class AttachedSession:
    """A server that was there before us and stays after us."""

    facts: Facts
    address: str
    pids: tuple[int, ...] = ()

    def counters(self) -> Raw:
        """`/metrics`, or nothing where the server has none."""
        try:
            reply = httpx.get(f"{self.address}/metrics", timeout=_TIMEOUT_S)
        except httpx.HTTPError:
            return {}
        return counters.parse(reply.text) if reply.status_code == 200 else {}

    def reset(self) -> bool:
        """An attached server cannot be restarted by us."""
        return False


def _base(url: str) -> str:
    """The address without the `/v1` that many paste along."""
    return url.rstrip("/").removesuffix("/v1")


def _served(address: str) -> Mapping[str, Any]:
    """The first model that the server lists. Raises SpecbenchError where nothing answers."""
    try:
        reply = httpx.get(f"{address}/v1/models", timeout=_TIMEOUT_S)
        models = reply.json()["data"] if reply.status_code == 200 else []
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        sent = not isinstance(error, httpx.HTTPError | httpx.InvalidURL)
        why = "it sends no list of models" if sent else str(error) or type(error).__name__
        raise SpecbenchError(
            f"engine.url: no OpenAI-style server answers at {address} ({why}); start it, or mend the address."
        ) from None
    return models[0] if models and isinstance(models[0], dict) else {}
