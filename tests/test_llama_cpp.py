"""runners.llama_cpp: options for each method, and the real server with the small catalogue model."""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from runners import frames, registry
from runners.base import Counts, Launch, Request, Stream, Where
from runners.client import Client
from runners.flags import methods_of
from runners.llama_cpp import LlamaCppEngine, LlamaCppSession
from specbench import models
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import EngineFailed, SpecbenchError, Unsupported

ENGINE = LlamaCppEngine()
PROMPTS = (
    "Repeat exactly, three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that reverses a list, then write it again with a docstring.",
)


def config(model: str, method: Method, concurrency: int = 1, **engine: Any) -> Config:
    ask = EngineAsk(name="llamacpp", **engine)
    return Config(engine=ask, model=model, method=method, workload=Workload(), concurrency=concurrency)


# --- from a config to options -----------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file to name as model: launching looks at no more than its hash."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def options(launch: Launch) -> dict[str, str]:
    """The child's options after the ones that every launch has."""
    argv = launch.argv[launch.argv.index("--spec-type") :]
    return dict(zip(argv[::2], argv[1::2], strict=True))


@pytest.mark.parametrize(
    ("method", "want"),
    [
        (Method(name="none"), {}),
        (
            Method(name="ngram-simple", k=8, params={"n": 4, "min_hits": 2}),
            {"--ngram-size-m": "8", "--ngram-size-n": "4", "--ngram-min-hits": "2"},
        ),
        (Method(name="ngram-map-k", k=8), {"--ngram-size-m": "8"}),
        (Method(name="ngram-map-k4v", params={"n": 5}), {"--ngram-size-n": "5"}),
        (
            Method(name="ngram-mod", k=16, params={"n": 8, "n_min": 2}),
            {"--ngram-mod-n-max": "16", "--ngram-mod-n-match": "8", "--ngram-mod-n-min": "2"},
        ),
        (Method(name="ngram-cache", k=8), {}),
        (Method(name="ngram-map-k", pinned=(0.8, 0.5)), {"--ngram-size-m": "2", "--synth-rates": "0.8,0.5"}),
    ],
    ids=lambda value: value.label if isinstance(value, Method) else "",
)
def test_options(gguf: str, method: Method, want: dict[str, str]) -> None:
    launch = ENGINE.launch(config(gguf, method), "1")
    assert options(launch) == {"--spec-type": method.name} | want
    assert launch.learns == (method.name not in ("none", "ngram-simple"))


def test_draft_model_options(gguf: str) -> None:
    method = Method(name="draft-simple", k=3, draft=gguf, params={"p_min": 0.5}, pinned=(0.8, 0.6, 0.4))
    launch = ENGINE.launch(config(gguf, method), "1")
    want = {
        "--draft-model": gguf,
        "--draft-n-max": "3",
        "--draft-p-min": "0.5",
        "--synth-rates": "0.8,0.6,0.4",
    }
    assert options(launch) == {"--spec-type": "draft-simple"} | want
    assert launch.files == {"model": Path(gguf), "draft": Path(gguf)}
    assert launch.facts.draft_sha256 == launch.facts.model_sha256
    # sha256 of the four bytes "GGUF"
    assert launch.facts.model_sha256 == "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd"


def test_sizes(gguf: str) -> None:
    launch = ENGINE.launch(
        config(gguf, Method(name="none"), 4, args={"slots": 2, "context": 512, "threads": 3}), "7"
    )
    facts = launch.facts
    assert (facts.slots, facts.context_tokens, facts.threads, facts.engine_version) == (4, 512, 3, "7")
    assert launch.argv[0] == sys.executable
    assert launch.argv == facts.argv


def test_one_core_is_left_to_the_client(gguf: str) -> None:
    cores = len(psutil.Process().cpu_affinity() or [])
    assert ENGINE.launch(config(gguf, Method(name="none")), "1").facts.threads == max(cores - 1, 1)
    every = ENGINE.launch(config(gguf, Method(name="none"), args={"threads": "cores"}), "1")
    assert every.facts.threads == cores


