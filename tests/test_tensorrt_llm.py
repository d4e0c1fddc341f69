"""runners.tensorrt_llm: its command and settings, its lifecycle and counts against the replica.

TensorRT-LLM itself was not run: options, settings, pages and fields are what its source and documentation say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from runners import flags, tensorrt_llm
from runners.base import Counts, Request, Stream, Where
from runners.client import Client
from runners.counters import parse as parse_counters
from runners.counts_trtllm import ITERATIONS, SPECULATIVE, iteration_sums, perf_raw, trtllm_counts
from runners.frames import parse
from runners.replicas import tensorrt_llm as replica
from runners.server import free_port
from runners.tensorrt_llm import (
    ARGS,
    TensorRtLlmEngine,
    TrtllmSession,
    fields,
    learns,
    settings_of,
    speculating,
)
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import Unsupported
from tests import help_texts
from tests.fake_environment import environment
from tests.help_texts import HELP
from tests.stand_ins import install, troubles

VERSION = "1.2.0"
MTP = Method(name="mtp", k=3)
DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install(tmp_path_factory.mktemp("trtllm"), "tensorrt_llm")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt_llm, "SETTLE_S", 0.01)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


def config(method: Method, model: str = "hf:org/model", concurrency: int = 1, **engine: Any) -> Config:
    ask = EngineAsk(name="tensorrt_llm", **engine)
    return Config(engine=ask, model=model, method=method, workload=Workload(), concurrency=concurrency)


def settings(method: Method, **about: Any) -> dict[str, Any]:
    """The file that the command names."""
    launch = TensorRtLlmEngine().launch(config(method, **about), VERSION)
    assert str(launch.files["settings"]) == launch.argv[launch.argv.index("--extra_llm_api_options") + 1]
    found: dict[str, Any] = orjson.loads(launch.files["settings"].read_bytes())
    return found


def request(number: int, tokens: int = 40, **fields: Any) -> Request:
    words = ({"role": "user", "content": f"prompt {number}"},)
    return Request(number, f"p{number}", None, number, 0, words, tokens, model="org/model", **fields)


# --- the command and its settings -------------------------------------------------------------------------


def test_every_option_is_one_of_trtllm_serve() -> None:
    known = set((HELP / "tensorrt_llm-1.2.txt").read_text().split())
    own = {*ARGS.values(), "--host", "--port", "--backend", "--revision", "--extra_llm_api_options"}
    assert own <= known
    replicas = {o for action in replica.parser()._actions for o in action.option_strings}
    assert replicas - {"-h", "--help"} <= known
    settings = help_texts.settings("tensorrt_llm")
    asked = settings_of(config(Method(name="none"), args={"overlap": True}), flags.Flags("none", ()))
    assert set(asked) <= set(settings["settings"])
    assert set(asked["kv_cache_config"]) <= set(settings["kv_cache_config"])


def test_command(python: str) -> None:
    launch = TensorRtLlmEngine().launch(
        config(Method(name="none"), python=python, concurrency=2, args={"context": 4096}), VERSION
    )
    assert launch.argv[:2] == (str(Path(python).parent / "trtllm-serve"), "org/model")
    assert launch.argv[launch.argv.index("--max_batch_size") + 1] == "2"
    assert launch.argv[launch.argv.index("--max_seq_len") + 1] == "4096"
    assert (launch.facts.speculative, launch.learns) == (False, False)
    inside = TensorRtLlmEngine().launch(config(Method(name="none"), command="docker run IMAGE"), VERSION)
    assert inside.argv[:4] == ("docker", "run", "IMAGE", "trtllm-serve")


SPECULATION = {
    "eagle3": {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "org/draft"},
    "draft-target": {
        "decoding_type": "DraftTarget",
        "max_draft_len": 3,
        "speculative_model_dir": "org/draft",
    },
    "pard": {"decoding_type": "PARD", "max_draft_len": 3, "speculative_model_dir": "org/draft"},
    "dflash": {"decoding_type": "DFlash", "max_draft_len": 3, "speculative_model_dir": "org/draft"},
    "mtp": {"decoding_type": "MTP", "max_draft_len": 3, "num_nextn_predict_layers": 3},
    "ngram": {"decoding_type": "NGram", "max_draft_len": 3, "is_public_pool": False},
    "sa": {"decoding_type": "SA", "max_draft_len": 3},
}
"""k is `max_draft_len`: it leaves the bonus token out."""


@pytest.mark.parametrize("name", SPECULATION)
def test_settings_of_a_method(name: str) -> None:
    draft = "org/draft" if "speculative_model_dir" in SPECULATION[name] else None
    found = settings(Method(name=name, k=3, draft=draft))
    assert found["speculative_config"] == SPECULATION[name]
    assert found.get("disable_overlap_scheduler") == (True if name in ("ngram", "draft-target") else None)
    assert found["kv_cache_config"] == {"enable_block_reuse": False}
    assert found["return_perf_metrics"]


def test_the_overlap_scheduler_can_be_held_equal_for_a_baseline() -> None:
    assert settings(Method(name="none"), args={"overlap": False})["disable_overlap_scheduler"] is True
    assert "disable_overlap_scheduler" not in settings(Method(name="none"))


def test_same_settings_same_file() -> None:
    files = {TensorRtLlmEngine().launch(config(MTP), VERSION).files["settings"] for _ in range(2)}
    files.add(TensorRtLlmEngine().launch(config(Method(name="none")), VERSION).files["settings"])
    assert len(files) == 2


def test_only_a_shared_pool_of_n_grams_learns() -> None:
    own = flags.resolve("tensorrt_llm", Method(name="ngram", k=3), VERSION)
    shared = flags.resolve("tensorrt_llm", Method(name="ngram", k=3, params={"public_pool": True}), VERSION)
    assert (learns(own), learns(shared)) == (False, True)


def test_relaxed_acceptance_is_named_as_lossy() -> None:
    loose = Method(name="mtp", k=3, params={"relaxed_acceptance": True, "relaxed_topk": 5})
    launch = TensorRtLlmEngine().launch(config(loose), VERSION)
    assert launch.facts.extra["lossy"] == ["use_relaxed_acceptance_for_thinking"]
    assert "lossy" not in TensorRtLlmEngine().launch(config(MTP), VERSION).facts.extra


@pytest.mark.parametrize(
    ("method", "about", "field"),
    [
        (Method(name="medusa", k=3), {}, "method.name"),
        (Method(name="eagle3", k=3), {}, "method.draft"),
        (Method(name="mtp"), {}, "method.k"),
        (Method(name="mtp", k=3, pinned=(0.8, 0.6, 0.4)), {}, "method.acceptance"),
        (Method(name="none"), {"args": {"threads": 4}}, "engine.args.threads"),
        (Method(name="none"), {"args": {"slots": True}}, "engine.args.slots"),
        (Method(name="none"), {"args": {"overlap": 1}}, "engine.args.overlap"),
        (Method(name="none"), {"model": "smollm2-135m"}, "model"),
        (Method(name="none"), {"url": "http://127.0.0.1:1", "args": {"slots": 2}}, "engine.args"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(method: Method, about: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported) as refused:
        TensorRtLlmEngine().launch(config(method, **about), VERSION)
    assert refused.value.field == field


# --- probing ----------------------------------------------------------------------------------------------


def test_probe_of_an_interpreter_with_and_without_it(tmp_path: Path, python: str) -> None:
    found = TensorRtLlmEngine().probe(Where(python=python))
    assert (found.ok, found.version, found.methods[0]) == (True, VERSION, "none")
    bare = TensorRtLlmEngine().probe(Where(python=environment(tmp_path / "bare", {})))
    assert (bare.ok, bare.version) == (False, None)
    assert "engine.command" in str(bare.install)


def test_probe_of_a_url_where_nobody_is() -> None:
    found = TensorRtLlmEngine().probe(Where(url=f"http://127.0.0.1:{free_port()}"))
    assert not found.ok
    assert "nothing answers" in str(found.why_not)


# --- the replica ------------------------------------------------------------------------------------------


@contextmanager
def session(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method = MTP
) -> Iterator[TrtllmSession]:
    for name, value in troubles(tmp_path / "starts").items():
        monkeypatch.setenv(name, value)
    launch = TensorRtLlmEngine().launch(config(method, python=python), VERSION)
    with TensorRtLlmEngine().start(launch, tmp_path / "log") as opened:
        yield opened


def measured(opened: TrtllmSession, requests: list[Request]) -> tuple[list[Stream], Counts]:
    engine, before = TensorRtLlmEngine(), opened.counters()

    async def work() -> list[Stream]:
        async with Client(opened.address, connections=4) as client:
            paths = [engine.path if r.prompt_ids is None else str(engine.ids_path) for r in requests]
            sent = [client.post(path, engine.body(r)) for path, r in zip(paths, requests, strict=True)]
            return [parse(exchange) for exchange in await asyncio.gather(*sent)]

    streams = asyncio.run(work())
    return streams, engine.counts(streams, before, opened.counters())


def test_counts_of_replies_and_server_agree(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*map(request, range(6)), request(6, prompt_ids=(5, 6, 7))]
    with session(python, tmp_path, monkeypatch) as opened:
        streams, counts = measured(opened, requests)
        assert (opened.facts.served_model, opened.facts.speculative) == ("org/model", True)
        assert opened.reset()
    assert {(stream.status, stream.output_tokens) for stream in streams} == {("ok", 40)}
    assert counts.drafted == sum(row.drafted or 0 for row in counts.requests)
    assert counts.accepted_verified == sum(row.accepted_verified or 0 for row in counts.requests)
    assert counts.steps_with_draft == sum(row.steps or 0 for row in counts.requests)  # every step drafts
    for row in counts.requests:
        assert row.steps is not None
        assert (row.drafted, row.accepted_verified) == (3 * row.steps, row.accepted_emitted)


def test_identity_of_acceptance(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AL_all − 1 = coverage × (AL_drafted − 1), with the server's drafts: it counts accepted tokens up to the end."""
    with session(python, tmp_path, monkeypatch) as opened:
        streams, counts = measured(opened, [request(n, 30 + n) for n in range(8)])
    emitted = sum((stream.output_tokens or 0) - 1 for stream in streams)
    steps = sum(row.steps or 0 for row in counts.requests)
    assert counts.steps_with_draft
    assert counts.accepted_verified
    coverage, al_drafted = (
        counts.steps_with_draft / steps,
        1 + counts.accepted_verified / counts.steps_with_draft,
    )
    assert emitted / steps - 1 == pytest.approx(coverage * (al_drafted - 1))


