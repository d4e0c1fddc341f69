"""The report's figures: speedups with intervals, the same by group, acceptance by position, latencies.

Boundary: draws fields of a `Summary` and computes none. Each figure comes in two drawings, one for wide
pages and paper and one for phones, because shrinking a wide one makes its text unreadable. Every arm keeps
one pen (hue, marker, dashes) in all figures, so each reads in grey.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from reports import _view
from reports._format import interval, known, number
from reports._svg import (
    FASTER,
    INK,
    MUTED,
    PAPER,
    SLOWER,
    Canvas,
    Pen,
    baseline_pen,
    legend,
    legend_height,
    pen,
    wrap,
)
from specbench.results import Arm, Distribution, Ratio, Summary, reading

WIDE, NARROW = 880.0, 340.0
MARGIN = 54.0
"""Left of a panel, for its tick and axis labels."""
LOG_FROM = 6.0
"""Span (largest over smallest) from which an axis of positive values is logarithmic."""
CURVE_POINTS = 160
"""Order statistics drawn per curve: more cannot be seen at this size, and pages stay small."""

_NICE = tuple(m * 10.0**e for e in range(-6, 7) for m in (1, 2, 5))


@dataclass(frozen=True)
class Panel:
    """One of several small plots of ratios: a title, and by row's name the ratio with a bound to mark beside it."""

    title: str
    rows: Mapping[str, tuple[Ratio | None, float | None]]


@dataclass(frozen=True)
class Drawing:
    """One figure: its file-safe name, a sentence for screen readers, and two inline SVGs."""

    slug: str
    title: str
    wide: str
    narrow: str


def speedup(summary: Summary) -> Drawing | None:
    """Forest plot: one row a measured arm, interval and estimate, a line at 1. None without any ratio."""
    label = _view.names(summary)
    rows = [(label[arm.config_id], arm.speedup) for arm in _view.compared(summary) if arm.speedup]
    if not rows:
        return None
    said = "; ".join(f"{name}: {interval(ratio)}" for name, ratio in rows)
    return _both("speedup", f"Speedup over the baseline by arm. {said}", lambda width: _forest(rows, width))


def groups(summary: Summary) -> Drawing | None:
    """Small multiples: one panel a measured arm, one row a group of prompts. None without any ratio."""
    arms = [arm for arm in _view.compared(summary) if any(group.speedup for group in arm.groups)]
    if not arms:
        return None
    label, kinds = _view.names(summary), _view.categories(arms)
    title = f"Speedup by group of prompts ({', '.join(kinds)}) for each arm; the figures are in the table"
    panels = [
        Panel(label[arm.config_id], {kind: (_view.group_speedup(arm, kind), None) for kind in kinds})
        for arm in arms
    ]
    return _both("groups", title, lambda width: _panels(panels, kinds, width))


def engines(summary: Summary) -> Drawing | None:
    """Small multiples: one panel a method, one row an engine: its speedup below its AL_all. None without two."""
    panels = [
        Panel(title, {row.engine: (row.arm.speedup, row.arm.metrics.get("al_all")) for row in rows})
        for title, rows in _view.beside(summary)
        if not any(row.arm.baseline for row in rows)
    ]
    names = tuple(dict.fromkeys(name for panel in panels for name in panel.rows))
    if len(names) < 2 or not any(ratio for panel in panels for ratio, _ in panel.rows.values()):
        return None
    title = f"Speedup within each engine ({', '.join(names)}) beside its bound AL_all, by method; the figures are in the table"
    return _both("engines", title, lambda width: _panels(panels, names, width))


def acceptance(summary: Summary) -> Drawing | None:
    """Marginal and conditional acceptance by draft position. None where no engine counted positions."""
    arms = [(i, arm) for i, arm in enumerate(_view.compared(summary)) if arm.positions]
    if not arms:
        return None
    label = _view.names(summary)
    names = [label[arm.config_id] for _, arm in arms]
    looks = [pen(i) for i, _ in arms]
    title = f"Acceptance by draft position, marginal and conditional, for {', '.join(names)}"
    return _both("acceptance", title, lambda width: _positions([a for _, a in arms], names, looks, width))


def latency(summary: Summary) -> Drawing | None:
    """Cumulative distributions of TPOT and TTFT over requests. None without any value."""
    arms = [arm for arm in _view.measured(summary) if arm.tpot_s.values or arm.ttft_s.values]
    if not arms:
        return None
    label, looks = _view.names(summary), _latency_pens(summary, arms)
    names = [label[arm.config_id] + (" (baseline)" if arm.baseline else "") for arm in arms]
    title = f"Share of requests at or below a TPOT and a TTFT, for {', '.join(names)}"
    return _both("latency", title, lambda width: _latencies(arms, names, looks, width))


