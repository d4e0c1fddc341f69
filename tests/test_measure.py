"""runners.measure: what a run finds wrong with its own cells, on real sockets; times and warm-up of its rows.

Each finding is provoked through a plan, the runner and the scripted server, so that it is known to be reached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runners.loopback import command
from runners.measure import _telemetry
from runners.run import Runner
from runners.server import serve
from specbench import trace
from specbench.cell import CellRecord, Facts
from specbench.metrics import request_values
from specbench.plan import check_plan
from specbench.validity import check_cell
from tests.make_cell import record
from tests.test_validity import replies
from workloads import load_split

BASELINE = {"name": "none", "baseline": True}
NGRAM = {"name": "ngram-simple", "k": 4}


def run(tmp_path: Path, method: dict[str, Any], ceiling: float | None = None, **tables: Any) -> trace.Run:
    """One block of one method, so two cells."""
    engine = {"name": "loopback", "step_ms": 1, "prefill_ms": 2} | tables.pop("engine", {})
    args = {key: engine.pop(key) for key in set(engine) - {"name", "url", "command"}}
    workload = {"categories": ["qa"], "prompts_per_category": 6, "max_tokens": 20} | tables.pop(
        "workload", {}
    )
    raw = {
        "name": "r",
        "model": "script",
        "workload": workload,
        "repeat": {"blocks": 1, "restart": "run"},
        "engine": [engine | ({"args": args} if engine["name"] == "loopback" else {})],
        "method": [method],
    }
    Runner(check_plan(raw | tables, "test"), tmp_path / "r", ceiling=lambda: ceiling).run()
    return trace.load(tmp_path / "r")


def first(found: trace.Run) -> CellRecord:
    return found.records[0]


def codes(found: trace.Run) -> set[str]:
    return {note.code for note in first(found).validity} - {"host-busy", "percentile-unsupported"}


def prompts(tmp_path: Path, *texts: str, **fields: str) -> dict[str, Any]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text} | fields) + "\n" for text in texts))
    return {"file": str(path), "categories": None, "prompts_per_category": None}


def test_a_sound_run_finds_nothing_but_few_requests(tmp_path: Path) -> None:
    found = run(tmp_path, NGRAM)
    assert codes(found) == set()
    assert "percentile-unsupported" in {note.code for note in first(found).validity}
    assert first(found).metrics["length_share"] == 1.0


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (dict.fromkeys(range(20), "503"), {"nothing-succeeded"}),
        ({4: "429"}, {"requests-failed", "throttled"}),
        ({4: "buffered"}, {"not-streamed"}),
        ({4: "reset", 5: "empty"}, {"requests-failed"}),
        (dict.fromkeys(range(20), "coalesced"), {"stream-coalesced"}),
    ],
)
def test_faults_of_the_server_are_found(tmp_path: Path, faults: dict[int, str], expected: set[str]) -> None:
    text = ",".join(f"{index}={fault}" for index, fault in faults.items())
    # Own history, so that no request but a warm-up comes before.
    found = run(tmp_path, BASELINE, engine={"faults": text}, workload={"history": "own"})
    assert codes(found) == expected


def test_speculation_that_never_drafts_is_found(tmp_path: Path) -> None:
    assert codes(run(tmp_path, NGRAM, engine={"coverage": 0.0})) == {"speculation-inactive"}


@pytest.mark.parametrize(("command", "known"), [({}, True), ({"command": "docker run --rm IMAGE"}, False)])
def test_an_engine_in_a_container_is_not_taken_for_other_work(
    tmp_path: Path, command: dict[str, str], known: bool
) -> None:
    """Its processes are the daemon's, so what else worked on the host is unknown, not all of it other work."""
    share = first(run(tmp_path, NGRAM, engine=command)).host.other_cpu_share
    assert (share is not None) == known


@contextmanager
def speculating_server(tmp_path: Path) -> Iterator[str]:
    argv, env = command({"k": 3, "accept": [0.8], "step_ms": 1})
    with serve(argv, env, tmp_path / "log") as server:
        yield server.address


def test_a_baseline_that_drafts_is_found(tmp_path: Path) -> None:
    with speculating_server(tmp_path) as url:
        # It lists no models, as a minimal server may not.
        found = run(tmp_path, BASELINE, engine={"name": "openai", "url": url})
    assert codes(found) == {"baseline-drafted"}


def test_short_replies_and_a_short_tail_are_found(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        BASELINE,
        workload={"max_tokens": 4, "prompts_per_category": 5, "history": "own"},
        load={"concurrency": [4]},
        engine={"prefill_ms": 30, "step_ms": 5},
    )
    assert codes(found) == {"few-output-tokens", "short-tail"}
    assert "now 4" in next(n.advice for n in first(found).validity if n.code == "few-output-tokens")


def test_a_client_near_its_ceiling_is_found(tmp_path: Path) -> None:
    assert codes(run(tmp_path, NGRAM, ceiling=1.0)) == {"client-near-ceiling"}


