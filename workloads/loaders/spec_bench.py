"""Question files of Spec-Bench (`question_id`, `category`, `turns`), which SPEED-Bench shares.

Source of the shape: github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl: 480 questions in 13 raw
categories, of which eight are MT-bench's. The task that Spec-Bench reports a category under becomes the
sub-category where the row has none. `reference` is a gold answer or a rubric, not a turn of a conversation,
so it does not become history.
"""

from __future__ import annotations

from dataclasses import replace

from workloads.loaders import jsonl
from workloads.loaders.fields import Row
from workloads.prompt import Prompt, WorkloadError

KEYS = ("question_id", "category", "turns")
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SINGLE = ("translation", "summarization", "qa", "math_reasoning", "rag")
TASKS = dict.fromkeys(_MT_BENCH, "mt_bench") | {name: name for name in _SINGLE}
"""Raw category to the task under which Spec-Bench reports it."""


def matches(row: Row) -> bool:
    """Whether a row has the three keys of a question."""
    return all(key in row for key in KEYS)


def parse(row: Row, fallback_id: str) -> Prompt:
    """One question as a prompt; raises WorkloadError with the reason where it cannot be one."""
    for key in KEYS:
        if row.get(key) is None:
            raise WorkloadError(f"the row has no `{key}`; a Spec-Bench question needs it.")
    prompt = jsonl.parse({key: value for key, value in row.items() if key != "messages"}, fallback_id)
    return prompt if "sub_category" in row else replace(prompt, sub_category=TASKS.get(prompt.category))