def test_a_baseline_emits_one_token_a_step(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(python, tmp_path, monkeypatch, Method(name="none")) as opened:
        _, counts = measured(opened, [request(1)])
    row = counts.requests[0]
    assert (row.steps, row.accepted_emitted, row.drafted) == (39, 0, 0)
    assert (counts.drafted, counts.accepted_verified) == (0, 0)


def test_it_attaches_to_a_url(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TensorRtLlmEngine()
    with session(python, tmp_path, monkeypatch) as opened:
        found = engine.probe(Where(url=opened.address))
        assert (found.ok, found.version) == (True, replica.VERSION)
        launch = engine.launch(config(MTP, url=opened.address), VERSION)
        with engine.start(launch, tmp_path / "x") as other:
            assert (other.facts.speculative, other.facts.served_model) == (True, "org/model")


def test_an_unknown_field_is_refused_as_there(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(python, tmp_path, monkeypatch) as opened:
        body = fields(request(0)) | {"return_token_ids": True}
        answer = httpx.post(f"{opened.address}/v1/chat/completions", json=body)
    assert (answer.status_code, "return_token_ids" in answer.text) == (400, True)


# --- counts -----------------------------------------------------------------------------------------------


def replied(tokens: int, mean: float | None, number: int = 7, **choice: Any) -> Stream:
    kept = {"avg_decoded_tokens_per_iter": mean} if mean is not None else {}
    return Stream(
        status="ok", output_tokens=tokens, tail={"choice": kept | choice, "id": f"chatcmpl-{number}"}
    )


@pytest.mark.parametrize(
    ("tokens", "mean", "steps"),
    [
        (40, 40 / 14, 13),
        (1, 1.0, 0),
        (40, 1.0, 39),
        (40, 0.0, None),  # the engine's word for "not yet"
        (40, 2.9, None),  # no whole number of iterations: tokens were cut off after they were counted
        (40, None, None),
        (40, 1e-320, None),
        (40, 1e-300, None),
    ],
)
def test_steps_from_mean_tokens_per_iteration(tokens: int, mean: float | None, steps: int | None) -> None:
    row = trtllm_counts([replied(tokens, mean)], {}, {SPECULATIVE: 1.0}).requests[0]
    assert row.steps == steps
    assert row.accepted_emitted == (None if steps is None else tokens - 1 - steps)


def test_figures_of_a_request_are_found_by_the_number_in_its_id() -> None:
    record = {"acceptance_rate": 0.5, "total_accepted_draft_tokens": 20, "total_draft_tokens": 40}
    page = [
        {"request_id": 7, "perf_metrics": {"speculative_decoding": record}},
        {"request_id": 8, "perf_metrics": {}},
    ]
    raw = perf_raw(page)
    seven, eight, nine = (trtllm_counts([replied(40, 2.0, n)], {}, raw).requests[0] for n in (7, 8, 9))
    assert (seven.drafted, seven.accepted_verified) == (40, 20)
    assert (eight.drafted, eight.accepted_verified) == (0, 0)
    assert (nine.drafted, nine.accepted_verified) == (None, None)
    assert perf_raw({"error": "x"}) == perf_raw([None, {"request_id": "a"}]) == {}


def test_a_record_in_the_choice_has_the_histogram() -> None:
    record = {
        "total_draft_tokens": 30,
        "total_accepted_draft_tokens": 12,
        "num_spec_steps": 10,
        "acceptance_histogram": [4, 2, 2, 2],
    }
    row = trtllm_counts([replied(23, 23 / 11, speculative_decoding=record)], {}, {}).requests[0]
    assert (row.steps, row.steps_with_draft, row.drafted, row.accept_hist) == (10, 10, 30, (4, 2, 2, 2))
    assert row.accepted_emitted == row.accepted_verified == 12


GARBAGE = ["many", "4", -1, 1.5, True, None, [2], {"a": 1}]


@pytest.mark.parametrize("bad", GARBAGE, ids=repr)
def test_a_record_that_makes_no_sense_is_unknown(bad: Any) -> None:
    """Each field alone: the others stay, but a histogram that nothing beside it confirms does not."""
    whole = {"total_draft_tokens": 30, "total_accepted_draft_tokens": 12, "num_spec_steps": 10}
    whole |= {"acceptance_histogram": [4, 2, 2, 2]}
    for name in whole:
        counts = trtllm_counts([replied(23, 23 / 11, speculative_decoding=whole | {name: bad})], {}, {})
        row = counts.requests[0]
        known = {"total_draft_tokens": row.drafted, "total_accepted_draft_tokens": row.accepted_verified}
        known |= {"num_spec_steps": row.steps_with_draft}
        assert {n: v for n, v in known.items() if v is not None} == {
            n: v for n, v in whole.items() if n in known and n != name
        }
        assert row.accept_hist == ((4, 2, 2, 2) if name == "total_draft_tokens" else None)
        assert row.steps == 10
        assert bool(counts.table) == (row.accept_hist is not None)
    for histogram in ([bad, 2, 2, 2], ["4", "2", "2", "2"], [5, 2, 2, 2], [4, 3, 2, 1], []):
        reply = replied(23, 23 / 11, speculative_decoding=whole | {"acceptance_histogram": histogram})
        counts = trtllm_counts([reply], {}, {})
        assert (counts.requests[0].accept_hist, counts.table) == (None, ())
        assert counts.requests[0].steps_with_draft == 10


@pytest.mark.parametrize("bad", GARBAGE, ids=repr)
def test_pages_that_make_no_sense_are_unknown(bad: Any) -> None:
    record = {"total_draft_tokens": bad, "total_accepted_draft_tokens": 3}
    raw = perf_raw([{"request_id": 7, "perf_metrics": {"speculative_decoding": record}}])
    found = trtllm_counts([replied(40, 2.0, 7)], {}, raw).requests[0]
    assert (found.drafted, found.accepted_verified) == (0 if bad is None else None, 3)
    perf_raw([{"request_id": 7, "perf_metrics": bad}])
    perf_raw([{"request_id": 7, "perf_metrics": {"speculative_decoding": bad}}])
    iteration_sums([{"iter": 1, "specDecodingStats": bad}], {})
    sums = iteration_sums([row(1, 3, 1), {"iter": 2, "specDecodingStats": {"numDraftTokens": bad}}], {})
    assert sums[ITERATIONS + "lost"] == (0 if bad is None else 1)
    assert (trtllm_counts([], {}, sums).drafted is None) == (bad is not None)


def row(number: int, drafted: int, accepted: int, **more: Any) -> dict[str, Any]:
    said = {
        "numDraftTokens": drafted,
        "numAcceptedTokens": accepted,
        "numRequestsWithDraftTokens": drafted // 3,
    }
    return {"iter": number, "specDecodingStats": said} | more


def test_iterations_are_summed_once_and_a_gap_is_seen() -> None:
    sums = iteration_sums([row(1, 3, 1), row(2, 6, 4), row(2, 6, 4, attentionDpRank=1), {"iter": 3}], {})
    assert {key.removeprefix(ITERATIONS): value for key, value in sums.items()} == {
        "drafts": 3.0, "draft_tokens": 9.0, "accepted_tokens": 5.0, "count": 3.0, "lost": 0.0, "last": 3.0,
    }  # fmt: skip
    more = iteration_sums([row(6, 3, 3)], sums)
    assert (more[ITERATIONS + "lost"], more[ITERATIONS + "draft_tokens"]) == (2.0, 12.0)
    whole = trtllm_counts([], {}, sums)
    assert (whole.steps_with_draft, whole.drafted, whole.accepted_verified) == (3, 9, 5)
    lost = trtllm_counts([], sums, more)
    assert (lost.steps_with_draft, lost.drafted, lost.counter_reset) == (None, None, False)
    assert trtllm_counts([], more, sums).counter_reset
    assert iteration_sums("text of Prometheus", sums)[ITERATIONS + "count"] == 3.0


def test_totals_take_the_drafts_of_the_iterations_only_where_both_agree() -> None:
    totals = {
        "trtllm_spec_decode_num_draft_tokens_total": 9.0,
        "trtllm_spec_decode_num_accepted_tokens_total": 5.0,
    }
    sums = iteration_sums([row(1, 3, 1), row(2, 6, 4)], {})
    assert trtllm_counts([], {}, totals | sums).steps_with_draft == 3
    other = trtllm_counts([], {}, totals | iteration_sums([row(2, 6, 4)], {}))
    assert (other.steps_with_draft, other.drafted, other.accepted_verified) == (None, 9, 5)
    assert trtllm_counts([], totals, dict.fromkeys(totals, 1.0)).counter_reset


def test_a_page_of_prometheus() -> None:
    raw = parse_counters((DATA / "prom" / "trtllm.prom").read_text())
    counts = trtllm_counts([], {}, raw)
    assert (counts.drafted, counts.accepted_verified, counts.steps_with_draft) == (1500, 900, None)
    assert speculating(raw) is None
    assert speculating({'trtllm_speculative_config_info{spec_enabled="True"}': 1.0})
    assert speculating({'trtllm_speculative_config_info{spec_enabled="false"}': 1.0}) is False


def test_a_failed_reply_has_no_counts() -> None:
    assert trtllm_counts([Stream()], {}, {SPECULATIVE: 0.0}).requests[0].steps is None
