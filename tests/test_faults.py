"""Faults that users of other benchmarks reported, each with the tests that fail where it is present.

The table is the index; the values are asserted in the tests it names. What it says of imports, gates and
models of bytes will grow with those. Below stand the faults that concern every module or engine at once.
"""

from __future__ import annotations

import ast
import math
from functools import cache
from pathlib import Path

import orjson
import pytest

from runners import registry
from runners.base import Request
from specbench import trace
from tests.make_cell import record, row
from tests.replay import CASES

TESTS = Path(__file__).parent
ROOT = TESTS.parent

GITHUB = "https://github.com/"
FAULTS: dict[str, tuple[str, str, str]] = {
    # fault: where it was reported, what went wrong, and the tests that catch it
    "B01": ("vllm-project/vllm/pull/3768", "a frame without content stops the TTFT clock",
            "metrics.role_chunk_does_not_stop_the_ttft_clock frames.recorded_stream"),
    "B02": ("vllm-project/guidellm/issues/1145", "a frame is counted as a token",
            "metrics.a_frame_is_not_a_token_and_the_two_gaps_have_two_names metrics.cumulative_usage_is_differenced "
            "frames.multi_token_frames_keep_gap_and_tpot_apart known_answers.everything_else_that_a_recorded_stream_states"),
    "B04": ("vllm-project/vllm/issues/7299", "usage is absent or null",
            "frames.usage_missing_does_not_count_frames frames.usage_null_on_each_chunk_is_unknown_until_it_comes "
            "metrics.unknown_tokens_are_unknown llama_cpp.body"),
    "B05": ("kubernetes-sigs/inference-perf/issues/559", "the reasoning channel is ignored",
            "metrics.reasoning_counts_for_ttft_and_content_has_its_own_time "
            "frames.reasoning_capped_before_content_has_ttft_but_no_first_content"),
    "B06": ("", "a character is cut between two reads", "frames.any_split_of_the_bytes_gives_the_same_stream"),
    "B07": ("vllm-project/aibrix/pull/2653", "comments, CR LF or `data:` without a space",
            "frames.crlf_comments_and_other_fields_are_not_tokens "
            "frames.any_line_end_comment_and_chunking_gives_the_same_stream"),
    "B08": ("ai-dynamo/aiperf/issues/340", "a coalesced or buffered stream looks infinitely fast",
            "metrics.coalesced_frames_are_a_share_and_no_gap_of_zero frames.buffered_stream_is_not_streamed "
            "frames.stream_buffered_into_quick_reads_is_not_streamed measure.faults_of_the_server_are_found"),
    "B09": ("", "an error or a cut within a stream counts as success",
            "frames.event_error_fails_the_reply frames.a_reply_cut_anywhere_before_its_end_is_failed_or_whole "
            "metrics.failures_enter_no_latency"),
    "B10": ("vllm-project/vllm-omni/issues/6693", "TPOT of 0 or 1 output token is 0 or negative",
            "metrics.no_interval_no_tpot metrics.mean_and_percentile_are_over_the_same_requests"),
    "B11": ("sgl-project/sglang/issues/10746", "the requested length is used for the produced one",
            "metrics.produced_tokens_count_not_requested_ones"),
    "B12": ("", "a whole message, or the completions endpoint, in a stream",
            "frames.recorded_stream metrics.no_interval_no_tpot"),
    "B13": ("ggml-org/llama.cpp/pull/12603", "absent draft fields are taken for 0 % or one token a step",
            "known_answers.no_draft_fields_are_unknown_and_not_one_token_a_step "
            "metrics.unknown_is_not_zero_percent_and_not_one_token_a_step metrics.published_llama_server_figures "
            "counts.a_server_without_counters_proves_no_steps"),
    "B14": ("Azure/azure-openai-benchmark/issues/20", "throttled requests are in the latencies",
            "metrics.failures_enter_no_latency loopback.each_fault_hits_the_request_it_names_and_no_other"),
    "B15": ("", "a connection is reset in the middle", "frames.recorded_stream client.reset_within_a_reply_is_reset"),
    "B16": ("kubernetes-sigs/inference-perf/issues/564", "tokens are counted anew for each chunk",
            "validity.more_tokens_than_were_allowed_is_a_wrong_count frames.usage_missing_does_not_count_frames"),
    "B17": ("tugot17/tokenomics/pull/16", "reasoning tokens are added twice; the end is at usage or [DONE]",
            "frames.reasoning_tokens_are_not_added_to_completion_tokens frames.captured_stream"),
    "B19": ("vllm-project/guidellm/issues/444", "failed requests are zeros in the samples",
            "metrics.failures_enter_no_latency"),
    "B20": ("modelscope/evalscope/issues/1159", "nothing succeeded and the figures are 0",
            "metrics.nothing_succeeded_is_null_never_zero summary.nothing_succeeded_is_no_zero "
            "measure.faults_of_the_server_are_found"),
    "B22": ("kubernetes-sigs/inference-perf/issues/648", "the client is the bottleneck",
            "measure.128_streams_are_in_flight_at_once measure.a_client_near_its_ceiling_is_found "
            "client.more_requests_than_kept_connections_do_not_wait validity.rate_below_requested"),
    "B23": ("sgl-project/sglang/issues/6177", "durations by the wall clock",
            "measure.times_follow_the_monotonic_clock_though_the_wall_clock_is_set_back "
            "faults.no_module_reads_the_wall_clock_but_for_the_one_anchor"),
    "B25": ("sgl-project/sglang/pull/13934", "warm-up sends the first prompt, or is measured",
            "metrics.warm_up_is_left_out validity.first_request_that_compiles_something "
            "measure.warm_up_sends_other_prompts_fills_the_concurrency_and_is_in_no_metric "
            "measure.a_prompt_that_was_a_warm_up_is_found"),
    "B26": ("vllm-project/vllm/issues/24591", "the prompt is not as long as was asked",
            "metrics.context_is_a_mean_over_stream_time "
            "frames.prompt_partly_from_cache_is_seen_from_llama_cpp_timings"),
    "B28": ("sgl-project/sglang/issues/3385", "chat requests to a base model",
            "gguf.a_base_model_is_refused_before_anything_is_sent"),
    "B29": ("ai-dynamo/aiperf/issues/798", "ShareGPT rows of other shapes vanish",
            "loaders.sharegpt_shapes_from_public_reports loaders.every_bad_row_is_reported_with_its_line"),
    "B31": ("eugr/llama-benchy/issues/31", "an empty corpus is divided by",
            "loaders.unusable_file_is_one_sentence workloads.nothing_left_is_said"),
    "B32": ("vllm-project/vllm/pull/17908", "the bonus token is in or out",
            "metrics.vllm_26498_where_only_the_server_counts counters.published_ratios "
            "known_answers.accepted_and_bonus_tokens_run_past_the_ends_of_replies"),
    "B34": ("sgl-project/sglang/pull/3152", "prefill's token is divided by verify steps",
            "metrics.sglang_13754_prefill_token_is_not_a_steps metrics.sglang_33518_with_nothing_cut "
            "metrics.zero_over_zero_is_null known_answers.the_prefill_token_makes_the_difference_of_two_definitions"),
    "B35": ("ggml-org/llama.cpp/pull/14104", "drafts that were never verified are in the denominator",
            "known_answers.drafts_that_were_never_verified_are_in_no_denominator "
            "known_answers.rounds_are_not_drafted_over_k"),
    "B38": ("vllm-project/vllm/pull/24049", "one engine of several, a restart, `_created`, no drafts",
            "counters.engines_are_summed counters.a_restart_of_one_engine_hides_behind_no_sum "
            "counters.a_restart_that_counted_past_the_old_value counters.no_drafts_have_no_ratios "
            "metrics.more_drafts_than_steps_is_no_coverage counts.counter_reset_leaves_the_requests"),
    "B41": ("kekzl/imp/issues/1538", "speculation is off, or the baseline's is on, in silence",
            "measure.speculation_that_never_drafts_is_found measure.a_baseline_that_drafts_is_found "
            "faults.every_engine_is_sent_the_temperature summary.speculation_that_did_not_run_has_no_speedup"),
    "B71": ("vllm-project/vllm-omni/pull/6976", "NaN or infinity in JSON",
            "faults.what_is_not_finite_is_written_as_null metrics.every_null_has_a_reason_and_nothing_is_nan "
            "summary.to_dict_holds_no_nan_and_round_trips stats.no_data_nan_and_infinity_are_refused"),
    "B74": ("LMCache/LMCache/pull/2970", "mean and percentiles over different requests",
            "metrics.mean_and_percentile_are_over_the_same_requests"),
}  # fmt: skip
"""B40 (losslessness) has its diagnostic, the equality of texts, in test_equality and test_summary."""


