"""The command as a careless or unlucky user meets it: wrong input, damaged runs, two runs at once, SIGTERM.

Every mistake ends with the right exit code, one sentence that names what to mend, and nothing on stdout.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from runners.openai import OpenAIEngine
from specbench import failures
from specbench.errors import SpecbenchError
from specbench.plan import check_plan
from tests.conftest import Call

ROOT = Path(__file__).parent.parent
PLAN = """
schema = 1
name = "cli"
seed = 7
model = "script"
[workload]
categories = ["qa"]
prompts_per_category = 3
max_tokens = 8
[sampling]
temperature = 0
[load]
concurrency = 2
[repeat]
blocks = 1
[[engine]]
name = "loopback"
args = { step_ms = 1 }
[[method]]
name = "none"
baseline = true
[[method]]
name = "ngram-simple"
k = 4
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run, beside its plan; copy it before doing harm."""
    here = tmp_path_factory.mktemp("cli")
    (here / "plan.toml").write_text(PLAN)
    command(here, "run", "plan.toml", "--out", "run").communicate()
    assert (here / "run" / "report.html").exists()
    return here


def command(here: Path, *args: str, **env: str) -> subprocess.Popen[str]:
    """The real command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "specbench", *args],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def refused(result: tuple[int, str, str]) -> str:
    """The one sentence of a usage error, after checking that there is nothing else."""
    code, out, err = result
    assert (code, out) == (2, ""), err
    assert err.startswith("specbench: ")
    assert err.count("\n") == 1
    return err


