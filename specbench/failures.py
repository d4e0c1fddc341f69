"""Blocks that a run could not finish because an engine failed in them, each with its reason.

They lie beside the cells, as `failed/<comparison>.<block>.json`, and go when the block is finished later. What the
block had measured before stays in `cells/` and pairs where both passes of an arm and its baseline are there.

Boundary: files of a run; `runners.run` decides what a failure is, `summarise` says it.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from specbench import trace


@dataclass(frozen=True)
class BlockFailure:
    """One block that was given up: where it stood, in which run of which arm it failed, and the sentence."""

    comparison: str
    block: int
    position: int
    engine: str
    method: str
    """The method's label."""
    concurrency: int
    cell_id: str
    session_id: str
    reason: str

    @property
    def sentence(self) -> str:
        """For the terminal and the report."""
        where = f"block {self.block + 1} at concurrency {self.concurrency} failed in {self.method} of {self.engine}"
        return f"{where}: {self.reason}"


def write(run_dir: Path, failure: BlockFailure) -> None:
    """Record a block as failed, in place of what was recorded of it before."""
    trace.write_atomic(_path(run_dir, failure.comparison, failure.block), orjson.dumps(asdict(failure)))


def clear(run_dir: Path, comparison: str, block: int) -> None:
    """The block was finished after all."""
    _path(run_dir, comparison, block).unlink(missing_ok=True)


def forget(run_dir: Path) -> None:
    """Of a run that begins anew."""
    shutil.rmtree(run_dir / "failed", ignore_errors=True)


def read(run_dir: Path) -> tuple[BlockFailure, ...]:
    """The failed blocks of a run, in order; a record that cannot be read is left out."""
    found = []
    for path in sorted((run_dir / "failed").glob("*.json")):
        try:
            failure = BlockFailure(**orjson.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError):
            continue
        if _is_whole(failure):
            found.append(failure)
    return tuple(sorted(found, key=lambda failure: (failure.comparison, failure.block)))


def _is_whole(failure: BlockFailure) -> bool:
    """Whether every value is of the kind that was written."""
    kinds = {"block": int, "position": int, "concurrency": int}
    return all(type(value) is kinds.get(name, str) for name, value in asdict(failure).items())


def _path(run_dir: Path, comparison: str, block: int) -> Path:
    return run_dir / "failed" / f"{comparison}.{block}.json"
