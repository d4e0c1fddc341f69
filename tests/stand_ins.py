"""Servers in place of engines, started exactly as the adapters start the engines: same interpreter, module and options.

`install` makes a real environment whose package of the engine is a stand-in: the adapter's probe finds its version,
its command runs it, and it listens, fails and dies as `SPECBENCH_REPLICA` says (`runners.replicas.start`). SGLang's
and TensorRT-LLM's are the replicas; vLLM's and llama.cpp's (below), which are also run for real elsewhere, are the
loopback server with the pages that their adapters ask for.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from runners.loopback_script import Script
from runners.loopback_server import Server, http_reply, run
from runners.replicas import start
from tests.fake_environment import environment

ROOT = Path(__file__).parent.parent
VERSIONS = {"llamacpp": ("xllamacpp", "2026.10"), "vllm": ("vllm", "0.32.0")}
VERSIONS |= {"sglang": ("sglang", "0.5.23"), "tensorrt_llm": ("tensorrt-llm", "1.2.0")}
"""The distribution of each engine and the version that the stand-in says."""

_PATHS = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
_SEE = f"import sys\nsys.path[:0] = {_PATHS!r}\n"
"""The stand-in's interpreter is another environment's: it is shown this one's packages."""
_MODULES = {
    "llamacpp": {"xllamacpp/__init__.py": "from tests.stand_ins import CommonParams, LlamaServer as Server, types as common_speculative_type\n"},
    "vllm": {"vllm/entrypoints/openai/api_server.py": "from tests.stand_ins import vllm\nvllm()\n"},
    "sglang": {"sglang/launch_server.py": "from runners.replicas.sglang import main\nmain()\n"},
    "tensorrt_llm": {},
}  # fmt: skip


def install(home: Path, engine: str) -> str:
    """An environment with the stand-in; the path of its interpreter."""
    distribution, version = VERSIONS[engine]
    python = environment(home, {distribution: version})
    (packages,) = home.glob("lib/python*/site-packages")
    for name, code in _MODULES[engine].items():
        module = packages / name
        module.parent.mkdir(parents=True, exist_ok=True)
        for folder in module.relative_to(packages).parents:
            (packages / folder / "__init__.py").touch()
        (packages / "__init__.py").unlink()
        module.write_text(_SEE + code)
    if engine == "tensorrt_llm":
        script = home / "bin" / "trtllm-serve"
        script.write_text(f"#!{python}\n{_SEE}from runners.replicas.tensorrt_llm import main\nmain()\n")
        script.chmod(0o755)
    return python


# --- a container ------------------------------------------------------------------------------------------

_DOCKER = '''#!{python}
"""The client of docker, `run [OPTIONS] IMAGE COMMAND…`, as far as its documentation says how it treats a command.

The command gets stdin only with -i, the environment only by -e NAME, a session of its own, and the signals that the
client gets. What happened is in {notes}.
"""
import os, signal, subprocess, sys

def note(*words):
    with open({notes!r}, "a") as file:
        print(*words, file=file, flush=True)

_, run, *words = sys.argv
options, passed = [], ["PATH"]
while words[0].startswith("-"):
    options.append(words.pop(0))
    if options[-1] in ("-e", "-v", "--network"):
        value = words.pop(0)
        passed += [value] if options[-1] == "-e" else []
env = {{name: os.environ[name] for name in passed if name in os.environ}}
stdin = None if "-i" in options else subprocess.DEVNULL
box = subprocess.Popen(words[1:], env=env, stdin=stdin, start_new_session=True)

def pass_on(number, frame):
    note("signal", number)
    box.send_signal(number)

signal.signal(signal.SIGTERM, pass_on)
note("start", box.pid)
status = box.wait()
note("end", status)
sys.exit(status if status >= 0 else 128 - status)
'''


