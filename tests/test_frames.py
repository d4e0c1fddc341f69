"""runners.frames and runners.sse: recorded streams, real captures, every streaming fault, any re-splitting."""

from __future__ import annotations

import gc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runners.base import Stream
from runners.client import Exchange
from runners.frames import coalesced, parse
from tests.replay import CASES, END, HEAD, capture, case, chunk, exchange, since_sent, tpot_s


def sse(record: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % orjson.dumps(record)


def delta(content: str | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    channels = {} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": channels | fields, "finish_reason": finish}]}


def usage(completion: int, prompt: int = 3, **fields: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion} | fields}


DONE = b"data: [DONE]\n\n"
COMPARED = set(
    (  # noqa: SIM905
        "text partial_text ttft_s time_to_first_content_s e2e_last_content_s output_tokens content_chunks "
        "distinct_arrivals per_chunk_tokens tpot_s streaming_effective http_status retry_after_s error_kind "
        "draft_n draft_accepted ok error_contains"
    ).split()
)
"""What a recorded stream states of a `Stream` itself."""


# --- recorded streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_recorded_stream(name: str) -> None:
    """Whatever the case states that a Stream holds."""
    expect, stream = CASES[name]["expect"], parse(case(name))
    assert (stream.status != "failed") is expect["ok"]
    found = {
        "text": stream.text,
        "partial_text": stream.text,
        "ttft_s": since_sent(stream.first_output_ns),
        "time_to_first_content_s": since_sent(stream.first_content_ns),
        "e2e_last_content_s": since_sent(stream.last_output_ns),
        "output_tokens": stream.output_tokens,
        "content_chunks": len(stream.frame_ns),
        "distinct_arrivals": len(set(stream.frame_ns)),
        "per_chunk_tokens": stream.frame_tokens,
        "tpot_s": pytest.approx(tpot_s(stream)) if tpot_s(stream) is not None else None,
        "streaming_effective": stream.status != "not_streamed",
        "http_status": stream.http_status,
        "retry_after_s": stream.retry_after_s,
        "error_kind": stream.error_kind,
        "draft_n": stream.tail.get("timings", {}).get("draft_n"),
        "draft_accepted": stream.tail.get("timings", {}).get("draft_n_accepted"),
    }
    assert set(found) == COMPARED - {"ok", "error_contains"}
    compared = {key: value for key, value in expect.items() if key in found}
    assert compared == {key: found[key] for key in compared}
    assert expect.get("error_contains", "") in (stream.error or "")


def test_every_recorded_stream_states_something_checked() -> None:
    assert len(CASES) == 20
    assert all("ok" in case_["expect"] for case_ in CASES.values())


def test_multi_token_frames_keep_gap_and_tpot_apart() -> None:
    """Three gaps of 20 ms, seven tokens after the first: TPOT is 60/7 ms, not 20."""
    stream = parse(case("multi_token_usage_final"))
    gaps = [(b - a) / 1e9 for a, b in zip(stream.frame_ns, stream.frame_ns[1:], strict=False)]
    assert gaps == pytest.approx([0.02, 0.02, 0.02])
    assert tpot_s(stream) == pytest.approx(0.06 / 7)
    assert (stream.output_tokens, stream.first_frame_tokens, stream.first_frame_tokens_from) == (
        8,
        1,
        "assumed",
    )


# --- captures of real engines -----------------------------------------------------------------------------

QUICK = "The quick brown fox jumps over the lazy dog."
# name: text, finish, frame tokens, output tokens, first and last output in ms after sending
CAPTURES: dict[str, tuple[str, str, list[int | None], int, float, float]] = {
    "vllm/chat_stream_tokenids_contusage.sse": (QUICK, "stop", [1, 1, 1, 5, 3], 11, 119.656, 285.820),
    "vllm/chat_max5_truncated_step.sse": (QUICK[:25], "length", [1, 1, 1, 2], 5, 120.748, 283.619),
    "vllm/completions_ids_stream.sse": (QUICK, "stop", [1, 1, 1, 5, 3], 11, 96.976, 258.575),
    "vllm/chat_stream_interval10.sse": (QUICK, "stop", [1, 10], 11, 96.619, 305.535),
    "vllm/chat_stream_usage.sse": (QUICK, "stop", [None] * 5, 11, 1844.233, 2043.780),
    "vllm/chat_stream_logprobs.sse": (QUICK, "stop", [None] * 4, 11, 14684.660, 14740.631),
    "vllm/draft_model/chat_stream_usage.sse": (QUICK, "stop", [1, 4, 4, 2], 11, 387.384, 1175.389),
    "llamacpp/draft/chat_stream_timings.sse": (
        QUICK.replace(" the", ""),
        "stop",
        [1] * 10,  # the end of text has no record of its own: it came with the finish chunk
        10,
        275.285,
        875.688,
    ),
    "llamacpp/draft/completion_ids_nprobs.sse": (
        QUICK + "\n\nThis",
        "length",
        [1] * 12,
        12,
        161.389,
        368.047,
    ),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_stream(name: str) -> None:
    text, finish, tokens, output, first_ms, last_ms = CAPTURES[name]
    stream = parse(capture(name))
    assert (stream.status, stream.finish, stream.output_tokens) == ("ok", finish, output)
    assert stream.text.startswith(text[:44])
    assert stream.frame_tokens == tokens
    assert since_sent(stream.first_output_ns) == pytest.approx(first_ms / 1e3, abs=1e-9)
    assert since_sent(stream.last_output_ns) == pytest.approx(last_ms / 1e3, abs=1e-9)
    assert stream.output_tokens_from == "usage"


def test_captured_vllm_keeps_its_record_of_speculation() -> None:
    stream = parse(capture("vllm/chat_max5_truncated_step.sse"))
    assert stream.tail["metrics"]["speculative_decoding"]["per_step_accepted"] == [4]
    assert (stream.prompt_tokens, stream.cached_tokens) == (46, 0)


def test_captured_llamacpp_marks_every_frame_with_its_timings() -> None:
    stream = parse(capture("llamacpp/draft/chat_stream_timings.sse"))
    marks = [mark or {} for mark in stream.marks]
    assert [mark["predicted_n"] for mark in marks] == list(range(1, 11))
    assert [mark.get("draft_n") for mark in marks] == [None, 3, 3, 3, 3, 6, 6, 6, 6, 9]


def test_captured_llamacpp_time_per_token_is_the_servers_own_though_the_end_of_text_is_never_sent() -> None:
    """predicted_ms 598.32 over predicted_n − 1 = 9; without the last step it would be 129.2 ms over 8."""
    stream = parse(capture("llamacpp/draft/chat_stream_timings.sse"))
    assert tpot_s(stream) == pytest.approx(598.32e-3 / 9, rel=0.005)


def test_captured_llamacpp_events_of_one_step_share_reads() -> None:
    """Fifteen of the 31 gaps are 0: accepted drafts come together, which is no time between tokens."""
    stream = parse(capture("llamacpp/draft/completion_stream_tokens.sse"))
    assert coalesced(stream) == pytest.approx(15 / 31)
    assert stream.status == "ok"


@pytest.mark.parametrize(
    ("name", "finish", "tokens"),
    [
        ("llamacpp/extra/stopmid.json", "stop_string", 3),
        ("llamacpp/extra/max4.json", "length", 4),
        ("vllm/chat_nonstream.json", "stop", 11),
        ("vllm/chat_max1.json", "length", 1),
    ],
)
def test_captured_reply_that_was_not_streamed(name: str, finish: str, tokens: int) -> None:
    stream = parse(capture(name))
    assert (stream.status, stream.finish, stream.output_tokens) == ("not_streamed", finish, tokens)
    assert stream.text


# --- faults -----------------------------------------------------------------------------------------------


def test_crlf_comments_and_other_fields_are_not_tokens() -> None:
    body = (
        b": keep-alive\r\n\r\nevent: message\r\nid: 7\r\nretry: 10\r\n"
        + b"data: %s\r\n\r\n" % orjson.dumps(delta("a"))
        + b": ping\r\n\r\n"
        + b"data: %s\r\n\r\n" % orjson.dumps(delta(" b", "stop"))
        + b"data: [DONE]\r\n\r\n"
    )
    stream = parse(exchange((0.1, body[:60]), (0.2, body[60:])))
    assert (stream.text, len(stream.frame_ns), stream.finish, stream.error) == ("a b", 2, "stop", None)


def test_comment_between_plain_events_is_skipped() -> None:
    body = sse(delta("a")) + b": ping\n\n" + sse(delta("b", "stop")) + DONE
    assert parse(exchange((0.1, body))).text == "ab"


def test_data_over_several_lines_is_one_event() -> None:
    body = b'data: {"choices":[{"delta":\ndata: {"content":"x"},"finish_reason":"stop"}]}\n\n' + DONE
    assert parse(exchange((0.1, body))).text == "x"


def test_usage_null_on_each_chunk_is_unknown_until_it_comes() -> None:
    reads = [(0.1 * i, sse(delta("w") | {"usage": None})) for i in range(1, 4)]
    stream = parse(exchange(*reads, (0.4, sse(delta("", "stop") | {"usage": None}) + sse(usage(3)) + DONE)))
    assert (stream.frame_tokens, stream.output_tokens, stream.output_tokens_from) == ([None] * 3, 3, "usage")


def test_usage_missing_does_not_count_frames() -> None:
    stream = parse(case("usage_missing"))
    assert (stream.output_tokens, stream.output_tokens_from) == (None, "unknown")


def test_placeholder_zero_usage_on_each_chunk_is_no_count() -> None:
    reads = [(0.1 * i, sse(delta("w") | {"usage": {"completion_tokens": 0}})) for i in range(1, 4)]
    stream = parse(exchange(*reads, (0.4, sse(delta("", "stop")) + sse(usage(3)) + DONE)))
    assert (stream.frame_tokens, stream.output_tokens) == ([None] * 3, 3)


def test_reasoning_capped_before_content_has_ttft_but_no_first_content() -> None:
    reads = [(0.2, sse(delta(reasoning="Let"))), (0.4, sse(delta(reasoning=" me", finish="length")) + DONE)]
    stream = parse(exchange(*reads))
    assert (since_sent(stream.first_output_ns), stream.first_content_ns) == (0.2, None)
    assert (stream.text, stream.reasoning, stream.finish, stream.status) == ("", "Let me", "length", "ok")


def test_reasoning_tokens_are_not_added_to_completion_tokens() -> None:
    stream = parse(case("reasoning_content"))
    assert (stream.output_tokens, stream.reasoning_tokens) == (4, 2)


def test_buffered_stream_is_not_streamed() -> None:
    body = b"".join(sse(delta(f" {i}")) for i in range(20)) + sse(delta("", "stop")) + sse(usage(20)) + DONE
    stream = parse(exchange((2.0, body)))
    assert (stream.status, stream.output_tokens, tpot_s(stream)) == ("not_streamed", 20, None)


def test_stream_buffered_into_quick_reads_is_not_streamed() -> None:
    """All output within 0.1 ms after 2 s: the reads differ, the time between them means nothing."""
    reads = [(2.0 + 5e-6 * i, sse(delta(f" {i}"))) for i in range(20)]
    stream = parse(exchange(*reads, (2.0002, sse(delta("", "stop")) + sse(usage(20)) + DONE)))
    assert stream.status == "not_streamed"


def test_fast_but_real_stream_is_streamed() -> None:
    """Three tokens 1 ms apart after a prefill of 2 s."""
    reads = [(2.0 + 1e-3 * i, sse(delta(f" {i}"))) for i in range(3)]
    stream = parse(exchange(*reads, (2.003, sse(delta("", "stop")) + sse(usage(3)) + DONE)))
    assert stream.status == "ok"
    assert tpot_s(stream) == pytest.approx(1e-3)


def test_coalesced_read_is_flagged_and_tpot_comes_from_totals() -> None:
    stream = parse(case("coalesced_read"))
    assert coalesced(stream) == pytest.approx(2 / 4)
    assert tpot_s(stream) == pytest.approx(0.025)


def test_one_word_and_end_of_text_is_a_streamed_single_token() -> None:
    """`completion_tokens` counts the end-of-text token; the answer still was one streamed token."""
    stream = parse(exchange((0.1, sse(delta("Yes"))), (0.2, sse(delta("", "stop")) + sse(usage(2)) + DONE)))
    assert (stream.status, tpot_s(stream)) == ("ok", None)


def test_empty_completion_is_empty_not_failed() -> None:
    stream = parse(case("zero_tokens"))
    assert (stream.status, stream.output_tokens, stream.first_output_ns) == ("empty", 0, None)


def test_event_error_fails_the_reply() -> None:
    body = sse(delta("a")) + b'event: error\ndata: {"message":"out of memory"}\n\n'
    stream = parse(exchange((0.1, body)))
    assert (stream.status, stream.error_kind, stream.error, stream.text) == (
        "failed",
        "in_band",
        "out of memory",
        "a",
    )


def test_event_error_in_plain_words_fails_the_reply() -> None:
    stream = parse(exchange((0.1, b"event: error\ndata: engine died\n\n")))
    assert (stream.status, stream.error_kind, stream.error) == ("failed", "in_band", "engine died")


def test_finish_reason_error_fails_the_reply() -> None:
    stream = parse(exchange((0.1, sse(delta("a"))), (0.2, sse(delta("", "error")) + DONE)))
    assert (stream.status, stream.error_kind) == ("failed", "in_band")


def test_json_cut_in_the_middle_fails_the_reply() -> None:
    stream = parse(exchange((0.1, sse(delta("a"))), (0.2, b'data: {"choices":[{"del\n\n' + DONE)))
    assert (stream.status, stream.error_kind, stream.text) == ("failed", "bad_json", "a")


def test_reset_after_the_last_record_is_no_failure() -> None:
    stream = parse(exchange((0.1, sse(delta("a"))), (0.2, sse(delta("", "stop")) + DONE), eof="reset"))
    assert stream.status == "ok"


def test_server_closing_within_a_chunk_fails_the_reply() -> None:
    cut = Exchange(
        None, 0, [(1, HEAD), (2, chunk(sse(delta("a")))), (3, b"fff\r\ndata: {")], 4, "closed", "gone"
    )
    stream = parse(cut)
    assert (stream.status, stream.error_kind, stream.error, stream.text) == (
        "failed",
        "incomplete_read",
        "gone",
        "a",
    )


@pytest.mark.parametrize(
    ("eof", "reads", "kind"),
    [
        ("refused", [], "refused"),
        ("timeout", [], "timeout"),
        ("timeout", [(1, HEAD)], "timeout"),
        ("reset", [], "incomplete_read"),
        ("closed", [(1, b"SSH-2.0-OpenSSH_9.6\r\n")], "protocol"),
        ("complete", [(1, HEAD), (2, END)], "truncated"),
    ],
)
def test_network_fault_before_any_token_fails_the_reply(eof: Any, reads: Any, kind: str) -> None:
    stream = parse(Exchange(None, 0, reads, 5, eof, "why"))
    assert (stream.status, stream.error_kind, stream.output_tokens) == ("failed", kind, None)


def test_html_error_page_with_status_200_fails_the_reply() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 25\r\n\r\n"
    stream = parse(Exchange(None, 0, [(1, head + b"<html>sign in here</html>")], 2, "complete"))
    assert (stream.status, stream.error_kind) == ("failed", "bad_json")
    assert "sign in here" in (stream.error or "")


def test_redirect_is_not_a_reply() -> None:
    head = b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n"
    stream = parse(Exchange(None, 0, [(1, head)], 2, "complete"))
    assert (stream.status, stream.error_kind, stream.http_status) == ("failed", "http", 302)


@pytest.mark.parametrize(
    "record", [[1], "text", {"choices": "no"}, {"choices": [7]}, {"usage": 3}, {"choices": [{"delta": [1]}]}]
)
def test_record_of_another_shape_never_raises(record: Any) -> None:
    body = b"data: %s\n\n" % orjson.dumps(record)
    assert parse(exchange((0.1, body + DONE))).status in ("failed", "empty")


@pytest.mark.parametrize(
    ("choice", "finish"),
    [
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_string"),
        ({"finish_reason": "stop", "stop_reason": 128001}, "stop"),
        ({"finish_reason": "stop", "matched_stop": "END"}, "stop_string"),
        ({"finish_reason": "length"}, "length"),
        ({"finish_reason": "tool_calls"}, "tool"),
        ({"finish_reason": "content_filter"}, "none"),
    ],
)
def test_finish_reasons(choice: dict[str, Any], finish: str) -> None:
    last = {"choices": [{"index": 0, "delta": {}} | choice]}
    assert parse(exchange((0.1, sse(delta("a"))), (0.2, sse(last) + DONE))).finish == finish


@pytest.mark.parametrize(
    ("stop_type", "finish"), [("eos", "stop"), ("limit", "length"), ("word", "stop_string")]
)
def test_stop_types_of_llama_cpp_completion(stop_type: str, finish: str) -> None:
    """/completion ends without [DONE]."""
    token = {"content": "a", "stop": False, "tokens_predicted": 1, "tokens_evaluated": 5}
    last = {"content": "", "stop": True, "stop_type": stop_type, "tokens_predicted": 2, "tokens_evaluated": 5}
    stream = parse(exchange((0.1, sse(token)), (0.2, sse(last))))
    assert (stream.status, stream.finish, stream.frame_tokens) == ("ok", finish, [1, 1])
    assert (stream.output_tokens, stream.prompt_tokens) == (2, 5)


def test_tool_call_deltas_are_output() -> None:
    calls = [{"index": 0, "function": {"name": "find", "arguments": "{"}}]
    reads = [
        (0.1, sse(delta(tool_calls=calls))),
        (0.2, sse(delta(tool_calls=calls))),
        (0.3, sse(delta("", "tool_calls")) + DONE),
    ]
    stream = parse(exchange(*reads))
    assert (since_sent(stream.first_output_ns), len(stream.frame_ns), stream.finish) == (0.1, 2, "tool")
    assert len(stream.tail["tool_calls"]) == 2


def test_token_ids_without_text_are_a_frame() -> None:
    """vLLM holds back half a character but sends its id: the token has come."""
    half = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None, "token_ids": [5]}]}
    rest = {
        "choices": [{"index": 0, "delta": {"content": "é"}, "finish_reason": "length", "token_ids": [6, 7]}]
    }
    stream = parse(exchange((0.1, sse(half)), (0.2, sse(rest) + DONE)))
    assert (stream.frame_tokens, stream.output_tokens, stream.output_tokens_from) == ([1, 2], 3, "server_ids")


