"""runners.counters: the Prometheus reader and differences over a window, on captured and hand-written pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.counters import SpecDelta, delta, parse, prefix_cache_hit_rate, spec_delta, total

DATA = Path(__file__).parent / "data"
PROM, CAPTURES = DATA / "prom", DATA / "captures"


def page(path: str) -> dict[str, float]:
    return parse((DATA / path).read_text())


# --- the text format --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("plain 1", "plain", 1.0),
        ("big 1.2e+06", "big", 1_200_000.0),
        ('m{b="2",a="1"} 3', 'm{a="1",b="2"}', 3.0),
        ('m{ a = "1" , b="2", } 3', 'm{a="1",b="2"}', 3.0),
        ('m{a="x y, z"} 4', 'm{a="x y, z"}', 4.0),
        (r'm{a="say \"hi\", {now}"} 5', r'm{a="say \"hi\", {now}"}', 5.0),
        (r'm{a="end\\"} 6', r'm{a="end\\"}', 6.0),
        ('m{a="1"} 7 1760000000000', 'm{a="1"}', 7.0),
        ('m_bucket{le="+Inf"} 8 # {trace_id="q"} 0.5', 'm_bucket{le="+Inf"}', 8.0),
        ("m{} 9", "m", 9.0),
        ("vllm:x_total -2", "vllm:x_total", -2.0),
    ],
)
def test_a_sample(line: str, key: str, value: float) -> None:
    assert parse(line) == {key: value}


@pytest.mark.parametrize(
    "line",
    [
        "# TYPE m counter",
        "#",
        "",
        "m NaN",
        "m +Inf",
        "m -Inf",
        "m",
        'm{a="1"}',
        'm{a="1" 2',
        "m{a=1} 2",
        "m two",
        "9m 1",
        "m 1.7e308",
        "m -1e16",
    ],
)
def test_what_is_no_sample(line: str) -> None:
    assert parse(line + "\ngood 1\n") == {"good": 1.0}


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), st.text(max_size=12), min_size=1, max_size=4
    )
)
def test_any_label_value_and_any_order(labels: dict[str, str]) -> None:
    escaped = {
        key: value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for key, value in labels.items()
    }
    pairs = [f'{key}="{value}"' for key, value in escaped.items()]
    forward, backward = parse(f"m{{{','.join(pairs)}}} 1"), parse(f"m{{{','.join(reversed(pairs))}}} 1")
    assert forward == backward
    assert list(forward.values()) == [1.0]


def test_names_are_whole() -> None:
    raw = page("prom/vllm_after.prom")
    assert total(raw, "vllm:spec_decode_num_accepted_tokens_total") == 1903
    assert total(raw, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == 850 + 600 + 453
    assert total(raw, "vllm:spec_decode_num_drafts_total") == 1184
    assert total(raw, "vllm:spec_decode_num_drafts") is None


# --- windows ----------------------------------------------------------------------------------------------


def expected(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((PROM / "_expected.json").read_text())[name]
    return value


def test_vllm_window_as_published() -> None:
    want = expected("vllm_before->vllm_after")
    before, after = page("prom/vllm_before.prom"), page("prom/vllm_after.prom")
    found = spec_delta(before, after, "vllm:", k=want["k"])
    assert found is not None
    assert (found.drafts, found.draft_tokens, found.accepted) == (
        want["drafts"],
        want["draft_tokens"],
        want["accepted"],
    )
    assert found.acceptance_rate == pytest.approx(want["acceptance_rate"], abs=1e-12)
    assert found.acceptance_length == pytest.approx(want["acceptance_length"], abs=1e-12)
    assert found.marginals == pytest.approx(want["per_pos"], abs=1e-12)
    assert prefix_cache_hit_rate(before, after) == pytest.approx(want["prefix_cache_hit_rate"])


def test_not_enabled_is_unknown_and_not_zero() -> None:
    raw = page("prom/vllm_nospec.prom")
    assert spec_delta(raw, raw, "vllm:") is None
    assert prefix_cache_hit_rate(raw, raw) is None


def test_llamacpp_page() -> None:
    found = spec_delta({}, page("prom/llamacpp_after.prom"), "llamacpp:")
    assert found == SpecDelta(100, 300, 150, (80, 50, 20))
    assert found.acceptance_length == 2.5
    assert found.marginals == (0.8, 0.5, 0.2)


def test_trtllm_counts_tokens_and_no_drafts() -> None:
    found = spec_delta({}, page("prom/trtllm.prom"), "trtllm_")
    assert found == SpecDelta(None, 1500, 900, None)
    assert (found.acceptance_rate, found.acceptance_length) == (0.6, None)


def test_sglang_gauges_are_no_window() -> None:
    assert spec_delta({}, page("prom/sglang.prom"), "sglang:") is None


@pytest.mark.parametrize(
    "case", json.loads((PROM / "spec_counters_known.json").read_text()), ids=lambda case: case["id"]
)
def test_published_ratios(case: dict[str, Any]) -> None:
    given, want = case["given"], case["expect"]
    drafts = given.get(
        "num_drafts",
        given.get("steps", given.get("rounds", given.get("num_spec_steps", given.get("spec_verify_ct")))),
    )
    drafted = given.get(
        "num_draft_tokens",
        given.get(
            "draft_tokens", given.get("drafted", given.get("spec_draft_token_num", given.get("tested")))
        ),
    )
    accepted = given.get(
        "num_accepted_tokens",
        given.get("accepted", given.get("num_accepted_draft_tokens", given.get("spec_accept_token_num"))),
    )
    values = {"num_drafts": drafts, "num_draft_tokens": drafted, "num_accepted_tokens": accepted}
    after = {
        f"vllm:spec_decode_{name}_total": float(value) for name, value in values.items() if value is not None
    }
    found = spec_delta({}, after, "vllm:")
    assert found is not None
    length = want.get("acceptance_length", want.get("vllm_definition"))
    if length is not None:
        assert found.acceptance_length == pytest.approx(length, abs=1e-12)
    rate = want.get("acceptance_rate", given.get("spec_accept_rate"))
    assert found.acceptance_rate == pytest.approx(rate, abs=1e-12)


def two_engines(first: float, second: float) -> dict[str, float]:
    return {
        f'vllm:spec_decode_num_{what}_total{{engine="{engine}",model_name="m"}}': value * scale
        for what, scale in (("drafts", 1.0), ("draft_tokens", 3.0), ("accepted_tokens", 1.25))
        for engine, value in (("0", first), ("1", second))
    }


def test_engines_are_summed() -> None:
    found = spec_delta(two_engines(0, 0), two_engines(100, 300), "vllm:")
    assert found is not None
    assert (found.drafts, found.draft_tokens, found.accepted) == (400, 1200, 500)
    assert found.acceptance_length == 2.25


def test_a_restart_of_one_engine_hides_behind_no_sum() -> None:
    assert spec_delta(two_engines(500, 100), two_engines(20, 900), "vllm:") == SpecDelta(reset=True)
    vanished = {key: value for key, value in two_engines(1, 900).items() if 'engine="1"' in key}
    assert spec_delta(two_engines(1, 100), vanished, "vllm:") == SpecDelta(reset=True)
    assert spec_delta(two_engines(1, 100), {}, "vllm:") == SpecDelta(reset=True)


def test_a_restart_that_counted_past_the_old_value() -> None:
    before = two_engines(5, 5) | {'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"}': 1.76e9}
    after = two_engines(50, 50) | {
        'vllm:spec_decode_num_drafts_created{engine="0",model_name="m"}': 1.76e9 + 60
    }
    assert spec_delta(before, after, "vllm:") == SpecDelta(reset=True)


def test_no_drafts_have_no_ratios() -> None:
    raw = page("captures/llamacpp/none/metrics_end.txt")
    found = spec_delta(raw, raw, "llamacpp:")
    assert found == SpecDelta(0, 0, 0, ())
    assert (found.acceptance_rate, found.acceptance_length, found.marginals) == (None, None, None)


def test_a_position_never_reached_counts_zero() -> None:
    raw = page("prom/llamacpp_after.prom")
    found = spec_delta({}, raw, "llamacpp:", k=5)
    assert found is not None
    assert found.per_pos == (80, 50, 20, 0, 0)


def test_delta_of_a_new_series_and_of_none() -> None:
    assert delta({}, {'m_total{a="1"}': 4.0, 'm_total{a="2"}': 2.0}, "m_total") == 6
    assert delta({"m_total": 4.0}, {"m_total": 3.0}, "m_total") is None
    assert delta({}, {}, "m_total") is None


def test_counters_that_no_server_can_mean() -> None:
    """A new counter below 0 is one that fell, and a position that no draft has is none."""
    stem = "vllm:spec_decode_num_"
    assert spec_delta({}, {f"{stem}drafts_total": -5.0}, "vllm:") == SpecDelta(reset=True)
    far = {f"{stem}drafts_total": 5.0, f'{stem}accepted_tokens_per_pos_total{{position="99999999999"}}': 1.0}
    assert spec_delta({}, far, "vllm:") == SpecDelta(drafts=5, per_pos=())


# --- captured servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "first", "last", "want"),
    [
        ("llamacpp/none", "before", "after", SpecDelta(0, 0, 0, ())),
        ("llamacpp/none", "before", "end", SpecDelta(0, 0, 0, ())),
        ("llamacpp/ngram", "before", "after", SpecDelta(2, 16, 2, (1, 1, 0, 0, 0, 0, 0, 0))),
        ("llamacpp/ngram", "before", "end", SpecDelta(67, 490, 323, (59, 59, 46, 39, 37, 37, 26, 20))),
        ("llamacpp/ngram", "after", "end", SpecDelta(65, 474, 321, (58, 58, 46, 39, 37, 37, 26, 20))),
        ("llamacpp/draft", "before", "after", SpecDelta(3, 9, 6, (2, 2, 2))),
        ("llamacpp/draft", "before", "end", SpecDelta(172, 502, 481, (166, 164, 151))),
        ("llamacpp/draft_synth", "before", "after", SpecDelta(3, 9, 6, (3, 2, 1))),
        ("llamacpp/draft_synth", "before", "end", SpecDelta(244, 715, 403, (190, 127, 86))),
        ("vllm", "before", "after", SpecDelta(2, 8, 8, (2, 2, 2, 2))),
        ("vllm", "before", "end", SpecDelta(48, 189, 118, (35, 30, 27, 26))),
        ("vllm", "after", "end", SpecDelta(46, 181, 110, (33, 28, 25, 24))),
        ("vllm/draft_model", "before", "after", SpecDelta(3, 9, 9, (3, 3, 3))),
    ],
)
def test_captured_windows(folder: str, first: str, last: str, want: SpecDelta) -> None:
    before, after = (page(f"captures/{folder}/metrics_{name}.txt") for name in (first, last))
    prefix = f"{folder.split('/')[0]}:"
    found = spec_delta(before, after, prefix)
    assert found == want
    # What was accepted is the sum over positions: an identity of the server's own counts.
    assert found.per_pos is not None
    assert sum(found.per_pos) == found.accepted
    assert spec_delta(after, before, prefix) == (want if want.drafts == 0 else SpecDelta(reset=True))


def test_captured_server_without_speculation() -> None:
    raw = page("captures/vllm/nospec/metrics.txt")
    assert spec_delta(raw, raw, "vllm:") is None
    assert prefix_cache_hit_rate({}, raw) == 0.0


def test_captured_page_is_read_whole() -> None:
    text = (CAPTURES / "vllm/metrics_end.txt").read_text()
    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(parse(text)) == len([line for line in samples if not line.endswith(("NaN", "Inf"))])
