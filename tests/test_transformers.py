"""runners.transformers_engine: settings for each method, and the real engine with the small catalogue model."""

from __future__ import annotations

import asyncio
import subprocess
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
from runners.transformers_engine import DISTRIBUTIONS, TransformersEngine
from runners.worker import MAIN, WorkerSession
from runners.workers import main as worker_main
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import SpecbenchError, Unsupported

ENGINE = TransformersEngine()
VERSION = "5.24.0"
CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


def config(model: str, method: Method, concurrency: int = 1, **engine: Any) -> Config:
    ask = EngineAsk(name="transformers", **engine)
    return Config(engine=ask, model=model, method=method, workload=Workload(), concurrency=concurrency)


def settings(launch: Launch) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(launch.argv[-1])
    return found


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
            Method(name="prompt-lookup", k=4, params={"n": 3}),
            {"generate": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}},
        ),
        (Method(name="prompt-lookup", k=4), {"generate": {"prompt_lookup_num_tokens": 4}}),
        (
            Method(name="early-exit", k=4, params={"exit_layer": 28}),
            {
                "generate": {"assistant_early_exit": 28},
                "assistant": CONSTANT | {"num_assistant_tokens": 4},
            },
        ),
    ],
    ids=lambda value: value.label if isinstance(value, Method) else "",
)
def test_settings(gguf: str, method: Method, want: dict[str, Any]) -> None:
    launch = ENGINE.launch(config(gguf, method, args={"threads": 2}), VERSION)
    assert settings(launch) == want | {"model": gguf, "threads": 2, "dtype": "float32"}
    assert (launch.facts.slots, launch.facts.threads, launch.learns) == (1, 2, False)
    assert launch.env["TQDM_DISABLE"] == "1"


@pytest.mark.parametrize("name", ["assisted", "universal"])
def test_assistant_settings(gguf: str, tmp_path: Path, name: str) -> None:
    draft = str(tmp_path / "draft.gguf")
    Path(draft).write_bytes(b"GGUF2")
    found = settings(ENGINE.launch(config(gguf, Method(name=name, k=5, draft=draft)), VERSION))
    assert found["draft"] == draft
    assert found["assistant"] == CONSTANT | {"num_assistant_tokens": 5}
    assert found.get("universal", False) == (name == "universal")


