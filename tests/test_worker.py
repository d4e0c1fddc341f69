"""runners.worker: the protocol of a worker in a real process, with a scripted engine in place of a model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from runners import worker
from runners.base import Stream
from runners.client import Exchange
from runners.worker import WorkerClient, WorkerSession, parse
from specbench.cell import Facts
from specbench.errors import EngineFailed

# What a request's first message says is what the engine does.
SCRIPT = textwrap.dedent('''
    """A scripted engine: no model, the same functions."""
    import os, sys, time

    print("a print while it loads")
    os.write(1, b"native code that prints\\n")

    class Engine:
        def __init__(self, asked):
            self.asked, self.active, self.done, self.dropped = asked, [], 0, 0
        def facts(self):
            return {"speculative": True, "extra": {"asked": self.asked}}
        def add(self, body, reply):
            if body["do"] == "refuse":
                raise ValueError("too long\\nby far")
            self.active.append([body, reply, 0])
        def busy(self):
            return bool(self.active)
        def step(self):
            for entry in list(self.active):
                self.one(entry)
        def one(self, entry):
            body, reply, count = entry
            do, entry[2] = body["do"], count + 1
            if do == "die" and count == 2:
                os.kill(os.getpid(), 9)
            if do == "exit" and count == 2:
                print("out of memory", file=sys.stderr)
                os._exit(3)
            if do == "raise" and count == 2:
                raise RuntimeError("bad state")
            if do == "hang":
                time.sleep(600)
            if do == "garbage":
                print("{not json")
                os.write(1, b'{"id": 0, "step": [1]}\\n')
            if do in ("slow", "batch"):
                time.sleep(0.02)
            if reply.cancelled:
                self.active.remove(entry)
                return reply.fail("given up")
            if count == 0 and do != "empty":
                reply.step([7, 8], drafted=3, accepted=1)
            elif count < 4 and do != "empty":
                reply.step([9], drafted=2, accepted=0)
            elif count < {"slow": 1000, "batch": 40}.get(do, 0):
                reply.step([9])
            else:
                self.active.remove(entry)
                self.done += 1
                text = {"unicode": "na\\u00efve \\U0001f600 \\ud800", "huge": "x" * 3_000_000}.get(do, "words")
                reply.end(finish="length", prompt_tokens=5, text="" if do == "empty" else text, echo=body.get("pad", "")[:3])
        def drop(self):
            self.dropped += len(self.active)
            self.active.clear()
        def counters(self):
            return {"worker_requests_total": self.done, "dropped": self.dropped}
        def reset(self):
            return False

    def load(asked, log):
        if asked.get("fail"):
            raise FileNotFoundError("no such model: x.gguf")
        if asked.get("far"):
            import subprocess
            code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
            far = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
            open(asked["far"], "w").write(str(far.pid))
        log("loaded")
        return Engine(asked)
''')


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "scripted.py"
    path.write_text(SCRIPT)
    return path


@contextmanager
def started(script: Path, asked: dict[str, Any] | None = None) -> Iterator[WorkerSession]:
    argv = worker.command((sys.executable,), script, asked or {})
    with worker.start_worker(
        argv, {}, script.with_name("log"), Facts(engine="scripted"), timeout_s=60
    ) as session:
        yield session


def ask(
    session: WorkerSession, *dos: str, timeout_s: float = 60, grace_s: float = 5, pad: str = ""
) -> list[Exchange]:
    """One exchange for each word, all at once."""

    async def run() -> list[Exchange]:
        async with WorkerClient(session, timeout_s=timeout_s, grace_s=grace_s) as client:
            bodies = [orjson.dumps({"do": do, "pad": pad}) for do in dos]
            return list(await asyncio.gather(*(client.post("generate", body) for body in bodies)))

    return asyncio.run(run())


def one(session: WorkerSession, do: str, **limits: Any) -> Stream:
    return parse(ask(session, do, **limits)[0])


def alive(pid: int) -> bool:
    """Running: a zombie that nobody has reaped yet is dead."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def eventually(check: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_reply_is_frames_with_the_workers_stamps(script: Path) -> None:
    with started(script, {"threads": 1}) as session:
        before = time.monotonic_ns()
        exchange = ask(session, "talk")[0]
        after = time.monotonic_ns()
        stream = parse(exchange)
        assert session.ready["facts"]["extra"] == {"asked": {"threads": 1}}
        assert session.pids == (session.worker._process.pid,)  # type: ignore[union-attr]
    assert (stream.status, stream.finish, stream.text) == ("ok", "length", "words")
    assert stream.frame_tokens == [2, 1, 1, 1]
    assert stream.frame_step == [0, 1, 2, 3]
    assert (stream.output_tokens, stream.output_tokens_from) == (5, "server_ids")
    assert (stream.first_frame_tokens, stream.first_frame_tokens_from) == (2, "reported")
    assert (stream.prompt_tokens, stream.prompt_tokens_from) == (5, "usage")
    assert [mark and mark["drafted"] for mark in stream.marks] == [3, 2, 2, 2]
    times = [exchange.sent_ns, *stream.frame_ns, stream.done_ns or 0]
    assert times == sorted(times)
    assert before <= times[0]
    assert times[-1] <= after
    # The pipe's own delay is not in the stamps: each record was stamped before it was read.
    assert all(stamp <= read for stamp, (read, _) in zip(stream.frame_ns, exchange.reads, strict=False))


