"""Every metric against figures that others published or that arithmetic gives."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runners import frames
from runners.base import RequestCounts, Stream
from runners.counts import SPECULATIVE, llama_counts, vllm_counts
from specbench import trace
from specbench.metrics import METERED, METRICS, CellView, compute, request_values
from tests.make_cell import failed, record, row, view
from tests.replay import capture, case

DATA = Path(__file__).parent / "data"
KNOWN = {item["id"]: item for item in json.loads((DATA / "prom" / "spec_counters_known.json").read_text())}
SENT_NS = 1_000_000_000


def value(cell: CellView, name: str) -> float | None:
    return compute(cell, [name])[0][name]


def reason(cell: CellView, name: str) -> str:
    return compute(cell, [name])[1][name]


def as_row(stream: Stream, request: int = 0, counts: RequestCounts | None = None) -> dict[str, Any]:
    """A parsed reply as the row that a runner stores."""
    taken = {name: getattr(stream, name) for name in trace.REQUEST_SCHEMA.names if hasattr(stream, name)}
    if counts is not None:
        given = {name: getattr(counts, name) for name in trace.REQUEST_SCHEMA.names if hasattr(counts, name)}
        taken |= {name: list(v) if isinstance(v, tuple) else v for name, v in given.items()}
    taken |= {
        name: taken[name] - SENT_NS for name in taken if name.endswith("_ns") and isinstance(taken[name], int)
    }
    return row(request) | taken | {"frame_ns": [t - SENT_NS for t in stream.frame_ns]}


def replayed(*names: str) -> CellView:
    return view(*(as_row(frames.parse(case(name)), i) for i, name in enumerate(names)))


# --- the table itself -------------------------------------------------------------------------------------


def test_table_is_whole_and_gates_what_the_statistics_say() -> None:
    assert {name for name, metric in METRICS.items() if metric.gated} == {"tpot_s", "error_rate"}
    assert all(name == metric.name and metric.unit and metric.description for name, metric in METRICS.items())
    columns = {*trace.REQUEST_SCHEMA.names, METERED}
    assert all(set(metric.needs) <= columns for metric in METRICS.values())


def test_direction_is_data() -> None:
    assert METRICS["output_tps"].direction == "higher"
    assert METRICS["tpot_p90_s"].direction == "lower"
    assert METRICS["prompt_tokens"].direction is None


def test_every_null_has_a_reason_and_nothing_is_nan() -> None:
    for cell in (view(failed()), view(row(0, (0.1,), output_tokens=1)), view()):
        values, reasons = compute(cell)
        assert set(values) == set(METRICS)
        for name, found in values.items():
            assert found is not None or reasons[name]
            assert found is None or math.isfinite(found)


# --- streams whose right values are published -------------------------------------------------------------


def test_role_chunk_does_not_stop_the_ttft_clock() -> None:
    cell = replayed("role_prelude")
    assert value(cell, "ttft_s") == pytest.approx(0.300)
    assert value(cell, "tpot_s") == pytest.approx(0.02)
    assert value(cell, "e2e_s") == pytest.approx(0.32)


def test_a_frame_is_not_a_token_and_the_two_gaps_have_two_names() -> None:
    cell = replayed("multi_token_usage_final")
    assert value(cell, "tpot_s") == pytest.approx(0.060 / 7)
    assert value(cell, "inter_frame_s") == pytest.approx(0.020)
    assert value(cell, "output_tokens") == 8
    assert value(cell, "tokens_per_frame") == 2


def test_cumulative_usage_is_differenced() -> None:
    cell = replayed("multi_token_continuous_usage")
    assert value(cell, "output_tokens") == 8
    assert value(cell, "tpot_s") == pytest.approx(0.060 / 7)


def test_reasoning_counts_for_ttft_and_content_has_its_own_time() -> None:
    cell = replayed("reasoning_content")
    assert value(cell, "ttft_s") == pytest.approx(0.2)
    assert value(cell, "ttfc_s") == pytest.approx(1.0)
    assert value(cell, "tpot_s") == pytest.approx(0.82 / 3)


def test_coalesced_frames_are_a_share_and_no_gap_of_zero() -> None:
    cell = replayed("coalesced_read")
    assert value(cell, "coalesced_share") == 0.5
    assert value(cell, "inter_frame_s") == pytest.approx(0.05)
    assert value(cell, "tpot_s") == pytest.approx(0.025)


def test_unknown_tokens_are_unknown() -> None:
    cell = replayed("usage_missing")
    assert value(cell, "output_tokens") is None
    assert value(cell, "output_tps") is None
    assert value(cell, "tpot_s") is None
    assert "output_tokens is unknown for 1 of 1" in reason(cell, "output_tps")


@pytest.mark.parametrize("name", ["single_token", "zero_tokens", "nonstream_message_in_stream"])
def test_no_interval_no_tpot(name: str) -> None:
    assert value(replayed(name), "tpot_s") is None


def test_failures_enter_no_latency() -> None:
    names = ("role_prelude", "error_midstream", "error_before_first_token", "truncated_no_done", "http_429")
    cell = replayed(*names, "http_503_html", "reset_midstream")
    assert value(cell, "ttft_s") == pytest.approx(0.300)
    assert value(cell, "e2e_s") == pytest.approx(0.32)
    assert (value(cell, "requests"), value(cell, "ok"), value(cell, "failed")) == (7, 1, 6)
    assert value(cell, "error_rate") == pytest.approx(6 / 7)
    assert value(cell, "throttled") == 1


def test_empty_completion_is_counted_and_is_no_failure() -> None:
    cell = replayed("role_prelude", "zero_tokens")
    assert (value(cell, "empty"), value(cell, "failed"), value(cell, "error_rate")) == (1, 0, 0)


def test_published_llama_server_figures() -> None:
    stream = frames.parse(case("llama_server_draft"))
    on = {SPECULATIVE: 1.0}
    cell = view(as_row(stream, counts=llama_counts([stream], on, on).requests[0]))
    assert value(cell, "steps") == 134
    assert value(cell, "al_all") == pytest.approx(199 / 134)
    assert value(cell, "acceptance_rate") == pytest.approx(65 / 347)


# --- populations ------------------------------------------------------------------------------------------


def test_mean_and_percentile_are_over_the_same_requests() -> None:
    rows = [row(0, (0.1,), output_tokens=1), *(row(i, (0.1, 0.11), output_tokens=2) for i in (1, 2))]
    cell = view(*rows)
    assert value(cell, "tpot_s") == value(cell, "tpot_p50_s") == pytest.approx(0.01)


def test_nothing_succeeded_is_null_never_zero() -> None:
    values, _ = compute(view(failed(0), failed(1)))
    for name in ("ttft_s", "tpot_s", "e2e_s", "output_tps", "output_tps_steady", "al_all", "output_tokens"):
        assert values[name] is None
    assert (values["requests"], values["failed"], values["error_rate"]) == (2, 2, 1)


def test_warm_up_is_left_out() -> None:
    # The published case: 1.537 s for the first request, then 0.058 s; 87.6 ms with it, 58 ms without.
    rows = [row(i, (0.058, 0.1), output_tokens=2) for i in range(1, 50)]
    cold = row(0, (1.537, 1.6), output_tokens=2)
    assert value(view(cold, *rows), "ttft_s") == pytest.approx(0.0876, abs=5e-5)
    assert value(view(cold | {"warmup": True}, *rows), "ttft_s") == pytest.approx(0.058)


def test_produced_tokens_count_not_requested_ones() -> None:
    # 128 asked for, 2 produced, 100 ms apart.
    cell = view(row(0, (0.1, 0.2), output_tokens=2), max_tokens=128)
    assert value(cell, "tpot_s") == pytest.approx(0.1)
    assert value(cell, "length_share") == value(CellView.pool([cell, cell]), "length_share") == 2 / 128
    assert value(view(row(0, (0.1, 0.2), output_tokens=2)), "length_share") is None


def test_a_retried_request_is_one_request() -> None:
    cell = view(failed(0, http_status=429), row(0, (0.1, 0.2), output_tokens=2, attempt=1))
    assert (value(cell, "requests"), value(cell, "failed"), value(cell, "throttled")) == (1, 0, 1)


def test_first_frame_of_several_tokens_is_taken_off() -> None:
    known = view(row(0, (0.1, 0.2, 0.3), (4, 3, 3), output_tokens=10, first_frame_tokens=4))
    assert value(known, "tpot_s") == pytest.approx(0.2 / 6)
    by_total = view(row(0, (0.1, 0.2, 0.3), output_tokens=10, first_frame_tokens=4))
    assert value(by_total, "tpot_s") == pytest.approx(0.2 / 6)
    unknown = view(row(0, (0.1, 0.2, 0.3), output_tokens=10))
    assert value(unknown, "tpot_s") == pytest.approx(0.2 / 9)


def test_an_end_token_that_was_never_sent_is_not_free() -> None:
    assert value(view(row(0, (0.1, 0.2), (1, 1), output_tokens=3)), "tpot_s") == pytest.approx(0.1)


def test_percentiles_wait_for_enough_requests() -> None:
    rows = [row(i, (0.1, 0.1 + 0.001 * (i + 1)), output_tokens=2) for i in range(29)]
    assert value(view(*rows[:28]), "tpot_p90_s") is None
    assert reason(view(*rows[:28]), "tpot_p90_s") == "p90 needs 29 values, here are 28"
    assert value(view(*rows), "tpot_p90_s") == pytest.approx(np.percentile(np.arange(1, 30) * 0.001, 90))
    assert value(view(*rows), "tpot_p90_upper_s") == pytest.approx(0.029)
    assert value(view(*rows), "tpot_p95_s") is None


def test_latency_from_the_scheduled_time_shows_what_waiting_hides() -> None:
    cell = view(row(0, (2.1, 2.2), output_tokens=2, sent_s=2.0, scheduled_ns=500_000_000))
    assert value(cell, "ttft_s") == pytest.approx(0.1)
    assert value(cell, "ttft_scheduled_s") == pytest.approx(1.6)
    assert value(cell, "schedule_delay_s") == pytest.approx(1.5)


def test_request_values_keep_the_order_of_the_rows() -> None:
    rows = [row(1, (0.1, 0.3), output_tokens=2), failed(0), row(2, (0.1, 0.2), output_tokens=2)]
    found = request_values(trace.request_table(rows), "tpot_s")
    assert found[[0, 2]] == pytest.approx([0.2, 0.1])
    assert math.isnan(found[1])


# --- throughput and load over time ------------------------------------------------------------------------

TWO_STREAMS = (
    row(0, (1.0, 2.0, 3.0), (1, 1, 1), output_tokens=3, prompt_tokens=10, done_ns=3_000_000_000),
    row(
        1,
        (2.0, 3.0, 4.0, 5.0),
        (1, 1, 1, 1),
        sent_s=1.0,
        output_tokens=4,
        prompt_tokens=20,
        done_ns=5_000_000_000,
    ),
)


def test_output_tps_from_first_send_to_last_output() -> None:
    assert value(view(*TWO_STREAMS, concurrency=2), "output_tps") == pytest.approx(7 / 5)


def test_steady_throughput_counts_only_full_concurrency() -> None:
    # Both are in flight from 1 s to 3 s; in (1, 3] come 2 tokens of each.
    cell = view(*TWO_STREAMS, concurrency=2)
    assert value(cell, "output_tps_steady") == pytest.approx(4 / 2)
    assert value(cell, "steady_share") == pytest.approx(2 / 5)
    assert value(view(*TWO_STREAMS, concurrency=3), "output_tps_steady") is None


def test_batch_is_a_mean_over_decoding_time() -> None:
    # Decoding 1 to 3 s and 2 to 5 s: 5 stream-seconds in 4 s.
    assert value(view(*TWO_STREAMS, concurrency=2), "batch_mean") == pytest.approx(5 / 4)


def test_batch_at_concurrency_one_is_one_in_spite_of_prefill() -> None:
    rows = [row(i, (2.0 * i + 1, 2.0 * i + 2), output_tokens=2, sent_s=2.0 * i) for i in range(3)]
    assert value(view(*rows), "batch_mean") == pytest.approx(1.0)


def test_context_is_a_mean_over_stream_time() -> None:
    # Stream 0 holds 11 then 12 tokens, stream 1 holds 21, 22, 23, each for a second.
    assert value(view(*TWO_STREAMS, concurrency=2), "context_mean") == pytest.approx(
        (11 + 12 + 21 + 22 + 23) / 5
    )


def test_cells_are_summed_before_they_are_divided() -> None:
    slow = view(row(0, (1.0, 10.0), output_tokens=10))
    fast = view(row(0, (1.0, 2.0), output_tokens=20))
    both = CellView.pool([slow, fast])
    assert value(both, "output_tps") == pytest.approx(30 / 12)
    assert (value(both, "requests"), value(both, "ok")) == (2, 2)
    assert value(both, "tpot_s") == pytest.approx((1.0 + 1 / 19) / 2)


def test_prefix_cache_share_and_the_engines_own_tpot() -> None:
    timed = row(0, (0.1, 0.4), output_tokens=4, prompt_tokens=100, cached_tokens=25, server_decode_ms=270.0)
    assert value(view(timed), "cached_share") == 0.25
    assert value(view(timed), "server_tpot_s") == pytest.approx(0.09)
    assert value(view(row(0, (0.1, 0.4), output_tokens=4)), "cached_share") is None


# --- speculation: figures that users published -------------------------------------------------------------


def counted(**columns: Any) -> dict[str, Any]:
    return row(0, (0.1, 1.0), **columns)


def test_llama_cpp_24536() -> None:
    given, expect = KNOWN["llamacpp-24536"]["given"], KNOWN["llamacpp-24536"]["expect"]
    cell = view(
        counted(
            output_tokens=given["predicted_n"],
            steps=given["steps"],
            steps_with_draft=given["steps"],
            drafted=given["draft_tokens"],
            accepted_verified=given["accepted"],
        )
    )
    assert value(cell, "acceptance_rate") == pytest.approx(expect["acceptance_rate"])
    assert value(cell, "al_drafted") == pytest.approx(expect["acceptance_length"])


def test_vllm_26498_where_only_the_server_counts() -> None:
    given, expect = KNOWN["vllm-26498-mtbench"]["given"], KNOWN["vllm-26498-mtbench"]["expect"]
    cell = view(
        counted(output_tokens=given["total_num_output_tokens"]),
        steps_with_draft=given["num_drafts"],
        drafted=given["num_draft_tokens"],
        accepted_verified=given["num_accepted_tokens"],
    )
    assert value(cell, "al_drafted") == pytest.approx(expect["acceptance_length"])
    assert value(cell, "acceptance_rate") == pytest.approx(expect["acceptance_rate"])
    assert "over the whole cell" in reason(cell, "al_drafted")
    # The counters run past the ends of replies: 12368 + 4687 = 17055 > 16994. How far is on no page.
    assert value(cell, "al_all") is None
    assert reason(cell, "al_all").startswith(
        f"{given['num_drafts']} to 16993 steps: unknown for 1 of 1 replies"
    )


def test_vllm_48892_one_draft_a_step() -> None:
    given, expect = KNOWN["vllm-48892-mtp1"]["given"], KNOWN["vllm-48892-mtp1"]["expect"]
    steps, accepted = given["num_drafts"], given["num_accepted_tokens"]
    cell = view(
        counted(
            output_tokens=1 + steps + accepted,
            steps=steps,
            steps_with_draft=steps,
            drafted=given["num_draft_tokens"],
            accepted_verified=accepted,
        )
    )
    assert value(cell, "al_all") == pytest.approx(expect["acceptance_length"])
    assert value(cell, "al_drafted") == pytest.approx(expect["acceptance_length"])
    assert value(cell, "acceptance_rate") == pytest.approx(expect["acceptance_rate"])


def test_sglang_13754_prefill_token_is_not_a_steps() -> None:
    item = KNOWN["sglang-13754"]
    cell = view(
        counted(output_tokens=item["given"]["completion_tokens"], steps=item["given"]["spec_verify_ct"])
    )
    assert value(cell, "al_all") == pytest.approx(item["expect"]["vllm_definition"])
    assert value(cell, "al_all") != pytest.approx(item["expect"]["sglang_definition"])


def test_sglang_33518_with_nothing_cut() -> None:
    # 106 tokens after prefill in 43 steps with 63 accepted: 2.46512 both ways.
    cell = view(
        counted(
            output_tokens=107,
            steps=43,
            steps_with_draft=43,
            drafted=129,
            accepted_verified=63,
            accepted_emitted=63,
        )
    )
    assert value(cell, "al_all") == pytest.approx(2.46512, abs=5e-6)
    assert value(cell, "al_drafted") == pytest.approx(2.46512, abs=5e-6)


def test_vllm_histogram() -> None:
    given, expect = KNOWN["vllm-perreq-histogram"]["given"], KNOWN["vllm-perreq-histogram"]["expect"]
    hist = given["acceptance_histogram"]
    cell = view(
        counted(
            steps=given["num_spec_steps"],
            steps_with_draft=sum(hist),
            drafted=given["num_draft_tokens"],
            accepted_verified=sum(j * n for j, n in enumerate(hist)),
        )
    )
    assert value(cell, "al_drafted") == pytest.approx(expect["acceptance_length"])
    assert value(cell, "acceptance_rate") == pytest.approx(expect["acceptance_rate"])
    assert value(cell, "coverage") == 1.0


def test_zero_over_zero_is_null() -> None:
    cell = view(counted(output_tokens=10, steps=9, steps_with_draft=0, drafted=0, accepted_verified=0))
    assert value(cell, "acceptance_rate") is None
    assert value(cell, "al_drafted") is None
    assert reason(cell, "acceptance_rate") == "nothing was drafted"
    assert (value(cell, "al_all"), value(cell, "coverage")) == (1.0, 0.0)


def test_unknown_is_not_zero_percent_and_not_one_token_a_step() -> None:
    cell = view(counted(output_tokens=200))
    for name in ("acceptance_rate", "al_all", "al_drafted", "coverage", "steps", "al_request_mean"):
        assert value(cell, name) is None


# --- steps that no frame shows ----------------------------------------------------------------------------


def as_counted(name: str, request: int = 0) -> dict[str, Any]:
    """A captured reply of vLLM as a row, counted as its adapter counts it."""
    stream = frames.parse(capture(f"vllm/{name}"))
    on = {"vllm:spec_decode_num_drafts_total": 0.0}
    return as_row(stream, request=request, counts=vllm_counts([stream], on, on).requests[0])


MERGED, STEPWISE = "chat_stream_interval10.sse", "chat_stream_tokenids_contusage.sse"
"""The same 11 tokens, once in two frames and once in a frame a step."""


def test_merged_frames_never_make_fewer_steps_of_the_same_reply() -> None:
    """8 accepted of 10 emitted would leave 2 steps and an AL_all of 5.0; 2 of the 8 lie past the end."""
    alone = view(as_counted(STEPWISE), k=4)
    assert (value(alone, "steps"), value(alone, "al_all")) == (4.0, 2.5)
    merged = view(as_counted(MERGED), k=4, steps_with_draft=2, drafted=8, accepted_verified=8)
    assert value(merged, "accepted_verified") == 8
    for name in ("steps", "al_all", "coverage", "accepted_emitted", "step_s"):
        assert value(merged, name) is None
        assert reason(merged, name).startswith(
            "2 to 6 steps: unknown for 1 of 1 replies, as accepted tokens past"
        )


def test_one_merged_reply_among_many_leaves_a_bound() -> None:
    """100 replies of 4 steps and one of 2 to 6: at most 1 % apart, and AL_all is given as no more than it is."""
    many = [as_counted(STEPWISE, request) for request in range(100)]
    cell = view(*many, as_counted(MERGED, 100), k=4)
    assert value(cell, "steps") == 406
    assert value(cell, "al_all") == pytest.approx(1010 / 406)
    assert value(cell, "coverage") == pytest.approx(202 / 406)
    assert reason(cell, "al_all").startswith("402 to 406 steps: unknown for 1 of 101 replies")
    assert value(view(*many[:50], as_counted(MERGED, 100), k=4), "al_all") is None


def test_totals_narrow_steps_down_where_the_drafts_are_short() -> None:
    """The server's totals over replies of which none knows its own: each is cut within one draft of at most k."""
    rows = [row(n, output_tokens=1001) for n in range(2)]
    cell = view(*rows, k=2, drafted=1800, accepted_verified=700, steps_with_draft=900)
    assert value(cell, "steps") == 1304
    assert reason(cell, "al_all").startswith("1300 to 1304 steps: unknown for 2 of 2 replies")
    assert value(cell, "coverage") == pytest.approx(900 / 1304)


