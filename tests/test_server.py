"""runners.server: a child is ready, crashes with a sentence, and never outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from runners import server
from specbench.errors import SpecbenchError

READY = 'print(\'{"address": "http://127.0.0.1:1", "version": "1"}\', flush=True)\n'
UNTIL_EOF = "import sys; sys.stdin.buffer.read()\n"


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def alive(pid: int) -> bool:
    """Running: a zombie that nobody has reaped yet is dead."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def eventually(check: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_ready_line_and_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    code = (
        "print('loading 7')\n"
        + READY
        + "print('[1, 2]')\nimport sys; print('warned', file=sys.stderr)\n"
        + UNTIL_EOF
    )
    with server.serve(python(code), {}, log) as child:
        assert child.address == "http://127.0.0.1:1"
        assert child.ready["version"] == "1"
        assert child.poll() is None
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
        assert eventually(lambda: {"loading 7", "[1, 2]", "warned"} <= set(log.read_text().splitlines()))
    assert not psutil.pid_exists(child.pid)
    assert "address" not in log.read_text()


def test_environment_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_TEST_TOKEN", "kept")
    code = (
        "import json, os\n"
        "print(json.dumps({'address': 'x', 'a': os.environ['SPECBENCH_TEST_TOKEN'], 'b': os.environ['B']}), flush=True)\n"
    )
    with server.serve(python(code + UNTIL_EOF), {"B": "given"}, tmp_path / "log") as child:
        assert (child.ready["a"], child.ready["b"]) == ("kept", "given")
    assert "kept" not in (tmp_path / "log").read_text()


def test_crash_before_ready_gives_its_last_line(tmp_path: Path) -> None:
    code = "import sys; print('one', file=sys.stderr); print('no such model: x.gguf', file=sys.stderr); sys.exit(3)"
    with (
        pytest.raises(
            SpecbenchError, match=r"status 3 before it was ready; its last words: no such model: x\.gguf"
        ),
        server.serve(python(code), {}, tmp_path / "log"),
    ):
        pass


def test_killed_before_ready_names_the_signal(tmp_path: Path) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with (
        pytest.raises(SpecbenchError, match=r"-11 \(SIGSEGV\)"),
        server.serve(python(code), {}, tmp_path / "log"),
    ):
        pass


def test_missing_program(tmp_path: Path) -> None:
    with (
        pytest.raises(SpecbenchError, match=r"/nowhere/python: No such file or directory"),
        server.serve(["/nowhere/python"], {}, tmp_path / "log"),
    ):
        pass


def test_late_child_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n" + UNTIL_EOF
    with (
        pytest.raises(SpecbenchError, match=r"was not ready after 1 s"),
        server.serve(python(code), {}, tmp_path / "log", timeout_s=1),
    ):
        pass
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_what_the_child_started_ends_too(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        + READY
        + UNTIL_EOF
    )
    with server.serve(python(code), {}, tmp_path / "log") as child:
        below = [process.pid for process in psutil.Process(child.pid).children(recursive=True)]
        assert len(below) == 2
    assert not any(alive(pid) for pid in below)


def test_stubborn_child_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_S", 0.2)
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(600)\n"
    )
    with server.serve(python(code), {}, tmp_path / "log") as child:
        pass
    assert not psutil.pid_exists(child.pid)


