"""runners.openvino: settings for each method, and the real engine with the small catalogue model."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest

from runners import environments, registry
from runners.base import Launch, Request, Stream, Where
from runners.drivers import parser, sender
from runners.openvino import DISTRIBUTIONS, OpenVinoEngine
from runners.worker import MAIN, WorkerSession
from runners.workers import main as worker_main
from specbench import host
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import SpecbenchError, Unsupported
from tests import help_texts

ENGINE = OpenVinoEngine()
VERSION = "2026.4.1.0"
PROMPTS = (
    "Repeat exactly, three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that reverses a list, then write it again with a docstring.",
    "Name the planets in order.",
)


def config(model: str, method: Method, concurrency: int = 1, **engine: Any) -> Config:
    ask = EngineAsk(name="openvino", **engine)
    return Config(engine=ask, model=model, method=method, workload=Workload(), concurrency=concurrency)


def settings(launch: Launch) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(launch.argv[-1])
    return found


# --- from a config to settings ----------------------------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file to name as model: launching looks at no more than its hash."""
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


@pytest.mark.parametrize(
    ("method", "want"),
    [
        (Method(name="none"), {}),
        (
            Method(name="prompt-lookup", k=4),
            {
                "pipeline": {"prompt_lookup": True},
                "generation": {"num_assistant_tokens": 4, "max_ngram_size": 3},
            },
        ),
        (
            Method(name="prompt-lookup", k=8, params={"n": 2}),
            {
                "pipeline": {"prompt_lookup": True},
                "generation": {"num_assistant_tokens": 8, "max_ngram_size": 2},
            },
        ),
    ],
    ids=lambda value: value.label if isinstance(value, Method) else "",
)
def test_settings(gguf: str, method: Method, want: dict[str, Any]) -> None:
    launch = ENGINE.launch(config(gguf, method, 4, args={"threads": 3}), VERSION)
    found = settings(launch)
    assert found == want | {
        "device": "CPU",
        "model": gguf,
        "properties": {"INFERENCE_NUM_THREADS": 3},
        "scheduler": {},
    }
    assert launch.argv == launch.facts.argv
    assert (launch.facts.threads, launch.learns) == (3, False)


def test_draft_model_settings(gguf: str, tmp_path: Path) -> None:
    launch = ENGINE.launch(config(gguf, Method(name="draft-model", k=3, draft=gguf)), VERSION)
    found = settings(launch)
    assert found["generation"] == {"num_assistant_tokens": 3}
    assert found["draft"] == gguf
    assert found["ir_cache"] == str(tmp_path / "cache" / "openvino")
    assert launch.facts.draft_sha256 == launch.facts.model_sha256 == found["draft_sha256"]
    threshold = Method(name="draft-model", draft=gguf, params={"p_min": 0.5})
    assert settings(ENGINE.launch(config(gguf, threshold), VERSION))["generation"] == {
        "assistant_confidence_threshold": 0.5
    }