def test_totals_that_do_not_fit_the_replies() -> None:
    cell = view(row(0, output_tokens=11), k=1, drafted=30, accepted_verified=4, steps_with_draft=30)
    assert value(cell, "al_all") is None
    assert "the server's totals do not fit their tokens" in reason(cell, "al_all")


def test_totals_with_failed_requests_give_no_steps() -> None:
    cell = view(counted(output_tokens=100), failed(1), steps_with_draft=50, drafted=150, accepted_verified=49)
    assert value(cell, "al_all") is None
    assert "requests that failed" in reason(cell, "al_all")
    assert value(cell, "acceptance_rate") == pytest.approx(49 / 150)


def test_more_drafts_than_steps_is_no_coverage() -> None:
    cell = view(counted(output_tokens=11, steps=10), steps_with_draft=50, drafted=150, accepted_verified=49)
    assert value(cell, "coverage") is None
    assert "other traffic" in reason(cell, "coverage")


def test_step_weighted_and_request_weighted_means_differ_and_are_named() -> None:
    cell = view(
        row(0, (0.1, 1.0), output_tokens=31, steps=10),
        row(1, (0.1, 1.0), output_tokens=31, steps=30),
    )
    assert value(cell, "al_all") == pytest.approx(60 / 40)
    assert value(cell, "al_request_mean") == pytest.approx((3 + 1) / 2)


