"""Every expected value of the sample data is checked: here what no other test reads, and that no key is left over.

The samples state both right values and, under names ending in WRONG, what tools with a known fault report.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runners.base import Stream
from runners.counters import parse as parse_counters
from runners.counters import spec_delta
from runners.counts import SPECULATIVE, llama_counts
from runners.frames import coalesced, parse
from specbench.metrics import CellView, compute
from tests.make_cell import row, view
from tests.replay import CASES, case, tpot_s
from tests.test_counters import PROM
from tests.test_frames import COMPARED
from tests.test_metrics import KNOWN, as_row


def metric(cell: CellView, name: str) -> float | None:
    return compute(cell, [name])[0][name]


def cell_of(stream: Stream, speculating: dict[str, float]) -> CellView:
    return view(as_row(stream, counts=llama_counts([stream], speculating, speculating).requests[0]))


def gaps_s(stream: Stream) -> list[float]:
    return [(b - a) / 1e9 for a, b in zip(stream.frame_ns, stream.frame_ns[1:], strict=False)]


# --- recorded streams -------------------------------------------------------------------------------------

ON = {SPECULATIVE: 1.0}


def _timing(name: str) -> Callable[[Stream], Any]:
    return lambda stream: metric(cell_of(stream, ON), name)


def _divided(stream: Stream) -> list[float]:
    pairs = zip(gaps_s(stream), stream.frame_tokens[1:], strict=True)
    return [gap / (tokens or 1) for gap, tokens in pairs]


OTHERS: dict[str, Callable[[Stream], Any]] = {
    "chunk_gaps_s": gaps_s,
    "itl_vllm_rule_s": gaps_s,
    "itl_divided_rule_s": _divided,
    "itl_replicated_rule_mean_s": tpot_s,
    "itl": gaps_s,
    "tokens_per_chunk_after_first": lambda s: ((s.output_tokens or 0) - 1) / (len(s.frame_ns) - 1),
    "no_replacement_char": lambda s: "\ufffd" not in s.text,
    "coalesced_events": lambda s: round(coalesced(s) * (len(s.frame_ns) - 1)),
    "counts_in_success_latency": lambda s: metric(view(as_row(s)), "ttft_s") is not None,
    "latency_counts": lambda s: metric(view(as_row(s)), "e2e_s") is not None,
    "throttled": lambda s: metric(view(as_row(s)), "throttled"),
    "acceptance_rate": lambda s: metric(cell_of(s, {}), "acceptance_rate"),
    "tokens_per_step": lambda s: metric(cell_of(s, {}), "al_all"),
    "al_all": _timing("al_all"),
    "steps_after_prefill": _timing("steps"),
    "target_steps_incl_prefill": lambda s: 1 + (metric(cell_of(s, ON), "steps") or 0),
    "tokens_per_step_incl_prefill": lambda s: (
        (s.output_tokens or 0) / (1 + (metric(cell_of(s, ON), "steps") or 0))
    ),
    "server_tok_s": lambda s: s.tail["timings"]["predicted_n"] / s.tail["timings"]["predicted_ms"] * 1e3,
    "prompt_was_cached": lambda s: (s.cached_tokens or 0) > 0,
}
WRONG = {
    "output_tokens_if_chunks_counted_WRONG": lambda s: s.output_tokens,
    "must_not": lambda s: s.output_tokens,
}
IN_WORDS = {"token_source", "reason", "warn"}
"""Said in words: the source is `unknown`, the status `truncated` or `empty`; test_frames asserts each."""


@pytest.mark.parametrize("name", CASES)
def test_everything_else_that_a_recorded_stream_states(name: str) -> None:
    expect, stream = CASES[name]["expect"], parse(case(name))
    for key, wanted in expect.items():
        if key in OTHERS:
            found = OTHERS[key](stream)
            assert found == (pytest.approx(wanted) if isinstance(wanted, float | list) else wanted), key
        elif key in WRONG:
            assert WRONG[key](stream) != wanted, key
        else:
            assert key in COMPARED | IN_WORDS, f"{key} is checked nowhere"


def test_no_draft_fields_are_unknown_and_not_one_token_a_step() -> None:
    """Unless the server itself says that it does not speculate, or that nothing was drafted."""
    stream = parse(case("llama_server_no_draft_fields"))
    unknown = llama_counts([stream], {}, {}).requests[0]
    assert (unknown.steps, unknown.accepted_emitted, unknown.drafted) == (None, None, None)
    for page in ({SPECULATIVE: 0.0}, {"llamacpp:spec_decode_num_drafts_total": 0.0}, ON):
        assert llama_counts([stream], page, page).requests[0].steps == (stream.output_tokens or 0) - 1


# --- counters that users published ------------------------------------------------------------------------


def sample(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return KNOWN[name]["given"], KNOWN[name]["expect"]


def test_every_published_count_is_one_of_these() -> None:
    ours = {"acceptance_length", "acceptance_rate", "accepted_plus_bonus", "per_pos", "tokens_per_round"}
    theirs = {"sglang_definition", "vllm_definition", "acceptance_rate_old_WRONG"}
    assert {key for item in KNOWN.values() for key in item["expect"]} == ours | theirs


def test_accepted_and_bonus_tokens_run_past_the_ends_of_replies() -> None:
    given, expect = sample("vllm-26498-mtbench")
    assert given["num_accepted_tokens"] + given["num_drafts"] == expect["accepted_plus_bonus"]
    assert expect["accepted_plus_bonus"] > given["total_num_output_tokens"]
    # So 1 + accepted / drafts is the length of drafted steps, and the emitted tokens bound the other one.
    assert expect["acceptance_length"] == pytest.approx(expect["accepted_plus_bonus"] / given["num_drafts"])


def test_one_position_is_the_rate() -> None:
    given, expect = sample("vllm-48892-mtp1")
    names = {
        "drafts": "num_drafts",
        "draft_tokens": "num_draft_tokens",
        "accepted_tokens": "num_accepted_tokens",
    }
    after = {f"vllm:spec_decode_num_{name}_total": float(given[key]) for name, key in names.items()}
    key = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}'
    found = spec_delta({}, after | {key: float(given["num_accepted_tokens"])}, "vllm:", k=given["k"])
    assert found is not None
    assert found.marginals == pytest.approx(expect["per_pos"], abs=5e-5)


def test_rounds_are_not_drafted_over_k() -> None:
    """899 tokens were drafted in 300 rounds of at most 3, and 1,024 tokens are prefill's, accepted and bonus."""
    given, expect = sample("ik_llama-2156-extract")
    counts = {"steps": given["rounds"], "steps_with_draft": given["rounds"], "drafted": given["drafted"]}
    cell = view(
        row(0, (0.1, 1.0), output_tokens=given["tokens"], accepted_verified=given["accepted"], **counts)
    )
    assert metric(cell, "acceptance_rate") == pytest.approx(expect["acceptance_rate"])
    assert given["tokens"] / given["rounds"] == pytest.approx(expect["tokens_per_round"])
    # The first token is prefill's, so AL_all is below tokens per round.
    assert metric(cell, "al_all") == pytest.approx(1023 / 300)


