"""An engine in a container: found, started, ready, stopped in order, and nothing of it left.

`docker` is a stand-in on disk (`tests.stand_ins.Docker`) that runs the command here, so what a daemon does with a
container whose client was killed is not shown.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from runners import server, worker
from runners.base import Request, Where
from runners.client import Client
from runners.environments import interpreter_for
from runners.frames import parse
from runners.server import Health, free_port, serve
from runners.sglang import SglangEngine
from specbench.cell import Config, EngineAsk, Facts, Method, Workload
from specbench.errors import EngineFailed
from tests.stand_ins import VERSIONS, Docker, install, running, troubles
from tests.test_server import PAGE, alive, eventually

REQUEST = Request(0, "p", None, 0, 0, ({"role": "user", "content": "Hello"},), 8, model="org/model")


@pytest.fixture
def docker(tmp_path: Path) -> Docker:
    return Docker(tmp_path)


def ended(docker: Docker) -> list[tuple[str, int]]:
    """What happened after the start, once the container has ended; its process is gone."""
    assert eventually(lambda: "end" in dict(docker.notes()))
    (start, pid), *rest = docker.notes()
    assert start == "start"
    assert not alive(pid)
    return rest


def test_a_server_in_a_container_starts_answers_and_stops(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, python = SglangEngine(), install(tmp_path / "box", "sglang")
    for name, value in troubles(tmp_path / "starts").items():
        monkeypatch.setenv(name, value)
    command = f"{docker.program} run --rm --init --network host -e SPECBENCH_REPLICA IMAGE"
    found = engine.probe(Where(python=python, command=command))
    assert (found.ok, found.version) == (True, VERSIONS["sglang"][1])
    docker.forget()
    ask = EngineAsk(name="sglang", python=python, command=command)
    config = Config(engine=ask, method=Method(name="nextn", k=3), model="hf:org/model", workload=Workload())
    with engine.start(engine.launch(config, VERSIONS["sglang"][1]), tmp_path / "log") as session:
        assert session.facts.speculative
        assert asyncio.run(replied(session.address)) == ("ok", 8)
        assert session.counters()
        # The keeper and the client, whose commands name it too, and the server.
        assert len(list(running(tmp_path / "box"))) == 3
    assert ended(docker) == [("signal", signal.SIGTERM), ("end", -signal.SIGTERM)]
    assert list(running(tmp_path)) == []


async def replied(address: str) -> tuple[str, int | None]:
    async with Client(address, connections=1) as client:
        stream = parse(await client.post(SglangEngine.path, SglangEngine().body(REQUEST)))
    return stream.status, stream.output_tokens


SLOW = PAGE + textwrap.dedent("""
    import signal
    def leave(*_):
        time.sleep(1)
        sys.exit(7)
    signal.signal(signal.SIGTERM, leave)
""")


def slow(docker: Docker, port: int) -> list[str]:
    """A server that takes a while to end, in a container."""
    code = SLOW + f"http.server.HTTPServer(('127.0.0.1', {port}), Page).serve_forever()\n"
    return [str(docker.program), "run", "--rm", "IMAGE", sys.executable, "-c", code]


def test_a_container_is_given_time_to_end(
    docker: Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is killed would leave it to its daemon."""
    monkeypatch.setattr(server, "STOP_S", 0.5)
    port = free_port()
    health = Health(f"http://127.0.0.1:{port}", here=False)
    with serve(slow(docker, port), {}, tmp_path / "log", health=health):
        pass
    assert ended(docker) == [("signal", signal.SIGTERM), ("end", 7)]


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_container_is_stopped_in_order_when_we_are_killed(docker: Docker, tmp_path: Path) -> None:
    port = free_port()
    code = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from runners.server import Health, serve
        health = Health("http://127.0.0.1:{port}", here=False)
        with serve({slow(docker, port)!r}, {{}}, Path({str(tmp_path / "log")!r}), health=health):
            print("ready", flush=True)
            time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as us:
        assert us.stdout is not None
        assert us.stdout.readline() == "ready\n"
        us.send_signal(signal.SIGKILL)
    assert ended(docker) == [("signal", signal.SIGTERM), ("end", 7)]


# --- a worker ---------------------------------------------------------------------------------------------

ENGINE = textwrap.dedent('''
    """Answers with the number that it was asked for."""
    import os, subprocess, sys

    class Engine:
        def facts(self):
            return {"speculative": False, "extra": {"pid": os.getpid(), "far": self.far}}
        def add(self, body, reply):
            reply.step([body["number"]])
            reply.end(finish="stop", prompt_tokens=1, text=str(body["number"]))
        def busy(self):
            return False
        def counters(self):
            return {"worker_requests_total": 0}

    def load(asked, log):
        engine = Engine()
        code = "import time; time.sleep(600)"
        engine.far = subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid
        return engine
''')


def in_container(docker: Docker, options: str, folder: Path) -> tuple[str, ...]:
    (folder / "scripted.py").write_text(ENGINE)
    command = f"{docker.program} run --rm {options} IMAGE"
    return worker.command(interpreter_for("openvino", sys.executable, command), folder / "scripted.py", {})


def test_a_worker_in_a_container_starts_answers_and_stops(docker: Docker, tmp_path: Path) -> None:
    argv = in_container(docker, "-i", tmp_path)
    with worker.start_worker(argv, {}, tmp_path / "log", Facts(engine="scripted")) as session:
        exchange = session.worker.send("generate", b'{"number": 42}').future.result(30)
        assert worker.parse(exchange).text == "42"
        inside = session.ready["facts"]["extra"]
        assert docker.notes() == [("start", inside["pid"])]
        assert alive(inside["pid"])
        assert os.getsid(inside["far"]) == inside["far"]
    # Its stdin closed, so no signal was needed: it ends its group itself. What was not in it ended too.
    assert ended(docker) == [("end", -signal.SIGKILL)]
    assert not alive(inside["far"])
    assert not any(psutil.pid_exists(pid) for pid in session.pids)


def test_a_worker_without_stdin_says_that_it_ended(docker: Docker, tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFailed, match=r"ended (with status|\(status) 137"),
        worker.start_worker(
            in_container(docker, "", tmp_path), {}, tmp_path / "log", Facts(engine="scripted")
        ) as session,
    ):
        session.counters()
    assert ended(docker) == [("end", -signal.SIGKILL)]