def test_no_zombie_after_a_crash(tmp_path: Path) -> None:
    with server.serve(python(READY + "import os; os._exit(9)"), {}, tmp_path / "log") as child:
        assert eventually(lambda: child.poll() == 9)
    assert not psutil.pid_exists(child.pid)
    mine = psutil.Process().children()
    assert [process for process in mine if process.status() == psutil.STATUS_ZOMBIE] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_child_dies_when_the_parent_is_killed(tmp_path: Path) -> None:
    # The child ignores its stdin, so only the death signal can end it.
    child_code = READY + "import time; time.sleep(600)"
    parent_code = (
        "import sys, time\nfrom pathlib import Path\nfrom runners.server import serve\n"
        f"with serve([sys.executable, '-u', '-c', {child_code!r}], {{}}, Path({str(tmp_path / 'log')!r})) as child:\n"
        "    print(child.pid, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert eventually(lambda: not alive(child))


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_child_of_a_parent_already_dead_does_not_start(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    engine = [sys.executable, "-c", f"open({str(mark)!r}, 'w')"]
    watched, alive = os.pipe()
    for parent, status in ((gone.stdout.strip(), 1), (str(os.getpid()), 0)):
        assert not mark.exists()
        keeper = [sys.executable, str(server.KEEPER), parent, str(watched), "5"]
        done = subprocess.run([*keeper, *engine], check=False, pass_fds=(watched,))
        assert done.returncode == status
    assert mark.exists()
    os.close(watched)
    os.close(alive)


# --- servers that print no ready line: a health page ------------------------------------------------------

PAGE = (
    "import http.server, sys, time\n"
    "class Page(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200 if self.path == '/health' else 404); self.end_headers()\n"
    "    def log_message(self, *words): pass\n"
)


def page(port: int, before: str = "") -> list[str]:
    code = f"{PAGE}{before}\nprint('loading', flush=True)\n"
    return python(code + f"http.server.HTTPServer(('127.0.0.1', {port}), Page).serve_forever()\n")


def health(port: int, **more: bool) -> server.Health:
    return server.Health(f"http://127.0.0.1:{port}", **more)


def test_a_server_is_ready_when_its_health_page_answers(tmp_path: Path) -> None:
    port, log = server.free_port(), tmp_path / "log"
    with server.serve(page(port), {}, log, health=health(port)) as child:
        assert child.address == f"http://127.0.0.1:{port}"
        assert child.poll() is None
        assert server.port_taken(port)
        assert eventually(lambda: "loading" in log.read_text())
        started = time.monotonic()
    # It does not look at its stdin, and is not given the time in which it might.
    assert time.monotonic() - started < server.STOP_S
    assert not psutil.pid_exists(child.pid)
    assert not server.port_taken(port)


def test_its_stdout_is_log_even_where_it_looks_like_a_ready_line(tmp_path: Path) -> None:
    port, log = server.free_port(), tmp_path / "log"
    with server.serve(page(port, READY), {}, log, health=health(port)) as child:
        assert child.address == f"http://127.0.0.1:{port}"
        assert eventually(lambda: "http://127.0.0.1:1" in log.read_text())


def test_a_server_that_dies_while_loading_gives_its_last_words(tmp_path: Path) -> None:
    port = server.free_port()
    with (
        pytest.raises(SpecbenchError, match=r"status 3 before it was ready; its last words: out of memory;"),
        server.serve(
            python("import sys; print('out of memory'); sys.exit(3)"),
            {},
            tmp_path / "log",
            health=health(port),
        ),
    ):
        pass


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    port, mark = server.free_port(), tmp_path / "pid"
    hang = f"import os; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    with (
        pytest.raises(SpecbenchError, match=r"was not ready after 1 s"),
        server.serve(page(port, hang), {}, tmp_path / "log", timeout_s=1, health=health(port)),
    ):
        pass
    assert not psutil.pid_exists(int(mark.read_text()))


def test_a_page_that_answers_503_is_waited_for(tmp_path: Path) -> None:
    port = server.free_port()
    slow = "class Page(Page):\n    began = time.monotonic()\n    def do_GET(self):\n        late = time.monotonic() - self.began > 0.5\n        self.send_response(200 if late else 503); self.end_headers()\n"
    started = time.monotonic()
    with server.serve(page(port, slow), {}, tmp_path / "log", health=health(port)):
        assert time.monotonic() - started > 0.5


def test_a_stop_right_after_the_start_is_heard(tmp_path: Path) -> None:
    """SIGTERM comes while the engine is not yet what it will be."""
    port = server.free_port()
    with server.serve(page(port), {}, tmp_path / "page", health=health(port)):
        asleep, started = python("import time; time.sleep(600)"), time.monotonic()
        for _ in range(5):
            with server.serve(asleep, {}, tmp_path / "log", health=health(port, here=False)):
                pass
    assert time.monotonic() - started < server.CONTAINER_STOP_S


@pytest.mark.skipif(sys.platform != "linux", reason="who listens is read from /proc")
def test_a_stranger_on_the_port_is_not_taken_for_the_server(tmp_path: Path) -> None:
    port = server.free_port()
    with server.serve(page(port), {}, tmp_path / "stranger", health=health(port)):
        late = "time.sleep(0.5)"
        with (
            pytest.raises(SpecbenchError, match=r"before it was ready; its last words: OSError: .*in use"),
            server.serve(page(port, late), {}, tmp_path / "log", health=health(port)),
        ):
            pass
        # In a container the listener is never of the child's session, so there its answer has to do.
        asleep = python("import time; time.sleep(600)")
        with server.serve(asleep, {}, tmp_path / "box", health=health(port, here=False)) as child:
            assert child.poll() is None


def test_a_long_start_is_spoken_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SAY_FIRST_S", 0.2)
    port, said = server.free_port(), list[str]()
    with (
        server.telling(said.append),
        server.serve(
            page(port, "print('7 of 9 shards', flush=True); time.sleep(1.2)"),
            {},
            tmp_path / "log",
            health=health(port),
        ),
    ):
        pass
    assert said
    assert said[-1].endswith("s): 7 of 9 shards")
    assert len(said) <= 3  # after 0.2, 0.4 and 0.8 s


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up by their session")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_server_started_dies_with_us(tmp_path: Path, number: signal.Signals) -> None:
    """An engine's own worker processes: no death signal reaches them, and this one also ignores SIGTERM."""
    port = server.free_port()
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    before = f"import subprocess; subprocess.Popen([sys.executable, '-c', {stubborn!r}])"
    parent_code = (
        "import sys, time\nfrom pathlib import Path\nfrom runners.server import Health, serve\n"
        f"health = Health('http://127.0.0.1:{port}')\n"
        f"with serve({page(port, before)!r}, {{}}, Path({str(tmp_path / 'log')!r}), health=health) as child:\n"
        "    print(child.pid, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        session = int(parent.stdout.readline())
        of_session = [p for p in psutil.pids() if psutil.pid_exists(p) and _session(p) == session]
        assert len(of_session) == 3  # the keeper, the server, and what it started
        parent.send_signal(number)
        parent.wait()
    assert eventually(lambda: not any(alive(pid) for pid in of_session))


# --- what made a session of its own -----------------------------------------------------------------------

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def far(pids: Path) -> str:
    """Code that starts two processes which no group kill reaches; the second is an orphan at once."""
    start = f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True, stdout=2).pid"
    orphan = f"import subprocess, sys; print({start})"
    return (
        "import subprocess, sys\n"
        f"near = {start}\n"
        f"away = subprocess.run([sys.executable, '-c', {orphan!r}], stdout=subprocess.PIPE, text=True).stdout\n"
        f"open({str(pids)!r}, 'w').write(f'{{near}} {{away}}')\n"
    )


def far_ones(pids: Path) -> list[int]:
    found = [int(word) for word in pids.read_text().split()]
    assert len(found) == 2
    assert all(alive(pid) and os.getsid(pid) == pid for pid in found)
    return found


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")


@on_linux
def test_a_session_of_its_own_ends_with_an_orderly_stop(tmp_path: Path) -> None:
    with server.serve(python(far(tmp_path / "pids") + READY + UNTIL_EOF), {}, tmp_path / "log"):
        found = far_ones(tmp_path / "pids")
    assert not any(alive(pid) for pid in found)


@on_linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_session_of_its_own_ends_when_the_server_crashes(tmp_path: Path, number: signal.Signals) -> None:
    code = far(tmp_path / "pids") + READY + "import time; time.sleep(600)"
    with server.serve(python(code), {}, tmp_path / "log") as child:
        found = far_ones(tmp_path / "pids")
        assert child.poll() is None
        (engine,) = [p for p in psutil.Process(child.pid).children() if p.pid not in found]
        engine.send_signal(number)
        assert child.poll(30) == -number
        assert child.how_it_ended() == f"-{number.value} ({number.name})"
        assert not any(alive(pid) for pid in found)
    mine = psutil.Process().children()
    assert [process for process in mine if process.status() == psutil.STATUS_ZOMBIE] == []


@on_linux
def test_a_session_of_its_own_ends_when_the_server_is_ended(tmp_path: Path) -> None:
    code = far(tmp_path / "pids") + READY + "import time; time.sleep(600)"
    with server.serve(python(code), {}, tmp_path / "log") as child:
        found = far_ones(tmp_path / "pids")
        child.kill()
        assert child.poll(30) == -signal.SIGKILL
        assert not any(alive(pid) for pid in found)


@on_linux
def test_a_session_of_its_own_dies_with_us(tmp_path: Path) -> None:
    code = far(tmp_path / "pids") + READY + "import time; time.sleep(600)"
    parent_code = (
        "import time\nfrom pathlib import Path\nfrom runners.server import serve\n"
        f"with serve({python(code)!r}, {{}}, Path({str(tmp_path / 'log')!r})) as child:\n"
        "    print(child.pid, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        keeper = int(parent.stdout.readline())
        found = far_ones(tmp_path / "pids")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert eventually(lambda: not any(alive(pid) for pid in (*found, keeper)))


def test_where_the_keeper_itself_is_killed_the_group_ends(tmp_path: Path) -> None:
    """Nobody should, but its number is the one that a session shows."""
    code = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\n"
    with server.serve(python(code + READY + STUBBORN), {}, tmp_path / "log") as child:
        below = [process.pid for process in psutil.Process(child.pid).children(recursive=True)]
        assert len(below) == 2
        child.process.send_signal(signal.SIGKILL)
    assert not any(alive(pid) for pid in below)


@on_linux
def test_what_a_server_that_ended_left_may_clear_up(tmp_path: Path) -> None:
    """Python's resource tracker, which unlinks shared memory, is such a process."""
    done = tmp_path / "done"
    tidy = f"import os, sys, time; os.read(0, 1); time.sleep(0.2); open({str(done)!r}, 'w')"
    code = (
        f"import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"left = subprocess.Popen([sys.executable, '-c', {tidy!r}], stdin=subprocess.PIPE)\n"
    )
    with server.serve(python(code + READY + UNTIL_EOF), {}, tmp_path / "log"):
        assert not done.exists()
    assert done.exists()


@on_linux
def test_a_stranger_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(python("import time; time.sleep(600)"), start_new_session=True) as stranger:
        with server.serve(python(far(tmp_path / "pids") + READY + UNTIL_EOF), {}, tmp_path / "log"):
            pass
        assert alive(stranger.pid)
        stranger.kill()


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def test_a_session_that_ended_can_still_be_asked(tmp_path: Path) -> None:
    with server.serve(python(READY + UNTIL_EOF), {}, tmp_path / "log") as child:
        child.kill()
        assert child.how_it_ended() == "-9 (SIGKILL)"
    assert child.poll() == -9


def test_a_log_is_of_one_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for words in ("first", "second"):
        with (
            pytest.raises(SpecbenchError, match=rf"its last words: {words};"),
            server.serve(python(f"import sys; sys.exit({words!r})"), {}, log),
        ):
            pass
    assert (log.read_text().strip(), (tmp_path / "log.old").read_text().strip()) == ("second", "first")
