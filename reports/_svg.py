"""A matplotlib figure as a small inline SVG that takes its colours and font from the page around it.

Boundary: knows canvases, colours and SVG text, nothing of speculative decoding. Figures are drawn in marker
colours that no one would choose (`#0101xx`); `inline` swaps them for CSS variables, so that one drawing
reads on a light page, a dark one and paper. Text stays text: it is sized with DejaVu Sans, which is wider
than the system fonts that a page uses, so what does not overlap here does not overlap there.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

INK, MUTED, RULE = "#010101", "#010102", "#010103"
FASTER, SLOWER, PAPER = "#010104", "#010105", "#010106"
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    RULE: "--rule",
    FASTER: "--good",
    SLOWER: "--bad",
    PAPER: "--paper",
} | {colour: f"--s{i}" for i, colour in enumerate(SERIES, 1)}

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1, 1.5), (6, 2, 1, 2), (3, 1.5))

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specbench",
    "font.family": ["DejaVu Sans"],
    "font.size": 12.0,
    "axes.edgecolor": RULE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "grid.color": RULE,
    "grid.linewidth": 1.0,
    "text.color": INK,
    "text.parse_math": False,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Pen:
    """How one arm is drawn everywhere: hue for the screen, marker and dashes for print."""

    colour: str
    marker: str
    dashes: tuple[float, ...]
    width: float = 2.0

    @property
    def linestyle(self) -> str | tuple[float, tuple[float, ...]]:
        """matplotlib's form of the dashes."""
        return (0, self.dashes) if self.dashes else "-"


def pen(index: int) -> Pen:
    """The pen of the `index`-th arm; the periods are coprime enough for 60 arms to differ."""
    return Pen(SERIES[index % len(SERIES)], MARKERS[index % len(MARKERS)], DASHES[index % len(DASHES)])


def baseline_pen(index: int) -> Pen:
    """The pen of the `index`-th baseline: ink without markers, so that it stays behind the arms."""
    return Pen(INK, "", DASHES[index % len(DASHES)], 1.6)


class Canvas:
    """A figure measured in CSS pixels from its top left corner."""

    def __init__(self, width: float, height: float) -> None:
        """An empty transparent figure of the given size."""
        self.width, self.height = width, height
        with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
            self.figure = Figure(figsize=(width / 72, height / 72), dpi=72)
            FigureCanvasSVG(self.figure)

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes with a faint vertical grid over a rectangle in pixels."""
        box = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
            axes = self.figure.add_axes(box)
            axes.patch.set_visible(False)
            axes.grid(axis="x")
        return axes

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: Literal["left", "center", "right"] = "left",
        colour: str = INK,
        size: float = 12,
        bold: bool = False,
    ) -> None:
        """Text whose middle line is at `y` pixels from the top."""
        self.figure.text(
            x / self.width,
            1 - y / self.height,
            text,
            ha=anchor,
            va="center",
            color=colour,
            fontsize=size,
            fontfamily="DejaVu Sans",
            fontweight="bold" if bold else "normal",
            parse_math=False,
            linespacing=1.15,
        )

    def sample(self, x: float, y: float, look: Pen) -> None:
        """A short stroke in an arm's pen, for a legend."""
        xs, level = [x / self.width, (x + 28) / self.width], 1 - y / self.height
        self.add(Line2D(xs, [level, level], color=look.colour, lw=look.width, ls=look.linestyle))
        dot = Line2D([sum(xs) / 2], [level], color=look.colour, marker=look.marker, ms=6, ls="none")
        self.add(dot)

    def add(self, artist: Artist) -> None:
        """Add an artist in figure coordinates."""
        self.figure.add_artist(artist)

    def svg(self, slug: str, title: str) -> str:
        """The drawing as an `<svg>` element; see `inline`."""
        out = io.StringIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():  # type: ignore[arg-type]
            # The page's own fonts draw the text, so a glyph that DejaVu lacks is no fault.
            warnings.filterwarnings("ignore", message=r"Glyph .* missing", category=UserWarning)
            self.figure.savefig(
                out,
                format="svg",
                transparent=True,
                metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")),
            )
        return inline(out.getvalue(), slug, title)


def legend_height(labels: Sequence[str], columns: int) -> float:
    """Pixels that `legend` needs."""
    return 21.0 * -(-len(labels) // columns) + 8 if labels else 0.0


def legend(canvas: Canvas, labels: Sequence[str], looks: Sequence[Pen], columns: int) -> None:
    """Names beside samples of their pens, in columns from the canvas's top."""
    column = canvas.width / columns
    for index, (label, look) in enumerate(zip(labels, looks, strict=True)):
        x, y = (index % columns) * column + 2, 10 + 21 * (index // columns)
        canvas.sample(x, y, look)
        canvas.text(x + 38, y, shorten(label, int((column - 44) / 7.2)), size=11.5)


def shorten(text: str, width: int) -> str:
    """At most `width` characters, the middle left out: both ends of a method's label tell it apart."""
    flat = re.sub(r"[ \t\r\n]+", " ", text).strip()
    if len(flat) <= width:
        return flat
    tail = (width - 1) // 3
    return f"{flat[: width - 1 - tail]}…{flat[len(flat) - tail :]}"


def wrap(text: str, width: int, lines: int = 2) -> str:
    """At most `lines` lines of `width` characters; what does not fit loses its middle, never its end."""
    for budget in range(width * lines, 1, -1):
        kept = textwrap.wrap(shorten(text, budget), width, break_on_hyphens=False)
        if len(kept) <= lines:
            return "\n".join(kept)
    return shorten(text, width)


def inline(svg: str, slug: str, title: str) -> str:
    """A stand-alone SVG made fit for an HTML page.

    Drops the XML prologue, metadata, style sheet and namespaces (none is needed in HTML, and the style
    sheet would leak into the page), keeps only ids that something refers to and makes them unique with
    `slug`, rounds coordinates to a hundredth of a pixel, and names the drawing for screen readers.
    """
    body = svg[svg.index("<svg") :]
    view = re.search(r'viewBox="([^"]+)"', body)
    assert view is not None  # matplotlib always writes one
    body = body[body.index(">") + 1 : body.rindex("</svg>")]
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    used = frozenset(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r"<[^>]*>", lambda tag: _clean_tag(tag[0], slug, used), body)
    body = re.sub(r"\s*\n\s*", "\n", body).strip()
    head = f'<svg viewBox="{view[1]}" role="img" aria-labelledby="{slug}-title" focusable="false">'
    return f'{head}\n<title id="{slug}-title">{escape(title)}</title>\n{body}\n</svg>'


def _clean_tag(tag: str, slug: str, used: frozenset[str]) -> str:
    """One tag, so that a label that happens to look like an id, a colour or a long number stays as it is."""

    def rename(found: re.Match[str]) -> str:
        return f' id="{slug}-{found[1]}"' if found[1] in used else ""

    tag = re.sub(r'\sid="([^"]*)"', rename, tag.replace("xlink:href", "href"))
    tag = re.sub(r'(href="#|url\(#)', rf"\g<1>{slug}-", tag)
    tag = re.sub(r"font-family: [^;\"]*;?\s?", "", tag)
    tag = re.sub(r"\s?transform=\"rotate\(-0 [^)]*\)\"", "", tag)
    tag = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", tag)
    return re.sub("#0101[0-9a-f]{2}", lambda found: f"var({_VARIABLES[found[0]]})", tag)