@pytest.mark.parametrize(
    ("method", "field"),
    [
        (Method(name="eagle"), "method.name"),
        (Method(name="none", k=3), "method.k"),
        (Method(name="ngram-cache", k=3), "method.k"),
        (Method(name="ngram-simple", k=8), "method.k"),  # match length is 12 unless given
        (Method(name="ngram-simple", k=3, params={"n": 4}), "method.k"),
        (Method(name="ngram-simple", params={"n": 4}, pinned=(0.8, 0.6, 0.4)), "method.k"),
        (Method(name="ngram-cache", pinned=(0.8, 0.6, 0.4)), "method.acceptance"),
        (Method(name="ngram-simple", params={"m": 4}), "method.m"),
        (Method(name="draft-simple", k=3), "method.draft"),
        (Method(name="ngram-map-k", draft="x.gguf"), "method.draft"),
        (Method(name="none", pinned=(0.5,)), "method.acceptance"),
        (Method(name="ngram-map-k", k=3, pinned=(0.8, 0.6)), "method.acceptance"),
    ],
    ids=lambda value: value.label if isinstance(value, Method) else "",
)
def test_what_it_cannot_do_names_the_field(gguf: str, method: Method, field: str) -> None:
    with pytest.raises(Unsupported) as caught:
        ENGINE.launch(config(gguf, method), "1")
    assert caught.value.field == field


@pytest.mark.parametrize(
    "args", [{"thread": 1}, {"threads": "all"}, {"threads": 0}, {"slots": True}, {"context": 1.5}]
)
def test_wrong_arguments_name_the_field(gguf: str, args: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=rf"^engine\.args\.{next(iter(args))}: "):
        ENGINE.launch(config(gguf, Method(name="none"), args=args), "1")


def test_body() -> None:
    messages = ({"role": "user", "content": "Hi"},)
    request = Request(0, "p", None, 0, 0, messages, max_tokens=5)
    sent = orjson.loads(ENGINE.body(request))
    # Temperature is always sent: a server's own default would decide otherwise.
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (0.0, 1.0, 0, 0.0)
    assert sent["repeat_penalty"] == 1.0  # a GGUF file may bring another
    assert sent["stream_options"] == {"include_usage": True}
    assert (sent["stream"], sent["timings_per_token"], sent["cache_prompt"]) == (True, True, False)
    assert not {"seed", "ignore_eos", "model"} & set(sent)
    fixed = Request(0, "p", None, 0, 0, messages, max_tokens=5, seed=3, ignore_eos=True, model="m")
    sent = orjson.loads(ENGINE.body(fixed))
    assert (sent["seed"], sent["ignore_eos"], sent["model"]) == (3, True, "m")


def test_probe_of_an_interpreter_that_is_not_there() -> None:
    found = ENGINE.probe(Where(python="/nowhere/python"))
    assert not found.ok
    assert found.why_not == "engine.python: /nowhere/python is no program that can be run"
    assert "xllamacpp" in str(found.install)


def test_probe_of_a_url_where_nothing_listens() -> None:
    found = ENGINE.probe(Where(url="http://127.0.0.1:9"))
    assert not found.ok
    assert "nothing answers at http://127.0.0.1:9" in str(found.why_not)


def test_a_server_attached_to_that_is_gone_costs_its_block() -> None:
    launch = ENGINE.launch(config("any", Method(name="none"), url="http://127.0.0.1:9"), "1")
    with pytest.raises(EngineFailed, match=r"^engine\.url: the server at .* stopped answering"):
        ENGINE.start(launch, Path("unused.log")).__enter__()


def test_registry_names_the_nearest() -> None:
    assert isinstance(registry.get("llamacpp"), LlamaCppEngine)
    with pytest.raises(
        SpecbenchError, match=r"engine\.name: llama\.cpp is not an engine; use one of .* llamacpp\?"
    ):
        registry.get("llama.cpp")


# --- the real server --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What a few requests left: replies and counts, in the order sent."""

    streams: list[Stream]
    counts: Counts
    session: LlamaCppSession


async def _send(
    session: LlamaCppSession, prompts: Sequence[str], concurrency: int, max_tokens: int
) -> list[Stream]:
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt: str) -> Stream:
        messages = ({"role": "user", "content": prompt},)
        request = Request(index, str(index), None, index, 0, messages, max_tokens=max_tokens)
        async with gate:
            return frames.parse(await client.post(ENGINE.path, ENGINE.body(request)))

    async with Client(session.address, connections=concurrency) as client:
        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))


@contextmanager
def serving(tmp_path: Path, asked: Config) -> Iterator[LlamaCppSession]:
    found = ENGINE.probe(Where())
    assert found.version is not None
    with ENGINE.start(ENGINE.launch(asked, found.version), tmp_path / "engine.log") as session:
        yield session


def run(
    tmp_path: Path,
    asked: Config,
    prompts: Sequence[str] = PROMPTS,
    concurrency: int = 1,
    max_tokens: int = 64,
) -> Ran:
    with serving(tmp_path, asked) as session:
        before = session.counters()
        streams = asyncio.run(_send(session, prompts, concurrency, max_tokens))
        counts = ENGINE.counts(streams, before, session.counters())
    assert [stream.error for stream in streams if stream.status != "ok"] == []
    assert not any(psutil.pid_exists(pid) for pid in session.pids)
    return Ran(streams, counts, session)


