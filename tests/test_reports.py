"""The report as a document: what it says, what it must never say, and that it cannot be broken from outside."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import reports
from reports import _format, _svg, _view, figures, html, markdown
from specbench.cell import Note
from specbench.cli.report import report
from specbench.errors import SpecbenchError
from specbench.results import Ratio, Summary, to_dict
from tests.demo_summary import EMPTY, baseline, demo, distribution, make_arm, many, positions, ratio
from tests.make_run import make_run

ROOT = Path(__file__).parent.parent
HOSTILE = "\"'></title></script><script>alert(1)</script><img src=x onerror=alert(2)>"
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """A page as lists: tags with their attributes, text by section, and the content of each script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.sections: dict[str, str] = {}
        self.scripts: list[str] = []
        self._section = "header"
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self._section = str(values["id"])
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.sections[self._section] = self.sections.get(self._section, "") + data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def alone(**changes: Any) -> Summary:
    """A run with one baseline, of which nothing succeeded."""
    nothing = baseline(
        metrics=dict.fromkeys(baseline().metrics),
        reasons={"tpot_s": "no request succeeded", "ttft_p99_s": "no request succeeded"},
        tpot_s=EMPTY,
        ttft_s=EMPTY,
        groups=(),
    )
    void = Note(
        code="nothing-succeeded", severity="invalid", advice="No request succeeded; read the engine's log."
    )
    given = {
        "ok": False,
        "verdict": "Nothing was measured.",
        "arms": (nothing,),
        "validity": (void,),
        "explanations": (),
    }
    return replace(demo(), **(given | changes))


# --- numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (_format.number(1234567), "1,234,567"),
        (_format.number(0.0123456), "0.01235"),
        (_format.number(-12.345), "−12.35"),
        (_format.number(1.5e-7), "1.500e-07"),
        (_format.number(0.0), "0"),
        (_format.number(None), "–"),
        (_format.number(math.nan), "–"),
        (_format.number(math.inf), "–"),
        (_format.milliseconds(0.0085714), "8.57"),
        (_format.milliseconds(1.2345), "1,234"),
        (_format.milliseconds(None), "–"),
        (_format.percent(0.4237), "42.4"),
        (_format.percent(None), "–"),
        (_format.fixed(1.0), "1.00"),
        (_format.fixed(None), "–"),
        (_format.times(1.2149), "1.21×"),
        (_format.times(12.34), "12.3×"),
        (_format.times(None), "–"),
        (_format.interval(Ratio(1.21, 1.149, 1.274, 0.95, 10, "wilcoxon")), "1.21× [1.15, 1.27]"),
        (_format.interval(Ratio(1.21, 0.4, math.inf, 0.95, 1, "welch")), "1.21× [0.40, –]"),
        (_format.interval(None), "–"),
        (_format.plural(1, "block"), "1 block"),
        (_format.plural(1200, "block"), "1,200 blocks"),
    ],
)
def test_numbers_look_right(shown: str, expected: str) -> None:
    assert shown == expected


# --- the reading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimates", "words"),
    [
        ([1.3], "Faster"),
        ([1.3, 1.0], "Faster"),
        ([0.7], "Slower"),
        ([0.7, 1.3], "Mixed: faster and slower"),
        ([1.01], "No measurable gain"),
        ([0.7, 1.01], "No measurable gain"),
        ([None], "Not compared"),
        ([], "Not compared"),
    ],
)
def test_mark_follows_the_intervals(estimates: list[float | None], words: str) -> None:
    arms = [make_arm(f"m{i}", speedup=ratio(e) if e else None) for i, e in enumerate(estimates)]
    assert _view.mark(replace(demo(), arms=(baseline(), *arms))).words == words


def test_mark_of_a_void_run_ignores_its_ratios() -> None:
    summary = replace(demo(), ok=False)
    assert _view.mark(summary).words == "Not usable"
    assert "✕" in html.render(summary).split("</header>")[0]


def test_a_pinned_arm_does_not_decide_the_mark() -> None:
    arms = (
        baseline(),
        make_arm(speedup=ratio(0.7)),
        make_arm("x pinned=0.9", pinned=True, speedup=ratio(1.9)),
    )
    assert _view.mark(replace(demo(), arms=arms)).words == "Slower"


def test_names_add_what_varies_and_never_clash() -> None:
    twins = (baseline(), make_arm(config_id="aaaaaa1"), make_arm(config_id="bbbbbb1"))
    assert list(_view.names(replace(demo(), arms=twins)).values()) == [
        "none",
        "ngram-simple k=8 · aaaaaa",
        "ngram-simple k=8 · bbbbbb",
    ]
    varied = (make_arm(config_id="1"), make_arm(config_id="2", concurrency=4))
    assert _view.names(replace(demo(), arms=varied))["2"] == "ngram-simple k=8 · concurrency\u00a04"