def test_what_is_printed_goes_to_the_log(script: Path) -> None:
    with started(script) as session:
        streams = [one(session, "garbage"), one(session, "talk")]
        assert session.counters() == {"worker_requests_total": 2, "dropped": 0}
        assert session.reset() is False
    assert [stream.frame_tokens for stream in streams] == [[2, 1, 1, 1]] * 2
    log = script.with_name("log").read_text()
    for words in (
        "a print while it loads",
        "native code that prints",
        "loaded",
        "{not json",
        '{"id": 0, "step": [1]}',
    ):
        assert words in log


def test_several_requests_share_the_steps(script: Path) -> None:
    with started(script) as session:
        streams = [parse(exchange) for exchange in ask(session, *["batch"] * 4)]
    assert [stream.output_tokens for stream in streams] == [5 + 36] * 4
    first, last = max(s.frame_ns[0] for s in streams), min(s.frame_ns[-1] for s in streams)
    assert first < last  # all had begun before one had ended


def test_unicode_huge_and_long_requests(script: Path) -> None:
    with started(script) as session:
        assert one(session, "unicode").text == "naïve 😀 \ufffd"
        assert len(one(session, "huge").text) == 3_000_000
        long = one(session, "talk", pad="né" * 500_000)  # more than a pipe holds
        assert long.status == "ok"
        assert long.tail["worker"]["echo"] == "nén"
        assert one(session, "empty").status == "empty"
        assert one(session, "empty").output_tokens == 0


def test_an_error_in_a_request_costs_that_request(script: Path) -> None:
    with started(script) as session:
        refused, failed = one(session, "refuse"), one(session, "raise")
        assert (refused.status, refused.error_kind) == ("failed", "in_band")
        assert refused.error == "ValueError: too long by far"
        assert (failed.status, failed.error_kind, failed.error) == (
            "failed",
            "in_band",
            "RuntimeError: bad state",
        )
        assert failed.frame_tokens == [2, 1]  # what had come is kept
        assert one(session, "talk").status == "ok"
        assert session.counters()["dropped"] == 1
    assert "Traceback" in script.with_name("log").read_text()


@pytest.mark.parametrize(("do", "how"), [("die", r"-9 \(SIGKILL\)"), ("exit", "3")])
def test_death_in_a_stream_is_told_to_all_and_later_requests_are_refused(
    script: Path, do: str, how: str
) -> None:
    with started(script) as session:
        lost = [parse(exchange) for exchange in ask(session, "slow", do)]
        later = one(session, "talk")
        with pytest.raises(EngineFailed, match=f"worker ended.*status {how}"):
            session.counters()
        pids = session.pids
    assert [stream.error_kind for stream in lost] == ["incomplete_read"] * 2
    assert lost[1].frame_tokens == [2, 1]
    assert later.error_kind == "refused"
    assert later.error == lost[0].error
    if do == "exit":
        assert "its last words: out of memory" in str(later.error)
    assert not alive(pids[0])


def test_a_slow_reply_is_given_up_and_the_worker_lives(script: Path) -> None:
    with started(script) as session:
        stream = one(session, "slow", timeout_s=0.3, grace_s=30)
        assert (stream.status, stream.error_kind) == ("failed", "timeout")
        assert stream.error == "no end of the reply within 0.3 s"
        assert stream.frame_ns
        assert one(session, "talk").status == "ok"


def test_a_worker_that_hangs_is_ended(script: Path) -> None:
    with started(script) as session:
        hung = one(session, "hang", timeout_s=0.3, grace_s=0.3)
        assert (hung.error_kind, hung.frame_ns) == ("timeout", [])
        later = one(session, "talk")
        assert later.error_kind == "refused"
        assert "hung in an earlier request" in str(later.error)
        assert not alive(session.pids[0])


