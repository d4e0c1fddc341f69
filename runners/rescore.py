"""Asks an engine what it would have said: next-token log-probabilities after given ids, for `specbench.equality`.

The engine asked is the baseline, without speculation: under speculation llama.cpp's log-probabilities of drafted tokens
are missing. Each token is asked for after its own prefix, in order, so that an engine can compute it as it was computed
in plain decoding, the prompt at once and then a token at a time: on llama.cpp the same prompt in two pieces instead of
one moved the logits of a small 4-bit model by up to 0.47.

Boundary: HTTP, off every hot path. What the numbers mean is `specbench.equality`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx

from specbench.equality import Divergence, Logprobs, Rescored, first_divergence, margin, score
from specbench.errors import InvalidMeasurement

TOP = 50
"""Tokens listed for each place: a token further down than that is far from a tie."""
VLLM_TOP = 20
"""The most that vLLM lists unless its server was started with another `--max-logprobs`."""
_TIMEOUT_S = 120.0


class Scores(Protocol):
    """Something that knows the next token's log-probabilities after a sequence of ids."""

    def next_logprobs(self, ids: Sequence[int], top: int) -> Logprobs:
        """The `top` likeliest tokens after `ids`, before any temperature or truncation."""


@dataclass
class LlamaCppScores:
    """llama.cpp's `/completion` with `n_probs`, at the address of a server that does not speculate.

    What it kept of the question before is used only where this one has one token more: a prompt that merely begins
    alike would be computed in other pieces than it was when it was measured.
    """

    address: str
    _before: tuple[int, ...] = ()

    def next_logprobs(self, ids: Sequence[int], top: int) -> Logprobs:
        kept, self._before = bool(self._before) and tuple(ids[:-1]) == self._before, tuple(ids)
        ask = {
            "prompt": list(ids),
            "n_predict": 1,
            "n_probs": top,
            "temperature": 0.0,
            "cache_prompt": kept,
        }
        reply = _post(f"{self.address}/completion", ask)
        try:
            listed = reply["completion_probabilities"][0]["top_logprobs"]
            return {int(entry["id"]): float(entry["logprob"]) for entry in listed}
        except (KeyError, IndexError, TypeError, ValueError):
            raise InvalidMeasurement(
                f"rescoring: {self.address} gives no log-probabilities; ask a llama.cpp server started with method none."
            ) from None


@dataclass(frozen=True)
class VllmScores:
    """vLLM's `/v1/completions` with `logprobs`, at the address of a server that does not speculate."""

    address: str
    model: str
    """The name that the server knows the model by."""

    def next_logprobs(self, ids: Sequence[int], top: int) -> Logprobs:
        ask = {
            "model": self.model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": min(top, VLLM_TOP),
            "return_tokens_as_token_ids": True,
        }
        reply = _post(f"{self.address}/v1/completions", ask)
        try:
            listed = reply["choices"][0]["logprobs"]["top_logprobs"][0]
            return {int(name.removeprefix("token_id:")): float(value) for name, value in listed.items()}
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            raise InvalidMeasurement(
                f"rescoring: {self.address} gives no log-probabilities by token id; ask a vLLM server without speculation."
            ) from None


def rescore(scores: Scores, prompt: Sequence[int], output: Sequence[int], top: int = TOP) -> Rescored:
    """Judge every token of an output by what the baseline prefers after the output's own beginning.

    Greedy output of a lossless method falls short nowhere by more than numerics do, even where its text parted from
    the baseline's long before.
    """
    tokens, ids = [], list(prompt)
    for token in output:
        tokens.append(score(token, scores.next_logprobs(ids, top)))
        ids.append(token)
    return Rescored(tuple(tokens))


def divergence(
    scores: Scores | None,
    prompt: Sequence[int],
    reference: Sequence[int],
    other: Sequence[int],
    top: int = TOP,
) -> Divergence | None:
    """Where two outputs of one prompt part, with the baseline's margin between the two tokens there if it can be asked."""
    found = first_divergence(reference, other)
    if scores is None or found is None or found.reference is None or found.other is None:
        return found
    for length in range(found.index + 1):
        listed = scores.next_logprobs([*prompt, *reference[:length]], top)
    return replace(found, margin=margin(listed, found.reference, found.other))


def _post(url: str, ask: dict[str, Any]) -> Any:
    try:
        reply = httpx.post(url, json=ask, timeout=_TIMEOUT_S, trust_env=False)
        reply.raise_for_status()
        return reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise InvalidMeasurement(f"rescoring: {url} did not answer as it should ({error}).") from None