def test_findings_come_once_and_the_gravest_first() -> None:
    arms = (baseline(), make_arm(validity=(Note(code="throttled", severity="note", advice="Slow down."),)))
    void = Note(code="counter-reset", severity="invalid", advice="Run it again.")
    warning = Note(code="host-busy", severity="warning", advice="Stop other work.")
    found = _view.findings(replace(demo(), arms=arms, validity=(warning, void)))
    assert [f.note.code for f in found] == ["counter-reset", "host-busy", "throttled"]
    assert [f.arms for f in found] == [(), (), ("ngram-simple k=8",)]


# --- the page ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(html.render(demo()))


def test_the_answer_stands_first(page: Page) -> None:
    head = page.sections["header"]
    assert demo().verdict in head.replace("\u00a0", " ")
    assert "Mixed: faster and slower" in head
    order = [
        "validity",
        "speedup",
        "pinned",
        "why",
        "acceptance",
        "latency",
        "output",
        "environment",
        "metrics",
        "terms",
    ]
    assert [key for key in page.sections if key != "header"] == order


def test_every_number_of_an_arm_is_on_the_page(page: Page) -> None:
    shown = page.sections["speedup"].replace("\u00a0", " ")
    for arm in demo().arms[1:4]:
        assert _format.interval(arm.speedup) in shown
        assert all(_format.interval(group.speedup) in shown for group in arm.groups)
    assert "0.973" not in page.sections["output"]
    assert page.sections["output"].count("97.3") == 3
    assert "none, against itself" in page.sections["output"].split("ngram-simple")[0]


def test_pinned_arms_have_tables_of_their_own(page: Page) -> None:
    pinned, free = "pinned=0.8,0.6,0.4", "p_min=0.5"
    assert pinned in page.sections["pinned"]
    assert free not in page.sections["pinned"]
    for section in ("speedup", "why", "acceptance", "latency", "output"):
        assert pinned not in page.sections[section], section
        assert free in page.sections[section], section
    tables = html.render(demo()).split('<table class="raw">')[1:]
    assert [(pinned in t.split("</table>")[0], free in t.split("</table>")[0]) for t in tables] == [
        (False, True),
        (True, False),
    ]


def test_the_page_asks_nothing_of_a_network(page: Page) -> None:
    text = html.render(demo())
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    links = [v for _, attributes in page.tags for k, v in attributes.items() if k in ("src", "href") and v]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert all(found.startswith("#") for found in re.findall(r"url\(([^)]*)\)", text))
    assert "default-src 'none'" in str(page.all("meta"))


def test_ids_are_unique_and_references_resolve(page: Page) -> None:
    ids = [value["id"] for _, value in page.tags if "id" in value]
    assert len(ids) == len(set(ids))
    text = html.render(demo())
    wanted = set(re.findall(r'(?:href="#|url\(#|aria-labelledby=")([^")]+)', text))
    assert len(wanted) > 20
    assert wanted <= set(ids)


