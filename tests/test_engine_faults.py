"""What goes wrong with a server, scripted: ten faults for each adapter, through its own start and lifecycle.

A server that fails costs its block: finished blocks stay, the run goes on and says so, nothing is left running. The
servers are stand-ins (`tests.stand_ins`) that the adapters start as they start the engines: the same interpreter,
module, options, health page and log. The one attached to (`openai`) is a replica of SGLang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import specbench
from runners import tensorrt_llm
from runners.run import GIVE_UP, Runner
from runners.server import Health, free_port, serve
from specbench import failures, trace
from specbench.errors import EXIT_INVALID, EXIT_OK, EXIT_USAGE, SpecbenchError
from specbench.plan import check_plan
from tests.stand_ins import install, running, troubles
from tests.test_server import eventually

METHODS: dict[str, dict[str, Any]] = {
    "llamacpp": {"name": "ngram-simple", "n": 4, "k": 4},
    "vllm": {"name": "ngram", "n": 3, "k": 4},
    "sglang": {"name": "nextn", "k": 3},
    "tensorrt_llm": {"name": "mtp", "k": 3},
}
STARTED = tuple(METHODS)
pytestmark = pytest.mark.slow
"""Each case starts four servers and more."""
CELLS = 4
"""Of a block: two methods, twice."""
LAST = 5
"""The last request of a server's first run: two of warm-up, and two prompts of two turns."""


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a stand-in for each engine, and its interpreter."""
    return {name: install(tmp_path_factory.mktemp(name), name) for name in STARTED}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt_llm, "SETTLE_S", 0.01)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


class Outcome:
    """What a run left: its exit code, what it said, and its cells."""

    def __init__(self, run_dir: Path, said: list[str], code: int) -> None:
        self.run_dir, self.said, self.code = run_dir, said, code
        self.failed = failures.read(run_dir)
        self.records = list(trace.read_cells(run_dir)) if run_dir.exists() else []

    def cells(self, block: int) -> int:
        return sum(record.block == block for record in self.records)

    def codes(self, block: int) -> set[str]:
        return {note.code for record in self.records if record.block == block for note in record.validity}

    def errors(self, block: int) -> set[str | None]:
        rows = trace.load(self.run_dir).requests
        mine = rows[(rows["block"] == block) & ~rows["warmup"]]
        return set(mine["error_kind"].dropna())


def run(engine: dict[str, Any], method: dict[str, Any], tmp_path: Path, **repeat: Any) -> Outcome:
    """Two blocks of a method and its baseline, each server kept for its block."""
    raw = {
        "name": "faults",
        "model": "hf:org/model",
        "workload": {
            "categories": ["qa"],
            "prompts_per_category": 2,
            "max_tokens": 12,
            "history": "own",
        },
        "repeat": {"blocks": 2, "restart": "block"} | repeat,
        "engine": [engine],
        "method": [{"name": "none", "baseline": True}, method],
    }
    if engine["name"] == "llamacpp":
        raw["model"] = str(tmp_path / "model.gguf")
        Path(raw["model"]).write_bytes(b"weights")
    if engine["name"] == "openai":
        raw["model"] = "served"
    said: list[str] = []
    runner = Runner(
        check_plan(raw | engine.pop("plan", {}), "test"), tmp_path / "run", say=said.append, timeout_s=1.5
    )
    try:
        runner.run()
    except SpecbenchError as error:
        return Outcome(tmp_path / "run", [*said, str(error)], error.exit_code)
    found = specbench.summary(tmp_path / "run")
    # Other work on this machine may void a short run, or bring its frames late; neither is looked at here.
    void = {n.code for n in found.validity if n.severity == "invalid"} - {"host-busy", "not-streamed"}
    return Outcome(tmp_path / "run", [*said, *sorted(void)], EXIT_INVALID if void else EXIT_OK)


@pytest.fixture
def started(homes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs with a server that makes trouble in the starts given; afterwards nothing of it may be left."""

    def go(engine: str, repeat: dict[str, Any] | None = None, **starts: Any) -> Outcome:
        for name, value in troubles(tmp_path / "starts", **starts).items():
            monkeypatch.setenv(name, value)
        ask = {"name": engine, "python": homes[engine]}
        return run(ask, METHODS[engine], tmp_path, **(repeat or {}))

    yield go
    assert eventually(lambda: not [p for home in homes.values() for p in running(Path(home).parent.parent)])


def assert_block_lost(found: Outcome, words: str) -> None:
    """The second block failed in its first cell and said why; the first one is whole."""
    assert (found.code, found.cells(0), found.cells(1)) == (EXIT_OK, CELLS, 0)
    (failure,) = found.failed
    assert (failure.block, failure.position) == (1, 0)
    assert words in failure.reason
    assert found.said == [failure.sentence]
    (note,) = [n for n in specbench.summary(found.run_dir).validity if n.code == "block-failed"]
    assert (note.severity, words in note.advice) == ("warning", True)