# --- plans ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("seed = 7", "seed = 99999999999999999999", "seed: the number is too large"),
        ("seed = 7", "seed = true", "seed: "),
        ('"script"', '""', "model: "),
        ("max_tokens = 8", "max_tokens = 99999999999999999999", "workload.max_tokens: the number is too large"),
        ("max_tokens = 8", "max_tokens = 2000000", "workload.max_tokens: "),
        ("max_tokens = 8", "max_tokens = true", "workload.max_tokens: "),
        ("max_tokens = 8", 'max_tokens = "8"', "workload.max_tokens: "),
        ("max_tokens = 8", 'file = ""', "workload.file: "),
        ("max_tokens = 8", 'file = "a\\u0000b"', "workload.file: holds a NUL character"),
        ('["qa"]', '"qa"', "workload.categories: Input should be a valid array"),
        ("temperature = 0", "temperature = inf", "sampling.temperature: must be a finite number, not inf"),
        ("temperature = 0", "seed = -1", "sampling.seed: "),
        ("concurrency = 2", "concurrency = 1000000000", "load.concurrency: at most 10000"),
        ("concurrency = 2", "concurrency = [2, nan]", "load.concurrency[1]: must be a finite number, not nan"),
        ("blocks = 1", "blocks = 1000000000000", "repeat.blocks: "),
        ("blocks = 1", "budget_s = inf", "repeat.budget_s: must be a finite number"),
        ("step_ms = 1", "step_ms = []", "engine[0].args: step_ms is an empty array"),
        ("step_ms = 1", "step_ms = 2020-01-01", "engine[0].args.step_ms: must be text or a number, not 2020-01-01"),
        ("step_ms = 1", 'step_ms = "x"', "engine.args.step_ms: must be a number of at least 0, not 'x'"),
        ("step_ms = 1", "step_ms = -1", "engine.args.step_ms: must be a number of at least 0, not -1"),
        ("step_ms = 1", 'frames = "tok"', "engine.args.frames: must be token or step, not 'tok'"),
        ("step_ms = 1", 'faults = "3=rest"', "engine.args.faults: write it like 3=reset,5=429"),
        ('name = "loopback"', 'name = "openai"\nurl = "localhost:80"', "engine[0].url: 'localhost:80' is not an address"),
        ('name = "loopback"', 'name = "loopback"\n[[engine]]\nname = "loopback"', "engine: two [[engine]] tables"),
        ("k = 4", "k = 5000", "method[1].k: must be 1024 or less"),
        ("k = 4", "k = [4, 4]", "method: ngram-simple k=4 stands twice"),
        ('name = "ngram-simple"\nk = 4', 'name = "none"', "method: none stands twice"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_plan_is_one_sentence(
    tmp_path: Path, call: Call, old: str, new: str, expected: str
) -> None:
    # The later of two equal engine tables keeps the args of the first.
    text = PLAN.replace(old, new, 1)
    assert text != PLAN
    if new.count("[[engine]]"):
        text = text.replace("args = { step_ms = 1 }\n", "")
    (tmp_path / "plan.toml").write_text(text)
    said = refused(call("run", tmp_path / "plan.toml", "--dry-run", "--json", "--out", tmp_path / "run"))
    assert expected in said


def test_settings_of_a_running_server_cannot_be_asked_for() -> None:
    """They would be ignored without a word."""
    text = PLAN.replace('name = "loopback"', 'name = "openai"\nurl = "http://127.0.0.1:1"')
    plan = check_plan(
        tomllib.loads(text.replace('name = "ngram-simple"\nk = 4', 'name = "as-served"')), "plan"
    )
    with pytest.raises(SpecbenchError, match=r"^engine\.args: "):
        OpenAIEngine().launch(plan.comparisons()[0].arms[0].config, "attached")


def test_a_server_that_is_not_there_is_named_before_anything_is_written(tmp_path: Path, call: Call) -> None:
    said = refused(
        call(
            "run",
            "--url",
            "http://127.0.0.1:1",
            "--baseline-url",
            "http://127.0.0.1:2",
            "--out",
            tmp_path / "r",
        )
    )
    assert "http://127.0.0.1:2" in said or "http://127.0.0.1:1" in said
    assert not (tmp_path / "r").exists()


def test_an_interpreter_that_is_none_is_named(tmp_path: Path, call: Call) -> None:
    text = PLAN.replace('name = "loopback"', 'name = "llamacpp"\npython = "/nope/python"')
    (tmp_path / "plan.toml").write_text(text.replace("args = { step_ms = 1 }\n", ""))
    said = refused(call("run", tmp_path / "plan.toml", "--out", tmp_path / "run"))
    assert "engine.python: /nope/python is no program" in said
    assert not (tmp_path / "run").exists(), "what can be refused is refused before anything is written"


def test_refused_rows_are_told(tmp_path: Path, call: Call) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Count to ten."}\n{"prompt": 3}\nnot JSON\n')
    file = f'file = "{tmp_path}/mine.jsonl"'
    text = PLAN.replace('categories = ["qa"]\nprompts_per_category = 3', file)
    (tmp_path / "plan.toml").write_text(text)
    _, _, err = call("run", tmp_path / "plan.toml", "--out", tmp_path / "run", "--json")
    assert "mine.jsonl: 2 rows refused (line 2: " in err


# --- run directories --------------------------------------------------------------------------------------


def test_out_is_a_file(measured: Path, call: Call) -> None:
    plan = measured / "plan.toml"
    assert "--out: " in refused(call("run", plan, "--out", plan))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:30])


@pytest.mark.parametrize("name", ["cell.json", "requests.parquet", "texts.jsonl.zst"])
@pytest.mark.parametrize("harm", [cut, Path.unlink])
def test_a_damaged_cell_is_named(
    measured: Path, tmp_path: Path, call: Call, name: str, harm: Callable[[Path], None]
) -> None:
    run = shutil.copytree(measured / "run", tmp_path / "run")
    path = min((run / "cells").glob(f"*/{name}"))
    harm(path)
    said = refused(call("report", run, "--json"))
    assert f"{path}: cannot be read (" in said
    assert "--resume" in said


def test_a_stray_file_among_the_cells_does_no_harm(measured: Path, tmp_path: Path, call: Call) -> None:
    run = shutil.copytree(measured / "run", tmp_path / "run")
    (run / "cells" / "notes.txt").write_text("mine")
    code, out, _ = call("report", run, "--json")
    assert code in (0, 3)
    assert json.loads(out)["reports"]


@pytest.mark.parametrize("content", ["{bad", "{}", '{"qa-01": 3}', "[]"])
def test_a_damaged_history_stops_a_resume(measured: Path, tmp_path: Path, call: Call, content: str) -> None:
    run = shutil.copytree(measured / "run", tmp_path / "run")
    shutil.rmtree(min((run / "cells").iterdir()))
    (run / "history.json").write_text(content)
    said = refused(call("run", measured / "plan.toml", "--resume", "--out", run))
    assert "history.json: damaged" in said


