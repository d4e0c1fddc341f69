"""Engines side by side: what a run of several engines says of each, of all together, and what it never divides."""

import html as markup
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import reports
from reports import _view, figures, html, markdown
from specbench import trace
from specbench.cell import CellRecord, Method
from specbench.cli.text import summary_text
from specbench.results import SideBySide, Summary, cells_json, to_dict
from specbench.summarise import summary
from tests.make_run import FOUR, LLAMACPP, EngineSpec, default_prompts, make_run
from tests.test_summary import change

METHODS = ("none", Method(name="ngram", k=4, params={"n": 3}), Method(name="draft-model", k=3, draft="m"))
NAMES = [engine.name for engine in FOUR]


def run_of(path: Path, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "methods": METHODS,
        "blocks": 3,
        "speedup": {"ngram": 1.2, "draft-model": 0.8},
        "engines": FOUR,
        "prompts": default_prompts(1),
    }
    return make_run(path, **(given | changes))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    return summary(run_of(tmp_path_factory.mktemp("runs") / "four"))


def beside(seen: Summary) -> SideBySide:
    assert seen.side_by_side is not None
    return seen.side_by_side


# --- the records ------------------------------------------------------------------------------------------


def test_one_engine_has_nothing_beside_it(tmp_path: Path) -> None:
    seen = summary(make_run(tmp_path / "one", blocks=1, concurrency=(1, 4)))
    assert seen.side_by_side is None
    assert seen.engine == "llamacpp"
    assert seen.engine_version == LLAMACPP.version


def test_every_idea_lists_every_engine_plain_decoding_first(four: Summary) -> None:
    ideas = beside(four).ideas
    assert [idea.name for idea in ideas] == ["none", "draft-model", "ngram"]
    assert all([side.engine for side in idea.sides] == NAMES for idea in ideas)
    assert {side.detail for side in ideas[2].sides} == {"k=4 n=3"}


def test_a_step_cost_is_al_over_speedup_and_a_step_is_decode_time_over_steps(four: Summary) -> None:
    arms = {arm.config_id: arm for arm in four.arms}
    for idea in beside(four).ideas:
        for side in idea.sides:
            arm = arms[side.config_id]
            assert side.step_s == arm.metrics["step_s"]
            if arm.speedup:
                assert side.step_cost == pytest.approx(arm.metrics["al_all"] / arm.speedup.estimate)  # type: ignore[operator]
            else:
                assert side.step_s == side.baseline_step_s
                assert side.step_cost is None


def test_step_times_follow_each_engines_own_pace(four: Summary) -> None:
    plain = {side.engine: side.step_s for side in beside(four).ideas[0].sides}
    for engine in FOUR:
        assert plain[engine.name] == pytest.approx(plain["llamacpp"] * engine.slowness, rel=0.03)  # type: ignore[operator]


def test_a_speedup_is_within_one_engine(four: Summary, tmp_path: Path) -> None:
    """An engine alone gives the very ratio that it gives among others."""
    alone = summary(run_of(tmp_path / "alone", engines=(FOUR[3],)))
    mine = {arm.label: arm.speedup for arm in four.arms if arm.engine == "vllm"}
    assert mine == {arm.label: arm.speedup for arm in alone.arms}