START_FAULTS = {
    "port": {"llamacpp": "couldn't bind", "*": "ddress already in use"},
    "die": {"*": "the weights of this model cannot be read"},
    "memory": {"*": "out of memory"},
    "killed": {"*": "SIGKILL"},
    "model": {"*": "is not a valid model identifier"},
}
"""Trouble of a start, and words of the sentence: the last ones of the log where it wrote any."""


@pytest.mark.parametrize("trouble", START_FAULTS)
@pytest.mark.parametrize("engine", STARTED)
def test_a_start_that_fails_costs_its_block(started: Any, engine: str, trouble: str) -> None:
    words = START_FAULTS[trouble].get(engine, START_FAULTS[trouble]["*"])
    assert_block_lost(started(engine, s3=trouble), words)


@pytest.mark.parametrize("engine", STARTED)
def test_a_slow_start_is_waited_for(started: Any, engine: str) -> None:
    found = started(engine, s3="slow")
    assert (found.code, found.cells(0), found.cells(1), found.failed) == (EXIT_OK, CELLS, CELLS, ())
    # A server of each arm, kept for its block: none of these needs to be started again to forget a run.
    assert len(list((found.run_dir / "logs").glob("*.log"))) == 2 * 2


@pytest.mark.parametrize("engine", STARTED)
def test_death_in_a_stream_costs_its_block(started: Any, engine: str) -> None:
    found = started(engine, s3={str(LAST): "die"})
    assert_block_lost(found, "the scripted engine died in the middle of a reply")
    assert "ended with status 1" in found.failed[0].reason or "ended (status 1)" in found.failed[0].reason


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        ("hang", "timeout", "requests-failed"),
        ("429", "throttled", "throttled"),
        ("503", "http", "requests-failed"),
    ],
)
@pytest.mark.parametrize("engine", STARTED)
def test_a_request_that_fails_costs_itself(
    started: Any, engine: str, fault: str, kind: str, code: str
) -> None:
    found = started(engine, s3={str(LAST): fault})
    assert (found.code, found.cells(0), found.cells(1), found.failed) == (EXIT_OK, CELLS, CELLS, ())
    assert found.errors(1) == {kind}
    assert code in found.codes(1)
    assert code not in found.codes(0)


@pytest.mark.parametrize("engine", STARTED)
def test_counters_that_fall_are_found(started: Any, engine: str) -> None:
    """In both arms, since which of them starts third is the seed's; a baseline may have no counter to fall."""
    found = started(engine, s3={str(LAST): "forget"}, s4={str(LAST): "forget"})
    assert (found.code, found.cells(1), found.failed) == (EXIT_OK, CELLS, ())
    assert "counter-reset" in found.codes(1)
    assert "counter-reset" not in found.codes(0)


# --- when nothing or too little succeeds ------------------------------------------------------------------


def test_nothing_succeeded_is_exit_3_and_says_why(started: Any) -> None:
    found = started("sglang", s1="memory", s2="memory")
    assert (found.code, len(found.failed), found.records) == (EXIT_INVALID, 2, [])
    (note,) = [n for n in specbench.summary(found.run_dir).validity if n.code == "nothing-succeeded"]
    assert "CUDA out of memory" in note.advice


def test_a_server_that_never_starts_is_given_up(started: Any) -> None:
    starts = {f"s{number}": "die" for number in range(1, 9)}
    found = started("sglang", {"blocks": 8}, **starts)
    assert (found.code, len(found.failed)) == (EXIT_INVALID, GIVE_UP)
    assert any("3 blocks in a row failed" in words for words in found.said)


def test_a_failed_block_is_run_again_and_forgotten(started: Any, tmp_path: Path) -> None:
    first = started("sglang", s3={str(LAST): "die"})
    assert len(first.failed) == 1
    kept = {path.name for path in trace.cell_dirs(first.run_dir)}
    plan = check_plan(trace.load(first.run_dir).manifest["plan"], "run.json")
    Runner(plan, first.run_dir).run(resume=True)
    assert failures.read(first.run_dir) == ()
    assert kept < {path.name for path in trace.cell_dirs(first.run_dir)}
    assert len(trace.cell_dirs(first.run_dir)) == 2 * CELLS
    assert "block-failed" not in {n.code for n in specbench.summary(first.run_dir).validity}


def test_cells_measured_before_a_failure_stay_and_give_no_ratio(started: Any) -> None:
    """The server of the second arm dies in the middle of the block: three of four cells may be there."""
    found = started("sglang", s4={str(LAST): "die"})
    assert (found.code, found.cells(0)) == (EXIT_OK, CELLS)
    assert 0 < found.cells(1) < CELLS
    arms = specbench.summary(found.run_dir).arms
    assert {arm.blocks for arm in arms if not arm.baseline} <= {
        0,
        1,
    }  # 0 where other work voided the first block


