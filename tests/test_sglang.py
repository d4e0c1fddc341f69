"""runners.sglang: its command against SGLang's own help text, its lifecycle and counts against the replica.

SGLang itself was not run: the help text is its own (0.5.23), the rest is what its source says.
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

from runners import flags
from runners.attached import page
from runners.base import Counts, Request, Stream, Where
from runners.client import Client
from runners.counts_sglang import GENERATED, SPECULATIVE, VERIFIED, sglang_counts, window
from runners.frames import parse
from runners.replicas import sglang as replica
from runners.server import Health, free_port, serve
from runners.sglang import ALWAYS, ARGS, SglangEngine, SglangSession, fields, said
from specbench.cell import Config, EngineAsk, Method, Workload
from specbench.errors import SpecbenchError, Unsupported
from tests.fake_environment import environment
from tests.help_texts import HELP, assert_flags_known
from tests.stand_ins import install, troubles

VERSION = "0.5.23"
NEXTN = Method(name="nextn", k=3)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return install(tmp_path_factory.mktemp("sglang"), "sglang")


def config(method: Method, model: str = "hf:org/model", concurrency: int = 1, **engine: Any) -> Config:
    ask = EngineAsk(name="sglang", **engine)
    return Config(engine=ask, model=model, method=method, workload=Workload(), concurrency=concurrency)


def launched(method: Method, **about: Any) -> tuple[str, ...]:
    return SglangEngine().launch(config(method, **about), VERSION).argv


def request(number: int, tokens: int = 40, **fields: Any) -> Request:
    words = ({"role": "user", "content": f"prompt {number}"},)
    return Request(number, f"p{number}", None, number, 0, words, tokens, model="org/model", **fields)


# --- the command ------------------------------------------------------------------------------------------


def test_every_flag_is_in_the_help_text() -> None:
    text = (HELP / f"sglang-{VERSION}.txt").read_text()
    assert_flags_known("sglang", text, VERSION)
    own = [word for word in ALWAYS if word.startswith("--")] + [option for option, _ in ARGS.values()]
    for option in (*own, "--model-path", "--revision", "--port"):
        assert f"\n  {option} " in text or f", {option} " in text or f"\n  {option}\n" in text, option


def test_the_replica_takes_the_command_and_no_other_options_than_the_launcher() -> None:
    text = (HELP / f"sglang-{VERSION}.txt").read_text()
    for action in replica.parser()._actions:
        for option in action.option_strings:
            assert option in {"-h", "--help"} or option in text


def test_k_drafted_tokens_are_k_plus_one_with_the_root() -> None:
    argv = launched(Method(name="eagle3", k=3, draft="org/draft"), python="/py")
    expected = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "org/draft"]
    expected += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
    expected += ["--speculative-num-draft-tokens", "4"]
    assert list(argv[-len(expected) :]) == expected
    assert argv[:5] == ("/py", "-m", "sglang.launch_server", "--model-path", "org/model")
    assert "--disable-radix-cache" in argv


@pytest.mark.parametrize(
    ("name", "option", "value"), [("dflash", "dflash-block-size", "5"), ("dspark", "dspark-block-size", "4")]
)
def test_blocks_count_the_root_or_not(name: str, option: str, value: str) -> None:
    argv = launched(Method(name=name, k=4, draft="org/draft"))
    assert argv[argv.index(f"--speculative-{option}") + 1] == value


def test_a_baseline_has_no_flag_of_speculation_and_slots_for_the_load() -> None:
    argv = launched(Method(name="none"), concurrency=4, args={"context": 4096})
    assert not [word for word in argv if word.startswith("--speculative")]
    assert argv[argv.index("--max-running-requests") + 1] == "4"
    assert argv[argv.index("--context-length") + 1] == "4096"


def test_a_container_and_a_revision() -> None:
    argv = launched(
        Method(name="none"), model="hf:org/model@main", command="docker run --rm --network host IMAGE"
    )
    assert argv[:8] == ("docker", "run", "--rm", "--network", "host", "IMAGE", "python3", "-m")
    assert argv[argv.index("--revision") + 1] == "main"


@pytest.mark.parametrize(
    ("method", "about", "field"),
    [
        (Method(name="medusa", k=3), {}, "method.name"),
        (Method(name="eagle3", k=3), {}, "method.draft"),
        (Method(name="eagle3", draft="o/d"), {}, "method.k"),
        (Method(name="nextn", k=3, pinned=(0.8, 0.6, 0.4)), {}, "method.acceptance"),
        (Method(name="none"), {"args": {"threads": 4}}, "engine.args.threads"),
        (Method(name="none"), {"args": {"slots": 0}}, "engine.args.slots"),
        (Method(name="none"), {"args": {"dtype": 4}}, "engine.args.dtype"),
        (Method(name="none"), {"model": "smollm2-135m"}, "model"),
        (Method(name="none"), {"url": "http://127.0.0.1:1", "args": {"slots": 2}}, "engine.args"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(method: Method, about: dict[str, Any], field: str) -> None:
    with pytest.raises(Unsupported) as refused:
        launched(method, **about)
    assert refused.value.field == field


def test_the_n_gram_trie_learns_and_the_others_do_not() -> None:
    learns = {
        name: flags.row_for("sglang", Method(name=name), VERSION).learns
        for name in ("none", "ngram", "eagle")
    }
    assert learns == {"none": False, "ngram": True, "eagle": False}


# --- probing ----------------------------------------------------------------------------------------------


def test_probe_of_an_interpreter_with_and_without_it(tmp_path: Path, python: str) -> None:
    found = SglangEngine().probe(Where(python=python))
    assert (found.ok, found.version) == (True, VERSION)
    assert {"none", "ngram", "eagle3", "nextn", "dflash"} <= set(found.methods)
    bare = SglangEngine().probe(Where(python=environment(tmp_path / "bare", {})))
    assert not bare.ok
    assert bare.install is not None
    assert "engine.url" in bare.install


def test_probe_of_a_url_where_nobody_is() -> None:
    found = SglangEngine().probe(Where(url=f"http://127.0.0.1:{free_port()}"))
    assert (found.ok, found.version) == (False, None)
    assert "nothing answers" in str(found.why_not)


# --- the replica ------------------------------------------------------------------------------------------


@contextmanager
def session(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Method = NEXTN, **engine: Any
) -> Iterator[SglangSession]:
    for name, value in troubles(tmp_path / "starts").items():
        monkeypatch.setenv(name, value)
    launch = SglangEngine().launch(config(method, python=python, **engine), VERSION)
    with SglangEngine().start(launch, tmp_path / "log") as opened:
        yield opened


def measured(opened: SglangSession, requests: list[Request]) -> tuple[list[Stream], Counts]:
    engine, before = SglangEngine(), opened.counters()

    async def work() -> list[Stream]:
        async with Client(opened.address, connections=4) as client:
            paths = [engine.path if r.prompt_ids is None else str(engine.ids_path) for r in requests]
            sent = [client.post(path, engine.body(r)) for path, r in zip(paths, requests, strict=True)]
            return [parse(exchange) for exchange in await asyncio.gather(*sent)]

    streams = asyncio.run(work())
    return streams, engine.counts(streams, before, opened.counters())


def test_facts_come_from_the_server(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session(python, tmp_path, monkeypatch, args={"dtype": "bfloat16"}) as opened:
        facts = opened.facts
        assert opened.pids
        assert opened.reset()
    assert (facts.speculative, facts.served_model, facts.precision) == (True, "org/model", "bfloat16")
    assert (facts.extra["algorithm"], facts.extra["draft_tokens"]) == ("NEXTN", 4)
    assert "lossy" not in facts.extra


def test_precision_in_the_words_of_every_engine() -> None:
    page = {"dtype": "bfloat16", "speculative_algorithm": None}
    assert said(page)["precision"] == "bfloat16"
    assert said(page | {"quantization": "fp8"})["precision"] == "bfloat16, fp8 weights"
    assert said(page | {"dtype": "auto"})["precision"] is None  # what it chose is on no page


def test_a_lossy_threshold_is_named(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method(name="nextn", k=3, params={"accept_threshold_single": 0.5})
    with session(python, tmp_path, monkeypatch, method) as opened:
        assert opened.facts.extra["lossy"] == ["speculative_accept_threshold_single=0.5"]


def test_counts_of_replies_and_server_agree(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [*map(request, range(6)), request(6, prompt_ids=(5, 6, 7))]
    with session(python, tmp_path, monkeypatch) as opened:
        streams, counts = measured(opened, requests)
    assert {stream.status for stream in streams} == {"ok"}
    assert [stream.output_tokens for stream in streams] == [40] * 7
    assert [stream.first_frame_tokens for stream in streams] == [1] * 7
    assert counts.steps_with_draft == sum(row.steps_with_draft or 0 for row in counts.requests)
    assert {row.request for row in counts.table} == set(range(7))
    for row in counts.requests:
        assert row.steps is not None
        assert row.accept_hist is not None
        assert (row.steps_from, row.drafted, sum(row.accept_hist)) == ("engine", 3 * row.steps, row.steps)


def test_identity_of_acceptance_where_nothing_was_cut(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AL_all − 1 = coverage × (AL_drafted − 1); a cut reply verified more than it emitted, never less."""
    with session(python, tmp_path, monkeypatch) as opened:
        streams, counts = measured(opened, [request(n, 30 + n) for n in range(12)])
    whole = 0
    for stream, row in zip(streams, counts.requests, strict=True):
        assert stream.output_tokens
        assert row.steps
        assert row.accepted_verified is not None
        assert row.accepted_emitted is not None
        assert row.accepted_emitted <= row.accepted_verified
        if row.accepted_emitted == row.accepted_verified:
            whole += 1
            al_all, al_drafted = (stream.output_tokens - 1) / row.steps, 1 + row.accepted_verified / row.steps
            assert al_all == pytest.approx(al_drafted)
    assert whole