def _latency_pens(summary: Summary, arms: Sequence[Arm]) -> list[Pen]:
    """Each arm's pen is that of its place among its kind, so that it is the same in every figure."""
    order = [arm.config_id for arm in _view.compared(summary)]
    bases = [arm.config_id for arm in _view.measured(summary) if arm.baseline]
    return [
        baseline_pen(bases.index(a.config_id)) if a.baseline else pen(order.index(a.config_id)) for a in arms
    ]


def _both(slug: str, title: str, draw: Callable[[float], Canvas]) -> Drawing:
    return Drawing(slug, title, draw(WIDE).svg(f"{slug}-w", title), draw(NARROW).svg(f"{slug}-n", title))


# --- speedups ---------------------------------------------------------------------------------------------


def _forest(rows: Sequence[tuple[str, Ratio]], width: float) -> Canvas:
    """Wide: name, strip, value in one line. Narrow: the name stands above its strip."""
    wide = width == WIDE
    names = [wrap(name, 36 if wide else 44) for name, _ in rows]
    deepest = max(name.count("\n") + 1 for name in names)
    longest = max(len(line) for name in names for line in name.split("\n"))
    pitch = 38.0 if wide else 38 + 15.0 * deepest
    left, right, top = (7.4 * longest + 34, 160.0, 26.0) if wide else (6.0, 134.0, 26.0)
    canvas = Canvas(width, top + pitch * len(rows) + 48)
    axes = canvas.axes(left, top, width - left - right, pitch * len(rows))
    low, high = _limits([ratio for _, ratio in rows])
    _ratio_axis(axes, low, high, wide)
    _sides(canvas, axes, left, width - left - right)
    axes.set_ylim(pitch * len(rows), 0)
    axes.grid(visible=wide, axis="x")
    for index, (name, (_, ratio)) in enumerate(zip(names, rows, strict=True)):
        middle = pitch * (index + 0.5) if wide else pitch * (index + 1) - 14
        # Cut between rows on a narrow page, where a line through all would strike out the names.
        axes.plot(
            [1, 1], [middle - (pitch / 2 if wide else 12), middle + (pitch / 2 if wide else 14)], **_UNIT
        )
        _whisker(axes, ratio, middle, low, high)
        canvas.text(width - 2, top + middle, interval(ratio), anchor="right")
        canvas.text(2, top + (middle if wide else pitch * index + 8 + 7.5 * deepest), name)
    return canvas


