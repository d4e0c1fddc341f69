"""The trace: the one contract between measuring and everything after it.

A run is a directory; each cell is a directory in it that is written beside its place and renamed into it,
so a reader sees a whole cell or none, and a cell is never changed afterwards:

    runs/<name>/run.json                       the plan, as asked
    runs/<name>/cells/<cell_id>/cell.json      specbench.cell.CellRecord
                               /requests.parquet, texts.jsonl.zst [, steps.parquet, telemetry.parquet]
    runs/<name>/superseded/<cell_id>.<n>/      cells of an interrupted block that was run again
    runs/<name>/index.parquet                  every scalar of every cell; rebuilt from the cells at will

This module stores and loads; it computes nothing.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from specbench._columns import REQUEST_SCHEMA as REQUEST_SCHEMA
from specbench._columns import TELEMETRY_SCHEMA as TELEMETRY_SCHEMA
from specbench.cell import SCHEMA_VERSION, CellRecord
from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    import pandas as pd

# --- writing ----------------------------------------------------------------------------------------------


def write_cell(
    run_dir: Path,
    record: CellRecord,
    requests: Sequence[dict[str, Any]],
    texts: Sequence[dict[str, Any]],
    telemetry: Sequence[dict[str, Any]] = (),
) -> Path:
    """Store one cell atomically and return its directory.

    `requests` are rows of `REQUEST_SCHEMA` (a missing optional key is null); `texts` hold
    `request`, `prompt_id`, `text` and `reasoning`; `telemetry` rows of `TELEMETRY_SCHEMA`, for which there is
    a file only where there are any. Raises OSError where the disk refuses; nothing half-written is then left
    under the cell's name.
    """
    cells = run_dir / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    final, part = cells / record.cell_id, cells / f".{record.cell_id}.{os.getpid()}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        _write_file(part / "requests.parquet", _parquet_bytes(requests, REQUEST_SCHEMA))
        if telemetry:
            _write_file(part / "telemetry.parquet", _parquet_bytes(telemetry, TELEMETRY_SCHEMA))
        lines = b"".join(orjson.dumps(row) + b"\n" for row in texts)
        _write_file(part / "texts.jsonl.zst", zstandard.compress(lines))
        _write_file(
            part / "cell.json", orjson.dumps(record.model_dump(mode="json"), option=orjson.OPT_INDENT_2)
        )
        _sync_dir(part)
        part.rename(final)
        _sync_dir(cells)
    except OSError:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return final


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a small file whole: a reader sees the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _write_file(part, data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    _sync_dir(path.parent)


@contextmanager
def writing(run_dir: Path, alone: bool) -> Iterator[None]:
    """Hold a run for writing, until the block or the process ends. Raises SpecbenchError where another holds it.

    Runs of one cell each share it (`alone` False). A file system without locks is trusted.
    """
    import fcntl  # POSIX only, and reading a run needs no lock

    with (run_dir / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecbenchError(
                f"{run_dir}: another specbench run writes here now; wait for it, or give --out another place."
            ) from None
        except OSError:
            pass
        yield


def supersede(run_dir: Path, cell_id: str) -> None:
    """Move a cell of an interrupted block out of the way; it is kept, and never read for a ratio."""
    kept = run_dir / "superseded"
    kept.mkdir(exist_ok=True)
    number = sum(1 for path in kept.iterdir() if path.name.startswith(f"{cell_id}."))
    (run_dir / "cells" / cell_id).rename(kept / f"{cell_id}.{number}")


def sweep(run_dir: Path) -> None:
    """Remove what a killed writer left behind: only names that this module gives to unfinished work."""
    for pattern in (".*.part", "cells/.*.part"):
        for path in run_dir.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_index(run_dir: Path) -> None:
    """Rebuild `index.parquet`: one row per cell with all its scalars."""
    rows = [index_row(record) for record in read_cells(run_dir)]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, compression="zstd")
    write_atomic(run_dir / "index.parquet", buffer.getvalue())


def index_row(record: CellRecord) -> dict[str, Any]:
    """The scalars of one cell, flat: identity, what was asked, facts, host evidence, codes, metrics."""
    config, facts = record.config, record.facts
    return {
        "cell_id": record.cell_id,
        "config_id": record.config_id,
        "comparison": record.comparison,
        "block": record.block,
        "position": record.position,
        "baseline": record.baseline,
        "session_id": record.session_id,
        "boot_id": record.machine.boot_id,
        "hostname": record.machine.hostname,
        "wall_time_utc": record.wall_time_utc,
        "window_s": record.window_s,
        "engine": config.engine.name,
        "engine_version": facts.engine_version,
        "model": config.model,
        "model_sha256": facts.model_sha256,
        "method": config.method.name,
        "method_label": config.method.label,
        "k": config.method.k,
        "pinned": config.method.pinned is not None,
        "concurrency": config.concurrency,
        "temperature": config.sampling.temperature,
        "validity": ",".join(note.code for note in record.validity),
        "invalid": any(note.severity == "invalid" for note in record.validity),
        "cpu_pressure_share": record.host.cpu_pressure_share,
        "steal_share": record.host.steal_share,
        "involuntary_switches_per_s": record.host.involuntary_switches_per_s,
        "other_cpu_share": record.host.other_cpu_share,
        "steps_with_draft": record.steps_with_draft,
        "drafted": record.drafted,
        "accepted_verified": record.accepted_verified,
    } | {f"metric.{name}": value for name, value in record.metrics.items()}


def request_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Rows as the table that reading them back would give."""
    table: pd.DataFrame = pa.Table.from_pylist(list(rows), schema=REQUEST_SCHEMA).to_pandas()
    return table


