"""Runs that are killed, or that meet a full disk, and are resumed leave the same cells as undisturbed ones.

The engine is the loopback server with its seeded script, so everything but the times must agree to the byte.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest

import specbench
from runners import loopback
from runners.run import Runner
from specbench import trace
from specbench.errors import SpecbenchError
from specbench.plan import Plan, check_plan

ROOT = Path(__file__).parent.parent
PLAN = """
schema = 1
name = "kill"
seed = 3
model = "script"
[workload]
split = "qualitative"
categories = ["qa"]
prompts_per_category = 3
max_tokens = 24
[load]
concurrency = 2
[repeat]
blocks = 4
[[engine]]
name = "loopback"
[[method]]
name = "none"
baseline = true
[[method]]
name = "ngram-simple"
k = 4
"""
CELLS = 16
TIMES = {
    "scheduled_ns",
    "sent_ns",
    "first_output_ns",
    "first_content_ns",
    "last_output_ns",
    "done_ns",
    "frame_ns",
}
TIMES |= {"server_queue_ms", "server_prefill_ms", "server_decode_ms"}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "kill.toml"
    path.write_text(PLAN)
    return path


def command(plan: Path, out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "specbench", "run", str(plan), "--out", str(out), *flags]


def start(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(plan: Path, out: Path) -> None:
    flags = ("--resume",) if (out / "run.json").exists() else ()
    done = subprocess.run(command(plan, out, *flags), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    assert "Traceback" not in done.stderr


def content(out: Path) -> dict[str, list[dict[str, Any]]]:
    """What a run holds, times aside: rows by cell, in request order."""
    run = specbench.load(out)
    columns = [name for name in trace.REQUEST_SCHEMA.names if name not in TIMES]
    result = {}
    for cell_id, rows in run.requests.groupby("cell_id"):
        ordered = rows.sort_values("request")[columns].to_json(orient="records")
        result[str(cell_id)] = [
            ordered,
            [text["text"] for text in sorted(run.texts(str(cell_id)), key=lambda t: t["request"])],
        ]
    return result


@pytest.fixture(scope="module")
def undisturbed(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(plan, out)
    kept = content(out)
    assert len(kept) == CELLS
    return kept


def assert_same(out: Path, undisturbed: dict[str, Any]) -> None:
    assert content(out) == undisturbed
    for (comparison, block), cells in specbench.load(out).cells.groupby(["comparison", "block"]):
        assert cells["session_id"].nunique() == 1, f"block {block} of {comparison} mixes sessions"
    assert not list(out.rglob("*.part"))


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9, and nothing that it had started may live on."""
    family = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_kill_at_random_moments_then_resume(plan: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    out, moments = tmp_path / "run", random.Random(11)
    for _ in range(8):
        process = start(command(plan, out, *(("--resume",) if (out / "run.json").exists() else ())))
        time.sleep(moments.uniform(0.3, 2.5))
        kill(process)
    finish(plan, out)
    assert_same(out, undisturbed)


@pytest.mark.slow
def test_kill_inside_a_block_sets_its_cells_aside(
    plan: Path, tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    process = start(command(plan, out))
    while len(trace.cell_dirs(out)) < 6 and process.poll() is None:
        time.sleep(0.005)
    kill(process)
    assert len(trace.cell_dirs(out)) % 4, "the kill came between two blocks; nothing was tried"
    finish(plan, out)
    assert_same(out, undisturbed)
    kept = list((out / "superseded").iterdir())
    assert kept
    assert {path.name.split(".")[0] for path in kept} <= set(undisturbed)


RENAME = """
import os, pathlib, signal, sys
real, left = pathlib.Path.rename, int(sys.argv.pop(1))
def rename(self, target):
    global left
    left -= "cells" in self.parts
    if left == 0:
        if {after}: real(self, target)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, target)
pathlib.Path.rename = rename
from specbench.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before-it", "after-it"])
def test_kill_at_the_rename(plan: Path, tmp_path: Path, undisturbed: dict[str, Any], after: bool) -> None:
    out = tmp_path / "run"
    arguments = command(plan, out)[3:]
    process = start([sys.executable, "-c", RENAME.format(after=after), "7", *arguments])
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert len(trace.cell_dirs(out)) == (7 if after else 6)
    finish(plan, out)
    assert_same(out, undisturbed)


FULL = """
set -e
mount -t tmpfs -o size=160k tmpfs "$1"
set +e; shift_out="$1/run"
"$2" -m specbench run "$3" --out "$shift_out" 2> "$4/first.err"; echo $? > "$4/first.rc"
set -e
mount -o remount,size=100m "$1"
"$2" -m specbench run "$3" --out "$shift_out" --resume 2> "$4/second.err" || [ $? = 3 ]
cp -r "$shift_out" "$4/run"
"""


@pytest.mark.slow
def test_full_disk_then_resume(plan: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    small, kept = tmp_path / "small", tmp_path / "kept"
    small.mkdir()
    kept.mkdir()
    unshare = shutil.which("unshare")
    probe = [unshare or "unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(small)]
    if unshare is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs `unshare -rm` to mount a small disk of its own")
    argv = [unshare, "-rm", "sh", "-c", FULL, "sh", str(small), sys.executable, str(plan), str(kept)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (kept / "first.rc").read_text().strip() == "2"
    complaint = (kept / "first.err").read_text().strip().splitlines()[-1]
    assert "No space left" in complaint
    assert "Traceback" not in (kept / "first.err").read_text()
    assert_same(kept / "run", undisturbed)


@pytest.mark.slow
def test_interrupt_leaves_a_resumable_run(plan: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    out = tmp_path / "run"
    process = start(command(plan, out))
    while len(trace.cell_dirs(out)) < 3 and process.poll() is None:
        time.sleep(0.01)
    family = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "--resume" in err
    assert "Traceback" not in err
    assert not psutil.wait_procs(family, timeout=10)[1]
    finish(plan, out)
    assert_same(out, undisturbed)


def test_a_second_run_over_the_first_is_refused(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    trace.write_atomic(out / "run.json", b"{}")
    done = subprocess.run(command(plan, out), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert set(os.listdir(out)) == {"run.json", ".lock"}


LLAMA = PLAN.replace('name = "loopback"', 'name = "llamacpp"').replace(
    'model = "script"', 'model = "smollm2-135m"'
)
LLAMA = (
    LLAMA.replace("concurrency = 2", "concurrency = 1")
    .replace("k = 4", "n = 4\nk = 8")
    .replace("blocks = 4", "blocks = 1")
)


def outputs(out: Path) -> dict[str, list[tuple[int, str, str]]]:
    """Cell to request, prompt and output hash: what must repeat on a real engine at concurrency 1."""
    rows = specbench.load(out).requests
    kept = ["request", "prompt_sha256", "output_sha256"]
    return {
        str(cell): sorted(group[kept].itertuples(index=False, name=None))
        for cell, group in rows.groupby("cell_id")
    }


@pytest.mark.slow
@pytest.mark.engine
def test_kill_on_llama_cpp_then_resume(model: str, tmp_path: Path) -> None:
    plan, calm, killed = tmp_path / "llama.toml", tmp_path / "calm", tmp_path / "killed"
    plan.write_text(LLAMA.replace("smollm2-135m", model))
    finish(plan, calm)
    process = start(command(plan, killed))
    while len(trace.cell_dirs(killed)) < 2 and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.7)  # into the third run of the first block: the server is up, requests are in flight
    kill(process)
    finish(plan, killed)
    assert outputs(killed) == outputs(calm)
    assert len(outputs(calm)) == 4
    assert list((killed / "superseded").iterdir())


def short(blocks: int, budget_s: float | None = None) -> Plan:
    text = PLAN.replace("blocks = 4", f"blocks = {blocks}").replace("max_tokens = 24", "max_tokens = 4")
    plan = check_plan(tomllib.loads(text), "plan")
    repeat = plan.repeat.model_copy(update={"budget_s": budget_s})
    return plan.model_copy(update={"repeat": repeat})


@pytest.mark.slow
def test_blocks_and_budget_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    Runner(short(2, budget_s=0.001), tmp_path / "run").run()
    assert len(trace.cell_dirs(tmp_path / "run")) == 4, "the first block always runs"
    (found,) = [n for n in specbench.summary(tmp_path / "run").validity if n.code == "unfinished"]
    assert "1 of 2 blocks at concurrency 2" in found.advice
    Runner(short(2), tmp_path / "run").run(resume=True)
    assert len(trace.cell_dirs(tmp_path / "run")) == 8
    assert not (tmp_path / "run" / "superseded").exists()
    assert "unfinished" not in {n.code for n in specbench.summary(tmp_path / "run").validity}
    Runner(short(3, budget_s=0.001), tmp_path / "run").run(resume=True)
    assert "unfinished" not in {n.code for n in specbench.summary(tmp_path / "run").validity}, (
        "one block fitted"
    )


@pytest.mark.slow
def test_cells_of_another_engine_version_are_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Runner(short(1), tmp_path / "run").run()
    monkeypatch.setattr(loopback, "VERSION", "2")
    with pytest.raises(SpecbenchError, match=r"--resume: .* another engine_version than now"):
        Runner(short(2), tmp_path / "run").run(resume=True)
    assert len(trace.cell_dirs(tmp_path / "run")) == 4