@pytest.mark.parametrize(
    "name", ["llamacpp/draft/chat_stream_timings.sse", "llamacpp/draft_synth/chat_stream_timings.sse"]
)
def test_identity_of_the_two_lengths_on_captured_replies(name: str) -> None:
    stream = frames.parse(capture(name))
    on = {SPECULATIVE: 1.0}
    cell = view(as_row(stream, counts=llama_counts([stream], on, on).requests[0]))
    al_all, al_drafted, coverage = (value(cell, n) for n in ("al_all", "al_drafted", "coverage"))
    assert al_all is not None
    assert al_drafted is not None
    assert coverage is not None
    emitted, accepted = value(cell, "emitted"), value(cell, "accepted_verified")
    assert emitted is not None
    assert accepted is not None
    # Exact where the end cut no draft; a cut leaves accepted tokens that were never emitted.
    cut = accepted - (emitted - (value(cell, "steps") or 0))
    assert al_all - 1 == pytest.approx(coverage * (al_drafted - 1) - cut / (value(cell, "steps") or 1))
    assert cut in (0, 1, 2, 3)


def test_a_category_knows_its_requests_but_not_the_servers_totals() -> None:
    rows = [counted(output_tokens=11, steps=5) | {"category": "copy"}, row(1, (0.1, 1.1), output_tokens=11)]
    cell = CellView.of(record(drafted=8, steps_with_draft=4, accepted_verified=3), trace.request_table(rows))
    assert value(cell, "acceptance_rate") == pytest.approx(3 / 8)
    part = cell.only("copy")
    assert value(part, "al_all") == 2.0
    assert value(part, "acceptance_rate") is None
    assert value(CellView.pool([cell, cell]).only("copy"), "requests") == 2
    assert value(CellView.pool([cell, cell]).only("copy"), "output_tps") == pytest.approx(11.0)