def _parquet_bytes(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), buffer, compression="zstd")
    return buffer.getvalue()


def _write_file(path: Path, data: bytes) -> None:
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise


def _sync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- reading ----------------------------------------------------------------------------------------------


def read_record(cell_dir: Path) -> CellRecord:
    """Read one `cell.json`; refuses a newer schema with a sentence that says what to do."""
    path = cell_dir / "cell.json"
    try:
        raw = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise _unreadable(path, error) from None
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise SpecbenchError(f"{path}: has no schema_version; this is not a cell that specbench wrote.")
    if version > SCHEMA_VERSION:
        raise SpecbenchError(
            f"{path}: written with trace schema {version}, this specbench reads up to {SCHEMA_VERSION}; "
            "upgrade specbench to read this run."
        )
    try:
        return CellRecord.model_validate(raw)
    except ValueError as error:
        first = str(error).splitlines()[1:3]
        raise SpecbenchError(f"{path}: does not fit the trace schema ({' '.join(first)}).") from None


def cell_dirs(run_dir: Path) -> list[Path]:
    """The finished cells of a run, in name order."""
    cells = run_dir / "cells"
    found = cells.iterdir() if cells.is_dir() else ()
    return sorted(path for path in found if not path.name.startswith(".") and path.is_dir())


def read_cells(run_dir: Path) -> Iterator[CellRecord]:
    """Every finished cell of a run, in the order it was run."""
    records = [read_record(path) for path in cell_dirs(run_dir)]
    yield from sorted(records, key=lambda r: (r.comparison, r.block, r.position))


def read_texts(cell_dir: Path) -> list[dict[str, Any]]:
    """The texts of one cell: `request`, `prompt_id`, `text`, `reasoning`."""
    path = cell_dir / "texts.jsonl.zst"
    try:
        return [orjson.loads(line) for line in zstandard.decompress(path.read_bytes()).splitlines()]
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> SpecbenchError:
    """For a cell that was whole when it was written, and is not now."""
    why = str(getattr(error, "strerror", None) or error).splitlines()[0].rstrip(".")
    return SpecbenchError(
        f"{path}: cannot be read ({why}); restore the file, or remove the cell's directory and measure it "
        "again with --resume."
    )