def test_a_model_that_cannot_be_loaded(script: Path) -> None:
    with (
        pytest.raises(EngineFailed, match=r"status 1 before it was ready.*no such model: x\.gguf"),
        started(script, {"fail": 1}),
    ):
        pass


def test_a_missing_interpreter(script: Path) -> None:
    argv = worker.command(("/nowhere/python",), script, {})
    with (
        pytest.raises(EngineFailed, match=r"/nowhere/python: No such file"),
        worker.start_worker(argv, {}, script.with_name("log"), Facts(engine="scripted")),
    ):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")
@pytest.mark.parametrize("do", ["talk", "die"])
def test_what_made_a_session_of_its_own_ends_with_the_worker(script: Path, tmp_path: Path, do: str) -> None:
    """As MPI does for its workers; in an orderly stop, and where the worker dies."""
    with started(script, {"far": str(tmp_path / "far")}) as session:
        far = int((tmp_path / "far").read_text())
        assert os.getsid(far) == far
        assert one(session, do).status == ("ok" if do == "talk" else "failed")
        assert alive(far) == (do == "talk") or eventually(lambda: not alive(far))
    assert not alive(far)


def test_it_ends_with_the_session_in_the_middle_of_a_reply(script: Path) -> None:
    async def leave(session: WorkerSession) -> None:
        async with WorkerClient(session, timeout_s=60) as client:
            task = asyncio.ensure_future(client.post("generate", orjson.dumps({"do": "slow"})))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with started(script) as session:
        asyncio.run(leave(session))
        assert eventually(lambda: session.counters()["worker_requests_total"] == 0)
    assert not psutil.pid_exists(session.pids[0])


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
@pytest.mark.parametrize("do", ["hang", "slow"])
def test_no_orphan_when_the_parent_is_killed(script: Path, do: str) -> None:
    code = textwrap.dedent(f"""
        import asyncio, sys
        from pathlib import Path
        from runners import worker
        from specbench.cell import Facts
        argv = worker.command((sys.executable,), Path({str(script)!r}), {{}})
        async def run(session):
            async with worker.WorkerClient(session, timeout_s=600) as client:
                await client.post("generate", b'{{"do": "{do}"}}')
        with worker.start_worker(argv, {{}}, Path({str(script.with_name("log"))!r}), Facts(engine="x")) as session:
            print(session.pids[0], flush=True)
            asyncio.run(run(session))
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        parent.send_signal(signal.SIGKILL)
    assert eventually(lambda: not alive(child))


def test_it_ends_when_its_stdin_closes(script: Path) -> None:
    argv = worker.command((sys.executable,), script, {})
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert b"worker:" in process.stdout.readline()
        process.stdin.write(b'{"id":0,"op":"generate","body":{"do":"hang"}}\n')
        process.stdin.close()
        assert process.wait(20) == -signal.SIGKILL


# --- lines that no worker of ours writes ------------------------------------------------------------------


def exchange(*records: object, eof: Any = "complete", error: str | None = None) -> Exchange:
    return Exchange(None, 1, [(9, orjson.dumps(record)) for record in records], 10, eof, error)


@pytest.mark.parametrize(
    "records",
    [
        ({"id": 0, "at": 2, "step": [1]}, {"id": 0, "at": 3, "strange": 1}),
        ({"id": 0, "step": [1]}, {"id": 0, "at": 3, "done": {}}),
        ({"id": 0, "at": 2, "done": 7},),
        ({"id": 0, "at": 2, "error": "no record"},),
        ([1],),
        (),
    ],
)
def test_records_of_another_shape(records: tuple[object, ...]) -> None:
    stream = parse(exchange(*records))
    assert (stream.status, stream.error_kind) == ("failed", "bad_json")


def test_a_reply_that_is_cut_keeps_its_frames() -> None:
    stream = parse(exchange({"id": 0, "at": 2, "step": [1, 2]}, eof="closed", error="it ended"))
    assert (stream.status, stream.error_kind, stream.error) == ("failed", "incomplete_read", "it ended")
    assert (stream.frame_ns, stream.frame_tokens, stream.output_tokens) == ([2], [2], 2)


def test_worker_files_import_nothing_of_ours() -> None:
    import ast

    ours = {"specbench", "runners", "workloads", "models_roofline", "reports"}
    files = sorted(worker.MAIN.parent.glob("*.py"))
    assert {"main.py", "openvino_worker.py", "transformers_worker.py"} <= {path.name for path in files}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & ours, path.name
    assert os.access(worker.MAIN, os.R_OK)