def test_the_page_is_accessible(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(cell.get("scope") in ("col", "row") for cell in page.all("th"))
    drawings = page.all("svg")
    assert len(drawings) == 8
    assert all(svg["role"] == "img" and svg["aria-labelledby"] for svg in drawings)
    assert "1.21× [1.16, 1.26]" in figures.speedup(demo()).title  # type: ignore[union-attr]
    assert all(
        box.get("tabindex") == "0" and box["aria-label"]
        for box in page.all("div")
        if box.get("role") == "region"
    )


def test_the_policy_admits_the_script_and_no_other(page: Page) -> None:
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(page.all("meta"))


def test_embedded_json_is_the_summary(page: Page) -> None:
    assert json.loads(page.scripts[0]) == json.loads(json.dumps(to_dict(demo()), allow_nan=False))


def test_large_runs_stay_small_and_say_what_is_left_out() -> None:
    full = many(12)
    arms = tuple(
        replace(a, tpot_s=distribution(0.01, 0.3, 2000), ttft_s=distribution(0.2, 0.3, 2000))
        for a in full.arms
    )
    text = html.render(replace(full, arms=arms))
    assert len(text.encode()) < 2_000_000
    data = json.loads(Page(text).scripts[0])
    assert "values" not in data["arms"][0]["tpot_s"]
    assert data["arms"][0]["tpot_s"]["p99"] == arms[0].tpot_s.p99
    assert "report.json beside this page holds them" in text
    assert "report.json beside this page holds them" not in html.render(demo())


def test_text_from_outside_stays_text() -> None:
    arm = make_arm(HOSTILE)
    arm = replace(
        arm,
        groups=tuple(replace(group, category=HOSTILE + str(i)) for i, group in enumerate(arm.groups)),
        positions=tuple(replace(p, source=HOSTILE) for p in arm.positions),
        reasons={"ttft_p99_s": HOSTILE},
        metrics=arm.metrics | {HOSTILE: None},
        validity=(Note(code=HOSTILE, severity="note", advice=HOSTILE),),
    )
    summary = replace(
        demo(),
        run=HOSTILE,
        verdict=HOSTILE,
        model=HOSTILE,
        arms=(baseline(), arm),
        explanations=(HOSTILE,),
        environment={HOSTILE: [HOSTILE], "a": {HOSTILE: HOSTILE}},
    )
    page = Page(html.render(summary))
    assert page.open == []
    assert len(page.scripts) == 2
    assert not page.all("img")
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert json.loads(page.scripts[0])["run"] == HOSTILE
    assert page.sections["header"].count(HOSTILE) >= 3
    stem = next(button["data-name"] for button in page.all("button"))
    assert re.fullmatch(r"[A-Za-z0-9-]+\.json", str(stem))


def test_the_same_summary_gives_the_same_bytes() -> None:
    code = (
        "import hashlib; from reports import html, markdown; from tests.demo_summary import demo; "
        "print(hashlib.sha256((html.render(demo()) + markdown.render(demo())).encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


# --- what is missing --------------------------------------------------------------------------------------


def test_nothing_succeeded_prints_dashes_with_reasons_and_no_zero() -> None:
    text = html.render(alone())
    page = Page(text)
    assert "Nothing was measured." in page.sections["header"]
    assert "No request succeeded" in page.sections["validity"]
    assert not page.all("svg")
    assert "no request succeeded" in [attributes.get("title") for attributes in page.all("abbr")]
    # Cells of the latency tables: n = 0 is a count; no latency is ever 0.
    latency = text.split('id="latency"')[1].split("</section>")[0]
    cells = re.findall(r"<td>(.*?)</td>", latency)
    assert cells.count("0") == 2
    assert len(cells) == 12
    assert sum("–" in cell for cell in cells) == 10
    assert "no request succeeded" in page.sections["metrics"]


def test_a_run_without_a_baseline_renders() -> None:
    arms = (replace(make_arm(), speedup=None, equality=None, groups=(), speedup_output_tps=None),)
    page = Page(html.render(replace(demo(), arms=arms)))
    assert "not compared" in page.sections["speedup"]
    assert "No output could be set against" in page.sections["output"]
    assert {svg["aria-labelledby"] for svg in page.all("svg")} == {
        "acceptance-w-title", "acceptance-n-title", "latency-w-title", "latency-n-title",
    }  # fmt: skip


def test_a_run_without_arms_renders() -> None:
    page = Page(html.render(alone(arms=(), validity=())))
    assert "No arm with measured acceptance" in page.sections["speedup"]
    assert "No finding" in page.sections["validity"]
    assert markdown.render(alone(arms=(), validity=())).startswith("## ✕ Not usable")


def test_reasons_show_for_values_that_had_to_be_derived() -> None:
    arm = make_arm(reasons={"al_all": "from the server's totals"})
    page = Page(html.render(replace(demo(), arms=(baseline(), arm))))
    assert "from the server's totals" in page.sections["metrics"]


# --- figures ----------------------------------------------------------------------------------------------


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_figures_take_their_colours_from_the_page() -> None:
    drawing = figures.groups(demo())
    assert drawing is not None
    assert "#0101" not in drawing.wide
    assert "var(--good)" in drawing.wide
    assert "var(--bad)" in drawing.wide
    assert "font-family" not in drawing.wide
    assert "<style" not in drawing.wide


def test_a_wide_range_of_speedups_asks_for_a_log_axis() -> None:
    def ticks(*estimates: float) -> list[str]:
        arms = [make_arm(f"m{i}", speedup=ratio(e)) for i, e in enumerate(estimates)]
        drawing = figures.speedup(replace(demo(), arms=(baseline(), *arms)))
        assert drawing is not None
        return [text for text in texts(drawing.wide) if re.fullmatch(r"[\d.]+×", text)]

    assert ticks(0.2, 5.0) == ["0.2×", "0.5×", "1×", "2×", "5×"]
    assert ticks(0.9, 1.2) == ["0.9×", "1×", "1.1×", "1.2×"]


def test_an_interval_without_end_is_cut_and_drawn() -> None:
    open_ended = Ratio(1.1, 1e-9, math.inf, 0.95, 1, "welch")
    drawing = figures.speedup(replace(demo(), arms=(baseline(), make_arm(speedup=open_ended))))
    assert drawing is not None
    assert "1.10× [0.00, –]" in texts(drawing.wide)
    assert "inf" not in drawing.wide.replace("</", "")
    assert "nan" not in drawing.wide.lower()


def test_long_names_keep_both_ends() -> None:
    name = "draft-simple k=4 p_min=0.5 " + "x" * 300 + " concurrency 64"
    lines = _svg.wrap(name, 36).split("\n")
    assert len(lines) == 2
    assert max(map(len, lines)) <= 36
    assert lines[0].startswith("draft-simple k=4 p_min=0.5")
    assert lines[1].endswith("concurrency 64")
    assert _svg.wrap("short", 36) == "short"


def test_names_in_figures_may_hold_anything() -> None:
    odd = '$x_1$ é 漢字 <b> & "q" 1.23456789 #010101'
    drawing = figures.latency(replace(demo(), arms=(baseline(), make_arm(odd))))
    assert drawing is not None
    shown = "".join(texts(drawing.wide))
    assert "$x_1$ é 漢字 &lt;b&gt; &amp;" in shown
    assert "1.23456789 #010101" in shown


def test_pens_differ_in_grey() -> None:
    looks = [(pen.marker, pen.dashes) for pen in map(_svg.pen, range(60))]
    assert len(set(looks)) == 60


def test_a_curve_ends_at_all_requests() -> None:
    for count in (1, 2, 159, 160, 161, 2000):
        xs, ys = figures._curve(distribution(0.01, 0.2, count))
        assert ys[0] == 0.0
        assert ys[-1] == 100.0
        assert len(xs) == len(ys) == min(count, figures.CURVE_POINTS) + 1
        assert xs == sorted(xs)


def test_one_position_and_one_request_are_drawn() -> None:
    arm = make_arm(positions=positions(0.8, 1), tpot_s=distribution(0.01, 0.2, 1), ttft_s=EMPTY)
    summary = replace(demo(), arms=(arm,))
    assert figures.acceptance(summary) is not None
    assert figures.latency(summary) is not None


# --- Markdown ---------------------------------------------------------------------------------------------


def test_markdown_says_the_same() -> None:
    text = markdown.render(demo())
    assert text.startswith("## ▲▼ Mixed: faster and slower\n")
    assert "| ngram-simple k=8 | 1.21× [1.16, 1.26] | ▲ faster |" in text
    assert "| none | 1× | baseline |" in text
    assert "**warning** `host-busy`" in text
    assert "| none, against itself | 220 | 100.0 | – | – |" in text
    assert text.count("<details>") == text.count("</details>") == 2
    measured, pinned = text.split("### Pinned acceptance")
    assert "pinned=0.8" not in measured
    assert "pinned=0.8" in pinned


def test_markdown_cannot_be_broken_from_outside() -> None:
    bad = "a|b\n`c` <img src=x> @someone *x* [y](z)"
    arm = make_arm(bad, validity=(Note(code=bad, severity="note", advice=bad),))
    text = markdown.render(
        replace(demo(), verdict=bad, run=bad, arms=(baseline(), arm), environment={bad: [bad]})
    )
    assert "<img" not in re.sub(r"`+ .*? `+", "", text)
    assert "@someone" not in re.sub(r"`+ .*? `+", "", text)
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().split("\n")}
        assert len(widths) == 1


# --- files and command ------------------------------------------------------------------------------------


def test_write_leaves_three_files(tmp_path: Path) -> None:
    paths = reports.write(demo(), tmp_path / "new")
    assert {kind: path.name for kind, path in paths.items()} == {
        "html": "report.html",
        "md": "report.md",
        "json": "report.json",
    }
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
    ]
    assert paths["html"].read_text() == html.render(demo())
    assert json.loads(paths["json"].read_text())["verdict"] == demo().verdict
    assert "NaN" not in paths["json"].read_text()


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(report)
    return CliRunner().invoke(app, list(arguments))


def test_command_reports_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", blocks=3)
    done = command(str(run), "--json")
    assert done.exit_code == 0, done.output
    [entry] = json.loads(done.stdout)["reports"]
    page = Path(entry["files"]["html"])
    assert page == run / "report.html"
    assert "ngram-simple k=8" in Page(page.read_text()).sections["speedup"]


def test_command_puts_several_runs_below_the_output(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, blocks=2, methods=("none", "ngram-simple")) for name in ("a", "b")]
    done = command(*map(str, runs), "--output", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert sorted(p.relative_to(tmp_path).as_posix() for p in (tmp_path / "out").rglob("*.html")) == [
        "out/a/report.html",
        "out/b/report.html",
    ]
    assert not (runs[0] / "report.html").exists()


def test_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "a").mkdir()
    for arguments, words in (
        ([str(tmp_path)], "not a run"),
        (["x", "--output", str(tmp_path / "file")], "--output"),
        (["x/a", "y/a", "--output", str(tmp_path / "o")], "two runs are named a"),
    ):
        done = command(*arguments)
        assert isinstance(done.exception, SpecbenchError)
        assert words in str(done.exception)