def test_the_command_line_reports_a_failed_block(
    homes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    for name, value in troubles(tmp_path / "starts", s1="memory").items():
        monkeypatch.setenv(name, value)
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'schema = 1\nname = "one"\nmodel = "hf:org/model"\n[workload]\ncategories = ["qa"]\nprompts_per_category = 2\n'
        'max_tokens = 8\nhistory = "own"\n[repeat]\nblocks = 1\n'
        f'[[engine]]\nname = "sglang"\npython = "{homes["sglang"]}"\n[[method]]\nname = "none"\nbaseline = true\n'
    )
    code, out, err = call("run", plan, "--out", tmp_path / "run")
    assert code == EXIT_INVALID
    assert "failed in none of sglang: the engine ended with status 1 before it was ready" in err
    assert "CUDA out of memory" in err
    assert "Nothing succeeded" in out
    assert "Traceback" not in err


# --- a server that is attached to -------------------------------------------------------------------------

AS_SERVED = {"name": "as-served"}
PER_BLOCK = CELLS * (LAST + 1)
"""Requests of a block."""


@contextmanager
def attached_server(home: str, tmp_path: Path, **starts: Any) -> Iterator[str]:
    port = free_port()
    argv = [
        home,
        "-m",
        "sglang.launch_server",
        "--model-path",
        "org/model",
        "--enable-metrics",
        f"--port={port}",
    ]
    argv += ["--speculative-algorithm", "NEXTN", "--speculative-num-draft-tokens", "4"]
    env = troubles(tmp_path / "starts", **starts)
    with serve(argv, env, tmp_path / "log", health=Health(f"http://127.0.0.1:{port}")) as server:
        yield server.address


def attach(url: str, tmp_path: Path, **engine: Any) -> Outcome:
    return run({"name": "openai", "url": url, **engine}, AS_SERVED, tmp_path, restart="never")


def test_an_attached_server_that_dies_costs_its_blocks(homes: dict[str, str], tmp_path: Path) -> None:
    with attached_server(homes["sglang"], tmp_path, s1={str(PER_BLOCK + LAST): "die"}) as url:
        found = attach(url, tmp_path)
    assert (found.cells(0), found.cells(1), len(found.failed)) == (CELLS, 0, 1)
    assert "stopped answering" in found.failed[0].reason


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        ("hang", "timeout", "requests-failed"),
        ("429", "throttled", "throttled"),
        ("503", "http", "requests-failed"),
    ],
)
def test_a_request_that_an_attached_server_fails(
    homes: dict[str, str], tmp_path: Path, fault: str, kind: str, code: str
) -> None:
    with attached_server(homes["sglang"], tmp_path, s1={str(PER_BLOCK + LAST): fault}) as url:
        found = attach(url, tmp_path)
    assert (found.cells(0), found.cells(1), found.errors(1)) == (CELLS, CELLS, {kind})
    assert code in found.codes(1)


def test_counters_of_an_attached_server_that_fall(homes: dict[str, str], tmp_path: Path) -> None:
    with attached_server(homes["sglang"], tmp_path, s1={str(PER_BLOCK + LAST): "forget"}) as url:
        found = attach(url, tmp_path)
    assert "counter-reset" in found.codes(1)
    assert "counter-reset" not in found.codes(0)


def test_nobody_at_the_url_is_exit_2_before_anything_is_written(tmp_path: Path) -> None:
    """It starts slowly, died at load, or was killed for memory: from here all look alike."""
    found = attach(f"http://127.0.0.1:{free_port()}", tmp_path)
    assert (found.code, found.records, os.path.exists(tmp_path / "run")) == (EXIT_USAGE, [], False)
    assert "no OpenAI-style server answers" in found.said[-1]


def test_a_stranger_on_the_port_is_exit_2(tmp_path: Path) -> None:
    """The port is another program's: a page of HTML where the list of models should be."""
    page = (
        "import http.server as h, sys\n"
        "class Page(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        body = b'<html>503 Busy</html>'\n"
        "        self.send_response(200 if self.path == '/health' else 503)\n"
        "        self.send_header('Content-Length', str(len(body))); self.end_headers(); self.wfile.write(body)\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), Page).serve_forever()\n"
    )
    port = free_port()
    argv = [sys.executable, "-c", page, str(port)]
    with serve(argv, {}, tmp_path / "log", health=Health(f"http://127.0.0.1:{port}")) as server:
        found = attach(server.address, tmp_path)
    assert found.code == EXIT_USAGE
    assert "it sends no list of models, HTTP 503" in found.said[-1]


def test_a_model_that_the_server_does_not_have_is_refused_by_name(
    homes: dict[str, str], tmp_path: Path
) -> None:
    with attached_server(homes["sglang"], tmp_path) as url:
        found = attach(url, tmp_path, plan={"model": "org/other"})
    assert found.code == EXIT_USAGE
    assert "serves org/model, not org/other; name one of those" in found.said[-1]