def test_methods_under_each_engines_own_word_are_one_idea(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", blocks=1, engines=FOUR[:2])

    def own(record: CellRecord) -> dict[str, Any]:
        word = {"llamacpp": "ngram-simple", "openvino": "prompt_lookup"}[record.config.engine.name]
        method = record.config.method
        changed = method.model_copy(update={"name": word}) if method.name == "ngram" else method
        return {"config": record.config.model_copy(update={"method": changed})}

    idea = beside(summary(change(run, own))).ideas[-1]
    assert (idea.name, len(idea.sides)) == ("ngram", 2)


def test_plain_text_of_one_engine_against_another(four: Summary) -> None:
    pairs = {pair.engines: pair for pair in beside(four).agreements}
    assert len(pairs) == 6
    assert all(pair.compared == 11 for pair in pairs.values())
    vllm = pairs["llamacpp", "vllm"]
    assert 0 < vllm.exact_share < 1
    assert vllm.exact_share < vllm.mean_matching_prefix < 1
    # Drafting has no part in it: each engine's methods keep its own plain text.
    assert all(arm.equality.exact_share == 1 for arm in four.arms if arm.equality)


def test_a_run_that_samples_compares_no_plain_text(tmp_path: Path) -> None:
    def sampled(record: CellRecord) -> dict[str, Any]:
        sampling = record.config.sampling.model_copy(update={"temperature": 0.7})
        return {"config": record.config.model_copy(update={"sampling": sampling})}

    run = change(run_of(tmp_path / "r", blocks=1, engines=FOUR[:2]), sampled)
    assert beside(summary(run)).agreements == ()


def test_pinned_acceptance_is_never_set_beside_measured(tmp_path: Path) -> None:
    methods = (*METHODS, Method(name="draft-model", k=3, draft="m", pinned=(0.8, 0.6, 0.4)))
    seen = summary(run_of(tmp_path / "r", methods=methods, blocks=1, engines=FOUR[:2]))
    listed = {side.config_id for idea in beside(seen).ideas for side in idea.sides}
    assert not listed & {arm.config_id for arm in seen.arms if arm.pinned}


def test_two_versions_of_one_engine_are_two_engines(tmp_path: Path) -> None:
    old, new = EngineSpec(version="1"), EngineSpec(version="2")
    run = make_run(tmp_path / "r", blocks=1, engines=(old,))
    make_run(tmp_path / "r", blocks=1, engines=(new,))

    def other(record: CellRecord) -> dict[str, Any]:
        if record.facts.engine_version == "1":
            return {}
        engine = record.config.engine.model_copy(update={"python": "/opt/new/bin/python"})
        config = record.config.model_copy(update={"engine": engine})
        return {"config": config, "config_id": config.config_id, "comparison": f"new-{record.comparison}"}

    seen = summary(change(run, other))
    assert {engine.name for engine in beside(seen).engines} == {"llamacpp 1", "llamacpp 2"}
    assert seen.engine == "llamacpp 1 and llamacpp 2"


# --- what is matched, in words ----------------------------------------------------------------------------


def test_differences_are_said_first_then_what_is_the_same(four: Summary) -> None:
    precision, threads, files, prompts = beside(four).remarks
    assert precision.startswith(
        "Precision is not the same: float32, 4-bit weights on llamacpp; bfloat16, 4-bit weights on openvino; float32 on "
    )
    assert threads == "Engine threads: 1 on llamacpp, openvino and transformers; unknown on vllm."
    assert files.startswith("Model file is not the same: ")
    assert "the same number of tokens on all engines in each of 11" in prompts


def test_matched_engines_say_so(tmp_path: Path) -> None:
    twin = EngineSpec("openvino", "2026.4.1")
    remarks = beside(summary(run_of(tmp_path / "r", blocks=1, engines=(LLAMACPP, twin)))).remarks
    assert remarks[:2] == (
        "Precision: float32, 4-bit weights on all engines.",
        "Engine threads: 1 on all engines.",
    )
    assert remarks[2].endswith(" on all engines.")


def test_prompts_that_differ_in_tokens_are_not_the_same_prompts(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", blocks=1, engines=FOUR[:2])
    for directory in trace.cell_dirs(run):
        if trace.read_record(directory).config.engine.name == "openvino":
            _longer(directory)
    remark = next(text for text in beside(summary(run)).remarks if text.startswith("Prompts"))
    assert "11 of 11 differ in tokens between engines" in remark
    assert remark.endswith("so the engines do not see the same prompt.")


def _longer(directory: Path) -> None:
    """Six more prompt tokens in every request, as another template would make them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = directory / "requests.parquet"
    table = pq.read_table(path)
    index = table.column_names.index("prompt_tokens")
    longer = pa.array([count.as_py() + 6 for count in table["prompt_tokens"]], table.schema.field(index).type)
    pq.write_table(table.set_column(index, table.schema.field(index), longer), path)


# --- words and pages --------------------------------------------------------------------------------------


def test_the_verdict_names_the_engine_of_every_figure(four: Summary) -> None:
    assert re.search(r"ngram k=4 n=3 gave \S+ \[\S+ \S+\] on transformers, \S+ \[\S+ \S+\] on ", four.verdict)
    assert "at concurrency" not in four.verdict, "one concurrency needs no mention"
    assert four.engine == "llamacpp, openvino, transformers and vllm"
    assert four.engine_version is None
    assert {line.partition(":")[0] for line in four.explanations} == {
        f"{label} on {engine}" for label in ("draft-model k=3", "ngram k=4 n=3") for engine in NAMES
    }


def test_several_concurrencies_are_named_beside_the_engine(tmp_path: Path) -> None:
    seen = summary(run_of(tmp_path / "r", blocks=3, concurrency=(1, 4), engines=FOUR[:2]))
    assert "on openvino at concurrency 4" in seen.verdict
    titles = [title for title, _ in _view.beside(seen)]
    assert titles[:2] == ["none · concurrency\u00a01", "draft-model k=3 · concurrency\u00a01"]


def test_commands_of_each_engine_stay_apart(four: Summary) -> None:
    commands = {name for name in four.environment if name.startswith("Command")}
    assert {f"Command (none on {name})" for name in NAMES} <= commands


def test_the_page_has_the_section_and_its_figure(four: Summary) -> None:
    page = html.render(four)
    section = page[page.index('<section id="engines">') : page.index('<section id="why">')]
    assert '<a href="#engines">' in page
    assert 'id="figure-engines"' in section
    assert section.count('scope="rowgroup"') == 3 + 2, "three methods, and two with positions"
    said = markup.unescape(section)
    for remark in beside(four).remarks:
        assert remark in said
    for name in NAMES:
        assert f'<th scope="row">{name}</th>' in section
    assert "llamacpp and vllm" in section


def test_a_page_of_one_engine_has_neither(tmp_path: Path) -> None:
    page = html.render(summary(make_run(tmp_path / "one", blocks=1)))
    assert "side by side" not in page
    assert figures.engines(summary(tmp_path / "one")) is None


def test_the_figure_has_a_panel_a_method_and_a_row_an_engine(four: Summary) -> None:
    drawing = figures.engines(four)
    assert drawing is not None
    for svg in (drawing.wide, drawing.narrow):
        assert all(f">{text}<" in svg for text in (*NAMES, "ngram k=4 n=3", "draft-model k=3"))
        assert ">none<" not in svg


def test_what_one_engine_alone_was_asked_for_stands_beside_its_name(four: Summary) -> None:
    seen = beside(four)
    sides = tuple(
        replace(side, detail="k=4 lookup_min=1 n=3") if side.engine == "vllm" else side
        for side in seen.ideas[2].sides
    )
    ideas = (*seen.ideas[:2], replace(seen.ideas[2], sides=sides))
    changed = replace(four, side_by_side=replace(seen, ideas=ideas))
    rows = dict(_view.beside(changed))["ngram k=4 n=3"]
    assert [(row.engine, row.detail) for row in rows][-1] == ("vllm", "lookup_min=1")
    assert "vllm lookup\\_min=1" in markdown.render(changed)
    assert 'vllm <span class="small">lookup_min=1</span>' in html.render(changed)


def test_an_engine_that_comes_twice_in_a_method_keeps_two_rows(four: Summary) -> None:
    seen = beside(four)
    twice = replace(seen.ideas[2], sides=(seen.ideas[2].sides[0], seen.ideas[2].sides[0]))
    rows = dict(_view.beside(replace(four, side_by_side=replace(seen, ideas=(twice,)))))["ngram k=4 n=3"]
    assert len({row.engine for row in rows}) == 2


def test_unknown_figures_are_dashes_with_a_reason(four: Summary) -> None:
    arms = tuple(
        replace(arm, positions=(), speedup=None, equality=None, metrics=dict.fromkeys(arm.metrics))
        for arm in four.arms
    )
    seen = replace(beside(four), agreements=(), remarks=())
    sides = tuple(
        replace(
            idea,
            sides=tuple(replace(s, step_s=None, baseline_step_s=None, step_cost=None) for s in idea.sides),
        )
        for idea in seen.ideas
    )
    empty = replace(four, arms=arms, side_by_side=replace(seen, ideas=sides))
    assert figures.engines(empty) is None
    page = html.render(empty)
    assert "Acceptance by position, engine by engine" not in page
    assert "nan" not in summary_text(empty).lower()
    assert "### Engines side by side" in markdown.render(empty)


def test_markdown_and_terminal_show_the_same_rows(four: Summary) -> None:
    text, terminal = markdown.render(four), summary_text(four)
    assert "### Engines side by side" in text
    assert "Plain greedy output, engine against engine" in text
    rows = [line for line in text.splitlines() if line.startswith("| ngram k=4 n=3 | ")]
    assert len(rows) == 2 * len(NAMES), "figures, and acceptance by position"
    assert "Engines side by side." in terminal
    assert len([line for line in terminal.splitlines() if re.match(r"ngram k=4 n=3 +1 +\w", line)]) == len(
        NAMES
    )
    header = next(line for line in terminal.splitlines() if line.startswith("engine "))
    assert header.split()[:2] == ["engine", "method"]


def test_json_names_the_engine_of_each_row(four: Summary) -> None:
    rows = cells_json(four)
    assert {row["engine"] for row in rows} == set(NAMES)
    assert all(row["engine_version"] and row["step_s"] for row in rows)
    record = json.loads(json.dumps(to_dict(four)))
    assert record["side_by_side"]["engines"][3]["threads"] is None
    assert len(record["side_by_side"]["ideas"]) == 3


def test_reports_are_written_whole(four: Summary, tmp_path: Path) -> None:
    paths = reports.write(four, tmp_path / "out")
    assert paths["html"].stat().st_size < 2_000_000


def test_an_unfinished_run_says_of_which_engine(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", blocks=1, engines=FOUR[:2])
    plan = {
        "name": "r", "model": "smollm2-135m", "repeat": {"blocks": 2},
        "engine": [{"name": "llamacpp"}, {"name": "openvino"}], "method": [{"name": "none", "baseline": True}],
    }  # fmt: skip
    (run / "run.json").write_text(json.dumps({"plan": plan}))
    advice = next(n.advice for n in summary(run).validity if n.code == "unfinished")
    assert "0 of 2 blocks of llamacpp at concurrency 1; 0 of 2 blocks of openvino at concurrency 1" in advice


# --- from a plan ------------------------------------------------------------------------------------------

PLAN = """
schema = 1
name = "two"
model = "script"
[workload]
split = "qualitative"
categories = ["qa"]
prompts_per_category = 2
max_tokens = 16
[repeat]
blocks = 1
restart = "never"
[[engine]]
name = "loopback"
args = { step_ms = 1 }
[[engine]]
name = "openai"
url = "URL"
baseline_url = "URL"
[[method]]
name = "none"
baseline = true
[[method]]
name = "ngram"
engines = ["loopback"]
k = 4
[[method]]
name = "as-served"
engines = ["openai"]
"""


def test_a_plan_over_two_engines_runs_to_its_report(tmp_path: Path, call: Callable[..., Any]) -> None:
    """The suite's word reaches an engine as its own; the cells keep the word that was asked."""
    from runners.loopback import command
    from runners.server import serve

    argv, env = command({"step_ms": 1, "prefill_ms": 1})
    with serve(argv, env, tmp_path / "server.log", timeout_s=60) as server:
        (tmp_path / "two.toml").write_text(PLAN.replace("URL", server.address))
        code, out, err = call("run", tmp_path / "two.toml", "--dry-run", "--json", "--out", tmp_path / "run")
        assert code == 0, err
        assert {(c["engine"], c["method"]) for c in json.loads(out)["cells"]} == {
            ("loopback", "none"), ("loopback", "ngram k=4"), ("openai", "none"), ("openai", "as-served"),
        }  # fmt: skip
        code, out, err = call("run", tmp_path / "two.toml", "--out", tmp_path / "run")
    assert "loopback · block 1 · ngram k=4" in err
    seen = summary(tmp_path / "run")
    assert beside(seen).ideas[0].name == "none"
    assert [side.engine for side in beside(seen).ideas[0].sides] == ["loopback", "openai"]
    assert {arm.label for arm in seen.arms if arm.engine == "loopback"} == {"none", "ngram k=4"}
    assert "Engines side by side" in out


def test_servers_of_one_engine_end_before_the_next_engines_start(tmp_path: Path) -> None:
    from runners.run import Runner
    from specbench.plan import check_plan

    raw = {
        "name": "two", "model": "script", "workload": {"categories": ["qa"], "prompts_per_category": 1, "max_tokens": 4},
        "repeat": {"blocks": 1, "restart": "never"},
        "engine": [{"name": "loopback", "args": {"step_ms": [1, 2]}}],
        "method": [{"name": "none", "baseline": True}, {"name": "ngram", "k": 4}],
    }  # fmt: skip
    alive: list[int] = []
    runner = Runner(check_plan(raw, "two"), tmp_path / "run")
    runner.report = lambda progress: alive.append(_children())
    runner.run()
    assert len(alive) == 8
    assert alive[4] == alive[0], "the second comparison starts with no server of the first"


def _children() -> int:
    import psutil

    return sum(
        "loopback_server" in " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)
    )
