"""The trace: what is written is read back, whole or not at all, and fits the committed JSON Schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pyarrow.parquet as pq
import pytest

import specbench
from specbench import schema, trace
from specbench.cell import SCHEMA_VERSION
from specbench.errors import SpecbenchError
from tests.make_cell import record, row
from tests.make_run import make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("trace") / "run", blocks=1)


def test_the_committed_schema_is_what_the_code_says() -> None:
    """`python -m specbench.schema` writes it."""
    assert orjson.loads(schema.PATH.read_bytes()) == schema.trace_schema()


def test_cells_and_requests_fit_the_schema(run_dir: Path) -> None:
    document = orjson.loads(schema.PATH.read_bytes())
    jsonschema.Draft202012Validator.check_schema(document)
    request = {**document["$defs"]["request"], "$defs": document["$defs"]}
    for cell in trace.cell_dirs(run_dir):
        jsonschema.validate(orjson.loads((cell / "cell.json").read_bytes()), document)
        for found in pq.read_table(cell / "requests.parquet").to_pylist():
            jsonschema.validate(found, request)


def test_the_schema_refuses_an_unknown_key_and_a_wrong_type(run_dir: Path) -> None:
    document = orjson.loads(schema.PATH.read_bytes())
    good = orjson.loads((trace.cell_dirs(run_dir)[0] / "cell.json").read_bytes())
    for wrong in ({"surprise": 1}, {"block": "one"}, {"validity": [{"code": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | wrong, document)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    asked = record()
    rows = [row(0, (0.1, 0.2, 0.4), [1, None, 2], prompt_tokens=7)]
    place = trace.write_cell(
        tmp_path, asked, rows, [{"request": 0, "prompt_id": "p", "text": "héllo \u2028", "reasoning": ""}]
    )
    assert trace.read_record(place) == asked
    (back,) = pq.read_table(place / "requests.parquet").to_pylist()
    assert back["frame_ns"] == [100_000_000, 200_000_000, 400_000_000]
    assert back["frame_tokens"] == [1, None, 2]
    assert back["cached_tokens"] is None
    assert trace.read_texts(place)[0]["text"] == "héllo \u2028"


def test_json_never_holds_nan(tmp_path: Path) -> None:
    wild = record().model_copy(update={"metrics": {"a": float("nan"), "b": float("inf"), "c": 1.5}})
    text = (trace.write_cell(tmp_path, wild, [], []) / "cell.json").read_text()
    assert orjson.loads(text)["metrics"] == {"a": None, "b": None, "c": 1.5}
    assert "NaN" not in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"schema_version": 99}', f"written with trace schema 99, this specbench reads up to {SCHEMA_VERSION}; upgrade"),
        (b"{", "cannot be read ("),
        (b"[]", "has no schema_version"),
        (b'{"schema_version": 1}', "does not fit the trace schema"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be_read_is_one_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "cell.json").write_bytes(content)
    with pytest.raises(SpecbenchError) as caught:
        trace.read_record(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unfinished_work_is_invisible_and_swept(run_dir: Path) -> None:
    before = trace.cell_dirs(run_dir)
    part = run_dir / "cells" / f".{'0' * 16}.{os.getpid()}.part"
    part.mkdir()
    (run_dir / f".index.parquet.{os.getpid()}.part").write_bytes(b"half")
    assert trace.cell_dirs(run_dir) == before
    trace.sweep(run_dir)
    assert not list(run_dir.rglob("*.part"))
    assert trace.cell_dirs(run_dir) == before


def test_the_index_is_rebuilt_from_the_cells(run_dir: Path) -> None:
    trace.write_index(run_dir)
    index = pq.read_table(run_dir / "index.parquet").to_pandas()
    assert len(index) == len(trace.cell_dirs(run_dir))
    assert set(index["cell_id"]) == set(specbench.load(run_dir).cells["cell_id"])
    assert "metric.tpot_s" in index


def test_superseded_cells_are_kept_and_numbered(tmp_path: Path) -> None:
    for number in range(2):
        trace.write_cell(tmp_path, record(), [], [])
        trace.supersede(tmp_path, record().cell_id)
        assert (tmp_path / "superseded" / f"{record().cell_id}.{number}" / "cell.json").is_file()
    assert trace.cell_dirs(tmp_path) == []


def test_frames_are_the_output_frames_of_measured_requests(run_dir: Path) -> None:
    run = specbench.load(run_dir)
    measured: Any = run.requests[~run.requests["warmup"]]
    assert len(run.frames) == int(measured["frame_ns"].map(len).sum())
    columns = ["cell_id", "method_label", "request", "prompt_id", "t_ns", "tokens", "step"]
    assert list(run.frames.columns) == columns
    assert run.frames.groupby(["cell_id", "request"])["t_ns"].diff().dropna().ge(0).all()


def test_load_of_something_else_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SpecbenchError, match=r"not a run \(it has no run\.json\)"):
        specbench.load(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"{", b"", b"\xff", b"5"], ids=repr)
def test_a_damaged_manifest_is_empty(tmp_path: Path, content: bytes) -> None:
    """The cells beside it say themselves what was asked of them."""
    (tmp_path / "run.json").write_bytes(content)
    assert trace.Run(tmp_path).manifest == {}