def test_a_prompt_that_was_a_warm_up_is_found(tmp_path: Path) -> None:
    warm = load_split("warmup").prompts[0]
    assert warm.system is None
    asked = prompts(tmp_path, warm.turns[0], "Name three rivers.", "Name three lakes.")
    assert codes(run(tmp_path, NGRAM, workload=asked)) == {"drafter-saw-prompt"}


def test_placeholders_and_random_tokens_are_found(tmp_path: Path) -> None:
    asked = prompts(tmp_path, "Note: full benchmark data should be fetched.", "x y z", category="random-64")
    assert codes(run(tmp_path, NGRAM, workload=asked)) == {"placeholder-data", "random-token-prompts"}


def test_a_drafter_that_learns_on_a_server_that_is_not_ours_is_found() -> None:
    facts = Facts(engine="llamacpp", url="http://h", speculative=True, extra={"drafter_learns": True})
    (found,) = check_cell(record(facts=facts), trace.request_table(replies()), [])
    assert found.code == "drafter-saw-prompt"
    assert "engine.url" in found.advice
    ours = facts.model_copy(update={"url": None})
    assert not check_cell(record(facts=ours), trace.request_table(replies()), [])


def test_a_decode_faster_than_memory_is_found() -> None:
    weights = 64 * 10**6
    about = record(facts=Facts(engine="llamacpp", speculative=True, extra={"weight_bytes": weights}))
    seen = _telemetry(about.facts, about.machine)
    assert seen["weight_bytes"] == weights
    assert (seen["memory_bytes_per_s"] or 0) > 0
    about = about.model_copy(update={"telemetry": seen})
    assert not check_cell(about, trace.request_table(replies()), [])
    # 15 steps in 19 µs read 64 MB each: 50 TB/s.
    quick = [r | {"last_output_ns": r["first_output_ns"] + 19_000} for r in replies()]
    assert [n.code for n in check_cell(about, trace.request_table(quick), [])] == [
        "implied-bandwidth-above-roof"
    ]


def test_no_roof_is_claimed_where_weights_may_lie_in_a_gpu_or_are_unknown() -> None:
    about = record()
    assert _telemetry(about.facts, about.machine) == {}
    gpu = about.machine.model_copy(update={"gpus": ("NVIDIA H100",)})
    assert _telemetry(Facts(engine="llamacpp", extra={"weight_bytes": 10**6}), gpu) == {}


@pytest.mark.engine
def test_a_real_engine_decodes_below_the_roof(model: str, tmp_path: Path) -> None:
    found = run(
        tmp_path, BASELINE, model=model, workload={"prompts_per_category": 1}, engine={"name": "llamacpp"}
    )
    seen, steps_s = first(found).telemetry, first(found).metrics["server_tpot_s"]
    weights, roof = seen["weight_bytes"], seen["memory_bytes_per_s"]
    assert weights == Path(model).stat().st_size
    assert steps_s is not None
    assert roof is not None
    assert weights / steps_s < 1.5 * roof
    assert "implied-bandwidth-above-roof" not in codes(found)


# --- rows -------------------------------------------------------------------------------------------------


def test_warm_up_sends_other_prompts_fills_the_concurrency_and_is_in_no_metric(tmp_path: Path) -> None:
    """vLLM and SGLang warm up with the first prompt itself, so that its request is a full cache hit."""
    found = run(tmp_path, NGRAM, load={"concurrency": [3]})
    rows = found.requests[found.requests["cell_id"] == first(found).cell_id]
    warm, measured = rows[rows["warmup"]], rows[~rows["warmup"]]
    assert len(warm) >= 3
    assert not set(warm["prompt_sha256"]) & set(measured["prompt_sha256"])
    assert warm["done_ns"].max() <= measured["sent_ns"].min()
    assert first(found).metrics["requests"] == len(measured)


def test_128_streams_are_in_flight_at_once(tmp_path: Path) -> None:
    """A client library's limit of 100 connections would hold the rest back."""
    found = run(
        tmp_path,
        BASELINE,
        workload={"categories": None, "prompts_per_category": 12, "max_tokens": 8, "history": "own"},
        load={"concurrency": [128]},
        engine={"prefill_ms": 1000},
    )
    rows = found.requests[(found.requests["cell_id"] == first(found).cell_id) & ~found.requests["warmup"]]
    assert int((rows["sent_ns"] < rows["done_ns"].min()).sum()) == 128


def test_times_follow_the_monotonic_clock_though_the_wall_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock falls by 2 s at every look: nothing but the one anchor of a cell may read it."""
    clock = iter(range(2_000_000_000, 0, -2))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    rows = run(tmp_path, NGRAM).requests
    ordered = rows[["sent_ns", "first_output_ns", "last_output_ns", "done_ns"]].to_numpy(dtype=float)
    assert (np.diff(ordered, axis=1) >= 0).all()
    assert all((np.diff(frames) >= 0).all() for frames in rows["frame_ns"])
    # Twenty tokens, a step of 1 ms each at least: not 2 s off in either direction.
    tpot = request_values(rows, "tpot_s")
    assert ((tpot > 0) & (tpot < 1)).all()
