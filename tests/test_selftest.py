"""runners.selftest: it measures, counts what it says, and is remembered only for this boot and Python."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import orjson
import pytest

from runners import selftest
from runners.selftest import DRAIN_STREAMS, DRAIN_TOKENS, SelfTest, cached_ceiling, ceiling, remember

RESULT = SelfTest(
    frames_per_cpu_s=300_000.0,
    frames_per_cpu_s_single=150_000.0,
    frames_per_cpu_s_paced=60_000.0,
    reads_per_cpu_s=140_000.0,
    frames_per_read=8.0,
    stamp_error_p50_s=2e-5,
    stamp_error_p99_s=3e-4,
    server_lateness_p99_s=1e-3,
    frames=163_840,
    frames_paced=19_200,
    duration_s=5.0,
    python="3.11.7",
    uvloop=None,
    cores=2,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user cache of its own."""
    monkeypatch.delenv("SPECBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specbench" / "ceiling.json"


def test_measured_ceiling_is_remembered(cache: Path) -> None:
    assert cached_ceiling() is None
    found = ceiling(quick=True)
    assert found is not None
    assert found > 0
    assert cached_ceiling() == found
    kept = orjson.loads(cache.read_bytes())["selftest"]
    assert kept["frames"] == 2 * DRAIN_STREAMS * DRAIN_TOKENS
    assert kept["frames_paced"] == 128 * 25
    assert 0 < kept["stamp_error_p50_s"] <= kept["stamp_error_p99_s"]


def test_ceiling_of_another_boot_or_python_is_not_used(cache: Path) -> None:
    remember(RESULT)
    assert cached_ceiling() == 60_000.0
    kept = orjson.loads(cache.read_bytes())
    cache.write_bytes(orjson.dumps(kept | {"key": "another boot"}))
    assert cached_ceiling() is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"key": 1}', b"null"])
def test_damaged_cache_is_no_ceiling(cache: Path, content: bytes) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content)
    assert cached_ceiling() is None


def test_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    remember(replace(RESULT))
    assert cached_ceiling() is None


def test_command_prints_one_json_document() -> None:
    """`specbench selftest --json --quick`."""
    done = subprocess.run(
        [sys.executable, "-m", "specbench", "selftest", "--json", "--quick"], capture_output=True, check=True
    )
    said = orjson.loads(done.stdout)
    assert set(said) == {field.name for field in fields(SelfTest)}
    assert done.stdout.count(b"\n") == 1
    assert said["frames_per_cpu_s"] > 0
    assert cached_ceiling() == said["frames_per_cpu_s_paced"]


def test_load_counts_every_frame_and_read() -> None:
    load = selftest._load({"step_ms": 0, "prefill_ms": 0}, streams=3, rounds=2, tokens=10)
    assert load.frames == 60
    assert load.reads >= 6
    assert load.cpu_s > 0
