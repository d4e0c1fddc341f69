"""The report as Markdown for a pull-request comment: verdict, validity, speedups, equality, environment.

Boundary: the same fields of a `Summary` as the page, fewer of them. Text that came from outside is escaped
so that it can neither break a table, nor become HTML, nor mention a person.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reports import _view
from reports._format import MISSING, fixed, interval, milliseconds, number, percent, plural
from specbench.results import Arm, SideBySide, Summary, reading

_SEVERITY_SIGN = {"invalid": "✕", "warning": "⚠", "note": "·"}


def render(summary: Summary) -> str:
    """The report as GitHub-flavoured Markdown."""
    parts = [
        *_head(summary),
        *_validity(summary),
        *_speedups("Speedup", _view.measured(summary), summary),
        *_groups(summary),
        *_engines(summary),
        *_speedups("Pinned acceptance (text invalid by design)", _view.pinned(summary), summary),
        *_why(summary),
        *_equality(summary),
        *_environment(summary),
    ]
    return "\n\n".join(parts) + "\n"


def _head(summary: Summary) -> Iterator[str]:
    mark = _view.mark(summary)
    yield f"## {mark.sign} {mark.words}"
    yield _text(summary.verdict)
    engine = f"{summary.engine} {summary.engine_version or ''}".strip()
    dropped = f" ({summary.dropped_blocks} dropped)" if summary.dropped_blocks else ""
    counts = f"{plural(len(summary.arms), 'arm')}, {plural(summary.blocks, 'block')}{dropped}"
    yield f"{_text(summary.model)} on {_text(engine)} · {counts} · run {_code(summary.run)}"


def _validity(summary: Summary) -> Iterator[str]:
    lines = []
    for finding in _view.findings(summary):
        note, arms = finding.note, f" ({_text(', '.join(finding.arms))})" if finding.arms else ""
        sign = _SEVERITY_SIGN[note.severity]
        lines.append(f"- {sign} **{note.severity}** {_code(note.code)}: {_text(note.advice)}{arms}")
    if lines:
        yield "### Validity"
        yield "\n".join(lines)


def _speedups(title: str, arms: Sequence[Arm], summary: Summary) -> Iterator[str]:
    if not arms:
        return
    label = _view.names(summary)
    header = ["Arm", "Speedup [interval]", "", "TPOT, median (ms)", "AL_all", "Coverage (%)", "Blocks"]
    yield f"### {title}"
    yield _table(header, [_speedup_row(arm, label[arm.config_id]) for arm in arms], left=(0, 2))


def _speedup_row(arm: Arm, name: str) -> list[str]:
    sign, word = _view.WORDS[reading(arm.speedup)]
    return [
        _text(name),
        "1×" if arm.baseline else interval(arm.speedup),
        "baseline" if arm.baseline else f"{sign} {word}",
        milliseconds(arm.tpot_s.p50),
        fixed(arm.metrics.get("al_all")),
        percent(arm.metrics.get("coverage")),
        number(arm.speedup.blocks if arm.speedup else arm.blocks),
    ]


def _groups(summary: Summary) -> Iterator[str]:
    arms, label = _view.compared(summary), _view.names(summary)
    kinds = _view.categories(arms)
    if not kinds:
        return
    header = ["Group"] + [_text(label[arm.config_id]) for arm in arms]
    rows = [[_text(kind)] + [interval(_view.group_speedup(arm, kind)) for arm in arms] for kind in kinds]
    yield _folded("Speedup by group of prompts", _table(header, rows))


def _engines(summary: Summary) -> Iterator[str]:
    """Engines side by side: what is matched, each engine's own figures, plain text of one against another."""
    if summary.side_by_side is None:
        return
    yield "### Engines side by side"
    yield "A speedup is read within one engine; nothing is divided between engines."
    yield "\n".join(f"- {_text(remark)}" for remark in summary.side_by_side.remarks)
    rows = [(method, row) for method, rows in _view.beside(summary) for row in rows]
    header = ["Method", "Engine", "Speedup [interval]", "AL_all", "Coverage (%)", "Step (ms)", "Step cost"]
    yield _table(header, [_side_row(method, row) for method, row in rows], left=(0, 1))
    depths = _view.depths(summary)
    counted = [_positions_row(method, row, depths) for method, row in rows if row.arm.positions]
    if counted:
        header = ["Method", "Engine", "Drafts", *(f"{j} (%)" for j in depths)]
        yield _folded(
            "Acceptance by position (marginal) on each engine", _table(header, counted, left=(0, 1))
        )
    yield from _agreements(summary.side_by_side)


def _side_row(method: str, row: _view.SideRow) -> list[str]:
    return [
        _text(method),
        _text(f"{row.engine} {row.detail}".strip()),
        "1×" if row.arm.baseline else interval(row.arm.speedup),
        fixed(row.arm.metrics.get("al_all")),
        percent(row.arm.metrics.get("coverage")),
        milliseconds(row.side.step_s),
        "1" if row.arm.baseline else fixed(row.side.step_cost),
    ]


def _positions_row(method: str, row: _view.SideRow, depths: Sequence[int]) -> list[str]:
    shares = [percent(_view.marginal(row.arm, j)) for j in depths]
    return [
        _text(method),
        _text(f"{row.engine} {row.detail}".strip()),
        number(row.arm.positions[0].drafts),
        *shares,
    ]


def _agreements(beside: SideBySide) -> Iterator[str]:
    rows = [
        [
            _text(" and ".join(pair.engines)),
            number(pair.compared),
            percent(pair.exact_share),
            percent(pair.mean_matching_prefix),
            number(pair.first_divergence_median),
        ]
        for pair in beside.agreements
    ]
    if rows:
        header = ["Engines", "Prompts", "Equal (%)", "Matching prefix (%)", "First difference (character)"]
        yield _folded("Plain greedy output, engine against engine", _table(header, rows))


def _why(summary: Summary) -> Iterator[str]:
    if summary.explanations:
        yield "### Why"
        yield "\n".join(f"- {_text(sentence)}" for sentence in summary.explanations)


def _equality(summary: Summary) -> Iterator[str]:
    rows = [
        [
            _text(row.name),
            number(row.compared),
            percent(row.exact_share),
            percent(row.mean_matching_prefix),
            number(row.first_divergence_median),
        ]
        for row in _view.equality_rows(summary)
    ]
    if rows:
        header = ["Arm", "Compared", "Equal (%)", "Matching prefix (%)", "First difference (character)"]
        yield "### Output equality"
        yield _table(header, rows)


def _environment(summary: Summary) -> Iterator[str]:
    named = {"Model SHA-256": summary.model_sha256} | summary.environment
    rows = [[_text(name), _plain(value)] for name, value in named.items()]
    yield _folded("Environment", _table(["What", "Value"], rows, left=(0, 1)))


def _plain(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, Mapping):
        return "; ".join(f"{_text(str(key))}: {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return _code(" ".join(map(str, value)))
    return _text(str(value))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,)) -> str:
    rule = [":---" if index in left else "---:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"


def _text(text: str) -> str:
    """One line in which nothing is markup; a zero-width space keeps `@name` from mentioning anyone."""
    flat = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat).replace("@", "@\u200b")


def _code(text: str) -> str:
    """One line in a code span that no backtick in it can end; a table's bar stays escaped inside."""
    flat = " ".join(text.split()).replace("|", r"\|")
    runs = max((len(run) for run in re.findall("`+", flat)), default=0)
    fence, gap = "`" * (runs + 1), " " if runs else ""
    return f"{fence}{gap}{flat}{gap}{fence}" if flat else MISSING
