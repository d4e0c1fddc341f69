"""OpenVINO GenAI in a worker: its continuous batching pipeline, stepped here one target pass at a time.

`add_request`, `step` and `read` give each request's tokens of each step, so a batch has per-request counts, which
`generate` over several prompts has not (it sums them). Seen on 2026.4.1: what a step accepted is what it emitted
less one; how much a step drafted is said in total only, after `generate`, and without the last step. The rule for it
(`_drafted`) is therefore held against that total when the worker starts. What a model was compiled to (it may take
fewer threads than were asked for) is in no object that Python gets: the engine prints it, where the log level says so.

Boundary: imports the standard library, numpy and the engine. The protocol is main.py's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

PROBE = " ".join(str(number % 8) for number in range(60))
"""A text that a model goes on copying, so that a drafter which looks in the prompt finds something."""
PROBE_TOKENS = 24
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
SAMPLERS = ("top_k", "min_p", *PENALTIES)
"""What a model's own settings could add to temperature and top_p, also to greedy decoding."""


def load(asked: dict[str, Any], log: Any) -> OpenVino:
    """Compile the model, and the draft model where there is one, and see whether it speculates."""
    return OpenVino(asked, log)


@dataclass
class _Active:
    """One request under way."""

    reply: Any
    handle: Any
    max_tokens: int
    prompt_tokens: int
    stops: frozenset[int]
    ids: list[int] = field(default_factory=list)
    finish: str = "none"


