"""What both replicas' replies share: a frame a step with its usage, and the usage of the whole at the end."""

from __future__ import annotations

from typing import Any

from runners.loopback_script import WORDS, Event, Reply


class StepReply(Reply):
    """One frame a step; a dialect adds to its choice and closes it."""

    def wants(self, option: str) -> bool:
        """Whether the request's `stream_options` ask for this."""
        return bool((self.ask.get("stream_options") or {}).get(option))

    def choice(self, tokens: list[int], out: int) -> dict[str, Any]:
        """What the dialect adds to the choice of a frame that ends at token `out`."""
        return {}

    def event(self, due_s: float, text: str | None, frame: bool = False, **choice: Any) -> Event:
        """A record with one choice; its running usage where asked."""
        extra = {"usage": self._tokens_used(choice.pop("out"))} if "out" in choice else {}
        says = {"delta": {"content": text} if text is not None else {}} if self.chat else {"text": text or ""}
        whole = {"index": 0, **says, "logprobs": None, "finish_reason": None} | choice
        return Event(due_s, self._sse({"choices": [whole]} | extra), frame)

    def usage(self, due_s: float) -> list[Event]:
        """The last record, where asked."""
        if not self.wants("include_usage"):
            return []
        used = self._tokens_used(len(self.tokens)) | {"prompt_tokens_details": {"cached_tokens": 0}}
        return [Event(due_s, self._sse({"choices": [], "usage": used}), False)]

    def _frame(self, due_s: float, first: int, size: int, timings: dict[str, Any]) -> Event:
        tokens, out = self.tokens[first : first + size], first + size
        text = "".join(f" {WORDS[token]}" for token in tokens)
        running = {"out": out} if self.wants("continuous_usage_stats") else {}
        return self.event(due_s, text, True, **self.choice(tokens, out), **running)
