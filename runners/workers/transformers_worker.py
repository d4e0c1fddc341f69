"""Hugging Face transformers in a worker: `generate` with a streamer that sees each target pass.

Seen on 5.24: one `put()` a step, after the prompt's own; in assisted generation the first pass takes the prompt and
the first draft together. What a step accepted is what it emitted less one, which `generate` has cut at the end token
and at the limit. What was drafted is in no output, so `get_candidates` of the candidate generator is wrapped, whatever
class it is of.

Boundary: imports the standard library and the engine. The protocol is main.py's.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

WARM_TOKENS = 8
PROBE = "Repeat after me: one two three, one two three, one two three."


def load(asked: dict[str, Any], log: Any) -> Transformers:
    """Load the model, and the assistant where there is one, and see whether it speculates."""
    return Transformers(asked, log)


class GivenUp(Exception):
    """The suite no longer waits for this reply."""


class Transformers:
    """One model; one request at a time, as assisted generation demands."""

    def __init__(self, asked: dict[str, Any], log: Any) -> None:
        self.asked = asked
        torch.set_num_threads(asked["threads"])
        transformers.utils.logging.set_verbosity_error()
        self.model, self.tokenizer = _load(asked["model"], asked["dtype"])
        self.assistant: Any = None
        self.more: dict[str, Any] = dict(asked.get("generate") or {})
        if asked.get("draft"):
            self.assistant, own = _load(asked["draft"], asked["dtype"])
            self.more["assistant_model"] = self.assistant
            if asked.get("universal"):
                self.more |= {"tokenizer": self.tokenizer, "assistant_tokenizer": own}
        # The assistant's own settings decide how much is drafted; for early exit the model is its own assistant.
        for name, value in (asked.get("assistant") or {}).items():
            setattr((self.assistant or self.model).generation_config, name, value)
        self.waiting: list[tuple[dict[str, Any], Any]] = []
        self.totals = dict.fromkeys(("requests", "tokens", "steps", "draft_tokens", "accepted_tokens"), 0)
        self.drafts = _Drafts(self.model)
        self._generate(
            self.tokenizer(PROBE).input_ids, {"max_tokens": WARM_TOKENS, "ignore_eos": True}, _Quiet()
        )
        self.speculative = self.drafts.made > 0
        log(f"candidate generator: {self.drafts.kind or 'none'}")

    # --- what main.py calls ---------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What the model is."""
        template = self.tokenizer.chat_template
        parameters = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return {
            "speculative": self.speculative,
            "threads": torch.get_num_threads(),
            "precision": str(self.model.dtype).removeprefix("torch."),
            "context_tokens": getattr(self.model.config, "max_position_embeddings", None),
            "template_sha256": hashlib.sha256(template.encode()).hexdigest()
            if isinstance(template, str)
            else None,
            "extra": {
                "torch": torch.__version__,
                "candidate_generator": self.drafts.kind,
                "attention": getattr(self.model.config, "_attn_implementation", None),
                "weight_bytes": parameters,
            },
        }

    def add(self, body: dict[str, Any], reply: Any) -> None:
        """Queue a request."""
        self.waiting.append((body, reply))

    def busy(self) -> bool:
        """Whether a request waits."""
        return bool(self.waiting)

    def step(self) -> None:
        """Answer the oldest request, all of it: `generate` does not come back before."""
        body, reply = self.waiting.pop(0)
        try:
            self._answer(body, reply)
        except GivenUp:
            reply.fail("given up")
        except Exception:
            self.waiting.insert(0, (body, reply))  # `drop` forgets it, and only it
            raise

    def drop(self) -> None:
        """Forget the request that failed, with no state of it left in the model."""
        del self.waiting[:1]

    def counters(self) -> dict[str, float]:
        """Totals since the start."""
        totals = {f"worker_{name}_total": float(value) for name, value in self.totals.items()}
        return totals | {"worker_speculative": float(self.speculative)}

    def reset(self) -> bool:
        """Nothing is kept: each `generate` has a cache of its own, and the draft length is constant."""
        return True

    # --- one reply ------------------------------------------------------------------------------------------

    def _answer(self, body: dict[str, Any], reply: Any) -> None:
        ids = body.get("ids") or self._encode(body["messages"])
        streamer = _Steps(reply, self.drafts, self.totals)
        self._generate(ids, body, streamer)
        self.totals["requests"] += 1
        ended = streamer.ids[-1:] and streamer.ids[-1] in _ends(self.model) and not body.get("ignore_eos")
        reply.end(
            finish="stop" if ended else "length",
            prompt_tokens=len(ids),
            text=self.tokenizer.decode(streamer.ids, skip_special_tokens=True),
        )

    def _encode(self, messages: list[dict[str, str]]) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _generate(self, ids: list[int], body: dict[str, Any], streamer: Any) -> None:
        prompt = torch.tensor([ids], dtype=torch.long)
        if body.get("seed") is not None:
            torch.manual_seed(body["seed"])
        own = self.model.generation_config
        kept = own.eos_token_id
        if body.get("ignore_eos"):
            own.eos_token_id = None  # a value of None in the call would fall back to the model's own
        self.drafts.begin()
        try:
            with torch.inference_mode():
                self.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=body["max_tokens"],
                    streamer=streamer,
                    **_sampling(body),
                    **self.more,
                )
        finally:
            own.eos_token_id = kept


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("temperature", 0.0) <= 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": body["temperature"],
        "top_p": body.get("top_p", 1.0),
        "top_k": 0,
    }