class OpenVino:
    """One pipeline and its requests."""

    def __init__(self, asked: dict[str, Any], log: Any) -> None:
        self.asked, self.log = asked, log
        self.active: list[_Active] = []
        self._numbers = 0
        self.totals = dict.fromkeys(("requests", "tokens", "steps", "draft_tokens", "accepted_tokens"), 0)
        self.pipe, lines = _overheard(self._pipeline, log)
        self.compiled = _compiled(lines)
        self.tokenizer = self.pipe.get_tokenizer()
        self.generation = dict(asked.get("generation") or {})
        self.k = self.generation.get("num_assistant_tokens") if asked.get("draft") else None
        self.speculative = self._probe()

    # --- what main.py calls ---------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What the engine says of itself."""
        template = self.tokenizer.get_original_chat_template()
        threads = self.compiled.get("INFERENCE_NUM_THREADS")
        return {
            "speculative": self.speculative,
            "threads": int(threads) if threads else None,
            "precision": self.compiled.get("INFERENCE_PRECISION_HINT"),
            "template_sha256": hashlib.sha256(template.encode()).hexdigest() if template else None,
            "extra": {
                "openvino_genai": genai.get_version() if hasattr(genai, "get_version") else genai.__version__,
                "openvino": ov.get_version(),
                "kv_precision": self.compiled.get("KV_CACHE_PRECISION"),
                "activation_group": self.compiled.get("DYNAMIC_QUANTIZATION_GROUP_SIZE"),
                "drafted_from": None if self.k is None else "rule, held against the engine's total",
            },
        }

    def add(self, body: dict[str, Any], reply: Any) -> None:
        """Queue a request; the scheduler takes it up in the next step."""
        ids = body.get("ids") or self._encode(body["messages"])
        self._numbers += 1
        config = self._config(body)
        handle = self.pipe.add_request(self._numbers, _tensor(ids), config)
        stops = frozenset(config.stop_token_ids)
        self.active.append(_Active(reply, handle, body["max_tokens"], len(ids), stops))

    def busy(self) -> bool:
        """Whether a request is under way."""
        return bool(self.active)

    def step(self) -> None:
        """One step of the scheduler: one target pass for each request in the batch."""
        self.pipe.step()
        at_ns = time.monotonic_ns()
        for request in list(self.active):
            self._read(request, at_ns)

    def drop(self) -> None:
        """Give every request up."""
        for request in self.active:
            request.handle.cancel()
        self.active.clear()

    def counters(self) -> dict[str, float]:
        """Totals since the start."""
        totals = {f"worker_{name}_total": float(value) for name, value in self.totals.items()}
        known = {} if self.speculative is None else {"worker_speculative": float(self.speculative)}
        return totals | known

    def reset(self) -> bool:
        """Nothing is kept from one request to the next: prefix caching is off and no drafter learns."""
        return True

    # --- requests -------------------------------------------------------------------------------------------

    def _read(self, request: _Active, at_ns: int) -> None:
        ids: list[int] = []
        while request.handle.can_read():
            for output in request.handle.read().values():
                ids += [int(token) for token in output.generated_ids]
                request.finish = {"STOP": "stop", "LENGTH": "length"}.get(output.finish_reason.name, "none")
        if ids:
            self._count(request, ids, at_ns)
        status = request.handle.get_status().name
        if request.reply.cancelled and status == "RUNNING":
            request.handle.cancel()
            self._end(request, status="CANCEL")
        elif status != "RUNNING":
            self._end(request, status)

    def _count(self, request: _Active, ids: list[int], at_ns: int) -> None:
        first = not request.ids
        drafted = 0 if first or self.speculative is False else self._drafted(request, ids)
        request.ids += ids
        request.reply.step(ids, at_ns, drafted=drafted, accepted=0 if first else len(ids) - 1)
        self.totals["tokens"] += len(ids)
        if not first:
            self.totals["steps"] += 1
            self.totals["draft_tokens"] += drafted or 0
            self.totals["accepted_tokens"] += len(ids) - 1

    def _drafted(self, request: _Active, ids: list[int]) -> int | None:
        """How much the draft model drafted for the step: k, or what may still be emitted beside the bonus token.

        A chain also ends at an end token, ignored ones too; one that was not accepted shows nowhere and counts as k.
        """
        if self.k is None:
            return None
        ended = "tree_depth" not in self.generation and request.stops.intersection(ids[:-1])
        return len(ids) - 1 if ended else _rule(self.k, request.max_tokens, len(request.ids))

    def _end(self, request: _Active, status: str) -> None:
        self.active.remove(request)
        if status in ("CANCEL", "STOP"):
            request.reply.fail("given up")
        elif status != "FINISHED":
            request.reply.fail(
                f"OpenVINO did not run the request ({status}): its KV cache is too small for it"
            )
        else:
            self.totals["requests"] += 1
            request.reply.end(
                finish=request.finish,
                prompt_tokens=request.prompt_tokens,
                text=self.tokenizer.decode(request.ids),
                **_durations(request.handle),
            )

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return [
            int(token) for token in self.tokenizer.encode(text, add_special_tokens=False).input_ids.data[0]
        ]

    def _config(self, body: dict[str, Any]) -> Any:
        config, plain = self.pipe.get_config(), genai.GenerationConfig()
        for name in SAMPLERS:
            if hasattr(plain, name):  # an older version may have fewer
                setattr(config, name, getattr(plain, name))
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = body.get("temperature", 0.0) > 0
        if config.do_sample:
            config.temperature, config.top_p = body["temperature"], body.get("top_p", 1.0)
            config.rng_seed = body.get("seed") or 0
        for name, value in self.generation.items():
            setattr(config, name, value)
        return config

    # --- the pipeline ---------------------------------------------------------------------------------------

    def _pipeline(self) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        for name, value in self.asked["scheduler"].items():
            setattr(scheduler, name, value)
        device, properties = self.asked["device"], self.asked["properties"]
        more = dict(self.asked.get("pipeline") or {})
        if self.asked.get("draft"):
            draft = _ir(Path(self.asked["draft"]), self.asked, self.log)
            more["draft_model"] = genai.draft_model(str(draft), device, **properties)
        return genai.ContinuousBatchingPipeline(
            self.asked["model"], scheduler, device, {**properties, **more}
        )

    def _probe(self) -> bool | None:
        """Whether it speculates, from one reply; also the first call, which compiles. None: the reply cannot tell."""
        config = self._config({"max_tokens": PROBE_TOKENS, "ignore_eos": True})
        ids = self.tokenizer.encode(PROBE, add_special_tokens=False).input_ids.data[0]
        result = self.pipe.generate([_tensor(ids)], [config])[0]
        steps = [int(size) for size in result.perf_metrics.raw_metrics.m_batch_sizes]
        said = result.extended_perf_metrics
        if self.asked.get("draft"):
            return self._check_rule(steps, said)
        # Of a prompt lookup that never hit nothing can be told: the engine reports no drafts.
        return max(steps) > 1 or (None if self.asked.get("pipeline") else False)

    def _check_rule(self, steps: list[int], said: Any) -> bool:
        """Hold the rule for drafted tokens against the engine's own total, which lacks the last step."""
        if said is None:
            return False
        total = getattr(said, "get_num_draft_tokens", lambda: None)()
        if self.k is not None:
            emitted = np.cumsum([0, *steps])
            mine = sum(_rule(self.k, PROBE_TOKENS, int(before)) for before in emitted[1 : len(steps) - 1])
            if mine != total:
                self.log(
                    f"the engine drafted {total} tokens where {mine} were expected: drafts are not counted"
                )
                self.k = None
        return bool(total) or max(steps) > 1