def test_held_back_tokens_are_counted_with_the_frame_that_shows_them() -> None:
    texts = [("a", 1), ("", 2), ("é", 3)]
    reads = [
        (0.1 * i, sse(delta(text) | {"usage": {"completion_tokens": n}}))
        for i, (text, n) in enumerate(texts, 1)
    ]
    stream = parse(exchange(*reads, (0.4, sse(delta("", "stop")) + sse(usage(3)) + DONE)))
    assert stream.frame_tokens == [1, 2]


def test_prompt_partly_from_cache_is_seen_from_llama_cpp_timings() -> None:
    stream = parse(case("llama_server_draft"))
    assert (stream.prompt_tokens, stream.cached_tokens) == (14, 13)


def test_frame_is_stamped_by_the_read_that_completed_it() -> None:
    event = sse(delta("abc"))
    stream = parse(exchange((0.1, event[:-1]), (0.2, event[-1:]), (0.3, sse(delta("", "stop")) + DONE)))
    assert since_sent(stream.first_output_ns) == 0.2


def test_parsing_leaves_the_garbage_collector_as_it_was() -> None:
    for wanted in (True, False, True):
        (gc.enable if wanted else gc.disable)()
        parse(case("role_prelude"))
        assert gc.isenabled() is wanted


# --- any split, any legal spelling ------------------------------------------------------------------------