def test_engine_arguments(gguf: str) -> None:
    args = {
        "precision": "f32",
        "kv_precision": "f16",
        "activation_group": 0,
        "batched_tokens": 512,
        "threads": 1,
    }
    found = settings(ENGINE.launch(config(gguf, Method(name="none"), args=args), VERSION))
    assert found["properties"] == {
        "INFERENCE_NUM_THREADS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    assert found["scheduler"] == {"max_num_batched_tokens": 512}
    known = help_texts.settings("openvino")
    assert set(found["properties"]) <= set(known["CPU"])
    assert {"enable_prefix_caching", *found["scheduler"]} <= set(known["SchedulerConfig"])


def test_eagle3_needs_a_folder_of_its_own_and_a_version_that_has_it(gguf: str, tmp_path: Path) -> None:
    folder = tmp_path / "eagle"
    folder.mkdir()
    (folder / "openvino_model.xml").write_text("<net/>")
    method = Method(name="eagle3", k=4, draft=str(folder), params={"tree_depth": 3, "branching_factor": 2})
    found = settings(ENGINE.launch(config(gguf, method), VERSION))
    assert found["draft"] == str(folder)
    assert found["generation"] == {"num_assistant_tokens": 4, "branching_factor": 2, "tree_depth": 3}
    with pytest.raises(Unsupported, match=r"method\.name: openvino 2025\.1 has no eagle3"):
        ENGINE.launch(config(gguf, method), "2025.1")
    with pytest.raises(Unsupported, match=r"method\.draft: eagle3 needs a draft model in OpenVINO's format"):
        ENGINE.launch(config(gguf, Method(name="eagle3", draft=gguf)), VERSION)


@pytest.mark.parametrize(
    ("method", "engine", "field"),
    [
        (Method(name="medusa"), {}, "method.name"),
        (Method(name="none", k=3), {}, "method.k"),
        (Method(name="prompt-lookup"), {}, "method.k"),
        (Method(name="prompt-lookup", k=3, params={"n": 0}), {}, "method.n"),
        (Method(name="prompt-lookup", k=3, draft="x"), {}, "method.draft"),
        (Method(name="draft-model", k=3), {}, "method.draft"),
        (Method(name="draft-model", k=3, draft="x", params={"p_min": 0.5}), {}, "method.p_min"),
        (Method(name="prompt-lookup", k=2, pinned=(0.5, 0.4)), {}, "method.acceptance"),
        (Method(name="none"), {"args": {"slots": 2}}, "engine.args.slots"),
        (Method(name="none"), {"args": {"precision": "f64"}}, "engine.args.precision"),
        (Method(name="none"), {"args": {"batched_tokens": 0}}, "engine.args.batched_tokens"),
        (Method(name="none"), {"args": {"activation_group": -1}}, "engine.args.activation_group"),
        (Method(name="none"), {"url": "http://127.0.0.1:1"}, "engine.url"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    gguf: str, method: Method, engine: dict[str, Any], field: str
) -> None:
    with pytest.raises(Unsupported) as refused:
        ENGINE.launch(config(gguf, method, **engine), VERSION)
    assert refused.value.field == field


def test_models_that_it_cannot_read(gguf: str, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(SpecbenchError, match=r"model: .* is no folder in OpenVINO's format"):
        ENGINE.launch(config(str(tmp_path / "hf"), Method(name="none")), VERSION)
    base = tmp_path / "base.gguf"
    base.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(SpecbenchError, match="no chat template"):
        ENGINE.launch(config(str(base), Method(name="none")), VERSION)


def test_probe_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    attached = ENGINE.probe(Where(url="http://127.0.0.1:1"))
    assert (attached.ok, attached.install) == (False, "Leave engine.url out.")
    absent = ENGINE.probe(Where(python="/nowhere/python"))
    assert absent.why_not == "/nowhere/python is no program that can be run here"


def test_it_is_registered() -> None:
    assert isinstance(registry.get("openvino"), OpenVinoEngine)


def worker_file(monkeypatch: pytest.MonkeyPatch, engine: ModuleType | None = None) -> Any:
    """The worker's module, which imports the engine."""
    monkeypatch.setitem(sys.modules, "openvino_genai", engine or ModuleType("openvino_genai"))
    monkeypatch.setitem(sys.modules, "openvino", ModuleType("openvino"))
    return worker_main.module(str(MAIN.with_name("openvino_worker.py")))


PRINTED = """\
SchedulerConfig {
  max_num_batched_tokens: 256
 }
Model: OV Tokenizer
  INFERENCE_NUM_THREADS: 2
  INFERENCE_PRECISION_HINT: bf16
Model: LLM with Paged Attention
  NETWORK_NAME: Model0
  INFERENCE_NUM_THREADS: 1
  INFERENCE_PRECISION_HINT: f32
  DYNAMIC_QUANTIZATION_GROUP_SIZE: 0
  KV_CACHE_PRECISION: f16
  RUNTIME_REQUIREMENTS: meta=1.0;ov=2026.4.1;isa=Intel AVX-512
EXECUTION_DEVICES:
  INFERENCE_NUM_THREADS: 9
 CPU: AMD EPYC
"""
"""Cut from what 2026.4.1 prints where OPENVINO_LOG_LEVEL is above 1, and a line that belongs to no model."""


def test_threads_and_precision_are_those_of_the_compiled_model(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = worker_file(monkeypatch)
    monkeypatch.delenv("OPENVINO_LOG_LEVEL", raising=False)
    log: list[str] = []

    def make() -> str:
        assert os.environ["OPENVINO_LOG_LEVEL"] == "2"
        os.write(1, PRINTED.encode())
        return "pipeline"

    made, lines = worker._overheard(make, log.append)
    assert (made, log, "OPENVINO_LOG_LEVEL" in os.environ) == ("pipeline", [], False)
    os.write(1, b"after")
    assert capfd.readouterr().out == "after"
    tokenizer = SimpleNamespace(get_original_chat_template=lambda: None)
    asker = SimpleNamespace(compiled=worker._compiled(lines), tokenizer=tokenizer, speculative=None, k=None)
    versions = SimpleNamespace(get_version=lambda: "2026.4.1")
    monkeypatch.setattr(worker, "genai", versions)
    monkeypatch.setattr(worker, "ov", versions)
    facts = worker.OpenVino.facts(asker)
    assert (facts["threads"], facts["precision"]) == (1, "f32")
    assert (facts["extra"]["kv_precision"], facts["extra"]["activation_group"]) == ("f16", "0")
    # A version that prints nothing leaves them unknown, not as they were asked.
    asker.compiled = worker._compiled([])
    assert (worker.OpenVino.facts(asker)["threads"], worker.OpenVino.facts(asker)["precision"]) == (
        None,
        None,
    )


def test_what_the_engine_printed_is_logged_where_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def make() -> None:
        os.write(1, b"[GGUF Reader]: no\n")
        raise RuntimeError("unsupported")

    with pytest.raises(RuntimeError, match="unsupported"):
        worker_file(monkeypatch)._overheard(make, log.append)
    assert log == ["[GGUF Reader]: no"]


def test_a_models_own_samplers_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's generation_config may bring a penalty, which would change greedy text too."""
    engine: Any = ModuleType("openvino_genai")
    # An older version without min_p: what it does not have is not set.
    engine.GenerationConfig = lambda: SimpleNamespace(
        top_k=2**64 - 1, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, no_repeat_ngram_size=2**64 - 1
    )  # fmt: skip
    worker = worker_file(monkeypatch, engine)
    own = SimpleNamespace(top_k=20, repetition_penalty=1.05, presence_penalty=0.5, eos_token_id=2)
    asker = SimpleNamespace(
        pipe=SimpleNamespace(get_config=lambda: own), generation={"num_assistant_tokens": 4}
    )
    found = worker.OpenVino._config(asker, {"max_tokens": 5, "temperature": 0.0})
    assert set(worker.SAMPLERS) <= set(help_texts.settings("openvino")["GenerationConfig"])
    assert vars(found) == {
        "top_k": 2**64 - 1,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "no_repeat_ngram_size": 2**64 - 1,
        "eos_token_id": 2,
        "max_new_tokens": 5,
        "ignore_eos": False,
        "do_sample": False,
        "num_assistant_tokens": 4,
    }


# --- the real engine --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(model: str) -> tuple[str, str]:
    """Path of the small model and the engine's version; a machine without the engine skips and says so."""
    python = environments.python_for("openvino", None)
    version = environments.version_in(python, DISTRIBUTIONS)
    if version is None:
        pytest.skip("openvino-genai is not installed; `specbench engines install openvino` does it")
    return model, version


METHODS = {
    "none": Method(name="none"),
    "prompt-lookup": Method(name="prompt-lookup", k=4),
    "draft-model": Method(name="draft-model", k=3, draft="smollm2-135m"),
}


EXACT: dict[str, Any] = {"precision": "f32", "kv_precision": "f32", "activation_group": 0, "threads": 1}
"""Arithmetic in which the width of a pass does not change the text; with the engine's defaults it does."""


def play(session: WorkerSession, requests: list[Request], at_once: int) -> list[Stream]:
    async def run() -> list[Stream]:
        async with sender(ENGINE, session, connections=at_once, timeout_s=300) as client:
            gate = asyncio.Semaphore(at_once)

            async def one(request: Request) -> Stream:
                path = ENGINE.path if request.prompt_ids is None else str(ENGINE.ids_path)
                async with gate:
                    return parser(ENGINE)(await client.post(path, ENGINE.body(request)))

            return list(await asyncio.gather(*map(one, requests)))

    return asyncio.run(run())


def ask(prompt: str, most: int = 40, **more: Any) -> Request:
    return Request(0, "p", None, 0, 0, ({"role": "user", "content": prompt},), most, **more)


def ids_of(stream: Stream) -> list[int]:
    return [token for mark in stream.marks for token in (mark or {})["step"]]


@pytest.fixture(scope="module", params=list(METHODS))
def running(
    request: pytest.FixtureRequest, installed: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, WorkerSession]]:
    """A worker of each method."""
    model, version = installed
    launch = ENGINE.launch(config(model, METHODS[request.param], args=EXACT), version)
    with ENGINE.start(launch, tmp_path_factory.mktemp("openvino") / "log") as session:
        yield request.param, session


@pytest.fixture(scope="module")
def baseline() -> dict[str, Any]:
    """What `none` answered; the first of the methods fills it."""
    return {}


@pytest.mark.engine
def test_replies_counts_and_the_identity(
    running: tuple[str, WorkerSession], baseline: dict[str, Any]
) -> None:
    name, session = running
    before = session.counters()
    streams = play(session, [ask(prompt) for prompt in PROMPTS], 1)
    after = session.counters()
    found = ENGINE.counts(streams, before, after)
    assert [stream.status for stream in streams] == ["ok"] * 3
    assert session.facts.speculative == (name != "none")
    assert (session.facts.precision, session.facts.threads) == ("float32, 4-bit weights", 1)
    assert session.facts.extra["activation_group"] == "0"
    for stream, counts in zip(streams, found.requests, strict=True):
        assert stream.frame_tokens[0] == 1
        assert stream.output_tokens == sum(stream.frame_tokens[1:]) + 1  # type: ignore[arg-type]
        assert counts.steps == len(stream.frame_ns) - 1
        assert counts.accepted_emitted == counts.accepted_verified
        assert stream.finish == ("length" if stream.output_tokens == 40 else "stop")
    tokens = sum(stream.output_tokens or 0 for stream in streams)
    assert after["worker_tokens_total"] - before["worker_tokens_total"] == tokens
    accepted = sum(counts.accepted_verified or 0 for counts in found.requests)
    assert (accepted > 0) == (name != "none")
    _check_drafts(name, found.requests, session)
    texts = baseline.setdefault("texts", [stream.text for stream in streams])
    assert [stream.text for stream in streams] == texts


def _check_drafts(name: str, requests: Any, session: WorkerSession) -> None:
    if name == "prompt-lookup":
        assert all(counts.drafted is None for counts in requests)
    elif name == "none":
        assert all((counts.drafted, counts.steps_with_draft) == (0, 0) for counts in requests)
    else:
        # The model is its own draft: nearly all of what it drafts is accepted.
        assert session.facts.extra["drafted_from"] is not None
        drafted = sum(counts.drafted for counts in requests)
        assert sum(counts.accepted_verified for counts in requests) > 0.95 * drafted
        assert all(counts.accepted_verified <= counts.drafted <= 3 * counts.steps for counts in requests)


@pytest.mark.engine
def test_a_batch_has_counts_of_its_own(running: tuple[str, WorkerSession]) -> None:
    _, session = running
    alone = play(session, [ask(prompt, 24) for prompt in PROMPTS], 1)
    together = play(session, [ask(prompt, 24) for prompt in PROMPTS], 3)
    assert [ids_of(stream) for stream in together] == [ids_of(stream) for stream in alone]
    assert [stream.prompt_tokens for stream in together] == [stream.prompt_tokens for stream in alone]
    starts, ends = [s.frame_ns[0] for s in together], [s.frame_ns[-1] for s in together]
    assert max(starts) < min(ends)
    # One pass serves all: some of their steps end at the same moment.
    assert set(together[0].frame_ns) & set(together[1].frame_ns)


@pytest.mark.engine
def test_ids_in_and_fixed_length(running: tuple[str, WorkerSession]) -> None:
    _, session = running
    messages = play(session, [ask(PROMPTS[2], 8)], 1)[0]
    from runners.tokens import Tokenizer

    tokenizer = Tokenizer.from_model(Path(str(session.facts.model_path)))
    ids = tokenizer.encode_chat([{"role": "user", "content": PROMPTS[2]}])
    assert tokenizer.template_sha256 == session.facts.template_sha256
    streams = play(session, [ask(PROMPTS[2], 8, prompt_ids=ids)], 1)
    assert streams[0].prompt_tokens == len(ids) == messages.prompt_tokens
    assert ids_of(streams[0]) == ids_of(messages)
    fixed = play(session, [ask("Say hi.", 60, ignore_eos=True)], 1)[0]
    assert (fixed.output_tokens, fixed.finish) == (60, "length")


@pytest.mark.engine
def test_more_threads_than_the_machine_has_are_not_claimed(
    installed: tuple[str, str], tmp_path: Path
) -> None:
    model, version = installed
    launch = ENGINE.launch(config(model, METHODS["none"], args={"threads": 1000}), version)
    assert launch.facts.threads == 1000
    with ENGINE.start(launch, tmp_path / "log") as session:
        assert session.facts.threads is not None
        assert 1 <= session.facts.threads <= host.cores()


@pytest.mark.engine
def test_sampling_follows_its_seed(running: tuple[str, WorkerSession]) -> None:
    name, session = running
    if name != "none":
        pytest.skip("a drafter changes how many numbers are drawn")
    asked = [ask(PROMPTS[2], 12, temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    first, again, other = (ids_of(stream) for stream in play(session, asked, 1))
    assert first == again != other
