"""runners.adapters: what every adapter takes and refuses alike."""

from __future__ import annotations

import gzip
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from runners import adapters, attached, in_process
from runners.base import Where
from runners.llama_cpp import LlamaCppEngine
from runners.loopback import LoopbackEngine
from runners.server import serve
from runners.vllm_args import Asked
from specbench.cell import Config, EngineAsk, Facts, Method, Workload
from specbench.errors import EngineFailed, SpecbenchError, Unsupported


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})


def config(**args: int | float | str | bool) -> Config:
    ask = EngineAsk(name="sglang", args=args)
    return Config(engine=ask, model="m", method=Method(name="none"), workload=Workload(), concurrency=2)


@pytest.mark.parametrize(("given", "want"), [("cores", 4), ("cores-1", 3), (2, 2), (9, 9)])
def test_threads(given: int | str, want: int) -> None:
    assert adapters.threads({"threads": given}, 10) == want


def test_one_core_is_left_to_the_client() -> None:
    assert adapters.threads({}, 10) == 3


@pytest.mark.parametrize("given", [0, 11, True, 1.0, "all", "2"])
def test_threads_that_are_none(given: int | float | str | bool) -> None:
    with pytest.raises(
        Unsupported, match=r'^engine\.args\.threads: must be a number from 1 to 10, "cores" or'
    ):
        adapters.threads({"threads": given}, 10)


def test_every_engine_with_threads_reads_them_alike() -> None:
    ask = EngineAsk(name="openvino", args={"threads": "cores"})
    assert in_process.threads(ask) == Asked.of(ask.args, 1, True).threads == 4
    with pytest.raises(Unsupported, match=r"^engine\.args\.threads: must be a number from 1 to 4,"):
        Asked.of({"threads": 5}, 1, True)  # each is bound to a core of its own


def test_slots_are_raised_to_the_concurrency() -> None:
    assert [adapters.slots(config()), adapters.slots(config(slots=1)), adapters.slots(config(slots=5))] == [
        2,
        2,
        5,
    ]


@pytest.mark.parametrize(
    ("asked", "speculative", "want"),
    [
        ("none", False, None),
        ("ngram", True, None),
        ("ngram", None, None),
        ("none", None, None),
        ("none", True, "method.name: none was asked for, but it speculates"),
        ("ngram", False, "method.name: ngram was asked for, but it does not speculate"),
    ],
)
def test_other_than_asked(asked: str, speculative: bool | None, want: str | None) -> None:
    assert adapters.other_than_asked(asked, speculative, "it") == want


def test_a_running_server_takes_no_arguments() -> None:
    ask = EngineAsk(name="llamacpp", url="http://127.0.0.1:9", args={"threads": 2})
    asked = Config(engine=ask, model="m", method=Method(name="none"), workload=Workload(), concurrency=1)
    with pytest.raises(Unsupported, match=r"^engine\.args: a running server has its own settings"):
        LlamaCppEngine().launch(asked, "1")


def test_the_name_that_requests_carry() -> None:
    """A server's only model is meant by any plan; of several the plan has to name one."""
    assert attached.request_name("http://a", "mine", ("theirs",), asked=False) == "theirs"
    assert attached.request_name("http://a", "theirs", ("theirs", "lora"), asked=False) == "theirs"
    with pytest.raises(SpecbenchError, match="serves theirs, lora, not mine; name one of those"):
        attached.request_name("http://a", "mine", ("theirs", "lora"), asked=False)


def test_a_server_of_ours_that_drafts_unasked_costs_its_block(tmp_path: Path) -> None:
    facts = Facts(engine="vllm", extra={"method": "none"})
    theirs = attached.HttpSession(facts, "http://a")
    with pytest.raises(SpecbenchError, match="speculates") as ended:
        theirs.check_speculation(True)
    assert not isinstance(ended.value, EngineFailed)
    said = "import sys; print('loaded', file=sys.stderr, flush=True); print('{\"address\": \"a\"}', flush=True); input()"
    log, match = tmp_path / "log", "vllm speculates; its last words: loaded"
    with serve([sys.executable, "-c", said], {}, log) as child, pytest.raises(EngineFailed, match=match):
        attached.HttpSession(facts, "http://a", child, log).check_speculation(True)


def test_a_recipe_that_fits_this_machine_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    where = Where(python=sys.executable)
    monkeypatch.setattr(adapters, "can_install", lambda engine: False)
    assert adapters.installed("sglang", where, ("no-such-package",), "Buy a GPU.").install == "Buy a GPU."
    monkeypatch.setattr(adapters, "can_install", lambda engine: True)
    monkeypatch.setattr(adapters, "how_to_install", lambda engine: f"specbench engines install {engine}")
    found = adapters.installed("sglang", where, ("no-such-package",), "Buy a GPU.")
    assert found.install == "specbench engines install sglang"


def test_the_loopback_engine_is_no_running_server() -> None:
    found = LoopbackEngine().probe(Where(url="http://127.0.0.1:1"))
    assert (found.ok, found.why_not) == (False, "engine.url: the loopback engine is always started here")


def test_a_draft_model_of_a_running_server_is_not_looked_for() -> None:
    ask = EngineAsk(name="llamacpp", url="http://127.0.0.1:1")
    asked = Config(engine=ask, model="m", method=Method(name="draft-simple", k=3), workload=Workload())
    assert LlamaCppEngine().launch(asked, "1").facts.extra["method"] == "draft-simple"


def test_a_page_keeps_its_headers_and_comes_unpacked() -> None:
    """llama.cpp says which process answered in a header."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = gzip.compress(b"said")
            self.send_response(200)
            for name, value in {"Process-Start-Time-Unix": "7", "Content-Encoding": "gzip"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reply = attached.ask(f"http://127.0.0.1:{server.server_port}", "/metrics")
        server.shutdown()
    assert reply is not None
    assert (reply.text, reply.headers["process-start-time-unix"]) == ("said", "7")
