"""Each engine's own figure of acceptance beside ours for the same reply: equal, or apart by a reason in exact numbers.

Theirs is read off a capture where the engine prints it, else made as its documentation or source makes it. Ours is
what `specbench.metrics` makes of the adapter's counts. SGLang and TensorRT-LLM were not run: theirs are a published
reply, and replies and pages of their replicas. `docs/acceptance.md` has a table of it, whose numbers are held here.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest

from runners import frames, in_process, worker
from runners.base import Counts, Raw, Stream
from runners.client import Exchange
from runners.counters import delta, parse
from runners.counts import SPECULATIVE, llama_counts, vllm_counts
from runners.counts_sglang import GENERATED, VERIFIED, sglang_counts
from runners.counts_sglang import SPECULATIVE as SGLANG_SPECULATIVE
from runners.counts_trtllm import SPECULATIVE as TRTLLM_SPECULATIVE
from runners.counts_trtllm import iteration_sums, perf_raw, trtllm_counts
from runners.loopback_script import Reply, Script, Step
from runners.replicas import sglang, tensorrt_llm
from runners.workers import main as worker_main
from specbench.metrics import compute
from tests.make_cell import row, view
from tests.replay import capture, exchange

DATA = Path(__file__).parent / "data"
CAPTURES = DATA / "captures"
PAGE = Path(__file__).parents[1] / "docs" / "acceptance.md"
HEADING = "## The engine's own figure beside ours"

Theirs = dict[str, Fraction]
"""The engine's figures by the name that the page gives them."""


# --- ours -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """Metrics of one reply, as the ratios of whole numbers that they are; None is unknown."""

    al_all: Fraction | None
    al_drafted: Fraction | None
    coverage: Fraction | None
    acceptance_rate: Fraction | None
    accepted_verified: Fraction | None
    emitted: Fraction
    steps: Fraction

    @property
    def cut(self) -> Fraction | None:
        """Accepted tokens that lie past the end of the reply, and so were never emitted."""
        accepted = self.accepted_verified
        return None if accepted is None else accepted - (self.emitted - self.steps)


COUNTS = ("steps", "steps_with_draft", "drafted", "accepted_verified", "accepted_emitted")
METRICS = ("al_all", "al_drafted", "coverage", "acceptance_rate", "accepted_verified", "emitted", "steps")


def ours(stream: Stream, counts: Counts) -> Ours:
    """A cell of this one reply through the metrics table."""
    values, _ = computed(stream, counts)
    exact: dict[str, Any] = {name: None if n is None else ratio(n) for name, n in values.items()}
    return Ours(**exact)


def computed(stream: Stream, counts: Counts) -> tuple[dict[str, float | None], dict[str, str]]:
    """Its metrics, and the reason for each that is unknown."""
    of_request = {name: getattr(counts.requests[0], name) for name in COUNTS}
    totals = {name: getattr(counts, name) for name in ("steps_with_draft", "drafted", "accepted_verified")}
    return compute(view(row(output_tokens=stream.output_tokens, **of_request), **totals), METRICS)


def ratio(value: float) -> Fraction:
    """The ratio of small whole numbers that this number is."""
    found = Fraction(value).limit_denominator(1000)
    assert float(found) == pytest.approx(value, rel=1e-15)
    return found


def printed(value: float, top: int, bottom: int, single: bool = False) -> Fraction:
    """The ratio that the engine says this number is, which it must be to the last digit that it prints."""
    whole = top / bottom
    assert value == (struct.unpack("f", struct.pack("f", whole))[0] if single else whole)
    return Fraction(top, bottom)


# --- tables of expected numbers ---------------------------------------------------------------------------


def line(theirs: Theirs, mine: Ours) -> list[Fraction | None]:
    """Their figures, then AL_all, AL_drafted, coverage, acceptance rate and tokens cut off."""
    found = [mine.al_all, mine.al_drafted, mine.coverage, mine.acceptance_rate]
    return [*theirs.values(), *found, mine.cut]


