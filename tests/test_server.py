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
        grandchildren = [process.pid for process in psutil.Process(child.pid).children()]
        assert len(grandchildren) == 1
    assert eventually(lambda: not alive(grandchildren[0]))


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
    done = subprocess.run(
        [sys.executable, "-S", "-c", server._SHIM, gone.stdout.strip(), *engine], check=False
    )
    assert done.returncode == 1
    assert not mark.exists()