@cache
def names_in(module: str) -> set[str]:
    tree = ast.parse((TESTS / f"test_{module}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_caught_by_tests_that_exist(fault: str) -> None:
    where, what, named = FAULTS[fault]
    assert what
    assert where or any(fault in case["see"] for case in CASES.values()), f"{fault} has no source"
    for name in named.split():
        module, _, test = name.partition(".")
        assert f"test_{test}" in names_in(module), f"{name} catches {what} ({GITHUB}{where}) and is gone"


# --- every module, every engine ---------------------------------------------------------------------------

WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
ANCHORS = {"runners/measure.py": 1}
"""The one wall-clock reading of a cell."""


def wall_clock_calls(path: Path) -> int:
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    named = [f for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)]
    return sum((f.value.id, f.attr) in WALL_CLOCKS for f in named if isinstance(f.value, ast.Name))


def test_no_module_reads_the_wall_clock_but_for_the_one_anchor() -> None:
    paths = [path for package in ("runners", "specbench") for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): wall_clock_calls(path) for path in paths}
    assert {name: count for name, count in found.items() if count} == ANCHORS


@pytest.mark.parametrize("name", registry.ENGINES)
def test_every_engine_is_sent_the_temperature(name: str) -> None:
    """Left out, a server's or a model card's default decides, and a drafter may refuse to run."""
    request = Request(0, "p", None, 0, 0, ({"role": "user", "content": "q"},), 8, temperature=0.0)
    assert orjson.loads(registry.get(name).body(request))["temperature"] == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(bad: float, tmp_path: Path) -> None:
    kept = record(metrics={"tpot_s": bad, "ttft_s": 0.5}, telemetry={"weight_bytes": bad})
    cell = trace.write_cell(tmp_path, kept, [row()], [])
    text = (cell / "cell.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    again = trace.read_record(cell)
    assert (again.metrics, again.telemetry) == ({"tpot_s": None, "ttft_s": 0.5}, {"weight_bytes": None})