def numbers(text: str) -> list[Fraction | None]:
    """A line of a table below; `-` is unknown."""
    return [None if word == "-" else Fraction(word) for word in text.replace("|", " ").split()]


def assert_identity(mine: Ours) -> None:
    """AL_all − 1 = coverage × (AL_drafted − 1), less what was cut off, a step."""
    assert mine.al_all is not None
    assert mine.coverage is not None
    assert mine.al_drafted is not None
    assert mine.cut is not None
    assert mine.al_all - 1 == mine.coverage * (mine.al_drafted - 1) - mine.cut / mine.steps


# --- llama.cpp --------------------------------------------------------------------------------------------

BY_TIMINGS = "predicted_n / (predicted_n − draft_n_accepted)"

LLAMACPP = {
    # mean len, draft acceptance, by timings | AL_all, AL_drafted, coverage, rate | cut
    "draft/chat_stream_timings.sse": "3 2/3 5/2 | 3 3 1 2/3 | 0",
    "ngram/chat_stream_timings.sse": "2 1/8 5/4 | 9/7 2 2/7 1/8 | 0",
}
"""Each is the only reply between two readings of its server's counters."""


def llamacpp(name: str) -> tuple[Theirs, Ours]:
    """Of the log's line "draft acceptance = … (… accepted / … generated), mean len = …" and of `timings`."""
    stream, pages = llamacpp_reply(name)
    mine = ours(stream, llama_counts([stream], *pages))
    drafts, drafted, accepted = grown(pages, "llamacpp:")
    timings = stream.tail["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (drafted, accepted)
    tokens = timings["predicted_n"]
    theirs = {
        "mean len": 1 + Fraction(accepted, drafts),
        "draft acceptance": Fraction(accepted, drafted),
        BY_TIMINGS: Fraction(tokens, tokens - accepted),
    }
    return theirs, mine


def llamacpp_reply(name: str) -> tuple[Stream, list[dict[str, float]]]:
    """A captured reply, and its server's counters before and after."""
    stream = frames.parse(capture(f"llamacpp/{name}"))
    after = (
        f"{name.removesuffix('.json')}_metrics" if "extra" in name else name.split("/")[0] + "/metrics_after"
    )
    return stream, [
        metrics("llamacpp/ngram/metrics_before"),
        metrics(f"llamacpp/{after}") | {SPECULATIVE: 1.0},
    ]


def metrics(name: str) -> dict[str, float]:
    return parse((CAPTURES / f"{name}.txt").read_text())


def grown(pages: Sequence[Raw], prefix: str) -> list[int]:
    """Drafts, drafted and accepted tokens between two pages."""
    names = [
        f"{prefix}spec_decode_num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    return [round(delta(pages[0], pages[-1], name) or 0) for name in names]


@pytest.mark.parametrize("name", LLAMACPP)
def test_llamacpp_counts_drafts_past_the_end_and_no_step_without_one(name: str) -> None:
    """`mean len` is AL_drafted, and tokens per pass by the timings count prefill's token and pass beside the steps'."""
    theirs, mine = llamacpp(name)
    assert line(theirs, mine) == numbers(LLAMACPP[name])
    assert theirs["mean len"] == mine.al_drafted
    assert theirs["draft acceptance"] == mine.acceptance_rate
    assert theirs[BY_TIMINGS] == (mine.emitted + 1) / (mine.steps + 1 - (mine.cut or 0))
    assert_identity(mine)


@pytest.mark.parametrize(
    ("name", "theirs", "between"),
    [
        ("draft_synth/chat_stream_usage.sse", "5/2", "3 to 9 steps"),
        # A stop word inside a draft leaves fewer tokens than were accepted: the figure falls below 1, even below 0.
        ("extra/stopmid.json", "-3/5", "1 to 2 steps"),
    ],
)
def test_a_reply_of_llamacpp_without_times_may_end_anywhere_in_its_last_draft(
    name: str, theirs: str, between: str
) -> None:
    """Only the times of its tokens tell its steps apart; of what it accepted some may lie past its end."""
    stream, pages = llamacpp_reply(name)
    timings = stream.tail["timings"]
    by_timings = Fraction(timings["predicted_n"], timings["predicted_n"] - timings["draft_n_accepted"])
    assert by_timings == Fraction(theirs)
    values, reasons = computed(stream, llama_counts([stream], *pages))
    assert (values["steps"], values["al_all"], values["coverage"]) == (None, None, None)
    assert reasons["al_all"].startswith(between)
    assert values["al_drafted"] == 1 + timings["draft_n_accepted"] / grown(pages, "llamacpp:")[0]


def test_merged_frames_of_vllm_do_not_show_the_steps() -> None:
    """Of one reply with 2 accepted tokens past its end: 4 steps in a frame each, unknown where frames hold several."""
    al_all = {}
    for name in ("chat_stream_tokenids_contusage.sse", "chat_stream_interval10.sse"):
        stream = frames.parse(capture(f"vllm/{name}"))
        page = {"vllm:spec_decode_num_drafts_total": 0.0}
        al_all[stream.output_tokens, len(stream.frame_ns)] = computed(
            stream, vllm_counts([stream], page, page)
        )[0]["al_all"]
    assert al_all == {(11, 5): 2.5, (11, 2): None}


# --- vLLM -------------------------------------------------------------------------------------------------

VLLM = {
    # mean_acceptance_length, draft_acceptance_rate | AL_all, AL_drafted, coverage, rate | cut
    "chat_max5_truncated_step.sse": "5 1 | 4/3 5 1/3 1 | 3",  # the limit fell inside the only draft
    "chat_stream_tokenids_contusage.sse": "5 1 | 5/2 5 1/2 1 | 2",  # the end of text did
    "draft_model/chat_stream_usage.sse": "4 1 | 10/3 4 1 1 | 2",
    # The captured replies all end inside a draft; without that last step nothing of them is cut.
    "chat_stream_tokenids_contusage.sse but for its last step": "5 1 | 7/3 5 1/3 1 | 0",
    "draft_model/chat_stream_usage.sse but for its last step": "4 1 | 4 4 1 1 | 0",
}


def vllm(name: str) -> tuple[Theirs, Ours]:
    """Of `metrics.speculative_decoding` in the reply's last chunk."""
    stream, record = vllm_reply(name)
    page = {"vllm:spec_decode_num_drafts_total": 0.0}
    mine = ours(stream, vllm_counts([stream], page, page))
    drafts, accepted = record["num_spec_steps"], record["num_accepted_draft_tokens"]
    length = printed(record["mean_acceptance_length"], drafts + accepted, drafts)
    rate = printed(record["draft_acceptance_rate"], accepted, record["num_draft_tokens"])
    return {"mean_acceptance_length": length, "draft_acceptance_rate": rate}, mine


def vllm_reply(name: str) -> tuple[Stream, dict[str, Any]]:
    path, _, shortened = name.partition(" ")
    stream = frames.parse(capture(f"vllm/{path}"))
    record = stream.tail["metrics"]["speculative_decoding"]
    return without_last_step(stream, record) if shortened else (stream, record)


def without_last_step(stream: Stream, record: Mapping[str, Any]) -> tuple[Stream, dict[str, Any]]:
    """The reply as it was one step earlier, from `per_step_accepted` and `per_step_drafted` of its record."""
    accepted, drafted = record["per_step_accepted"][:-1], record["per_step_drafted"][:-1]
    earlier = {
        "acceptance_histogram": [accepted.count(length) for length in range(record["num_spec_tokens"] + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
        "draft_acceptance_rate": sum(accepted) / sum(drafted),
    }
    kept, last = stream.frame_tokens[:-1], stream.frame_tokens[-1]
    tail = {"metrics": {"speculative_decoding": earlier}}
    tokens = (stream.output_tokens or 0) - (last or 0)
    return replace(
        stream, frame_tokens=kept, frame_ns=stream.frame_ns[:-1], output_tokens=tokens, tail=tail
    ), earlier


@pytest.mark.parametrize("name", VLLM)
def test_vllm_counts_drafts_past_the_end_and_no_step_without_one(name: str) -> None:
    """`mean_acceptance_length` is AL_drafted: it leaves out steps without a draft and counts drafts past the end."""
    theirs, mine = vllm(name)
    assert line(theirs, mine) == numbers(VLLM[name])
    assert theirs["mean_acceptance_length"] == mine.al_drafted
    assert theirs["draft_acceptance_rate"] == mine.acceptance_rate
    assert_identity(mine)
    stream, record = vllm_reply(name)
    if "per_step_accepted" in record:  # what the last step verified and one more, less what it showed
        assert mine.cut == record["per_step_accepted"][-1] + 1 - (stream.frame_tokens[-1] or 0)


BENCH = {
    # acceptance_length, acceptance_rate | AL_all, AL_drafted, coverage, rate | cut
    "draft_model/chat_stream_usage.sse": "4 100 | 10/3 4 1 1 | 2",
}


def vllm_bench(name: str) -> tuple[Theirs, Ours]:
    """Of `vllm bench serve`, which reads the server's counters before and after."""
    pages = [metrics(f"vllm/{name.split('/')[0]}/metrics_{when}") for when in ("before", "after")]
    stream = frames.parse(capture(f"vllm/{name}"))
    assert delta(pages[0], pages[1], "vllm:generation_tokens_total") == stream.output_tokens
    drafts, drafted, accepted = grown(pages, "vllm:")
    counts = vllm_counts([stream], *pages)
    assert (counts.steps_with_draft, counts.drafted, counts.accepted_verified) == (drafts, drafted, accepted)
    theirs = {
        "spec_decode_acceptance_length": 1 + Fraction(accepted, drafts),
        "spec_decode_acceptance_rate": 100 * Fraction(accepted, drafted),
    }
    return theirs, ours(stream, counts)


@pytest.mark.parametrize("name", BENCH)
def test_vllm_bench_serve_has_the_servers_counters_and_a_rate_in_percent(name: str) -> None:
    """It and the server's log divide the same counters, over every request that the server had meanwhile."""
    theirs, mine = vllm_bench(name)
    assert line(theirs, mine) == numbers(BENCH[name])
    assert theirs["spec_decode_acceptance_length"] == mine.al_drafted
    assert theirs["spec_decode_acceptance_rate"] == 100 * (mine.acceptance_rate or 0)
    assert_identity(mine)


# --- SGLang -----------------------------------------------------------------------------------------------

SGLANG = {
    # spec_accept_length, spec_accept_rate, by counters | AL_all, AL_drafted, coverage, rate | cut
    "published reply": "50/47 11/940 50/47 | 199/188 199/188 1 11/940 | 0",
    "replica, whole": "11/4 1/2 11/4 | 5/2 5/2 1 1/2 | 0",
    "replica, cut": "3 7/9 3 | 8/3 10/3 1 7/9 | 2",
}
SGLANG_STEPS = {
    # tokens, drafted and accepted of each pass, prefill's first
    "replica, whole": ((1, 0, 0), (4, 3, 3), (2, 3, 1), (1, 3, 0), (3, 3, 2)),
    "replica, cut": ((1, 0, 0), (4, 3, 3), (2, 3, 1), (2, 3, 3)),
}
BY_COUNTERS = "Δgeneration_tokens / Δspec_verify_calls"


def sglang_figures(name: str) -> tuple[Theirs, Ours]:
    """Of `spec_tokens_details` in a reply, and of the two counters of the server."""
    stream = published_sglang() if name == "published reply" else sglang_replica(SGLANG_STEPS[name])
    said, tokens = stream.tail["sglext"]["spec_tokens_details"], stream.output_tokens or 0
    verified, accepted = said["spec_verify_ct"], said["spec_num_correct_drafts"]
    page = {SGLANG_SPECULATIVE: 1.0, GENERATED: float(tokens), VERIFIED: float(verified)}
    theirs = {
        "spec_accept_length": printed(said["spec_accept_length"], tokens, verified),
        "spec_accept_rate": printed(said["spec_accept_rate"], accepted, said["spec_num_proposed_drafts"]),
        BY_COUNTERS: Fraction(tokens, verified),
    }
    return theirs, ours(stream, sglang_counts([stream], dict.fromkeys(page, 0.0), page))


def published_sglang() -> Stream:
    """The counts that a user published, in the names of 0.5.23."""
    known = json.loads((DATA / "prom" / "spec_counters_known.json").read_text())
    given = next(item["given"] for item in known if item["id"] == "sglang-13754")
    renamed = {
        "spec_num_correct_drafts": given["spec_accept_token_num"],
        "spec_num_proposed_drafts": given["spec_draft_token_num"],
    }
    tail = {"sglext": {"spec_tokens_details": given | renamed}}
    return Stream(status="ok", output_tokens=given["completion_tokens"], tail=tail)


Steps = Sequence[tuple[int, int, int]]
SCRIPT = Script(frames="step", k=3, accept=(1.0,))
"""What a replica would make up is replaced by the steps of a test."""


def sglang_replica(steps: Steps) -> Stream:
    reply = sglang.SglangReply(SCRIPT, ask(steps) | {"return_spec_tokens_details": True}, 1)
    return read(reply, steps)


def ask(steps: Steps) -> dict[str, Any]:
    """A request for as many tokens as the steps emit, with everything that the adapters ask for."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    words = [{"role": "user", "content": "say something"}]
    tokens = sum(step[0] for step in steps)
    return {"messages": words, "max_tokens": tokens, "stream": True, "stream_options": options}


def read(reply: Reply, steps: Steps) -> Stream:
    """A replica's reply of these steps, as the client reads it."""
    reply.steps = [Step(*step) for step in steps]
    return frames.parse(exchange(*((event.due_s, event.data) for event in reply.events())))


@pytest.mark.parametrize("name", SGLANG)
def test_sglang_counts_the_token_of_prefill_as_if_a_step_had_emitted_it(name: str) -> None:
    """`spec_accept_length` is completion tokens / verify calls: prefill's one token too many, whatever was cut."""
    theirs, mine = sglang_figures(name)
    assert line(theirs, mine) == numbers(SGLANG[name])
    assert mine.al_all is not None
    assert theirs["spec_accept_length"] == mine.al_all + 1 / mine.steps
    assert theirs[BY_COUNTERS] == theirs["spec_accept_length"]  # of one request; of n it has n such tokens
    assert theirs["spec_accept_rate"] == mine.acceptance_rate
    assert_identity(mine)


# --- TensorRT-LLM -----------------------------------------------------------------------------------------

TRTLLM = {
    # avg_decoded_tokens_per_iter, acceptanceLength, acceptance_rate | AL_all, AL_drafted, coverage, rate | cut
    "replica, whole": "9/5 3 2/3 | 2 3 1/2 2/3 | 0",
    "replica, cut": "2 3 2/3 | 7/3 3 2/3 2/3 | 0",
}
TRTLLM_STEPS = {
    "replica, whole": ((1, 0, 0), (4, 3, 3), (1, 0, 0), (1, 0, 0), (2, 3, 1)),
    "replica, cut": ((1, 0, 0), (4, 3, 3), (1, 0, 0), (2, 3, 3)),  # counts end with the reply: 1 of 3
}


def trtllm(name: str) -> tuple[Theirs, Ours]:
    """Of the reply's choice, of the iterations of `/metrics` and of `/perf_metrics`."""
    given = tensorrt_llm.parser().parse_args(["m"])
    settings = {
        "speculative_config": {"max_draft_len": 3},
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
    }
    server = tensorrt_llm.TrtllmServer(SCRIPT, given, settings)
    before = trtllm_pages(server)[0]
    reply = server.make(b"/v1/chat/completions", ask(TRTLLM_STEPS[name]), 1)
    stream = read(reply, TRTLLM_STEPS[name])
    server.finished(reply)
    after, iterations, record = trtllm_pages(server)
    mine = ours(stream, trtllm_counts([stream], before, after))
    drafted = [stats for row_ in iterations if (stats := row_.get("specDecodingStats"))]
    lengths = sum(ratio(stats["acceptanceLength"]) for stats in drafted)
    tokens, mean = stream.output_tokens or 0, stream.tail["choice"]["avg_decoded_tokens_per_iter"]
    accepted, proposed = record["total_accepted_draft_tokens"], record["total_draft_tokens"]
    theirs = {
        "avg_decoded_tokens_per_iter": printed(mean, tokens, len(iterations), single=True),
        "acceptanceLength": Fraction(lengths, len(drafted)),
        "acceptance_rate": printed(record["acceptance_rate"], accepted, proposed),
    }
    return theirs, mine


def trtllm_pages(server: tensorrt_llm.TrtllmServer) -> tuple[Raw, list[dict[str, Any]], dict[str, Any]]:
    """Everything that its pages say, then the iterations alone and the record of the last request."""
    iterations, requests = server.page(b"/metrics"), server.page(b"/perf_metrics")
    raw = (
        parse(server.metrics())
        | iteration_sums(iterations, {})
        | perf_raw(requests)
        | {TRTLLM_SPECULATIVE: 1.0}
    )
    return raw, iterations, requests[-1]["perf_metrics"]["speculative_decoding"] if requests else {}


@pytest.mark.parametrize("name", TRTLLM)
def test_trtllm_counts_prefill_as_an_iteration_and_its_token_with_the_others(name: str) -> None:
    """`avg_decoded_tokens_per_iter` has prefill's token and pass in it, `acceptanceLength` no step without a draft."""
    theirs, mine = trtllm(name)
    assert line(theirs, mine) == numbers(TRTLLM[name])
    assert theirs["avg_decoded_tokens_per_iter"] == (mine.emitted + 1) / (mine.steps + 1)
    assert theirs["acceptanceLength"] == mine.al_drafted
    assert theirs["acceptance_rate"] == mine.acceptance_rate
    assert_identity(mine)


# --- OpenVINO GenAI ---------------------------------------------------------------------------------------

PER_INFERENCE = "(get_num_accepted_tokens + inferences) / inferences"

OPENVINO = {
    # get_draft_acceptance_rate, tokens an inference | AL_all, AL_drafted, coverage, rate | cut
    "ir_main_ir_draft_1": "5/6 8/3 | 18/5 18/5 1 13/15 | 0",
    "ir_main_ir_draft_2": "9/10 3 | 29/8 29/8 1 21/23 | 0",
}
K, LIMIT, END_OF_TEXT = 3, 30, 2
"""Of the captured requests; the first reply ended by itself, the second at the limit."""


def openvino(name: str) -> tuple[Theirs, Ours]:
    """Of `extended_perf_metrics`, and of the inferences of the main model."""
    said = orjson.loads((CAPTURES / "openvino" / "draft_model.json").read_bytes())[name]
    drafted = openvino_drafts(said["steps"])
    accepted, proposed = said["get_num_accepted_tokens"], said["get_num_draft_tokens"]
    assert sum(drafted[:-1]) == proposed
    assert said["get_num_rejected_tokens"] == proposed - accepted
    inferences = said["inferences"]
    assert inferences == len(said["steps"])
    theirs = {
        "get_draft_acceptance_rate": printed(
            said["get_draft_acceptance_rate"], accepted, proposed, single=True
        ),
        PER_INFERENCE: Fraction(accepted + inferences, inferences),
    }
    return theirs, in_worker([len(ids) for ids in said["steps"]], drafted)


def openvino_drafts(steps: Sequence[Sequence[int]]) -> list[int]:
    """What each step drafted by the worker's rule, which only the engine's total can confirm."""
    drafted, asker = [0], SimpleNamespace(k=K, generation={})
    for number in range(1, len(steps)):
        before = [token for ids in steps[:number] for token in ids]
        request = SimpleNamespace(max_tokens=LIMIT, ids=before, stops={END_OF_TEXT})
        drafted.append(openvino_worker().OpenVino._drafted(asker, request, steps[number]))
    return drafted


@cache
def openvino_worker() -> Any:
    """The worker's module, which needs the engine to be imported and not for this."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("openvino", "openvino_genai"):
            patch.setitem(sys.modules, name, ModuleType(name))
        return worker_main.module(str(worker.MAIN.with_name("openvino_worker.py")))


def in_worker(emitted: Sequence[int], drafted: Sequence[int | None]) -> Ours:
    """Ours of a reply whose passes, prefill's first, emitted and were drafted so much."""
    records: list[dict[str, Any]] = [
        {"id": 0, "at": 10 + n, "step": [5] * tokens, "accepted": tokens - 1, "drafted": proposed}
        for n, (tokens, proposed) in enumerate(zip(emitted, drafted, strict=True))
    ]
    records.append({"id": 0, "at": 99, "done": {"finish": "length", "prompt_tokens": 4, "text": "x"}})
    stream = worker.parse(Exchange(None, 1, [(100, orjson.dumps(one)) for one in records], 100, "complete"))
    return ours(stream, in_process.counts([stream], {}, {}, "captured steps"))


@pytest.mark.parametrize("name", OPENVINO)
def test_openvino_loses_the_last_step_and_counts_prefills_inference(name: str) -> None:
    """The engine's totals of accepted and drafted tokens were taken before the last step, which is in ours.

    With `ignore_eos` the reply goes on after an end token, but a draft that holds one ends there: 20, not 21.
    """
    theirs, mine = openvino(name)
    assert line(theirs, mine) == numbers(OPENVINO[name])
    said = orjson.loads((CAPTURES / "openvino" / "draft_model.json").read_bytes())[name]
    last = len(said["steps"][-1]) - 1
    assert mine.accepted_verified == said["get_num_accepted_tokens"] + last
    assert theirs[PER_INFERENCE] == (mine.emitted + 1 - last) / (mine.steps + 1)
    assert last == K  # all of the last draft, so that it was K
    assert_identity(mine)


def test_openvino_has_no_figure_for_a_prompt_lookup() -> None:
    """`extended_perf_metrics` is None there and the draft lengths are in no output, so only AL_all is known."""
    said = orjson.loads((CAPTURES / "openvino" / "draft_model.json").read_bytes())["prompt_lookup"]
    assert said["extended_perf_metrics"] is None
    mine = in_worker(said["batch"], [0] + [None] * (len(said["batch"]) - 1))
    assert (mine.al_all, mine.al_drafted, mine.coverage, mine.acceptance_rate) == (
        Fraction(11, 9),
        None,
        None,
        None,
    )
    assert mine.cut == 0  # 11 emitted by 9 steps of which one accepted 2


# --- transformers -----------------------------------------------------------------------------------------

TRANSFORMERS = {
    # num_matches / proposed, tokens a put() | AL_all, AL_drafted, coverage, rate | cut
    "assistant_default": "9/10 11/2 | 9 9 1 8/9 | 0",
    "assistant_k4_const": "8/9 11/3 | 3 3 1 4/5 | 0",
    "assistant_k4_const_max8": "1 4 | 3 3 1 1 | 0",
    "early_exit_28": "4/15 11/7 | 5/3 5/3 1 4/13 | 0",
    "prompt_lookup": "7/12 11/4 | 10/3 9/2 2/3 1 | 0",
}


def transformers_passes(name: str) -> list[tuple[int, int, int]]:
    """Tokens, proposed and accepted of each pass; a prompt lookup says of accepted tokens only what it emitted."""
    said = orjson.loads((CAPTURES / "transformers" / "streamer.json").read_bytes())[name]
    tokens = [len(event[3]) for event in said["events"][1:] if event[1] == "Tensor"]
    proposed = [number for kind, number in said["hooks"] if kind == "prop"]
    matches = [number for kind, number in said["hooks"] if kind == "acc"] or [count - 1 for count in tokens]
    return list(zip(tokens, proposed, matches, strict=True))


def transformers(name: str) -> tuple[Theirs, Ours]:
    """Of hooks on the candidate generator and of the streamer: `generate` itself returns no figure."""
    passes = transformers_passes(name)
    tokens, proposed, matches = (sum(column) for column in zip(*passes, strict=True))
    theirs = {
        "Σ num_matches / Σ proposed": Fraction(matches, proposed),
        "tokens / put()": Fraction(tokens, len(passes)),
    }
    return theirs, in_worker([one[0] for one in passes], [one[1] for one in passes])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_drafts_for_the_first_pass_too(name: str) -> None:
    """`generate` says nothing; its hooks and its streamer also have the first pass, which is prefill and no step."""
    theirs, mine = transformers(name)
    assert line(theirs, mine) == numbers(TRANSFORMERS[name])
    tokens, proposed, matches = transformers_passes(name)[0]
    assert theirs["tokens / put()"] == (mine.emitted + tokens) / (mine.steps + 1)
    accepted, rate = mine.accepted_verified, mine.acceptance_rate
    assert accepted is not None
    assert rate is not None
    assert theirs["Σ num_matches / Σ proposed"] == (accepted + matches) / (accepted / rate + proposed)
    assert_identity(mine)


def test_captures_without_a_draft_have_no_figure() -> None:
    """A plain reply has nothing to compare, nor has an early exit of which nothing was accepted but one token a step."""
    assert in_worker([1] * 11, [0] * 11).al_drafted is None
    mine = transformers("early_exit_4")[1]
    assert line({}, mine) == numbers("1 1 1 0 | 0")


# --- the page ---------------------------------------------------------------------------------------------

ENGINES: dict[str, tuple[Callable[[str], tuple[Theirs, Ours]], Mapping[str, str]]] = {
    "llama.cpp": (llamacpp, LLAMACPP),
    "vLLM": (vllm, VLLM),
    "vllm bench serve": (vllm_bench, BENCH),
    "SGLang": (sglang_figures, SGLANG),
    "TensorRT-LLM": (trtllm, TRTLLM),
    "OpenVINO": (openvino, OPENVINO),
    "transformers": (transformers, TRANSFORMERS),
}
MINE = {"AL_all": "al_all", "AL_drafted": "al_drafted", "acceptance_rate": "acceptance_rate"}


def shown() -> list[list[str]]:
    """Cells of the page's table: engine, its figure, what it is, why it differs, seen in, theirs, ours."""
    lines = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n## ")[0].splitlines()
    rows = [
        [cell.strip(" `") for cell in text.strip("|").split("|")] for text in lines if text.startswith("|")
    ]
    return rows[2:]


@pytest.mark.parametrize("cells", shown(), ids=lambda cells: f"{cells[0]} {cells[1]}")
def test_the_page_shows_these_numbers(cells: list[str]) -> None:
    engine, figure, _, _, seen_in, shown_theirs, shown_ours = cells
    theirs, mine = ENGINES[engine][0](seen_in)
    assert shown_theirs == f"{float(theirs[figure]):.4f}"
    metric, _, value = shown_ours.partition(" ")
    assert value == f"{float(getattr(mine, MINE[metric])):.4f}"


def test_the_page_has_every_figure_of_every_engine() -> None:
    found = {(engine, name) for engine, (of, table) in ENGINES.items() for name in of(next(iter(table)))[0]}
    assert {(cells[0], cells[1]) for cells in shown()} == found