def _ends(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def _load(path: str, dtype: str) -> tuple[Any, Any]:
    """Model and tokenizer from a folder, or from a GGUF file, whose weights are dequantised."""
    place = Path(path)
    where = str(place) if place.is_dir() else str(place.parent)
    file = {} if place.is_dir() else {"gguf_file": place.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, dtype), **file)
    model.eval()
    own = model.generation_config
    # A model's own sampling settings would be applied, or warned of, beside what a request asks for.
    own.do_sample, own.temperature, own.top_p, own.top_k = False, None, None, None
    own.min_p = own.typical_p = own.repetition_penalty = own.no_repeat_ngram_size = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, **file)
    if own.eos_token_id is None:
        own.eos_token_id = tokenizer.eos_token_id
    if own.pad_token_id is None:
        own.pad_token_id = _ends(model).copy().pop()
    return model, tokenizer


class _Drafts:
    """Counts what a model's candidate generators draft, by standing between the model and each of them."""

    def __init__(self, model: Any) -> None:
        self.kind: str | None = None
        self.made = 0
        self.last: tuple[int, int] | None = None
        """Tokens of the newest draft, and the nanoseconds that it took."""
        make = getattr(model, "_get_candidate_generator", None)
        if make is None:
            raise RuntimeError(
                "this version of transformers has no _get_candidate_generator to count drafts at"
            )

        def counted(*arguments: Any, **named: Any) -> Any:
            return self._counted(make(*arguments, **named))

        model._get_candidate_generator = counted

    def begin(self) -> None:
        """A new reply."""
        self.last = None

    def take(self) -> tuple[int, int] | None:
        """The newest draft, once."""
        last, self.last = self.last, None
        return last

    def _counted(self, generator: Any) -> Any:
        self.kind = type(generator).__name__
        self.made += 1
        get = generator.get_candidates

        def get_candidates(input_ids: Any, *arguments: Any, **named: Any) -> Any:
            began = time.monotonic_ns()
            found = get(input_ids, *arguments, **named)
            self.last = (int(found[0].shape[1] - input_ids.shape[1]), time.monotonic_ns() - began)
            return found

        generator.get_candidates = get_candidates
        return generator


class _Quiet(BaseStreamer):  # type: ignore[misc]
    def put(self, value: Any) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


class _Steps(BaseStreamer):  # type: ignore[misc]
    """Reports each step as it ends."""

    def __init__(self, reply: Any, drafts: _Drafts, totals: dict[str, int]) -> None:
        self.reply, self.drafts, self.totals = reply, drafts, totals
        self.ids: list[int] = []
        self.prompt_seen = False

    def put(self, value: Any) -> None:
        """The prompt first, then the tokens of one step."""
        at_ns = time.monotonic_ns()
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        if self.reply.cancelled:
            raise GivenUp
        ids = [int(token) for token in value.flatten().tolist()]
        drafted, draft_ns = self.drafts.take() or (0, None)
        self.reply.step(ids, at_ns, drafted=drafted, accepted=len(ids) - 1, draft_ns=draft_ns)
        self.totals["tokens"] += len(ids)
        if self.ids:
            self.totals["steps"] += 1
            self.totals["draft_tokens"] += drafted
            self.totals["accepted_tokens"] += len(ids) - 1
        self.ids += ids

    def end(self) -> None:
        """The reply's last record says it."""
