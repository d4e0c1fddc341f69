"""A replica of SGLang 0.5.23's server: `python -m runners.replicas.sglang` takes the options of its launcher.

Routes: /health, /v1/models, /model_info, /server_info, /metrics (with --enable-metrics), /flush_cache,
/v1/chat/completions, /v1/completions. As there: the first token comes alone; every later step verifies a whole
draft, which may run past the end of the reply; counters rise when a request finishes; `sglext` has a record of its
own before the usage; a streamed chat that asks for token ids is refused; unknown fields are ignored.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import orjson

from runners.loopback_script import Event, Reply, Script, Step
from runners.loopback_server import Server, http_reply
from runners.replicas.reply import StepReply
from runners.replicas.start import serve

VERSION = "0.5.23"
"""The version of SGLang that this speaks like."""


def parser() -> argparse.ArgumentParser:
    """The options of `python -m sglang.launch_server` that the adapter uses."""
    options = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
    options.add_argument("--model-path", "--model", required=True)
    options.add_argument("--revision")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=30000)
    options.add_argument("--tensor-parallel-size", "--tp-size", type=int, default=1)
    for name in ("context-length", "max-running-requests", "stream-interval", "random-seed"):
        options.add_argument(f"--{name}", type=int)
    for name in ("dtype", "attention-backend", "served-model-name", "load-format"):
        options.add_argument(f"--{name}")
    options.add_argument("--mem-fraction-static", type=float)
    for name in ("enable-metrics", "enable-cache-report", "disable-radix-cache"):
        options.add_argument(f"--{name}", action="store_true")
    options.add_argument("--speculative-algorithm")
    options.add_argument("--speculative-draft-model-path")
    for name in ("num-steps", "eagle-topk", "num-draft-tokens", "dflash-block-size", "dspark-block-size"):
        options.add_argument(f"--speculative-{name}", type=int)
    options.add_argument("--speculative-ngram-max-bfs-breadth", type=int)
    options.add_argument("--speculative-token-map")
    for name in ("single", "acc"):
        options.add_argument(f"--speculative-accept-threshold-{name}", type=float, default=1.0)
    return options


def draft_tokens(given: argparse.Namespace) -> int | None:
    """SGLang's own number of draft tokens, which counts the root; None without speculation."""
    if given.speculative_algorithm is None:
        return None
    gamma = given.speculative_dspark_block_size
    whole = given.speculative_num_draft_tokens or given.speculative_dflash_block_size
    return int(whole or (gamma + 1 if gamma else 12))


class SglangReply(StepReply):
    """A reply in SGLang's words."""

    @property
    def verified(self) -> list[Step]:
        """Steps that verified a draft: with speculation all but prefill's."""
        return [step for step in self.steps[1:] if step.drafted]

    def record(self) -> dict[str, Any] | None:
        """`spec_tokens_details`; None where nothing was verified."""
        steps = self.verified
        if not steps:
            return None
        correct, proposed = (sum(getattr(s, name) for s in steps) for name in ("accepted", "drafted"))
        lengths = [step.accepted for step in steps]
        return {
            "spec_accept_rate": correct / proposed,
            "spec_accept_length": len(self.tokens) / len(steps),
            "spec_cap_length": 0.0,
            "spec_block_accept_length": 0.0,
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": proposed,
            "spec_verify_ct": len(steps),
            "spec_correct_drafts_histogram": [lengths.count(n) for n in range(max(lengths) + 1)],
            "spec_cap_lens_histogram": [],
        }

    def choice(self, tokens: list[int], out: int) -> dict[str, Any]:
        """Ids of a completion, where asked."""
        ids = not self.chat and self.ask.get("return_token_ids")
        return {"matched_stop": None} | ({"token_ids": tokens} if ids else {})

    def _closing(self, due_s: float, timings: dict[str, Any]) -> list[Event]:
        out = [self.event(due_s, None, finish_reason="length", matched_stop=None)]
        if self.ask.get("return_spec_tokens_details") and (record := self.record()):
            extra = {"routed_experts": None, "cached_tokens_details": None, "spec_tokens_details": record}
            out.append(Event(due_s, self._sse({"choices": [], "sglext": extra}), False))
        return out + self.usage(due_s)


