"""Each finding: a cell that shows it, and one beside it that does not."""

from collections.abc import Sequence
from typing import Any

import pytest

from specbench import cell, trace
from specbench._checks import is_degenerate, percentile_advice
from specbench.cell import Facts, HostBusy, Method, Note, Workload
from specbench.validity import CHECKS, SEVERITY, Code, check_cell, gravest_first, note
from tests.make_cell import failed, record, row

PROSE = (
    "The ferry left at dawn with eleven passengers, two goats and a crate of apples. Nobody on the quay waved, "
    "for the fog had swallowed the pier before the rope was off. By noon the captain had told three stories, "
    "none of them true, and the goats had found the apples."
)
IN_SUMMARY = {
    Code.UNFINISHED,
    Code.SMALL_N,
    Code.MIXED_SESSIONS,
    Code.BLOCK_FAILED,
    Code.SPEEDUP_ABOVE_AL,
    Code.OUTPUT_DIFFERS,
}


def reply(i: int = 0, **changes: Any) -> dict[str, Any]:
    """A healthy reply of 20 tokens, one a frame, 10 ms apart, one second a request."""
    start = 1.0 * i
    times = [start + 0.05 + 0.01 * j for j in range(20)]
    healthy: dict[str, Any] = {
        "output_tokens": 20,
        "prompt_tokens": 30,
        "cached_tokens": 0,
        "steps": 15,
        "steps_with_draft": 10,
        "drafted": 40,
        "accepted_verified": 4,
        "prompt_sha256": f"sha-{i}",
        "frame_step": list(range(20)),
    }
    return row(i, times, [1] * 20, sent_s=start, **(healthy | changes))


def replies(n: int = 30, **changes: Any) -> list[dict[str, Any]]:
    return [reply(i, **changes) for i in range(n)]


def plain(n: int = 30) -> list[dict[str, Any]]:
    """Replies of a baseline."""
    return replies(n, steps=19, steps_with_draft=None, drafted=None, accepted_verified=None)


def codes(
    rows: Sequence[dict[str, Any]],
    about: cell.CellRecord | None = None,
    texts: Sequence[str] = (),
    **given: Any,
) -> set[str]:
    lines = [{"request": i, "prompt_id": "", "text": text, "reasoning": ""} for i, text in enumerate(texts)]
    return {n.code for n in check_cell(about or record(), trace.request_table(rows), lines, **given)}


def advice(code: Code, rows: Sequence[dict[str, Any]], about: cell.CellRecord | None = None) -> str:
    found = check_cell(about or record(), trace.request_table(rows), [])
    return next(n.advice for n in found if n.code == code)


# --- the list itself --------------------------------------------------------------------------------------


def test_a_healthy_cell_has_no_finding() -> None:
    assert codes(replies(), texts=[PROSE]) == set()
    assert codes(plain(), record("none")) == set()


def test_every_code_is_checked_here_or_in_the_summary() -> None:
    assert set(CHECKS) | IN_SUMMARY == set(Code)
    assert not set(CHECKS) & IN_SUMMARY
    assert set(SEVERITY) == set(Code)


def test_each_code_once_at_its_gravest_and_the_gravest_first() -> None:
    notes = [
        note(Code.SMALL_N, "n"),
        note(Code.HOST_BUSY, "a cell"),
        note(Code.HOST_BUSY, "the run", "invalid"),
        note(Code.THROTTLED, "t"),
        note(Code.THROTTLED, "again"),
    ]
    found = gravest_first(notes)
    assert [(n.code, n.severity) for n in found] == [
        ("host-busy", "invalid"),
        ("throttled", "warning"),
        ("small-n", "note"),
    ]
    assert found[0].advice == "the run"
    assert gravest_first([]) == ()


def test_findings_fit_the_record() -> None:
    found = check_cell(record(), trace.request_table([failed()]), [])
    again = record().model_copy(update={"validity": found})
    assert cell.CellRecord.model_validate(again.model_dump(mode="json")).validity == found
    assert all(isinstance(n, Note) and n.advice.endswith(".") for n in found)


