"""runners.counts: steps, drafts and acceptance of captured replies, and the identity that ties them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runners import frames
from runners.base import Counts, RequestCounts, Stream
from runners.client import Exchange
from runners.counters import parse
from runners.counts import SPECULATIVE, llama_counts, vllm_counts

CAPTURES = Path(__file__).parent / "data" / "captures"
SPECULATING = {SPECULATIVE: 1.0}


def reply(path: str) -> Stream:
    """A captured body as the client would have read it, one read an event."""
    body = (CAPTURES / path).read_bytes()
    kind = b"text/event-stream" if path.endswith(".sse") else b"application/json"
    parts = [part + b"\n\n" for part in body.split(b"\n\n") if part] if path.endswith(".sse") else [body]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\nconnection: close\r\n\r\n"
    reads = [(place * 10_000_000, part) for place, part in enumerate([head, *parts])]
    return frames.parse(
        Exchange(scheduled_ns=None, sent_ns=0, reads=reads, end_ns=reads[-1][0], eof="closed")
    )


def metrics(path: str) -> dict[str, float]:
    return parse((CAPTURES / path).read_text())


def llama(path: str) -> RequestCounts:
    raw = {SPECULATIVE: 0.0} if path.startswith("llamacpp/none") else SPECULATING
    return llama_counts([reply(path)], raw, raw).requests[0]


# --- llama.cpp --------------------------------------------------------------------------------------------

GROUPED: dict[str, tuple[int, int | None, int | None, int | None, int, tuple[int, ...] | None]] = {
    # steps, with draft, drafted, accepted, emitted by acceptance, histogram: read off the captures by hand
    "none/chat_stream_timings.sse": (9, None, None, None, 0, None),
    "ngram/chat_stream_timings.sse": (7, 2, 16, 2, 2, (1, 0, 1)),
    "draft/chat_stream_timings.sse": (3, 3, 9, 6, 6, (1, 0, 0, 2)),
    "draft_synth/chat_stream_timings.sse": (5, 5, 15, 4, 4, (3, 1, 0, 1)),
    "ngram/completion_stream_tokens.sse": (25, 1, 8, 6, 6, (0, 0, 0, 0, 0, 0, 1)),
    "draft/completion_stream_tokens.sse": (8, 8, 23, 23, 23, (0, 0, 1, 7)),
    "draft_synth/completion_stream_tokens.sse": (11, 10, 28, 20, 20, (3, 0, 1, 6)),
}


@pytest.mark.parametrize("name", GROUPED)
def test_llama_steps_from_frames(name: str) -> None:
    found = llama(f"llamacpp/{name}")
    counted = (found.steps, found.steps_with_draft, found.drafted, found.accepted_verified)
    assert (*counted, found.accepted_emitted, found.accept_hist) == GROUPED[name]
    assert found.steps_from == "grouped"


@pytest.mark.parametrize("name", [name for name in GROUPED if not name.startswith("none")])
def test_llama_identity(name: str) -> None:
    stream, found = reply(f"llamacpp/{name}"), llama(f"llamacpp/{name}")
    assert stream.output_tokens is not None
    assert found.accept_hist is not None
    assert found.steps
    assert found.steps_with_draft
    accepted = sum(length * count for length, count in enumerate(found.accept_hist))
    al_all = (stream.output_tokens - 1) / found.steps
    al_drafted = 1 + accepted / sum(found.accept_hist)
    coverage = found.steps_with_draft / found.steps
    assert al_all - 1 == pytest.approx(coverage * (al_drafted - 1), abs=1e-12)
    assert accepted == found.accepted_verified


def test_llama_frame_steps() -> None:
    assert llama("llamacpp/draft/chat_stream_timings.sse").frame_step == (0, 1, 1, 1, 1, 2, 2, 2, 2, 3)
    assert llama("llamacpp/ngram/chat_stream_timings.sse").frame_step == (0, 1, 2, 3, 4, 4, 4, 5, 6, 7)


def test_llama_server_times() -> None:
    found = llama("llamacpp/draft/chat_stream_timings.sse")
    assert (found.server_prefill_ms, found.server_decode_ms) == (273.561, 598.32)


def test_llama_without_marks_a_stop_leaves_steps_unknown() -> None:
    found = llama("llamacpp/ngram/chat_stream_usage.sse")
    assert (found.steps, found.steps_from, found.accepted_emitted, found.steps_with_draft) == (None,) * 4
    assert (found.drafted, found.accepted_verified) == (16, 2)


def test_llama_stop_word_inside_an_accepted_draft() -> None:
    # 3 tokens, 8 accepted: tokens minus accepted would be -5 steps.
    found = llama("llamacpp/extra/stopmid.json")
    assert (found.steps, found.accepted_emitted, found.accepted_verified) == (None, None, 8)


def test_llama_limit_inside_a_draft_trims_it() -> None:
    found = llama("llamacpp/extra/max4.json")
    assert (found.steps, found.steps_from, found.drafted, found.accepted_emitted) == (1, "derived", 2, 2)


def test_llama_never_zero_where_nothing_is_said() -> None:
    found = llama("llamacpp/none/chat_stream_timings.sse")
    assert (found.steps_with_draft, found.drafted, found.accepted_verified) == (None, None, None)
    # The same frames from a server that speculates prove that nothing was drafted.
    proved = llama_counts([reply("llamacpp/none/chat_stream_timings.sse")], {}, SPECULATING).requests[0]
    assert (proved.steps, proved.steps_with_draft, proved.drafted, proved.accepted_verified) == (9, 0, 0, 0)
    assert proved.accept_hist is None


def test_llama_failed_reply_has_no_counts() -> None:
    assert llama_counts([Stream()], {}, SPECULATING).requests == (RequestCounts(),)


def synthetic(steps: Sequence[tuple[float, int, int, int]], final: tuple[float, int, int, int]) -> Stream:
    """Frames of (ms, tokens so far, drafted, accepted), as llama.cpp marks them."""

    def timings(at: tuple[float, int, int, int]) -> dict[str, Any]:
        names = ("predicted_ms", "predicted_n", "draft_n", "draft_n_accepted")
        return dict(zip(names, at, strict=True))

    return Stream(
        status="ok",
        finish="stop",
        frame_ns=[place * 1000 for place in range(len(steps))],
        marks=[timings(step) for step in steps],
        output_tokens=final[1],
        tail={"timings": timings(final)},
    )


def test_llama_steps_whose_text_is_held_back() -> None:
    # Tokens 2 and 3 are parts of one character: their two steps show one frame, at the second's time.
    stream = synthetic([(0.001, 1, 0, 0), (20, 3, 0, 0), (30, 4, 0, 0)], (30, 4, 0, 0))
    found = llama_counts([stream], {}, SPECULATING).requests[0]
    assert (found.steps, found.steps_with_draft, found.frame_step) == (3, 0, (0, 2, 3))


def test_llama_step_that_ends_inside_a_character() -> None:
    # Step 1 accepts 3 and emits tokens 2 to 5, of which token 5 is held back until step 2 completes it.
    stream = synthetic([(0.001, 1, 0, 0), (10, 4, 3, 3), (20, 6, 6, 3), (30, 7, 6, 3)], (30, 7, 6, 3))
    found = llama_counts([stream], {}, SPECULATING).requests[0]
    assert (found.steps, found.steps_with_draft, found.accept_hist) == (3, 2, (1, 0, 0, 1))
    assert found.accepted_emitted == found.accepted_verified == 3


def test_llama_hidden_steps_with_drafts_blur_the_histogram_only() -> None:
    # Two steps and one draft between the same two frames: which step drafted is not known.
    stream = synthetic([(0.001, 1, 0, 0), (20, 4, 3, 1)], (20, 4, 3, 1))
    found = llama_counts([stream], {}, SPECULATING).requests[0]
    assert (found.steps, found.steps_with_draft, found.accept_hist, found.drafted) == (2, None, None, 3)


def test_llama_end_token_inside_an_accepted_draft() -> None:
    # The last step accepts 4 of 4 and the reply ends after 2 of its tokens.
    stream = synthetic([(0.001, 1, 0, 0), (10, 2, 0, 0), (20, 3, 4, 4)], (20, 4, 4, 4))
    found = llama_counts([stream], {}, SPECULATING).requests[0]
    assert (found.steps, found.accepted_verified, found.accepted_emitted) == (2, 4, 1)


@pytest.mark.parametrize(
    "mark",
    [
        {"predicted_ms": 2.0, "predicted_n": 3, "draft_n": 4, "draft_n_accepted": 2**62},
        {"predicted_ms": 2.0, "predicted_n": 3, "draft_n": 4, "draft_n_accepted": 2**31 - 1},
        {"predicted_ms": 2.0, "predicted_n": 3, "draft_n": 4, "draft_n_accepted": -1},
        {"predicted_ms": "soon", "predicted_n": 3, "draft_n": 4, "draft_n_accepted": 1},
        7,
    ],
    ids=repr,
)
def test_llama_marks_that_no_server_can_mean_have_no_histogram(mark: Any) -> None:
    """Found out without counting up to them."""
    stream = synthetic([(0.0, 1, 0, 0), (2.0, 3, 4, 1), (3.0, 5, 8, 2)], (3.0, 5, 8, 2))
    assert llama_counts([stream], SPECULATING, SPECULATING).requests[0].accept_hist == (0, 2)
    stream.marks[1] = mark
    assert llama_counts([stream], SPECULATING, SPECULATING).requests[0].accept_hist is None


def test_llama_cell_table() -> None:
    folder = "llamacpp/draft/"
    before, after = metrics(folder + "metrics_before.txt"), metrics(folder + "metrics_after.txt")
    found = llama_counts([reply(folder + "chat_stream_timings.sse")], before, after)
    assert (found.steps_with_draft, found.drafted, found.accepted_verified, found.counter_reset) == (
        3,
        9,
        6,
        False,
    )
    assert rows(found, "cell") == [(None, 1, 3, 2), (None, 2, 3, 2), (None, 3, 3, 2)]
    # Per request and per server, counted by two different parts of llama.cpp.
    assert rows(found, "request") == [(0, 1, 3, 2), (0, 2, 3, 2), (0, 3, 3, 2)]


def test_drafts_of_which_nothing_was_accepted_count_at_the_first_position() -> None:
    """The server has no series for a position before one was accepted there; left out, they would raise the share
    of the cells and replies beside them."""
    none = {
        f"llamacpp:spec_decode_num_{what}_total": 0.0
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    }
    some = dict(zip(none, (5.0, 20.0, 0.0), strict=True))
    stream = synthetic([(0.001, 1, 0, 0), (10, 2, 4, 0), (20, 3, 8, 0)], (20, 3, 8, 0))
    found = llama_counts([stream], none, some)
    assert found.requests[0].accept_hist == (2,)
    assert rows(found, "cell") == [(None, 1, 5, 0)]
    assert rows(found, "request") == [(0, 1, 2, 0)]
    # Accepted tokens without their positions say nothing of a position.
    assert (
        rows(llama_counts([], none, some | {"llamacpp:spec_decode_num_accepted_tokens_total": 3.0}), "cell")
        == []
    )


def rows(counts: Counts, scope: str) -> list[tuple[int | None, int, int, int]]:
    return [
        (row.request, row.position, row.drafts, row.accepted) for row in counts.table if row.scope == scope
    ]


def test_counter_reset_leaves_the_requests() -> None:
    folder = "llamacpp/draft/"
    before, after = metrics(folder + "metrics_end.txt"), metrics(folder + "metrics_after.txt")
    found = llama_counts([reply(folder + "chat_stream_timings.sse")], before, after)
    assert found.counter_reset
    assert (found.steps_with_draft, found.drafted, found.accepted_verified) == (None, None, None)
    assert rows(found, "cell") == []
    assert found.requests[0].steps == 3


# --- vLLM -------------------------------------------------------------------------------------------------


def vllm(path: str) -> RequestCounts:
    page = (
        {"vllm:num_requests_running": 0.0} if "nospec" in path else {"vllm:spec_decode_num_drafts_total": 0.0}
    )
    return vllm_counts([reply(path)], page, page).requests[0]


def test_vllm_last_step_cut_by_the_limit() -> None:
    found = vllm("vllm/chat_max5_truncated_step.sse")
    assert (found.steps, found.steps_from, found.steps_with_draft, found.drafted) == (3, "grouped", 1, 4)
    assert (found.accepted_verified, found.accepted_emitted) == (4, 1)
    assert found.frame_step == (0, 1, 2, 3)


def test_vllm_end_token_inside_a_draft() -> None:
    found = vllm("vllm/chat_stream_tokenids_contusage.sse")
    assert (found.steps, found.steps_with_draft, found.accepted_verified, found.accepted_emitted) == (
        4,
        2,
        8,
        6,
    )
    assert found.accept_hist == (0, 0, 0, 0, 2)


def test_vllm_draft_model() -> None:
    found = vllm("vllm/draft_model/chat_stream_usage.sse")
    assert (found.steps, found.steps_with_draft, found.accepted_verified, found.accepted_emitted) == (
        3,
        3,
        9,
        7,
    )


def test_vllm_merged_frames_leave_steps_unknown() -> None:
    found = vllm("vllm/chat_stream_interval10.sse")
    assert (found.steps, found.accepted_emitted, found.frame_step) == (None, None, None)
    assert found.steps_with_draft == 2


def test_vllm_one_token_has_no_steps() -> None:
    found = vllm("vllm/chat_max1.json")
    assert (found.steps, found.steps_with_draft, found.drafted, found.accepted_emitted) == (0, 0, 0, 0)


def test_vllm_without_speculation() -> None:
    found = vllm("vllm/nospec/chat_stream_usage.sse")
    assert (found.steps, found.accepted_emitted, found.steps_with_draft, found.drafted) == (11, 0, None, None)


@pytest.mark.parametrize(
    "name", ["vllm/nospec/chat_stream_usage.sse", "vllm/draft_model/chat_stream_usage.sse"]
)
def test_a_server_without_counters_proves_no_steps(name: str) -> None:
    """Behind a proxy a frame may be a part of a step or several; a record of drafts in the reply still proves."""
    found = vllm_counts([reply(name)], {}, {}).requests[0]
    assert (found.steps, found.accepted_emitted) == ((None, None) if "nospec" in name else (3, 7))


@pytest.mark.parametrize(
    "bad", [["2", "1"], [2, -1], [2, True], [1.5], "21", 3, {"0": 2}, [[2]], [0, 2**31], [0] * 2000], ids=str
)
def test_a_histogram_that_is_none_is_no_record(bad: Any) -> None:
    """Counts that are no counts neither, and nothing that follows from them."""
    stream = frame_counts([1, 1, 1], [2], 3)
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    stream.tail["metrics"]["speculative_decoding"] = {"acceptance_histogram": bad} | dict.fromkeys(names, bad)
    found = vllm_counts([stream], {}, {})
    (row,) = found.requests
    number = bad if type(bad) is int else None
    assert (row.accept_hist, row.steps_with_draft, row.drafted) == (None, number, number)
    assert (found.table, row.steps) == ((), None)


def frame_counts(tokens: Sequence[int], histogram: Sequence[int] | None, output_tokens: int) -> Stream:
    spec = {"acceptance_histogram": list(histogram)} if histogram is not None else None
    return Stream(
        status="ok",
        frame_ns=list(range(len(tokens))),
        frame_tokens=list(tokens),
        output_tokens=output_tokens,
        tail={"metrics": {"speculative_decoding": spec}},
    )


@pytest.mark.parametrize(
    ("tokens", "histogram", "output_tokens", "steps"),
    [
        ([1, 3, 1, 2], [2, 1, 1], 7, 3),  # untruncated: emitted 6 = 3 steps + 3 accepted
        ([1, 3, 1, 2], [2, 0, 2], 7, 3),  # the last step accepted 2 and emitted 2
        ([1, 4, 1], [2, 1, 1], 6, None),  # a frame of 4 tokens at k = 2 is two steps
        ([1, 2, 2], [1, 1, 0], 5, None),  # two accepting steps shown, one counted
        ([1, 3, 1], [0, 0, 1], 6, 3),  # an end token that no frame shows is a step of its own
        ([2, 1, 1], [0, 0, 0], 4, None),  # the first frame holds more than prefill's token
        ([1, 1, 2], None, 4, None),  # no record on a speculating server: 2 tokens may be one step or two
        ([1, 1, 1], None, 3, 2),
    ],
)
def test_vllm_frames_against_the_histogram(
    tokens: list[int], histogram: list[int] | None, output_tokens: int, steps: int | None
) -> None:
    page = {"vllm:spec_decode_num_drafts_total": 5.0}
    found = vllm_counts([frame_counts(tokens, histogram, output_tokens)], page, page).requests[0]
    assert found.steps == steps


def test_vllm_histogram_of_far_more_drafts_than_frames() -> None:
    """It is found to disagree without a list of all its drafts."""
    found = vllm_counts([frame_counts([1, 1, 1], [0, 2**31 - 1], 3)], {}, {}).requests[0]
    assert found.steps is None


def test_vllm_times_of_a_request() -> None:
    """As vLLM 0.32 said with --enable-per-request-metrics: the first token's time includes the wait in the queue."""
    stream = frame_counts([1, 3, 1], [1, 0, 1], 5)
    stream.tail["metrics"] |= {
        "time_to_first_token_ms": 38.25,
        "queue_time_ms": 0.25,
        "generation_time_ms": 69.5,
    }
    found = vllm_counts([stream], {}, {}).requests[0]
    assert (found.server_queue_ms, found.server_prefill_ms, found.server_decode_ms) == (0.25, 38.0, 69.5)
    assert vllm_counts([frame_counts([1], None, 1)], {}, {}).requests[0].server_prefill_ms is None