@pytest.fixture(scope="module")
def plain(model: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("plain"), config(model, Method(name="none")), (*PROMPTS, PROMPTS[0]))


def check_identity(ran: Ran) -> None:
    """Counts of replies against the server's own, and AL_all − 1 = coverage × (AL_drafted − 1)."""
    requests = ran.counts.requests
    assert sum(request.drafted or 0 for request in requests) == ran.counts.drafted
    assert sum(request.accepted_verified or 0 for request in requests) == ran.counts.accepted_verified
    assert sum(request.steps_with_draft or 0 for request in requests) == ran.counts.steps_with_draft
    for stream, request in zip(ran.streams, requests, strict=True):
        assert stream.output_tokens is not None
        assert request.accepted_emitted is not None
        assert request.accepted_verified is not None
        assert request.steps_from == "grouped"
        assert request.steps
        emitted = stream.output_tokens - 1
        assert emitted == request.steps + request.accepted_emitted
        assert request.accepted_emitted <= request.accepted_verified
        if request.steps_with_draft and request.accepted_emitted == request.accepted_verified:
            al_drafted = 1 + request.accepted_verified / request.steps_with_draft
            coverage = request.steps_with_draft / request.steps
            assert emitted / request.steps - 1 == pytest.approx(coverage * (al_drafted - 1), abs=1e-12)


@pytest.mark.engine
def test_plain(plain: Ran) -> None:
    facts = plain.session.facts
    assert (facts.speculative, facts.slots, facts.context_tokens) == (False, 1, 4096)
    assert (facts.precision, facts.extra["weight_type"]) == ("float32, 4-bit weights", "Q4_1")
    assert facts.model_sha256 == models.CATALOGUE["smollm2-135m"].sha256
    assert len(facts.template_sha256 or "") == 64
    for stream, request in zip(plain.streams, plain.counts.requests, strict=True):
        assert stream.output_tokens is not None
        # One token a step, the first by prefill; nothing is said about drafts.
        assert (request.steps, request.accepted_emitted) == (stream.output_tokens - 1, 0)
        assert (request.steps_with_draft, request.drafted, request.accepted_verified) == (None, None, None)
    assert (plain.counts.steps_with_draft, plain.counts.table) == (0, ())


@pytest.mark.engine
def test_a_repeated_prompt_is_computed_again(plain: Ran) -> None:
    first, _, again = plain.streams
    assert (first.cached_tokens, again.cached_tokens) == (0, 0)
    assert first.prompt_tokens == again.prompt_tokens
    assert first.text == again.text


@pytest.mark.engine
@pytest.mark.parametrize(
    "method",
    [
        Method(name="ngram-simple", k=8, params={"n": 3}),
        Method(name="ngram-map-k", k=8, params={"n": 3}),
        Method(name="ngram-map-k4v", k=8, params={"n": 3}),
        Method(name="ngram-mod", k=8, params={"n": 4}),
        Method(name="ngram-cache"),
    ],
    ids=lambda method: method.name,
)
def test_ngram_drafters(model: str, plain: Ran, tmp_path: Path, method: Method) -> None:
    ran = run(tmp_path, config(model, method))
    assert ran.session.facts.speculative is True
    assert ran.counts.drafted
    assert ran.counts.accepted_verified
    check_identity(ran)
    assert [stream.text for stream in ran.streams] == [stream.text for stream in plain.streams[:2]]
    rows = [row for row in ran.counts.table if row.scope == "cell"]
    assert [row.position for row in rows] == list(range(1, len(rows) + 1))
    assert sum(row.accepted for row in rows) == ran.counts.accepted_verified
    assert {row.drafts for row in rows} == {ran.counts.steps_with_draft}


@pytest.mark.engine
def test_the_target_as_its_own_draft(model: str, plain: Ran, tmp_path: Path) -> None:
    ran = run(tmp_path, config(model, Method(name="draft-simple", k=3, draft=model)))
    check_identity(ran)
    assert ran.counts.accepted_verified is not None
    assert ran.counts.drafted
    assert ran.counts.accepted_verified / ran.counts.drafted > 0.8
    assert [stream.text for stream in ran.streams] == [stream.text for stream in plain.streams[:2]]


