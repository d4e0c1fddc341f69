"""Plain prompt rows, one JSON object each: the format of this package's own splits, and of most users' files.

The text is under the first of these keys that a row has: `messages` (chat messages), `turns`, `prompt`,
`text`, `question`, `input`, `query`, `instruction` (joined with `input` where both are given). A value may
be a string (one turn), a list of strings (turns) or a list of chat messages. Optional: `id`, `category`,
`sub_category`, `difficulty`, `language`, `source`, `system`, `history` (answers to the turns), and an
expected length in tokens as `expected_tokens`, `output_tokens`, `output_len` or `output_length`. Other keys
are left alone: files carry all sorts of notes.
"""

from __future__ import annotations

from workloads.loaders.fields import Row, id_field, json_name, length_field, text_field, text_list
from workloads.loaders.sharegpt import Dialogue, conversation
from workloads.prompt import UNCATEGORISED, Prompt, WorkloadError

TEXT_KEYS = ("messages", "turns", "prompt", "text", "question", "input", "query", "instruction")


def matches(row: Row) -> bool:
    """Whether a row has a text under any known key."""
    return any(row.get(key) is not None for key in TEXT_KEYS)


def parse(row: Row, fallback_id: str) -> Prompt:
    """One row as a prompt; raises WorkloadError with the reason where it cannot be one."""
    dialogue = _dialogue(row)
    return Prompt(
        id=id_field(row, fallback_id),
        category=text_field(row, "category") or UNCATEGORISED,
        sub_category=text_field(row, "sub_category"),
        turns=dialogue.turns,
        difficulty=text_field(row, "difficulty"),
        expected_tokens=length_field(row),
        language=text_field(row, "language"),
        source=text_field(row, "source"),
        system=_system(row, dialogue),
        history=_history(row, dialogue),
    )


def _dialogue(row: Row) -> Dialogue:
    key = next((key for key in TEXT_KEYS if row.get(key) is not None), None)
    if key is None:
        raise WorkloadError(f"the row has no text; give it under one of {', '.join(TEXT_KEYS)}.")
    value = row[key]
    if key == "input" and isinstance(row.get("instruction"), str) and isinstance(value, str):
        return Dialogue(("\n\n".join(filter(str.strip, (row["instruction"], value))),))
    if key == "messages" or (isinstance(value, list) and value and isinstance(value[0], dict)):
        return conversation(value, key)
    if isinstance(value, str):
        return Dialogue((value,))
    if not isinstance(value, list):
        raise WorkloadError(f"`{key}` is {json_name(value)}; it must be a string or a list of turns.")
    return Dialogue(text_list(value, key))


def _system(row: Row, dialogue: Dialogue) -> str | None:
    given = text_field(row, "system")
    if given is not None and dialogue.system is not None:
        raise WorkloadError("the system text is given twice, as `system` and as a message; keep one.")
    return given if given is not None else dialogue.system


def _history(row: Row, dialogue: Dialogue) -> tuple[str, ...]:
    given = row.get("history")
    return dialogue.history if given is None else text_list(given, "history")