# --- requests ---------------------------------------------------------------------------------------------


def test_nothing_succeeded() -> None:
    assert codes([failed(0), failed(1)]) == {"nothing-succeeded"}
    assert "reset by peer" in advice(Code.NOTHING_SUCCEEDED, [failed()])
    assert codes([]) >= {"nothing-succeeded"}
    assert "nothing-succeeded" not in codes([*replies(29), failed(29)])


def test_requests_failed() -> None:
    assert codes([*replies(30), failed(30)]) == {"requests-failed"}
    assert "1 of 31" in advice(Code.REQUESTS_FAILED, [*replies(30), failed(30)])


def test_throttled_by_the_server_and_by_the_device() -> None:
    retried = [*replies(30), failed(0, http_status=429, sent_ns=0) | {"attempt": 1}]
    assert codes(retried) == {"throttled"}
    assert codes(replies(), record(telemetry={"throttled_share": 0.3})) == {"throttled"}
    assert codes(replies(), record(telemetry={"throttled_share": 0.0})) == set()


def test_not_streamed() -> None:
    whole = row(30, (30.5,), output_tokens=20, status="not_streamed", sent_s=30.0)
    assert "not-streamed" not in codes(replies())
    for healthy, gravity in ((30, "warning"), (3, "invalid")):
        table = trace.request_table([*replies(healthy), whole])
        (found,) = [n for n in check_cell(record(), table, ()) if n.code == "not-streamed"]
        assert found.severity == gravity, f"one reply in one piece beside {healthy} streamed ones"


def test_few_output_tokens_names_the_limit_in_use() -> None:
    short = [
        row(i, (i + 0.1, i + 0.2), [1, 1], sent_s=float(i), output_tokens=2, drafted=1) for i in range(30)
    ]
    about = record(workload=Workload(max_tokens=2))
    assert "few-output-tokens" in codes(short, about)
    assert "now 2" in advice(Code.FEW_OUTPUT_TOKENS, short, about)
    assert "few-output-tokens" not in codes(replies())


def test_percentile_unsupported_below_29() -> None:
    assert codes(replies(28)) == {"percentile-unsupported"}
    assert codes(replies(29)) == set()
    assert percentile_advice(0) is None


# --- stream -----------------------------------------------------------------------------------------------