def test_cells_without_their_plan_are_not_gone_on_with(measured: Path, tmp_path: Path, call: Call) -> None:
    run = shutil.copytree(measured / "run", tmp_path / "run")
    (run / "run.json").unlink()
    assert "holds cells but no run.json" in refused(call("run", measured / "plan.toml", "--out", run))


def test_a_run_that_measured_nothing_is_no_obstacle(measured: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"plan_id": "of another plan"}')
    code, out, err = call("run", measured / "plan.toml", "--out", tmp_path / "run", "--json")
    assert code in (0, 3), err
    assert len(json.loads(out)["cells"]) == 2


# --- processes --------------------------------------------------------------------------------------------


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has finished its first cell and has a while to go."""
    text = PLAN.replace("step_ms = 1", "step_ms = 40").replace("blocks = 1", "blocks = 9")
    text = text.replace("max_tokens", 'history = "own"\nmax_tokens')
    (tmp_path / "plan.toml").write_text(text)
    process = command(tmp_path, "run", "plan.toml", "--out", "run")
    end = time.monotonic() + 60
    while not list((tmp_path / "run").glob("cells/[!.]*")) and time.monotonic() < end:
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


def test_two_runs_cannot_write_one_directory(
    tmp_path: Path, call: Call, running: subprocess.Popen[str]
) -> None:
    for extra in ([], ["--resume"]):
        said = refused(call("run", tmp_path / "plan.toml", "--out", tmp_path / "run", *extra))
        assert "another specbench run writes here now" in said
    assert running.poll() is None


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=30)
    assert (running.returncode, out) == (130, "")
    assert "finished cells are kept" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not psutil.wait_procs(children, timeout=10)[1]


@pytest.mark.parametrize(
    "words", [["run", "--fooo"], ["rune"], ["workloads", "show"], ["models", "fetch", "--x"]]
)
def test_a_wrong_flag_is_one_sentence(call: Call, words: list[str]) -> None:
    assert refused(call(*words)).endswith("--help`.\n")


def test_a_reader_that_goes_away_is_no_regression() -> None:
    """Exit 1 would read as a failed check."""
    argv = [sys.executable, "-m", "specbench", "workloads", "show", "qualitative", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(argv, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert b"Traceback" not in done.stderr


def test_a_server_that_is_killed_is_named(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    runner, end = psutil.Process(running.pid), time.monotonic() + 30
    while time.monotonic() < end:
        below = runner.children(recursive=True)
        servers = [c for c in below if c.is_running() and c.net_connections("tcp")]
        if servers:
            servers[0].kill()
            break
    while not (lost := failures.read(tmp_path / "run")) and time.monotonic() < end:
        time.sleep(0.05)
    assert "the loopback server no longer answers" in lost[0].reason
    assert running.poll() is None, "one block is lost, not the run"


def test_json_is_json_in_any_locale(measured: Path) -> None:
    process = command(
        measured, "workloads", "show", "qualitative", "--json", LC_ALL="C", PYTHONIOENCODING="ascii"
    )
    out, _ = process.communicate()
    assert not out.isascii()
    assert json.loads(out)["prompts"]


# --- servers ----------------------------------------------------------------------------------------------


class Liar(http.server.BaseHTTPRequestHandler):
    """A server whose usage cannot be true."""

    usage: dict[str, Any] = {}  # noqa: RUF012

    def do_GET(self) -> None:
        self.reply(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        text = {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}
        events = [text, {"choices": [], "usage": self.usage}]
        self.reply("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())

    def reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("count", [10**14, -3, 2.5, "12"])
def test_counts_that_cannot_be_true_fail_the_request_and_not_the_run(
    tmp_path: Path, call: Call, count: object
) -> None:
    handler = type("Handler", (Liar,), {"usage": {"prompt_tokens": count, "completion_tokens": 4}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        args = ("--blocks", 1, "--out", tmp_path / "run", "--json", "--max-tokens", 4)
        (tmp_path / "p.jsonl").write_text('{"prompt": "Count."}\n')
        code, out, _ = call(
            "run", "--url", url, "--baseline-url", url, "--prompts", tmp_path / "p.jsonl", *args
        )
        server.shutdown()
    assert code == 3
    assert f"prompt_tokens is {count!r}" in json.loads(out)["validity"][0]["advice"]
