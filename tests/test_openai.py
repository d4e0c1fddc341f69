"""runners.openai: what a URL offers is found out, and each kind is asked and counted as its own adapter would."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from runners import attached, loopback, tensorrt_llm
from runners.base import Counts, Request, Stream, Where
from runners.client import Client
from runners.frames import parse
from runners.openai import OpenAIEngine, discover
from runners.server import Health, free_port, serve
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import EngineFailed, SpecbenchError, Unsupported
from tests.stand_ins import install, troubles

K = 3
COMMANDS: dict[str, tuple[str, ...]] = {
    "vllm": ("-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--served-model-name", "org/model",
             "--speculative-config", '{"num_speculative_tokens": 3}'),
    "sglang": ("-m", "sglang.launch_server", "--model-path", "org/model", "--enable-metrics",
               "--speculative-algorithm", "NEXTN", "--speculative-num-draft-tokens", "4"),
    "tensorrt_llm": ("trtllm-serve", "org/model"),
}  # fmt: skip


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: install(tmp_path_factory.mktemp(kind), kind) for kind in COMMANDS}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt_llm, "SETTLE_S", 0.01)


@contextmanager
def server(kind: str, homes: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """A server of this kind that speculates, started apart from any adapter; its address."""
    if kind == "llamacpp":
        argv, env = loopback.command({"k": K, "accept": [0.8], "step_ms": 3.0})
        with serve(argv, env, tmp_path / "log") as child:
            yield child.address
        return
    port = free_port()
    argv_ = [homes[kind], *COMMANDS[kind], f"--port={port}"]
    if kind == "tensorrt_llm":
        settings = tmp_path / "settings.yaml"
        speculation = {"decoding_type": "MTP", "max_draft_len": K}
        told = {
            "return_perf_metrics": True,
            "enable_iter_perf_stats": True,
            "speculative_config": speculation,
        }
        settings.write_bytes(orjson.dumps(told))
        argv_ = [str(Path(homes[kind]).parent / "trtllm-serve"), "org/model", "--host", "127.0.0.1"]
        argv_ += ["--config", str(settings), f"--port={port}"]
    health = Health(f"http://127.0.0.1:{port}")
    with serve(argv_, troubles(tmp_path / "starts"), tmp_path / "log", health=health) as child:
        yield child.address


def config(url: str | None, method: str = "as-served", model: str = "served", **about: Any) -> Config:
    ask = EngineAsk(name="openai", url=url, args=about.pop("args", {}))
    return Config(engine=ask, model=model, method=Method(name=method, **about), workload=Workload())


def measured(
    engine: OpenAIEngine, url: str, log: Path, model: str = "served"
) -> tuple[list[Stream], Counts, Any]:
    """Three requests as a runner would send them; streams, counts and facts."""
    launch = engine.launch(config(url, model=model), str(engine.probe(Where(url=url)).version))
    with engine.start(launch, log) as session:
        before = session.counters()
        name = str(session.facts.served_model)

        async def work() -> list[Stream]:
            async with Client(session.address, connections=3) as client:
                asks = [
                    Request(n, "p", None, n, 0, ({"role": "user", "content": f"say {n}"},), 30, model=name)
                    for n in range(3)
                ]
                return [
                    parse(e)
                    for e in await asyncio.gather(*(client.post(engine.path, engine.body(a)) for a in asks))
                ]

        streams = asyncio.run(work())
        return streams, engine.counts(streams, before, session.counters()), session.facts


KINDS = ("vllm", "sglang", "tensorrt_llm", "llamacpp")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_asked_and_counted(kind: str, homes: dict[str, str], tmp_path: Path) -> None:
    with server(kind, homes, tmp_path) as url:
        found = discover(url)
        assert found.kind == kind
        if kind != "llamacpp":  # the loopback server has no page that says so
            assert (found.speculative, found.models) == (True, ("org/model",))
        streams, counts, facts = measured(OpenAIEngine(), url + "/v1", tmp_path / "log2")
    assert {stream.status for stream in streams} == {"ok"}, [stream.error for stream in streams]
    assert facts.extra["kind"] == kind
    assert counts.steps_with_draft
    for stream, row in zip(streams, counts.requests, strict=True):
        assert stream.output_tokens == 30
        assert row.steps
        assert row.drafted
        assert row.accepted_emitted == 29 - row.steps


def test_versions_are_part_of_what_was_attached_to(homes: dict[str, str], tmp_path: Path) -> None:
    with server("sglang", homes, tmp_path) as url:
        found = OpenAIEngine().probe(Where(url=url))
    assert (found.ok, found.version, found.methods) == (True, "sglang 0.5.23", ("none", "as-served"))


def test_a_server_of_no_known_kind_is_asked_only_the_standard(tmp_path: Path) -> None:
    engine = OpenAIEngine()
    body = orjson.loads(
        engine.body(Request(0, "p", None, 0, 0, ({"role": "user", "content": "q"},), 8, ignore_eos=True))
    )
    assert set(body) == {
        "model",
        "messages",
        "temperature",
        "top_p",
        "max_tokens",
        "stream",
        "stream_options",
        "ignore_eos",
    }


def test_two_kinds_are_asked_what_both_take(homes: dict[str, str], tmp_path: Path) -> None:
    """One request goes to either URL: SGLang refuses a chat that asks for ids, so then vLLM is not asked either."""
    engine = OpenAIEngine()
    with server("vllm", homes, tmp_path) as one, server("sglang", homes, tmp_path) as other:
        request = Request(0, "p", None, 0, 0, ({"role": "user", "content": "q"},), 8)
        assert engine.probe(Where(url=one)).ok
        assert orjson.loads(engine.body(request))["return_token_ids"]
        assert engine.probe(Where(url=other)).ok
        assert not {"return_token_ids", "return_spec_tokens_details"} & set(
            orjson.loads(engine.body(request))
        )


def test_the_model_must_be_one_that_is_served(homes: dict[str, str], tmp_path: Path) -> None:
    engine = OpenAIEngine()
    with server("sglang", homes, tmp_path) as url:
        assert engine.launch(config(url, model="org/model"), "x").facts.served_model == "org/model"
        assert engine.launch(config(url), "x").facts.served_model == "org/model"
        with pytest.raises(SpecbenchError, match="serves org/model, not other; name one of those"):
            engine.launch(config(url, model="other"), "x")


@pytest.mark.parametrize(
    ("about", "field"),
    [
        ({"method": "ngram"}, "method.name"),
        ({"k": 3}, "method"),
        ({"args": {"slots": 2}}, "engine.args"),
        ({"url": None}, "engine.url"),
    ],
)
def test_what_an_attached_server_cannot_be_told(about: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported) as refused:
        OpenAIEngine().launch(config(about.pop("url", "http://127.0.0.1:1"), **about), "x")
    assert refused.value.field == field


def test_nobody_is_not_usable_and_says_why() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    found = OpenAIEngine().probe(Where(url=url))
    assert not found.ok
    assert f"no OpenAI-style server answers at {url}" in str(found.why_not)
    assert not OpenAIEngine().probe(Where()).ok
    assert "no OpenAI-style server answers" in str(OpenAIEngine().probe(Where(url="http://xn--zz-")).why_not)


def test_a_page_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of it comes in time; the whole does not."""
    monkeypatch.setattr(attached, "MOST_BYTES", 1000)
    with socket.create_server(("127.0.0.1", 0)) as door:

        def pour() -> None:
            line, _ = door.accept()
            with line, suppress(OSError):
                line.recv(65536)
                line.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                while True:
                    line.sendall(b"x" * 100)

        thread = threading.Thread(target=pour, daemon=True)
        thread.start()
        found = OpenAIEngine().probe(Where(url=f"http://127.0.0.1:{door.getsockname()[1]}"))
        thread.join(10)
    assert "it sends a page that does not end" in str(found.why_not)
    assert not thread.is_alive()


def test_a_server_that_is_gone_fails_its_session(homes: dict[str, str], tmp_path: Path) -> None:
    engine = OpenAIEngine()
    with server("sglang", homes, tmp_path) as url:
        launch = engine.launch(config(url), "x")
        with engine.start(launch, tmp_path / "log2") as session:
            assert session.pids == ()
            assert not session.reset()
    with pytest.raises(EngineFailed, match=r"engine\.url: the server at .* stopped answering"):
        session.counters()
