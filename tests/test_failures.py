"""specbench.failures: records of blocks that failed, and what is left of damaged ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from specbench import failures

WHOLE = failures.BlockFailure("c", 0, 1, "vllm", "ngram k=4", 2, "cell", "session", "it ended with status 1")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    failures.write(tmp_path, WHOLE)
    assert failures.read(tmp_path) == (WHOLE,)
    failures.clear(tmp_path, "c", 0)
    assert failures.read(tmp_path) == ()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        [],
        {"block": 1},
        asdict(WHOLE) | {"block": "x"},
        asdict(WHOLE) | {"comparison": None},
        asdict(WHOLE) | {"reason": ["a"]},
        asdict(WHOLE) | {"more": 1},
    ],
    ids=str,
)
def test_a_damaged_record_is_left_out(tmp_path: Path, content: Any) -> None:
    failures.write(tmp_path, WHOLE)
    damaged = tmp_path / "failed" / "b.0.json"
    damaged.write_bytes(content if isinstance(content, bytes) else orjson.dumps(content))
    assert failures.read(tmp_path) == (WHOLE,)