class SglangServer(Server):
    """Its pages and counters."""

    def __init__(self, script: Script, given: argparse.Namespace) -> None:
        self.given = given
        super().__init__(script)

    def forget(self) -> None:
        """Counters at 0."""
        super().forget()
        self.finished_requests = self.generated = self.verify_calls = 0
        self.accept_length = self.accept_rate = 0.0

    def make(self, path: bytes, ask: dict[str, Any], index: int) -> Reply:
        """A reply in its words."""
        return SglangReply(self.script, ask, index)

    def refuse(self, path: bytes, body: bytes) -> bytes | None:
        """/flush_cache, and what 0.5.23 does not do."""
        if path == b"/flush_cache":
            return http_reply("200 OK", "text/plain", b"Cache flushed.\n")
        ask = orjson.loads(body)
        if path == b"/v1/chat/completions" and ask.get("stream") and ask.get("return_token_ids"):
            return _bad_request("return_token_ids is not supported with streaming on chat completions.")
        return None

    def count(self, reply: Reply) -> None:
        """Counted when it has finished."""

    def finished(self, reply: Reply) -> None:
        """Raise the counters and set the gauges, which hold the last value."""
        assert isinstance(reply, SglangReply)
        self.finished_requests += 1
        self.generated += len(reply.tokens)
        self.verify_calls += len(reply.verified)
        if record := reply.record():
            self.accept_length, self.accept_rate = record["spec_accept_length"], record["spec_accept_rate"]

    def metrics(self) -> str:
        """Prometheus text with SGLang's labels; a counter that never rose has no line."""
        label = f'model_name="{self.name}"'
        counters = {
            f'sglang:generation_tokens_total{{is_streaming="true",{label}}}': self.generated,
            f'sglang:num_requests_total{{is_streaming="true",{label}}}': self.finished_requests,
            f"sglang:spec_verify_calls_total{{{label}}}": self.verify_calls,
        }
        gauges = {
            f'sglang:num_running_reqs{{{label},tp_rank="0"}}': 0.0,
            f'sglang:spec_accept_length{{{label},tp_rank="0"}}': self.accept_length,
            f'sglang:spec_accept_rate{{{label},tp_rank="0"}}': self.accept_rate,
        }
        lines = [f"{name} {value}\n" for name, value in counters.items() if value]
        return "".join(lines + [f"{name} {value}\n" for name, value in gauges.items()])

    @property
    def name(self) -> str:
        """The model's name in requests."""
        return str(self.given.served_model_name or self.given.model_path)

    def get(self, path: bytes) -> bytes:
        """Reply to GET."""
        if path == b"/metrics":
            return super().get(path) if self.given.enable_metrics else super().get(b"/none")
        if path in (b"/health", b"/health_generate", b"/flush_cache"):
            return http_reply("200 OK", "text/plain", b"")
        page = self.page(path)
        return super().get(b"/none") if page is None else _json("200 OK", page)

    def page(self, path: bytes) -> dict[str, Any] | None:
        """A page of JSON."""
        if path == b"/v1/models":
            card = {"id": self.name, "object": "model", "owned_by": "sglang", "root": self.name}
            return {"object": "list", "data": [card | {"max_model_len": self.given.context_length}]}
        if path in (b"/model_info", b"/get_model_info"):
            return {
                "model_path": self.given.model_path,
                "served_model_name": self.name,
                "is_generation": True,
            }
        if path in (b"/server_info", b"/get_server_info"):
            state = {"avg_spec_accept_length": self.accept_length or None, "last_gen_throughput": 0.0}
            return self.settings() | {"version": VERSION, "internal_states": [state]}
        return None

    def settings(self) -> dict[str, Any]:
        """The resolved arguments."""
        return vars(self.given) | {"speculative_num_draft_tokens": draft_tokens(self.given)}


def _json(status: str, content: dict[str, Any]) -> bytes:
    return http_reply(status, "application/json", orjson.dumps(content))


def _bad_request(message: str) -> bytes:
    error = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    return _json("400 Bad Request", error)


def main(argv: Sequence[str] | None = None) -> None:
    """Serve as the launcher would."""
    given = parser().parse_args(argv)
    tokens = draft_tokens(given)
    script: dict[str, Any] = {"frames": "step", "overrun": True, "k": (tokens or 1) - 1}
    script |= {"accept": [0.8, 0.7, 0.6]} if tokens else {}
    serve(lambda whole: SglangServer(whole, given), script, given.port)


if __name__ == "__main__":
    main(sys.argv[1:])
