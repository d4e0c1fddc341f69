"""What servers counted: Prometheus text to numbers, and the difference of two readings over a window.

Boundary: no network and no engine here; `counts` turns replies and these differences into acceptance. The
parser follows the Prometheus text exposition format 0.0.4. vLLM and llama.cpp name their speculation
counters alike after a prefix, and TensorRT-LLM two of them, so one reader serves all three. SGLang's gauges
hold the latest value and no total, so no window can be read from them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from runners.base import Raw
from specbench.cell import MAX_K

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|(?=\}))')
MOST = 2.0**53
"""A larger counter is garbage: a float no longer tells it from the next one."""
PROCESS_START = "process_start_time_seconds"
"""The usual name of the gauge that tells one process from the next."""
_POSITION = re.compile(r'[{,]position="(\d+)"')


def parse(text: str) -> dict[str, float]:
    """Prometheus text to `{name or name{a="x",b="y"}: value}`, labels sorted by name.

    Label values keep their escapes. Comments, unreadable lines and values that are not finite or beyond counting
    are left out: a record of a run holds no NaN.
    """
    found: dict[str, float] = {}
    for line in text.split("\n"):  # not splitlines: a label value may hold other line separators
        sample = _sample(line.strip())
        if sample is not None and abs(sample[1]) <= MOST:  # False for NaN
            found[sample[0]] = sample[1]
    return found


def _sample(line: str) -> tuple[str, float] | None:
    """One line as key and value; None for a comment or a line that is no sample."""
    name = _NAME.match(line)
    if name is None:
        return None
    labels, rest = _labels(line[name.end() :].lstrip())
    fields = rest.split()  # a value, then perhaps a timestamp or an exemplar
    if labels is None or not fields:
        return None
    try:
        return name.group() + labels, float(fields[0])
    except ValueError:
        return None


def _labels(text: str) -> tuple[str | None, str]:
    """The label block in sorted order and what follows it; None where it does not close."""
    if not text.startswith("{"):
        return "", text
    pairs: list[tuple[str, str]] = []
    place = 1
    while (label := _LABEL.match(text, place)) is not None:
        pairs.append((label.group(1), label.group(2)))
        place = label.end()
    rest = text[place:].lstrip()
    if not rest.startswith("}"):
        return None, rest
    inner = ",".join(f'{key}="{value}"' for key, value in sorted(pairs))
    return (f"{{{inner}}}" if pairs else ""), rest[1:]


def total(raw: Raw, name: str) -> float | None:
    """Sum of a metric over all its labels, by its whole name; None where it is absent."""
    values = [value for _, value in _series(raw, name)]
    return sum(values) if values else None


def _series(raw: Raw, name: str) -> Iterator[tuple[str, float]]:
    """The series of exactly this metric: `x_total` never matches `x_total_per_pos` or `x_created`."""
    for key, value in raw.items():
        if key == name or key.startswith(name + "{"):
            yield key, value


def went_back(before: Raw, after: Raw, name: str) -> bool:
    """Whether a counter fell (a new one below 0), vanished or was created anew: its server restarted in the window.

    Each series is looked at alone, since one engine of several may restart behind a rising sum.
    """
    created = [(key, value) for key, value in _series(before, name.removesuffix("_total") + "_created")]
    fell = any(after.get(key, -math.inf) < value for key, value in _series(before, name)) or any(
        value < before.get(key, 0.0) for key, value in _series(after, name)
    )
    return fell or any(after.get(key, value) != value for key, value in created)


def restarted(before: Raw, after: Raw) -> bool:
    """Whether the two readings come from different processes, where the server gives its start time."""
    return any(after.get(key, value) != value for key, value in _series(before, PROCESS_START))


def delta(before: Raw, after: Raw, name: str) -> float | None:
    """Growth of a counter over the window, summed over labels; None where it is absent or went back.

    A series that appears inside the window counts from 0.
    """
    grown = [value - before.get(key, 0.0) for key, value in _series(after, name)]
    return None if not grown or went_back(before, after, name) else sum(grown)


# --- speculation ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecDelta:
    """Speculation over a window, for the whole server; None is unknown.

    `drafts` are target steps that carried a draft. `per_pos[j]` of them had their first j + 1 tokens accepted.
    After a counter reset (`reset`) nothing is known.
    """

    drafts: int | None = None
    draft_tokens: int | None = None
    accepted: int | None = None
    per_pos: tuple[int, ...] | None = None
    reset: bool = False

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafted tokens over drafted tokens."""
        return _ratio(self.accepted, self.draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """AL_drafted = 1 + accepted / drafts: tokens per step that carried a draft, bonus token included."""
        ratio = _ratio(self.accepted, self.drafts)
        return None if ratio is None else 1 + ratio

    @property
    def marginals(self) -> tuple[float, ...] | None:
        """P(the first j + 1 drafted tokens accepted) over all drafts."""
        if self.per_pos is None or not self.drafts:
            return None
        return tuple(count / self.drafts for count in self.per_pos)


def _ratio(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def spec_delta(before: Raw, after: Raw, prefix: str, k: int | None = None) -> SpecDelta | None:
    """Speculation counters of `prefix` (`vllm:`, `llamacpp:`, `trtllm_`) over a window.

    Returns None where the server has no such counters: speculation is not enabled, or not counted. A position
    that no draft reached has no series and counts 0, up to `k` positions where `k` is given.
    """
    stem = f"{prefix}spec_decode_num_"
    names = [f"{stem}{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")]
    if all(total(after, name) is None for name in names) and all(
        total(before, name) is None for name in names
    ):
        return None
    by_position = f"{stem}accepted_tokens_per_pos_total"
    if restarted(before, after) or any(went_back(before, after, name) for name in (*names, by_position)):
        return SpecDelta(reset=True)
    drafts, draft_tokens, accepted = (_whole(delta(before, after, name)) for name in names)
    per_pos = None if drafts is None else _per_position(before, after, by_position, k)
    return SpecDelta(drafts, draft_tokens, accepted, per_pos)


def _per_position(before: Raw, after: Raw, name: str, k: int | None) -> tuple[int, ...]:
    counts: dict[int, float] = {}
    for key, value in _series(after, name):
        position = _POSITION.search(key)
        if position is not None and (at := int(position.group(1)[:10])) < MAX_K:
            counts[at] = counts.get(at, 0.0) + value - before.get(key, 0.0)
    length = max(max(counts, default=-1) + 1, k or 0)
    return tuple(round(counts.get(at, 0.0)) for at in range(length))


def prefix_cache_hit_rate(before: Raw, after: Raw, prefix: str = "vllm:") -> float | None:
    """Share of prompt tokens looked up over the window that the prefix cache held; None without look-ups."""
    hits = _whole(delta(before, after, f"{prefix}prefix_cache_hits_total"))
    return _ratio(hits, _whole(delta(before, after, f"{prefix}prefix_cache_queries_total")))
