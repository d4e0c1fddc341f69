"""ShareGPT exports, and chat messages in general: a conversation of both sides under one key.

The shapes met in public copies differ: `from`/`value` beside `role`/`content` (even inside one row), `human`
or `user`, `gpt`, `assistant`, `chatgpt` or `bing`; rows that open with the model's turn; a leading system
text. Public reports: ai-dynamo/aiperf issue 798 (only the first two turns used) and pull 828 (rows with
mixed keys vanish). Rules, so that one row always gives one prompt:

- everything before the first human turn is dropped but the system text, which is kept;
- an empty assistant message counts as absent; neighbours of one side are joined by a blank line;
- all turns are kept, and the assistant's become the prompt's history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import NamedTuple

from workloads.loaders.fields import Row, id_field, json_name, length_field, text_field
from workloads.prompt import UNCATEGORISED, Prompt, WorkloadError

KEYS = ("conversations", "conversation")
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
}


class Message(NamedTuple):
    """One message with its role in chat-completions terms: user, assistant or system."""

    role: str
    text: str


class Dialogue(NamedTuple):
    """A conversation seen from the user: their turns, the system text, and the answers that came with it."""

    turns: tuple[str, ...]
    system: str | None = None
    history: tuple[str, ...] = ()


def matches(row: Row) -> bool:
    """Whether a row has a ShareGPT conversation."""
    return any(key in row for key in KEYS)


def parse(row: Row, fallback_id: str) -> Prompt:
    """One row as a prompt; raises WorkloadError with the reason where it cannot be one."""
    key = next((key for key in (*KEYS, "messages") if row.get(key) is not None), None)
    if key is None:
        raise WorkloadError("the row has no `conversations`; a ShareGPT row lists its messages there.")
    dialogue = conversation(row[key], key)
    return Prompt(
        id=id_field(row, fallback_id),
        category=text_field(row, "category") or UNCATEGORISED,
        expected_tokens=length_field(row),
        language=text_field(row, "language"),
        source=text_field(row, "source"),
        **dialogue._asdict(),
    )


def conversation(value: object, key: str) -> Dialogue:
    """A list of messages under `key` as a dialogue, by the rules above."""
    if not isinstance(value, list):
        raise WorkloadError(f"`{key}` is {json_name(value)}; it must be a list of messages.")
    messages = [_message(item, f"{key}[{i}]") for i, item in enumerate(value)]
    start = next((i for i, message in enumerate(messages) if message.role == "user"), None)
    if start is None:
        raise WorkloadError(f"`{key}` has no human turn; nothing could be asked.")
    spoken = _joined(m for m in messages[start:] if m.text.strip())
    if any(message.role == "system" for message in spoken):
        raise WorkloadError(f"`{key}` has a system message after the first human turn; put it first.")
    system = "\n\n".join(m.text for m in messages[:start] if m.role == "system" and m.text.strip())
    turns = tuple(m.text for m in spoken if m.role == "user")
    return Dialogue(turns, system or None, tuple(m.text for m in spoken if m.role == "assistant"))


def _joined(messages: Iterable[Message]) -> list[Message]:
    runs = groupby(messages, key=lambda message: message.role)
    return [Message(role, "\n\n".join(message.text for message in run)) for role, run in runs]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, Mapping):
        raise WorkloadError(f"`{where}` is {json_name(item)}; it must be an object with a role and a text.")
    name = item.get("from") or item.get("role")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise WorkloadError(f"`{where}` is from {name!r}; known are {', '.join(ROLES)}.")
    text = _content(next((item[k] for k in ("value", "content", "text") if k in item), None), where)
    if role == "user" and not text.strip():
        raise WorkloadError(f"`{where}` is an empty human turn.")
    return Message(role, text)


def _content(value: object, where: str) -> str:
    """Plain text, or the joined text parts of a chat-completions content list."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    texts = [
        part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)
    ]
    if not texts or len(texts) != len(parts):
        raise WorkloadError(f"`{where}` has content that is not text; only text can be sent.")
    return "\n".join(texts)