@pytest.mark.parametrize(
    ("method", "engine", "field"),
    [
        (Method(name="eagle3"), {}, "method.name"),
        (Method(name="none", k=3), {}, "method.k"),
        (Method(name="prompt-lookup"), {}, "method.k"),
        (Method(name="assisted", k=3), {}, "method.draft"),
        (Method(name="early-exit", k=3), {}, "method.exit_layer"),
        (Method(name="early-exit", k=3, params={"exit_layer": 0}), {}, "method.exit_layer"),
        (Method(name="none"), {"args": {"dtype": "int8"}}, "engine.args.dtype"),
        (Method(name="none"), {"args": {"context": 8}}, "engine.args.context"),
        (Method(name="none"), {"url": "http://127.0.0.1:1"}, "engine.url"),
        (Method(name="none"), {"concurrency": 2}, "load.concurrency"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    gguf: str, method: Method, engine: dict[str, Any], field: str
) -> None:
    with pytest.raises(Unsupported) as refused:
        ENGINE.launch(config(gguf, method, **engine), VERSION)
    assert refused.value.field == field


def test_universal_is_for_another_vocabulary(gguf: str) -> None:
    with pytest.raises(Unsupported, match=r"method\.draft: universal is for .*use assisted"):
        ENGINE.launch(config(gguf, Method(name="universal", k=3, draft=gguf)), VERSION)


def test_models_that_it_cannot_read(gguf: str, tmp_path: Path) -> None:
    (tmp_path / "ir").mkdir()
    (tmp_path / "ir" / "openvino_model.xml").write_text("<net/>")
    with pytest.raises(SpecbenchError, match=r"method\.draft: .* is no Hugging Face folder"):
        ENGINE.launch(config(gguf, Method(name="assisted", draft=str(tmp_path / "ir"))), VERSION)


def test_probe_says_what_is_missing() -> None:
    absent = ENGINE.probe(Where(python="/nowhere/python"))
    assert absent.why_not == "/nowhere/python is no program that can be run here"
    assert isinstance(registry.get("transformers"), TransformersEngine)


def test_a_models_own_samplers_are_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's generation_config may bring a penalty, which would change greedy text too."""
    own = SimpleNamespace(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, typical_p=0.9, repetition_penalty=1.05,
        no_repeat_ngram_size=3, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = SimpleNamespace(generation_config=own, eval=lambda: None)
    streamers: Any = ModuleType("streamers")
    streamers.BaseStreamer = object
    engine: Any = ModuleType("transformers")
    engine.AutoModelForCausalLM = SimpleNamespace(from_pretrained=lambda *_, **__: model)
    engine.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: None)
    torch: Any = ModuleType("torch")
    torch.float32 = "float32"
    for name, module in {
        "torch": torch,
        "transformers": engine,
        "transformers.generation.streamers": streamers,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "transformers.generation", ModuleType("generation"))
    worker = worker_main.module(str(MAIN.with_name("transformers_worker.py")))
    assert worker._load(str(tmp_path), "float32") == (model, None)
    assert {name: value for name, value in vars(own).items() if value is not None} == {
        "do_sample": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


# --- the real engine --------------------------------------------------------------------------------------

PROMPTS = (
    "Repeat exactly: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that reverses a list.",
)
METHODS = {
    "none": Method(name="none"),
    "prompt-lookup": Method(name="prompt-lookup", k=4, params={"n": 3}),
    "assisted": Method(name="assisted", k=3, draft="smollm2-135m"),
    "early-exit": Method(name="early-exit", k=3, params={"exit_layer": 28}),
    "universal": Method(name="universal", k=3),
}


@pytest.fixture(scope="module")
def installed(model: str) -> tuple[str, str]:
    """Path of the small model and the engine's version; a machine without the engine skips and says so."""
    python = environments.python_for("transformers", None)
    version = environments.version_in(python, DISTRIBUTIONS)
    if version is None:
        pytest.skip("transformers is not installed; `specbench engines install transformers` does it")
    return model, version


OTHER_VOCABULARY = """
import copy, sys, torch, transformers
from pathlib import Path
source = Path(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.bfloat16)
tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
config = copy.deepcopy(model.config)
del config.quantization_config
plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
plain.load_state_dict(model.state_dict())
tokenizer.add_tokens(["<|of another vocabulary|>"])
plain.resize_token_embeddings(len(tokenizer))
plain.save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
"""


@pytest.fixture(scope="module")
def other_vocabulary(installed: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small model with one token more, which transformers takes for another tokenizer."""
    folder = tmp_path_factory.mktemp("other-vocabulary")
    python = environments.python_for("transformers", None)
    subprocess.run(
        [python, "-c", OTHER_VOCABULARY, installed[0], str(folder)],
        check=True,
        capture_output=True,
        timeout=280,
    )
    return str(folder)


@pytest.fixture(scope="module", params=list(METHODS))
def running(
    request: pytest.FixtureRequest, installed: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, WorkerSession]]:
    """A worker of each method."""
    model, version = installed
    method = METHODS[request.param]
    if request.param == "universal":
        method = method.model_copy(update={"draft": request.getfixturevalue("other_vocabulary")})
    launch = ENGINE.launch(config(model, method, args={"threads": 1}), version)
    with ENGINE.start(launch, tmp_path_factory.mktemp("transformers") / "log") as session:
        yield request.param, session


@pytest.fixture(scope="module")
def baseline() -> dict[str, Any]:
    """What `none` answered; the first of the methods fills it."""
    return {}


def play(session: WorkerSession, requests: list[Request]) -> list[Stream]:
    async def run() -> list[Stream]:
        async with sender(ENGINE, session, connections=1, timeout_s=300) as client:
            paths = [ENGINE.path if r.prompt_ids is None else str(ENGINE.ids_path) for r in requests]
            found = [await client.post(path, ENGINE.body(r)) for path, r in zip(paths, requests, strict=True)]
            return [parser(ENGINE)(exchange) for exchange in found]

    return asyncio.run(run())


def ask(prompt: str, most: int = 24, **more: Any) -> Request:
    return Request(0, "p", None, 0, 0, ({"role": "user", "content": prompt},), most, **more)


@pytest.mark.engine
@pytest.mark.slow
def test_replies_counts_and_the_identity(
    running: tuple[str, WorkerSession], baseline: dict[str, Any]
) -> None:
    name, session = running
    before = session.counters()
    streams = play(session, [ask(prompt) for prompt in PROMPTS])
    after = session.counters()
    found = ENGINE.counts(streams, before, after)
    assert [stream.status for stream in streams] == ["ok"] * 2
    assert session.facts.speculative == (name != "none")
    for stream, counts in zip(streams, found.requests, strict=True):
        assert counts.steps == len(stream.frame_ns) - 1
        assert counts.accepted_verified == counts.accepted_emitted
        assert counts.drafted is not None
        assert counts.steps_with_draft is not None
        # In the first pass, too, no more was accepted than drafted.
        assert all(mark and mark["accepted"] <= mark["drafted"] for mark in stream.marks)
        assert counts.accepted_verified <= counts.drafted
        k = METHODS[name].k
        assert name == "universal" or counts.drafted <= (k or 0) * counts.steps
    drafted = sum(counts.drafted or 0 for counts in found.requests)
    assert (drafted > 0) == (name != "none")
    texts = baseline.setdefault("texts", [stream.text for stream in streams])
    assert [stream.text for stream in streams] == texts
    assert "token" not in streams[0].text


@pytest.mark.engine
@pytest.mark.slow
def test_ids_in_and_fixed_length(running: tuple[str, WorkerSession]) -> None:
    from runners.tokens import Tokenizer

    _, session = running
    tokenizer = Tokenizer.from_model(Path(str(session.facts.model_path)))
    ids = tokenizer.encode_chat([{"role": "user", "content": PROMPTS[0]}])
    streams = play(
        session,
        [ask(PROMPTS[0], 6), ask(PROMPTS[0], 6, prompt_ids=ids), ask("Say hi.", 30, ignore_eos=True)],
    )
    assert streams[1].prompt_tokens == len(ids) == streams[0].prompt_tokens
    assert streams[1].text == streams[0].text
    assert (streams[2].output_tokens, streams[2].finish) == (30, "length")
    # The end token counts again for the next reply.
    assert play(session, [ask(PROMPTS[0], 24)])[0].finish == "stop"