# --- time of a step ---------------------------------------------------------------------------------------


def test_a_steps_time_is_decode_time_over_steps() -> None:
    # 4 tokens in 2 steps over 0.3 s, 2 tokens in 2 steps over 0.1 s: 0.4 s of decoding in 4 steps.
    cell = view(
        row(0, [1.0, 1.1, 1.1, 1.3, 1.3], [1, 1, 1, 1, 1], steps=2, accepted_emitted=2),
        row(1, [2.0, 2.05, 2.1], [1, 1, 1], steps=2, accepted_emitted=0),
    )
    assert compute(cell, ["step_s"])[0]["step_s"] == pytest.approx(0.1)


def test_a_steps_time_by_the_servers_totals() -> None:
    # 5 emitted after prefill, none of them an accepted draft: 5 steps in 0.4 s.
    merged = row(0, [1.0, 1.4], [1, 5], output_tokens=6)
    values, reasons = compute(view(merged, drafted=4, accepted_verified=0, steps_with_draft=2), ["step_s"])
    assert values["step_s"] == pytest.approx(0.08)
    assert "over the whole cell" in reasons["step_s"]
    # With 3 accepted, up to 3 of them lie past the end.
    values, reasons = compute(view(merged, drafted=4, accepted_verified=3, steps_with_draft=2), ["step_s"])
    assert values["step_s"] is None
    assert reasons["step_s"].startswith("2 to 5 steps")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row(0, [1.0, 1.1], [1, 1])], "steps are unknown for 1 of 1 replies"),
        ([row(0, [1.0], [1], steps=0)], "no reply was decoding for a measurable time"),
    ],
)
def test_no_step_time_without_steps_or_time(rows: list[dict[str, Any]], why: str) -> None:
    values, reasons = compute(view(*rows), ["step_s"])
    assert values["step_s"] is None
    assert reasons["step_s"] == why