@pytest.mark.parametrize("metrics", ["fast", [1], {"speculative_decoding": 7}, {"queue_time_ms": "soon"}])
def test_vllm_metrics_of_another_shape_are_no_counts(metrics: Any) -> None:
    stream = frame_counts([1, 3, 1], [1, 0, 1], 5)
    stream.tail["metrics"] = metrics
    found = vllm_counts([stream], {}, {}).requests[0]
    assert (found.steps_with_draft, found.server_queue_ms, found.server_prefill_ms) == (None, None, None)


def test_vllm_data_parallel_engines_and_restarts() -> None:
    """Two engines behind one address are summed; where one of them started anew, nothing of the window is known."""
    before = metrics_of({"0": 100, "1": 40})
    both = vllm_counts([], before, metrics_of({"0": 110, "1": 70}))
    assert (both.steps_with_draft, both.counter_reset) == (40, False)
    anew = vllm_counts([], before, metrics_of({"0": 160, "1": 3}))
    assert (anew.steps_with_draft, anew.drafted, anew.counter_reset) == (None, None, True)
    assert anew.table == ()


def metrics_of(drafts: dict[str, int]) -> dict[str, float]:
    """A page of a server with these engines: three drafted and two accepted tokens a draft, and time stamps."""
    lines = [
        f'vllm:spec_decode_num_{what}{{engine="{engine}",model_name="m"}} {value}'
        for engine, count in drafts.items()
        for what, value in (
            ("drafts_total", count),
            ("drafts_created", 1.8e9),
            ("draft_tokens_total", 3 * count),
            ("accepted_tokens_total", 2 * count),
        )
    ]
    return parse("\n".join(lines))


def test_vllm_cell_table() -> None:
    before, after = (
        metrics("vllm/draft_model/metrics_before.txt"),
        metrics("vllm/draft_model/metrics_after.txt"),
    )
    found = vllm_counts([reply("vllm/draft_model/chat_stream_usage.sse")], before, after)
    assert (found.steps_with_draft, found.drafted, found.accepted_verified) == (3, 9, 9)
    assert rows(found, "cell") == rows_of(3, (3, 3, 3))
    assert rows(found, "request") == [(0, *row[1:]) for row in rows_of(3, (3, 3, 3))]


def rows_of(drafts: int, accepted: Sequence[int]) -> list[tuple[int | None, int, int, int]]:
    return [(None, place, drafts, count) for place, count in enumerate(accepted, start=1)]