@dataclass(frozen=True)
class Run:
    """A run on disk, opened for reading. Tables are read on first use."""

    path: Path

    @cached_property
    def records(self) -> tuple[CellRecord, ...]:
        """Every finished cell."""
        return tuple(read_cells(self.path))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """`run.json`: the plan as asked, name and schema; empty where it is damaged, which costs no cell."""
        try:
            value = orjson.loads((self.path / "run.json").read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell with all scalars (the index, derived afresh from the cells)."""
        import pandas as pd

        return pd.DataFrame([index_row(record) for record in self.records])

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per request of every cell, with the cell's identity beside it; warm-up rows are kept."""
        return _concat(self._keyed(record, self._read_requests(record)) for record in self.records)

    @cached_property
    def frames(self) -> pd.DataFrame:
        """One row per output-carrying frame: `t_ns`, `tokens`, `step` (null where unknown)."""
        columns = [
            "cell_id",
            "method_label",
            "request",
            "prompt_id",
            "frame_ns",
            "frame_tokens",
            "frame_step",
        ]
        long = self.requests.loc[~self.requests["warmup"], columns]
        long = long.explode(["frame_ns", "frame_tokens", "frame_step"], ignore_index=True)
        names = {"frame_ns": "t_ns", "frame_tokens": "tokens", "frame_step": "step"}
        long = long.dropna(subset=["frame_ns"]).rename(columns=names).reset_index(drop=True)
        return long.astype({"t_ns": "int64", "tokens": "Int64", "step": "Int64"})

    @cached_property
    def acceptance(self) -> pd.DataFrame:
        """The acceptance table of every cell, one long table."""
        import pandas as pd

        rows = [{"cell_id": r.cell_id} | a.model_dump() for r in self.records for a in r.acceptance]
        return pd.DataFrame(rows)

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        """One row per reading of a device, with its `cell_id`; empty where no cell has any."""
        paths = {r.cell_id: self.path / "cells" / r.cell_id / "telemetry.parquet" for r in self.records}
        tables = [TELEMETRY_SCHEMA.empty_table().add_column(0, "cell_id", pa.array([], pa.string()))]
        for cell_id, path in paths.items():
            if path.exists():
                table = _read_table(path)
                tables.append(table.add_column(0, "cell_id", pa.array([cell_id] * len(table), pa.string())))
        frame: pd.DataFrame = pa.concat_tables(tables).to_pandas()
        return frame

    def texts(self, cell_id: str) -> list[dict[str, Any]]:
        """The texts of one cell."""
        return read_texts(self.path / "cells" / cell_id)

    def _read_requests(self, record: CellRecord) -> pd.DataFrame:
        path = self.path / "cells" / record.cell_id / "requests.parquet"
        frame: pd.DataFrame = _read_table(path).to_pandas()
        return frame

    @staticmethod
    def _keyed(record: CellRecord, frame: pd.DataFrame) -> pd.DataFrame:
        frame.insert(0, "cell_id", record.cell_id)
        for name in ("config_id", "comparison", "block", "position", "baseline"):
            frame[name] = getattr(record, name)
        frame["method_label"] = record.config.method.label
        frame["concurrency"] = record.config.concurrency
        return frame


def _read_table(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(path, error) from None


def _concat(frames: Iterable[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    kept = list(frames)
    return pd.concat(kept, ignore_index=True) if kept else pd.DataFrame()


def load(path: str | Path) -> Run:
    """Open a run directory, such as `runs/demo`. Raises SpecbenchError where there is none."""
    run_dir = Path(path)
    if not (run_dir / "run.json").is_file():
        raise SpecbenchError(
            f"{run_dir}: not a run (it has no run.json); give the directory that `specbench run` wrote."
        )
    return Run(run_dir)
