"""A replica of `trtllm-serve` (TensorRT-LLM 1.2): `python -m runners.replicas.tensorrt_llm MODEL …` takes its options.

Routes: /health, /version, /v1/models, /metrics (JSON, given away when read), /prometheus/metrics and /perf_metrics
(with return_perf_metrics), /v1/chat/completions, /v1/completions. As there: an unknown field is refused; a frame is
an iteration and carries the mean tokens per iteration so far, prefill's included; drafts are whole, and accepted
tokens are counted up to the end of the reply; the iterations that nobody reads are dropped after a while.
"""

from __future__ import annotations

import argparse
import itertools
import struct
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from runners.loopback_script import Event, Reply, Script, Step
from runners.loopback_server import Server, http_reply
from runners.replicas.reply import StepReply
from runners.replicas.start import serve

VERSION = "1.2.0"
"""The version of TensorRT-LLM that this speaks like."""
RING = 1000
"""Iterations kept where `iter_stats_max_iterations` says nothing."""
COMMON = (  # noqa: SIM905
    "model stream stream_options temperature top_p top_k min_p max_tokens seed stop n ignore_eos logprobs user "
    "stop_token_ids min_tokens repetition_penalty presence_penalty frequency_penalty skip_special_tokens"
).split()
FIELDS = {
    b"/v1/chat/completions": {*COMMON, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
                              "chat_template", "chat_template_kwargs", "prompt_token_ids", "response_format"},
    b"/v1/completions": {*COMMON, "prompt", "echo", "best_of", "suffix", "detokenize", "add_special_tokens"},
}  # fmt: skip
"""Fields of a request; any other is refused."""


def parser() -> argparse.ArgumentParser:
    """The options of `trtllm-serve` that the adapter uses."""
    options = argparse.ArgumentParser(prog="trtllm-serve", allow_abbrev=False)
    options.add_argument("model")
    options.add_argument("--host", default="localhost")
    options.add_argument("--port", type=int, default=8000)
    options.add_argument("--backend", default="pytorch")
    options.add_argument("--revision")
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size", "tp_size"):
        options.add_argument(f"--{name}", type=int)
    options.add_argument("--config", "--extra_llm_api_options", dest="config", type=Path)
    return options


class TrtllmReply(StepReply):
    """A reply in TensorRT-LLM's words."""

    def __init__(self, script: Script, ask: dict[str, Any], index: int) -> None:
        super().__init__(script, ask, index)
        self.number = index
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{index}"

    @property
    def drafting(self) -> list[Step]:
        """Steps with a draft, each with the accepted tokens that were emitted."""
        return [s._replace(accepted=min(s.accepted, s.tokens - 1)) for s in self.steps if s.drafted]

    def choice(self, tokens: list[int], out: int) -> dict[str, Any]:
        """Mean tokens per iteration so far, as a 32-bit float; the last frame is the end."""
        ends = list(itertools.accumulate(step.tokens for step in self.steps))
        (mean,) = struct.unpack("f", struct.pack("f", out / (ends.index(out) + 1)))
        last = out == len(self.tokens)
        return {"avg_decoded_tokens_per_iter": mean} | ({"finish_reason": "length"} if last else {})

    def _closing(self, due_s: float, timings: dict[str, Any]) -> list[Event]:
        return self.usage(due_s)