def _panels(panels: Sequence[Panel], names: Sequence[str], width: float) -> Canvas:
    """Panels share the scale and the rows; the names of the rows stand at the left."""
    wide = width == WIDE
    columns = (2 if len(panels) == 4 else min(len(panels), 3)) if wide else 1
    room = min(7.2 * max(map(len, names)) + 18, 180.0 if wide else 116.0)
    gap, head, pitch, foot = 22.0, 40.0, 22.0, 48.0
    panel_width = (width - room - gap * (columns - 1) - 8) / columns
    deep = head + pitch * len(names) + foot
    canvas = Canvas(width, deep * -(-len(panels) // columns))
    marks = [mark for panel in panels for mark in panel.rows.values()]
    low, high = _limits([ratio for ratio, _ in marks if ratio], [bound for _, bound in marks if bound])
    for index, panel in enumerate(panels):
        left, top = room + (index % columns) * (panel_width + gap), (index // columns) * deep
        axes = canvas.axes(left, top + head, panel_width, pitch * len(names))
        _ratio_axis(axes, low, high, panel_width > 300, title=index + columns >= len(panels))
        axes.axvline(1, **_UNIT)
        axes.set_ylim(len(names), 0)
        title = wrap(panel.title, max(int(panel_width / 7.6), 8))
        canvas.text(left, top + head / 2, title, size=11.5, bold=True)
        for row, name in enumerate(names):
            if index % columns == 0:
                short = wrap(name, int((room - 14) / 7.2), 1)
                canvas.text(2, top + head + pitch * (row + 0.5), short, size=11.5)
            _mark(axes, panel.rows.get(name, (None, None)), row + 0.5, low, high)
    return canvas


def _mark(axes: Axes, mark: tuple[Ratio | None, float | None], y: float, low: float, high: float) -> None:
    """One row of a panel: the bound as an upright stroke, the ratio as a whisker, a dash where there is none."""
    ratio, bound = mark
    if bound is not None and known(bound):
        axes.plot([bound], [y], color=INK, marker="|", ms=13, mew=2.4, clip_on=False)
    if ratio is None:
        axes.text(1, y, "–", color=MUTED, ha="center", va="center")
    else:
        _whisker(axes, ratio, y, low, high)


def _limits(ratios: Sequence[Ratio], bounds: Sequence[float] = ()) -> tuple[float, float]:
    """Axis limits that hold 1, bounds and estimates; an interval is cut at three times beyond them."""
    points = [1.0, *(b for b in bounds if known(b))] + [
        r.estimate for r in ratios if known(r.estimate) and r.estimate > 0
    ]
    low = max(min([*points, *(r.low for r in ratios if known(r.low))]), min(points) / 3)
    high = min(max([*points, *(r.high for r in ratios if known(r.high))]), max(points) * 3)
    margin = (high / low) ** 0.06 if high > low else 1.0
    return min(low / margin, 0.97), max(high * margin, 1.03)


def _ratio_axis(axes: Axes, low: float, high: float, roomy: bool, title: bool = True) -> None:
    if high / low > LOG_FROM:
        axes.set_xscale("log")
        inside = [tick for tick in _NICE if low <= tick <= high]
        axes.xaxis.set_major_locator(FixedLocator(inside))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6 if roomy else 3, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.yaxis.set_major_locator(NullLocator())
    if title:
        axes.set_xlabel(
            "Speedup (baseline TPOT / TPOT)" if roomy else "Speedup (×)", labelpad=6, fontsize=11.5
        )


def _sides(canvas: Canvas, axes: Axes, left: float, width: float) -> None:
    """Above the line at 1: which side is which, where there is room to say it."""
    place = axes.transData.transform((1, 0))[0]
    if place - left > 60:
        canvas.text(place - 6, 12, "◂ slower", anchor="right", colour=MUTED, size=11)
    if left + width - place > 60:
        canvas.text(place + 6, 12, "faster ▸", colour=MUTED, size=11)


_UNIT: dict[str, Any] = {"color": INK, "lw": 1.2, "solid_capstyle": "butt"}
_SIGNS = {
    "gain": (FASTER, "^", True),
    "loss": (SLOWER, "v", True),
    "same": (INK, "o", False),
    "few": (MUTED, "o", False),
}


def _whisker(axes: Axes, ratio: Ratio, y: float, low: float, high: float) -> None:
    """An interval with its estimate; an arrow head where the interval runs past the axis."""
    colour, marker, filled = _SIGNS[reading(ratio)]
    start = max(ratio.low, low) if known(ratio.low) else low
    end = min(ratio.high, high) if known(ratio.high) else high
    axes.plot([start, end], [y, y], color=colour, lw=2.2, solid_capstyle="butt", clip_on=False)
    for inside, edge, arrow in ((ratio.low >= low, low, "<"), (ratio.high <= high, high, ">")):
        if not inside:
            axes.plot([edge], [y], color=colour, marker=arrow, ms=6, clip_on=False)
    if known(ratio.estimate):
        face = colour if filled else PAPER
        axes.plot([ratio.estimate], [y], color=colour, marker=marker, ms=8, mfc=face, mew=1.8, clip_on=False)


# --- acceptance -------------------------------------------------------------------------------------------


def _positions(arms: Sequence[Arm], names: Sequence[str], looks: Sequence[Pen], width: float) -> Canvas:
    canvas, boxes = _two_panels(names, looks, width)
    for box, title, field in zip(
        boxes,
        ("Marginal: all drafts up to here accepted", "Conditional: accepted, given the one before"),
        ("marginal", "conditional"),
        strict=True,
    ):
        axes = canvas.axes(*box)
        canvas.text(box[0] - MARGIN + 2, box[1] - 20, title, size=11.5, bold=True)
        axes.grid(axis="y")
        axes.grid(visible=False, axis="x")
        for arm, look in zip(arms, looks, strict=True):
            points = [(p.position, getattr(p, field)) for p in arm.positions]
            drawn = [(x, y * 100) for x, y in points if known(y)]
            _marked(axes, [x for x, _ in drawn], [y for _, y in drawn], look, look.linestyle)
        deepest = max(position.position for arm in arms for position in arm.positions)
        axes.set_xlim(0.6, max(deepest, 2) + 0.4)
        _percent_axis(axes)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.set_xlabel("Draft position (tokens)", labelpad=6, fontsize=11.5)
        axes.set_ylabel("Accepted (%)", labelpad=6, fontsize=11.5)
    return canvas


# --- latency ----------------------------------------------------------------------------------------------


def _latencies(arms: Sequence[Arm], names: Sequence[str], looks: Sequence[Pen], width: float) -> Canvas:
    canvas, boxes = _two_panels(names, looks, width)
    kinds = (
        ("TPOT", "TPOT (ms per output token)", [arm.tpot_s for arm in arms]),
        ("TTFT", "TTFT (ms)", [arm.ttft_s for arm in arms]),
    )
    for box, (short, title, shown) in zip(boxes, kinds, strict=True):
        axes = canvas.axes(*box)
        canvas.text(
            box[0] - MARGIN + 2, box[1] - 20, f"{short}: share of requests at or below", size=11.5, bold=True
        )
        axes.grid(axis="y")
        for distribution, look in zip(shown, looks, strict=True):
            xs, ys = _curve(distribution)
            axes.step(xs, ys, where="post", color=look.colour, lw=look.width, ls=look.linestyle)
            _marked(axes, xs[10::40] or xs[-1:], ys[10::40] or ys[-1:], look, "none")
        _time_axis(axes, [v * 1e3 for d in shown for v in d.values if known(v)])
        _percent_axis(axes)
        axes.set_xlabel(title, labelpad=6, fontsize=11.5)
        axes.set_ylabel("Requests (%)", labelpad=6, fontsize=11.5)
    return canvas


def _curve(distribution: Distribution) -> tuple[list[float], list[float]]:
    """The empirical distribution at up to `CURVE_POINTS` evenly spaced order statistics (ms, per cent)."""
    ordered = sorted(value * 1e3 for value in distribution.values if known(value))
    count = len(ordered)
    drawn = min(count, CURVE_POINTS)
    ranks = [round(i * (count - 1) / max(drawn - 1, 1)) for i in range(drawn)]
    points = [(value, 0.0) for value in ordered[:1]]
    points += [(ordered[rank], (rank + 1) / count * 100) for rank in ranks]
    return [x for x, _ in points], [y for _, y in points]


def _time_axis(axes: Axes, values: Sequence[float]) -> None:
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > LOG_FROM:
        low, high = min(positive) / 1.1, max(positive) * 1.1
        axes.set_xscale("log")
        inside = [tick for tick in _NICE if low <= tick <= high]
        every = -(-len(inside) // 6)
        axes.xaxis.set_major_locator(FixedLocator(inside[::every]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(low, high)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(0, max(positive, default=1.0) * 1.08)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value, 3)))


# --- shared by the two-panel figures ----------------------------------------------------------------------


def _two_panels(
    names: Sequence[str], looks: Sequence[Pen], width: float
) -> tuple[Canvas, list[tuple[float, float, float, float]]]:
    """A legend above two panels, side by side on a wide page and stacked on a narrow one."""
    wide = width == WIDE
    columns = 2 if wide else 1
    head = legend_height(names, columns)
    tall, margin, above, below = (230.0 if wide else 190.0), MARGIN, 40.0, 54.0
    panel = (width - (2 if wide else 1) * margin - (26 if wide else 0)) / columns - 8
    deep = above + tall + below
    canvas = Canvas(width, head + (deep if wide else 2 * deep))
    legend(canvas, names, looks, columns)
    second = (margin + panel + 26 + margin, head + above) if wide else (margin, head + deep + above)
    return canvas, [(margin, head + above, panel, tall), (*second, panel, tall)]


def _percent_axis(axes: Axes) -> None:
    """0 to 100 with room for markers at both ends; the grid's line at 0 replaces the frame."""
    axes.set_ylim(-5, 105)
    axes.yaxis.set_major_locator(FixedLocator([0, 25, 50, 75, 100]))
    axes.spines["bottom"].set_visible(False)


def _marked(axes: Axes, xs: Sequence[float], ys: Sequence[float], look: Pen, linestyle: Any) -> None:
    """Points in an arm's hue and marker, joined as `linestyle` says."""
    style: dict[str, Any] = {"color": look.colour, "lw": look.width, "ls": linestyle, "marker": look.marker}
    axes.plot(xs, ys, ms=6, mew=0, clip_on=False, **style)