@pytest.mark.engine
def test_pinned_acceptance(model: str, tmp_path: Path) -> None:
    method = Method(name="draft-simple", draft=model, pinned=(0.8, 0.6, 0.4))
    ran = run(tmp_path, config(model, method), max_tokens=160)
    check_identity(ran)
    rows = [row for row in ran.counts.table if row.scope == "cell"]
    drafts = rows[0].drafts
    # Each position within four standard errors of its rate.
    for row, rate in zip(rows, (0.8, 0.6, 0.4), strict=True):
        assert row.accepted / drafts == pytest.approx(rate, abs=4 * (rate * (1 - rate) / drafts) ** 0.5)


@pytest.mark.engine
def test_four_slots(model: str, tmp_path: Path) -> None:
    prompts = [f"{prompt} Then count to {number}." for prompt in PROMPTS for number in (3, 4, 5)]
    asked = config(model, Method(name="ngram-simple", k=8, params={"n": 3}), concurrency=4)
    ran = run(tmp_path, asked, prompts, concurrency=4, max_tokens=32)
    assert ran.session.facts.slots == 4
    assert ran.counts.drafted
    check_identity(ran)


@pytest.mark.engine
def test_client_and_server_agree_on_the_time_per_token(model: str, tmp_path: Path) -> None:
    ran = run(
        tmp_path,
        config(model, Method(name="ngram-simple", k=8, params={"n": 3})),
        [*PROMPTS, PROMPTS[1] + " Go."],
    )
    ratios = []
    for stream, request in zip(ran.streams, ran.counts.requests, strict=True):
        if (stream.output_tokens or 0) >= 32 and stream.finish == "length":
            assert request.server_decode_ms is not None
            client_ms = (stream.frame_ns[-1] - stream.frame_ns[0]) / 1e6
            ratios.append(client_ms / request.server_decode_ms)
    assert statistics.median(ratios) == pytest.approx(1, abs=0.1)


@pytest.mark.engine
def test_a_drafter_that_cannot_be_set_up(model: str, tmp_path: Path) -> None:
    asked = config(model, Method(name="draft-eagle3", k=3, draft=model))
    with (
        pytest.raises(
            SpecbenchError,
            match=r"draft-eagle3 was asked for, but llamacpp does not speculate; its last words: .* not eagle3",
        ),
        serving(tmp_path, asked),
    ):
        pass


@pytest.mark.engine
def test_a_file_that_is_no_model(gguf: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    asked = config(gguf, Method(name="none"))
    with (
        pytest.raises(SpecbenchError, match=r"before it was ready; .*failed to load model"),
        serving(tmp_path, asked),
    ):
        pass


@pytest.mark.engine
def test_attach_to_a_running_server(model: str, tmp_path: Path) -> None:
    with serving(tmp_path, config(model, Method(name="ngram-simple", k=8, params={"n": 4}), 2)) as running:
        url = running.address + "/v1/"
        assert ENGINE.probe(Where(url=url)).ok
        launch = ENGINE.launch(config("any", Method(name="ngram-simple", k=8, params={"n": 4}), url=url), "1")
        with ENGINE.start(launch, tmp_path / "attached.log") as attached:
            assert (attached.address, attached.pids) == (running.address, ())
            assert (attached.facts.slots, attached.facts.speculative) == (2, True)
            first, second = attached.counters(), attached.counters()
            assert first["slots_speculative"] == 1
            assert first["process_start_time_seconds"] == second["process_start_time_seconds"]
        baseline = ENGINE.launch(config("any", Method(name="none"), url=url), "1")
        with pytest.raises(SpecbenchError, match=r"^method\.name: none was asked for, but .* speculates"):
            ENGINE.start(baseline, tmp_path / "baseline.log").__enter__()
    gone = ENGINE.launch(config("any", Method(name="none"), url=url), "1")
    with pytest.raises(SpecbenchError, match=r"^engine\.url: the server at .* stopped answering"):
        ENGINE.start(gone, tmp_path / "gone.log").__enter__()


@pytest.mark.engine
def test_a_server_that_was_killed_says_so(model: str, tmp_path: Path) -> None:
    with serving(tmp_path, config(model, Method(name="none"))) as session:
        psutil.Process(session.pids[0]).children()[0].kill()  # below our keeper
        with pytest.raises(SpecbenchError, match=r"llamacpp (ended with status -9|stopped answering)"):
            session.counters()


def test_every_method_is_probed() -> None:
    pytest.importorskip("xllamacpp")
    found = ENGINE.probe(Where(python=sys.executable))
    assert (found.ok, found.methods) == (True, methods_of("llamacpp", None))
    assert found.version == ENGINE.probe(Where()).version