def test_the_prefill_token_makes_the_difference_of_two_definitions() -> None:
    given, expect = sample("sglang-13754")
    tokens, verified = given["completion_tokens"], given["spec_verify_ct"]
    assert tokens / verified == pytest.approx(expect["sglang_definition"])
    assert metric(view(row(0, (0.1, 1.0), output_tokens=tokens, steps=verified)), "al_all") == pytest.approx(
        expect["vllm_definition"]
    )


def test_drafts_that_were_never_verified_are_in_no_denominator() -> None:
    given, expect = sample("llamacpp-14104")
    cell = view(row(0, (0.1, 1.0), drafted=given["tested"], accepted_verified=given["accepted"]))
    assert metric(cell, "acceptance_rate") == expect["acceptance_rate"]
    assert given["accepted"] / given["drafted_incl_skipped"] == expect["acceptance_rate_old_WRONG"]


def test_every_expected_page_is_read() -> None:
    expected = json.loads((PROM / "_expected.json").read_text())
    assert set(expected) == {"vllm_before->vllm_after", "vllm_nospec->vllm_nospec", "parser"}
    raw = parse_counters((PROM / "vllm_nospec.prom").read_text())
    assert spec_delta(raw, raw, "vllm:") is None
    pages = {path.name for path in Path(PROM).glob("*.prom")}
    assert pages == {f"{name}.prom" for name in ("llamacpp_after", "sglang", "trtllm")} | {
        f"vllm_{name}.prom" for name in ("before", "after", "nospec")
    }