class TrtllmServer(Server):
    """Its pages and counters."""

    def __init__(self, script: Script, given: argparse.Namespace, settings: dict[str, Any]) -> None:
        self.given, self.settings = given, settings
        self.kept = settings.get("iter_stats_max_iterations") or RING
        super().__init__(script)

    def forget(self) -> None:
        """Counters and records at 0."""
        super().forget()
        self.draft_tokens = self.accepted_tokens = self.iterations = 0
        self.unread: deque[dict[str, Any]] = deque(maxlen=self.kept if self.kept > 0 else None)
        self.records: list[dict[str, Any]] = []

    def make(self, path: bytes, ask: dict[str, Any], index: int) -> Reply:
        """A reply in its words."""
        return TrtllmReply(self.script, ask, index)

    def refuse(self, path: bytes, body: bytes) -> bytes | None:
        """A field that it does not know."""
        unknown = set(orjson.loads(body)) - FIELDS.get(path, set())
        if not unknown:
            return None
        detail = [
            {
                "type": "extra_forbidden",
                "loc": ["body", min(unknown)],
                "msg": "Extra inputs are not permitted",
            }
        ]
        return _json("400 Bad Request", {"error": str(detail)})

    def count(self, reply: Reply) -> None:
        """Counted when it has finished."""

    def finished(self, reply: Reply) -> None:
        """Iterations, totals and the request's record."""
        assert isinstance(reply, TrtllmReply)
        for step in reply.steps:
            self.iterations += 1
            self.unread.append(_iteration(self.iterations, step))
        drafted, accepted = (sum(getattr(s, n) for s in reply.drafting) for n in ("drafted", "accepted"))
        self.draft_tokens, self.accepted_tokens = self.draft_tokens + drafted, self.accepted_tokens + accepted
        metrics: dict[str, Any] = {
            "first_iter": self.iterations - len(reply.steps) + 1,
            "last_iter": self.iterations,
        }
        if drafted:
            metrics["speculative_decoding"] = {
                "acceptance_rate": accepted / drafted,
                "total_accepted_draft_tokens": accepted,
                "total_draft_tokens": drafted,
            }
        self.records.append({"request_id": reply.number, "perf_metrics": metrics})

    def metrics(self) -> str:
        """Prometheus text."""
        label = f'model_name="{self.given.model}"'
        says = self.settings.get("speculative_config")
        info = f'{label},spec_enabled="{str(bool(says)).lower()}"'
        lines = [f"trtllm_speculative_config_info{{{info}}} 1.0\n"]
        if says:
            for name, value in (("draft", self.draft_tokens), ("accepted", self.accepted_tokens)):
                lines.append(f"trtllm_spec_decode_num_{name}_tokens_total{{{label}}} {value}\n")
        return "".join(lines)

    def get(self, path: bytes) -> bytes:
        """Reply to GET."""
        if path == b"/prometheus/metrics" and self.settings.get("return_perf_metrics"):
            return super().get(b"/metrics")
        if path == b"/health":
            return http_reply("200 OK", "text/plain", b"")
        page = self.page(path)
        return super().get(b"/none") if page is None else _json("200 OK", page)

    def page(self, path: bytes) -> Any:
        """A page of JSON; what was read of /metrics and /perf_metrics is gone."""
        if path == b"/v1/models":
            card = {"id": self.given.model, "object": "model", "owned_by": "tensorrt_llm"}
            return {"object": "list", "data": [card]}
        if path == b"/version":
            return {"version": VERSION}
        if path == b"/metrics":
            rows = list(self.unread) if self.settings.get("enable_iter_perf_stats") else []
            self.unread.clear()
            return rows
        if path == b"/perf_metrics":
            rows, self.records = (self.records if self.settings.get("return_perf_metrics") else []), []
            return rows
        return None


def _iteration(number: int, step: Step) -> dict[str, Any]:
    """One iteration with one request, as /metrics has it."""
    accepted = min(step.accepted, step.tokens - 1)
    row: dict[str, Any] = {"iter": number, "iterLatencyMS": 1.0, "numActiveRequests": 1}
    row["inflightBatchingStats"] = {"avgNumDecodedTokensPerIter": float(step.tokens)}
    if step.drafted:
        row["specDecodingStats"] = {
            "numDraftTokens": step.drafted,
            "numAcceptedTokens": accepted,
            "numRequestsWithDraftTokens": 1,
            "acceptanceLength": 1.0 + accepted,
            "iterLatencyMS": 0.5,
            "draftOverhead": 0.5,
        }
    return row


def _json(status: str, content: Any) -> bytes:
    return http_reply(status, "application/json", orjson.dumps(content))


def main(argv: Sequence[str] | None = None) -> None:
    """Serve as `trtllm-serve` would."""
    given = parser().parse_args(argv)
    settings = orjson.loads(given.config.read_bytes()) if given.config else {}
    speculative = settings.get("speculative_config") or {}
    k = int(speculative.get("max_draft_len") or 0)
    script: dict[str, Any] = {"frames": "step", "overrun": True, "k": k}
    script |= {"accept": [0.8, 0.7, 0.6]} if k else {}
    serve(lambda whole: TrtllmServer(whole, given, settings), script, given.port)


if __name__ == "__main__":
    main(sys.argv[1:])