def test_its_own_acceptance_length_counts_the_token_of_prefill(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """spec_accept_length = completion tokens / verified: one token more than the steps emitted."""
    with session(python, tmp_path, monkeypatch) as opened:
        (stream,), counts = measured(opened, [request(1)])
    said = stream.tail["sglext"]["spec_tokens_details"]
    assert said["spec_accept_length"] == pytest.approx(40 / counts.requests[0].steps)
    assert said["spec_accept_length"] > 39 / counts.requests[0].steps


def test_a_baseline_emits_one_token_a_step(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(python, tmp_path, monkeypatch, Method(name="none")) as opened:
        streams, counts = measured(opened, [request(1)])
    row = counts.requests[0]
    assert (row.steps, row.steps_from, row.accepted_emitted, row.drafted) == (39, "derived", 0, None)
    assert (counts.steps_with_draft, counts.drafted) == (None, None)
    assert "sglext" not in streams[0].tail


def test_a_url_must_do_what_was_asked(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SglangEngine()
    with session(python, tmp_path, monkeypatch) as opened:
        found = engine.probe(Where(url=opened.address + "/v1"))
        assert (found.ok, found.version) == (True, VERSION)
        with engine.start(engine.launch(config(NEXTN, url=opened.address), VERSION), tmp_path / "x") as other:
            assert (other.facts.speculative, other.pids) == (True, ())
        for method, what in (("none", "the server at .* speculates"), ("nextn", "drafts 3 tokens, not 5")):
            wrong = Method(name=method, k=None if method == "none" else 5)
            launch = engine.launch(config(wrong, url=opened.address), VERSION)
            with pytest.raises(SpecbenchError, match=what), engine.start(launch, tmp_path / "y"):
                pass


def test_the_replica_does_what_the_source_says(tmp_path: Path, python: str) -> None:
    """No /metrics without its option, no ids in a streamed chat, and a page of settings."""
    port = free_port()
    argv = [python, "-m", "sglang.launch_server", "--model-path", "m", f"--port={port}"]
    with serve(argv, {}, tmp_path / "log", health=Health(f"http://127.0.0.1:{port}")) as server:
        assert httpx.get(f"{server.address}/metrics").status_code == 404
        body = orjson.loads(SglangEngine().body(request(0))) | {"return_token_ids": True}
        refused = httpx.post(f"{server.address}/v1/chat/completions", json=body)
        assert (refused.status_code, "not supported" in refused.json()["message"]) == (400, True)
        assert page(server.address, "/server_info")["speculative_num_draft_tokens"] is None


# --- counts -----------------------------------------------------------------------------------------------


def counters_page(generated: float, verified: float) -> dict[str, float]:
    label = 'model_name="m"'
    return {
        f'{GENERATED}{{is_streaming="true",{label}}}': generated,
        f"{VERIFIED}{{{label}}}": verified,
        f"sglang:spec_accept_length{{{label}}}": 9.9,
        SPECULATIVE: 1.0,
    }


def replied(details: dict[str, Any] | None, tokens: int = 200) -> Stream:
    tail = {"sglext": {"spec_tokens_details": details}} if details else {}
    return Stream(status="ok", output_tokens=tokens, tail=tail)


def test_published_counts_of_a_reply() -> None:
    """200 tokens, 188 verified, 11 accepted of 940 drafted: 1.06383 by SGLang, 1 + 11/188 without prefill's token."""
    details = {"spec_verify_ct": 188, "spec_num_correct_drafts": 11, "spec_num_proposed_drafts": 940}
    page = counters_page(200, 188)
    counts = sglang_counts([replied(details)], {SPECULATIVE: 1.0}, page)
    row = counts.requests[0]
    assert (row.steps, row.accepted_emitted, row.accepted_verified, row.drafted) == (188, 11, 11, 940)
    grown = window({}, page)
    assert grown.tokens_per_verify == pytest.approx(1.06383, abs=1e-5)
    assert pytest.approx(1 + 11 / 188) == (200 - 1) / row.steps


def test_gauges_are_no_totals_and_a_fall_is_a_reset() -> None:
    grown = window(counters_page(100, 40), counters_page(160, 60))
    assert (grown.generated, grown.verified, grown.tokens_per_verify) == (60, 20, 3.0)
    assert window(counters_page(100, 40), counters_page(160, 20)).reset
    counts = sglang_counts([replied(None)], counters_page(100, 40), counters_page(90, 30))
    assert (counts.counter_reset, counts.steps_with_draft) == (True, None)


def test_a_restart_that_rose_past_the_old_value_is_seen_in_the_replies() -> None:
    details = {"spec_verify_ct": 50, "spec_num_correct_drafts": 0, "spec_num_proposed_drafts": 150}
    counts = sglang_counts([replied(details, 51)], counters_page(30, 20), counters_page(80, 60))
    assert (counts.counter_reset, counts.steps_with_draft) == (True, None)
    assert counts.requests[0].steps == 50


@pytest.mark.parametrize(
    "details", [None, {}, {"spec_verify_ct": 0}, {"spec_verify_ct": "7"}, {"spec_verify_ct": -1}]
)
def test_a_missing_record_is_unknown_and_not_zero(details: dict[str, Any] | None) -> None:
    counts = sglang_counts([replied(details)], counters_page(0, 0), counters_page(0, 0))
    row = counts.requests[0]
    assert (row.steps, row.drafted, row.accepted_verified, row.accept_hist) == (None, None, None, None)


@pytest.mark.parametrize("sglext", [[1], "x", {"spec_tokens_details": [1]}])
def test_a_record_of_another_shape_is_no_count(sglext: Any) -> None:
    stream = Stream(status="ok", output_tokens=9, tail={"sglext": sglext})
    assert sglang_counts([stream], {}, counters_page(0, 0)).requests[0].steps is None


def test_a_histogram_that_disagrees_is_left_out() -> None:
    details = {"spec_verify_ct": 3, "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 9}
    right = sglang_counts([replied(details | {"spec_correct_drafts_histogram": [1, 0, 2]}, 8)], {}, {})
    wrong = sglang_counts([replied(details | {"spec_correct_drafts_histogram": [1, 1, 2]}, 8)], {}, {})
    assert (right.requests[0].accept_hist, wrong.requests[0].accept_hist) == ((1, 0, 2), None)


def test_a_failed_reply_has_no_counts() -> None:
    assert sglang_counts([Stream()], {}, counters_page(0, 0)).requests[0].steps is None


def test_body_asks_for_the_record_and_switches_other_samplers_off() -> None:
    chat, ids = fields(request(0, ignore_eos=True, seed=7)), fields(request(0, prompt_ids=(1, 2)))
    assert (chat["return_spec_tokens_details"], chat["top_k"], chat["ignore_eos"], chat["seed"]) == (
        True,
        -1,
        True,
        7,
    )
    # The model's own settings, which the server takes where nothing is said, may have a penalty.
    assert (chat["repetition_penalty"], ids["repetition_penalty"]) == (1.0, 1.0)
    assert "return_token_ids" not in chat
    assert (ids["prompt"], ids["return_token_ids"]) == ([1, 2], True)
    assert "messages" not in ids