def test_stream_coalesced_means_steps_not_tokens() -> None:
    times = [0.05 + 0.01 * (j // 4) for j in range(20)]
    by_four = {"frame_ns": [round(t * 1e9) for t in times]}
    assert codes(replies(30, **by_four, frame_step=list(range(20)))) >= {"stream-coalesced"}
    # Accepted drafts of one step that arrive in one read are no fault.
    steps = [j // 4 for j in range(20)]
    assert "stream-coalesced" not in codes(replies(30, **by_four, frame_step=steps))
    # Where steps are unknown, frames in one read are all there is to see.
    assert "stream-coalesced" in codes(replies(30, **by_four, frame_step=[None] * 20))


def test_token_counts_disagree() -> None:
    assert codes(replies(30, output_tokens=40)) == {"token-counts-disagree"}
    assert codes(replies(30, output_tokens=21)) == set(), "an end token that is never sent"
    assert codes(replies(30, frame_tokens=[None] * 20, output_tokens=40)) == set(), "nothing to disagree with"


def test_more_tokens_than_were_allowed_is_a_wrong_count() -> None:
    # The published case: a mean of 14,382 tokens under a limit of 8,192.
    about = record(workload=Workload(max_tokens=8192))
    rows = replies(30, output_tokens=14382, frame_tokens=[None] * 20)
    assert codes(rows, about) == {"token-counts-disagree"}


# --- host, client and load --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "busy"),
    [
        (HostBusy(window_s=1, other_cpu_share=0.5), True),
        (HostBusy(window_s=1, steal_share=0.1, other_cpu_share=0.0), True),
        (HostBusy(window_s=1, cpu_pressure_share=0.9), True),
        (HostBusy(window_s=1, cpu_pressure_share=0.9, other_cpu_share=0.0), False),
        (HostBusy(window_s=1, cpu_pressure_share=0.0, other_cpu_share=0.1), False),
        (HostBusy(window_s=1), False),
    ],
)
def test_host_busy(host: HostBusy, busy: bool) -> None:
    assert codes(replies(), record(host=host)) == ({"host-busy"} if busy else set())


def test_client_near_ceiling() -> None:
    near = cell.ClientUse(frames=1, cpu_s=1, ceiling_frames_per_cpu_s=1000.0, frames_per_s=800.0)
    assert codes(replies(), record(client=near)) == {"client-near-ceiling"}
    no_ceiling = cell.ClientUse(frames=1, cpu_s=9.0, frames_per_s=800.0)
    assert codes(replies(), record(client=no_ceiling)) == {"client-near-ceiling"}
    idle = cell.ClientUse(frames=1, cpu_s=0.1)
    assert codes(replies(), record(client=idle)) == set()


def test_rate_below_requested() -> None:
    late = [reply(i, scheduled_ns=i * 500_000_000) for i in range(30)]
    assert codes(late) == {"rate-below-requested"}
    assert codes([reply(i, scheduled_ns=i * 1_000_000_000) for i in range(30)]) == set()


def test_short_tail() -> None:
    assert codes(replies(), record(concurrency=4)) == {"short-tail"}
    together = [reply(i) | {"sent_ns": 0, "done_ns": 40_000_000_000} for i in range(30)]
    assert "short-tail" not in codes(together, record(concurrency=30))


def test_prefix_cache_hit_unless_asked_for() -> None:
    hit = replies(30, cached_tokens=15)
    assert codes(hit) == {"prefix-cache-hit"}
    assert codes(hit, record(args={"cache_prompt": True})) == set()
    assert codes(replies(30, cached_tokens=None)) == set()


def test_drafter_saw_prompt() -> None:
    twice = [*replies(30), reply(30) | {"prompt_sha256": "sha-3"}]
    assert codes(twice) == {"drafter-saw-prompt"}
    warmed = [reply(0) | {"warmup": True, "request": 99}, *replies(30)]
    assert codes(warmed) == {"drafter-saw-prompt"}
    retry = [*replies(30), failed(30, prompt_sha256="x"), reply(30) | {"attempt": 1, "prompt_sha256": "x"}]
    assert "drafter-saw-prompt" not in codes(retry)
    same_warm_up = [reply(i) | {"warmup": True, "prompt_sha256": "w"} for i in (90, 91)]
    assert codes([*same_warm_up, *replies(30)]) == set()


# --- warm-up ----------------------------------------------------------------------------------------------


def test_first_request_that_compiles_something() -> None:
    # The published case: 1,537 ms, then 58 ms.
    late = reply(0) | {"first_output_ns": 1_537_000_000, "last_output_ns": 1_737_000_000}
    assert codes([late, *replies(30)[1:]]) == {"warm-up-drift"}
    assert "1.54 s" in advice(Code.WARM_UP_DRIFT, [late, *replies(30)[1:]])
    assert codes([late | {"warmup": True}, *replies(30)[1:]]) == set()


def test_a_long_first_prompt_explains_a_late_first_token() -> None:
    late = reply(0, prompt_tokens=900) | {"first_output_ns": 900_000_000, "last_output_ns": 1_100_000_000}
    assert codes([late, *replies(30)[1:]]) == set()


def test_a_baseline_that_speeds_up_was_not_warm() -> None:
    rows = plain()
    for slow in rows[:10]:
        slow["last_output_ns"] += 60_000_000
    assert codes(rows, record("none")) == {"warm-up-drift"}
    # A drafting arm's TPOT depends on its text, so order proves nothing there.
    drafting = replies()
    for slow in drafting[:10]:
        slow["last_output_ns"] += 60_000_000
    assert codes(drafting) == set()


# --- speculation ------------------------------------------------------------------------------------------


def test_speculation_that_did_not_run_is_a_finding_not_a_speedup_of_one() -> None:
    off = record(facts=Facts(engine="llamacpp", speculative=False))
    assert codes(replies(), off) == {"speculation-inactive"}
    assert codes(replies(30, drafted=0, steps_with_draft=0, accepted_verified=0)) == {"speculation-inactive"}
    unknown = replies(30, drafted=None, steps_with_draft=None, accepted_verified=None)
    assert codes(unknown, record(drafted=0)) == {"speculation-inactive"}
    assert codes(unknown) == set(), "unknown is not zero"
    assert codes(plain(), record("none")) == set()


def test_baseline_drafted() -> None:
    assert codes(replies(), record("none")) == {"baseline-drafted"}
    on = record("none", facts=Facts(engine="llamacpp", speculative=True))
    assert codes(plain(), on) == {"baseline-drafted"}
    assert codes(plain(), record("none", drafted=0, steps_with_draft=0, accepted_verified=0)) == set()


def test_counter_reset() -> None:
    name = 'llamacpp:tokens_predicted_total{model="m"}'
    fell = record(counters_before={name: 500.0}, counters_after={name: 20.0})
    assert codes(replies(), fell) == {"counter-reset"}
    assert codes(replies(), counter_reset=True) == {"counter-reset"}
    gauge = record(counters_before={"requests_processing": 3.0}, counters_after={"requests_processing": 0.0})
    assert codes(replies(), gauge) == set()
    grew = record(counters_before={name: 500.0}, counters_after={name: 900.0})
    assert codes(replies(), grew) == set()


def test_implied_bandwidth_above_roof() -> None:
    # 15 steps in 0.19 s read 100 MB each: 7.9 GB/s.
    above = record(telemetry={"weight_bytes": 1e8, "memory_bytes_per_s": 5e9})
    assert codes(replies(), above) == {"implied-bandwidth-above-roof"}
    below = record(telemetry={"weight_bytes": 1e8, "memory_bytes_per_s": 2e10})
    assert codes(replies(), below) == set()


# --- text -------------------------------------------------------------------------------------------------


def test_degenerate_repetition() -> None:
    loop = PROSE + " and then the goats ate" * 40
    assert codes(replies(), texts=[PROSE] * 8 + [loop]) == {"degenerate-repetition"}
    assert codes(replies(), texts=[PROSE] * 30 + [loop]) == set(), "one in thirty is no finding"


@pytest.mark.parametrize("text", ["", "no", "yes " * 20, PROSE, "def f(x):\n    return x + 1\n\n\n" + PROSE])
def test_ordinary_and_short_texts_are_not_loops(text: str) -> None:
    assert not is_degenerate(text)


@pytest.mark.parametrize("text", ["的确如此。" * 60, "0" * 400, PROSE * 2 + "\n- item\n" * 120])
def test_loops_in_any_script(text: str) -> None:
    assert is_degenerate(text)


def test_random_token_prompts() -> None:
    assert codes(replies(30, category="random")) == {"random-token-prompts"}
    assert codes(replies(), record(workload=Workload(split="random-1024"))) == {"random-token-prompts"}
    about = record(Method(name="none"), workload=Workload(split="random-1024"))
    assert codes(plain(), about) == set(), "no acceptance is claimed of a baseline"


def test_placeholder_data() -> None:
    sentence = "Full benchmark data should be fetched from the source using SPECDEC_BENCH"
    assert codes(replies(), prompts=["A real one", sentence]) == {"placeholder-data"}
    assert codes(replies(), prompts=["Fetch the full benchmark results for me"]) == set()


def test_lossy_acceptance_names_the_switch() -> None:
    about = record().model_copy(
        update={"facts": cell.Facts(engine="sglang", extra={"lossy": ["threshold=0.5"]})}
    )
    assert "threshold=0.5" in advice(Code.LOSSY_ACCEPTANCE, replies(), about)