class Docker:
    """A stand-in for the client of docker, as a program on disk."""

    def __init__(self, folder: Path) -> None:
        self.program, self._notes = folder / "docker", folder / "docker.notes"
        self.program.write_text(_DOCKER.format(python=sys.executable, notes=str(self._notes)))
        self.program.chmod(0o755)

    def notes(self) -> list[tuple[str, int]]:
        """What happened: `start` with the process in the container, `signal` with its number, `end` with a status."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        return [(word, int(number)) for word, number in map(str.split, lines)]

    def forget(self) -> None:
        """Nothing has happened yet."""
        self._notes.unlink(missing_ok=True)


# --- vLLM -------------------------------------------------------------------------------------------------


class VllmServer(Server):
    """The loopback server in vLLM's style, with the pages that the adapter asks for."""

    def __init__(self, script: Script, given: argparse.Namespace) -> None:
        self.given = given
        super().__init__(script)

    def metrics(self) -> str:
        """Counters of speculation only where it is on."""
        lines = super().metrics().splitlines(keepends=True)
        return "".join(line for line in lines if self.script.k or "spec_decode" not in line)

    def get(self, path: bytes) -> bytes:
        """Reply to GET."""
        pages: dict[bytes, Any] = {
            b"/version": {"version": "0.32.0"},
            b"/v1/models": {"data": [{"id": self.given.served_model_name, "owned_by": "vllm"}]},
        }
        return _json(pages[path]) if path in pages else super().get(path)


def vllm(argv: Sequence[str] | None = None) -> None:
    """`python -m vllm.entrypoints.openai.api_server`: the options that matter here; the others are let be."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", required=True)
    options.add_argument("--served-model-name")
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--speculative-config", default="{}")
    given, _ = options.parse_known_args(argv)
    k = orjson.loads(given.speculative_config).get("num_speculative_tokens", 0)
    script = {"style": "vllm", "frames": "step", "overrun": True, "k": k, "accept": [0.8, 0.7, 0.6]}
    start.serve(lambda whole: VllmServer(whole, given), script, given.port)


def _json(content: Any) -> bytes:
    return http_reply("200 OK", "application/json", orjson.dumps(content))


# --- llama.cpp: the package that our own child imports ----------------------------------------------------


class CommonParams:
    """A parameter record that takes any field."""

    def __getattr__(self, name: str) -> CommonParams:
        inner = CommonParams()
        setattr(self, name, inner)
        return inner


class _Types:
    def __getattr__(self, name: str) -> str:
        return name


types = _Types()


class LlamaPages(Server):
    """The loopback server, with the pages that the adapter asks for."""

    def get(self, path: bytes) -> bytes:
        """Reply to GET."""
        pages: dict[bytes, Any] = {
            b"/props": {"model_ftype": "Q4_1", "total_slots": 1},
            b"/slots": [{"id": 0, "speculative": self.script.k > 0}],
            b"/v1/models": {"data": [{"id": "stand-in", "owned_by": "llamacpp"}]},
        }
        return _json(pages[path]) if path in pages else super().get(path)


class LlamaServer:
    """`xllamacpp.Server`: serves from a thread of the child and knows its address."""

    def __init__(self, params: Any) -> None:
        speculates = not str(params.speculative.types[0]).endswith("NONE")
        trouble = start.begin()
        if trouble == "port":
            sys.exit("0.01 E srv: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 0")
        faults = trouble if isinstance(trouble, dict) else {}
        script = {"k": 4, "accept": [0.8, 0.7, 0.6]} if speculates else {}
        self.listening_address = ""
        self._ready = threading.Event()
        server = LlamaPages(start.script_of(script, faults))
        threading.Thread(target=run, args=(server, 0, self._listens), daemon=True).start()
        self._ready.wait()

    def _listens(self, address: str) -> None:
        self.listening_address = address
        self._ready.set()


def troubles(count: Path, **start_: Any) -> dict[str, str]:
    """The environment in which the starts with these numbers (`s3`) make trouble."""
    numbered = {name[1:]: what for name, what in start_.items()}
    return {start.VARIABLE: orjson.dumps({"count": str(count), "start": numbered, "script": QUICK}).decode()}


QUICK = {"step_ms": 3.0, "prefill_ms": 3.0}


def running(home: Path) -> Iterator[int]:
    """Processes that still run from an environment."""
    import psutil

    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or ()
        if any(str(home) in word for word in words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield process.pid