def _rule(k: int, max_tokens: int, emitted: int) -> int:
    return max(0, min(k, max_tokens - emitted - 1))


def _durations(handle: Any) -> dict[str, Any]:
    """Times that the engine took of this request, where the version says them per request."""
    try:
        raw = handle.get_perf_metrics().raw_metrics
        return {"prefill_ms": float(raw.m_times_to_first_token[0]) / 1e3}
    except (AttributeError, IndexError, RuntimeError):
        return {}


def _tensor(ids: Any) -> Any:
    return ov.Tensor(np.asarray(ids, dtype=np.int64).reshape(1, -1))


_LEVEL = "OPENVINO_LOG_LEVEL"


def _overheard(make: Callable[[], Any], log: Any) -> tuple[Any, list[str]]:
    """What a call returns, and the lines that the engine prints in it: what it compiled each model to.

    They go to the log where the call fails, and nowhere else: a log's last words are shown to the user.
    """
    try:
        with _stdout_aside() as lines:
            made = make()
    except Exception:
        log("\n".join(lines))
        raise
    return made, lines


@contextmanager
def _stdout_aside() -> Iterator[list[str]]:
    """Where native code prints to meanwhile, at a level at which it does; lines, filled on leaving."""
    lines: list[str] = []
    asked, kept = os.environ.get(_LEVEL), os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.environ[_LEVEL] = "2"  # its INFO
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            ctypes.CDLL(None).fflush(None)  # what C still holds, before the next line sends it elsewhere
            os.dup2(kept, 1)
            os.close(kept)
            os.environ.pop(_LEVEL)
            os.environ.update({} if asked is None else {_LEVEL: asked})
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def _compiled(lines: Iterable[str]) -> dict[str, str]:
    """Properties of the language model. A draft model is given the same; the last one printed counts."""
    found: dict[str, str] = {}
    inside = False
    for line in lines:
        name, _, value = line.partition(":")
        if name == "Model":
            inside = value.strip().startswith("LLM")
        elif inside and line.startswith("  "):
            found[name.strip()] = value.strip()
        else:
            inside = False
    return found


def _ir(model: Path, asked: dict[str, Any], log: Any) -> Path:
    """The folder of a draft model: the one given, or a GGUF written as OpenVINO's own format, once."""
    if model.is_dir():
        return model
    place = Path(asked["ir_cache"]) / f"{asked['draft_sha256'][:16]}-{genai.__version__}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    log(f"writing {model} as OpenVINO's format to {place}")
    scratch = Path(tempfile.mkdtemp(prefix=".ir-", dir=place.parent))
    try:
        link = scratch / model.name
        os.symlink(model, link)  # the engine writes beside the file, whose own folder may be read-only
        genai.LLMPipeline(str(link), asked["device"], enable_save_ov_model=True)
        link.unlink()
        os.replace(scratch, place)
    except OSError:
        if not place.is_dir():  # else another worker was quicker
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place