PIECES = ["Hi", " you", "中文", "✅", "\u0085", "\u2028", "data: x", "\n\n", "é", "", "🎲"]


def told(stream: Stream) -> tuple[Any, ...]:
    return (
        stream.text,
        stream.reasoning,
        stream.finish,
        stream.output_tokens,
        stream.frame_tokens,
        stream.error,
    )


def streamed(pieces: list[str], line_end: bytes = b"\n", comments: bool = False) -> bytes:
    records = [delta(piece) | {"usage": {"completion_tokens": i + 1}} for i, piece in enumerate(pieces)]
    records += [delta("", "stop"), usage(len(pieces))]
    body = b""
    for record in records:
        body += (b": note" + line_end * 2) if comments else b""
        body += b"data: " + orjson.dumps(record) + line_end * 2
    return body + b"data: [DONE]" + line_end * 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8), st.data())
def test_any_split_of_the_bytes_gives_the_same_stream(pieces: list[str], data: st.DataObject) -> None:
    wire = HEAD + chunk(streamed(pieces)) + END
    whole = parse(Exchange(None, 0, [(1, wire)], 1, "complete"))
    cuts = data.draw(st.lists(st.integers(0, len(wire)), max_size=12).map(sorted))
    reads = [(i + 1, wire[a:b]) for i, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(wire)], strict=True))]
    split = parse(Exchange(None, 0, [read for read in reads if read[1]], len(reads), "complete"))
    assert told(split) == told(whole)
    assert whole.text == "".join(pieces)
    assert split.frame_ns == sorted(split.frame_ns)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.booleans(),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
)
def test_any_line_end_comment_and_chunking_gives_the_same_stream(
    pieces: list[str], line_end: bytes, comments: bool, sizes: list[int]
) -> None:
    plain = parse(exchange((0.1, streamed(pieces))))
    body, reads = streamed(pieces, line_end, comments), []
    while body:
        size = sizes[len(reads) % len(sizes)]
        reads.append((0.1, body[:size]))
        body = body[size:]
    assert told(parse(exchange(*reads))) == told(plain)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), st.data())
def test_a_reply_cut_anywhere_before_its_end_is_failed_or_whole(
    pieces: list[str], data: st.DataObject
) -> None:
    body = streamed(pieces)
    ended = body.index(b'"finish_reason":"stop"')
    cut = data.draw(st.integers(0, ended))
    stream = parse(exchange((0.1, body[:cut]), eof="reset"))
    assert stream.status == "failed"
    assert "".join(pieces).startswith(stream.text)
