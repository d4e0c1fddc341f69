"""One self-contained HTML page: the answer in a sentence first, then what supports it.

Boundary: lays a `Summary` out and computes nothing. The page makes no request (its own policy forbids any),
reads without JavaScript, and everything that came from a prompt, a label or an engine is escaped. The same
summary gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache, partial
from typing import Any

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from reports import _format, _view, figures
from specbench import __version__
from specbench.metrics import METERED, METRICS
from specbench.results import Arm, Summary, reading, to_dict

EMBED_LIMIT_BYTES = 600_000
"""Above this the embedded data leave out the values behind the latency curves, so the page stays mailable."""

TONES = {"gain": "good", "loss": "bad", "same": "neutral", "few": "neutral", "none": "neutral"}
SEVERITY = {
    "invalid": {"sign": "✕", "tone": "void"},
    "warning": {"sign": "⚠\ufe0e", "tone": "bad"},
    "note": {"sign": "•", "tone": "neutral"},
}
METHODS = {"wilcoxon": "Wilcoxon", "welch": "Welch, small n"}

TERMS = (
    ("TPOT", "Time per output token: last minus first output time, over the tokens after the first frame."),
    ("TTFT", "Time to first token: from sending a request to the first frame with output on any channel."),
    ("k", "Number of drafted tokens in a round, without the bonus token that the target adds."),
    ("Step", "One forward pass of the target after prefill."),
    (
        "AL_all",
        "Emitted tokens per step over all steps; bounds a lossless decode-time speedup at equal batch.",
    ),
    ("AL_drafted", "One plus the accepted tokens per step that verified a draft."),
    ("Coverage", "Share of steps that verified a draft: AL_all − 1 = coverage × (AL_drafted − 1)."),
    ("Acceptance", "Accepted over drafted tokens."),
    ("Marginal", "Share of all drafts of which every token up to a position was accepted."),
    ("Conditional", "Of the drafts accepted up to the position before, the share accepted here as well."),
    (
        "Block",
        "Every arm run once in random order and then in reverse, on the same prompts, host and session.",
    ),
    ("Speedup", "Baseline TPOT over the arm’s TPOT, from the medians of paired log ratios within blocks."),
    (
        "Interval",
        "Wilcoxon: exact signed rank, from 8 blocks on. Welch: fewer blocks, on log ratios. t: for reference.",
    ),
    ("Tokens/s, ratio", "Ratio of output tokens per second over the whole window: reported, not decided on."),
    (
        "Step cost",
        "AL_all over speedup: baseline steps that a step with drafting, wider verification and overhead cost.",
    ),
    ("Pinned acceptance", "The engine is told how many drafts to accept; only its speed means anything."),
    ("Equal", "Share of prompts whose output is the baseline’s, character for character."),
)


def render(summary: Summary) -> str:
    """The page as a string of HTML, under 2 MB for a dozen arms."""
    data, thinned = _embedded(summary)
    script = _asset("script.js")
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            summary=summary,
            mark=_view.mark(summary),
            label=_view.names(summary),
            arms=_view.measured(summary),
            compared=_view.compared(summary),
            pinned=_view.pinned(summary),
            kinds=_view.categories(_view.measured(summary)),
            facts=_facts(summary),
            sections=_sections(summary),
            findings=_view.findings(summary),
            drawings=_drawings(summary),
            equality=_view.equality_rows(summary),
            beside=_view.beside(summary),
            depths=_view.depths(summary),
            environment=_surroundings(summary),
            metrics=_metric_rows(summary.arms),
            terms=TERMS,
            data=data,
            thinned=thinned,
            file_name=f"{_file_stem(summary.run)}.json",
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            style=Markup(_asset("style.css")),
        )
    )


@cache
def _environment() -> Environment:
    loader = PackageLoader("reports", "templates")
    env = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    env.globals |= {
        "number": _format.number,
        "three": partial(_format.number, digits=3),
        "milliseconds": _format.milliseconds,
        "percent": _format.percent,
        "percent_whole": lambda share: _format.number(share * 100, 3),
        "times": _format.times,
        "bare": _format.bare,
        "interval": lambda ratio: _format.tight(_format.interval(ratio)),
        "fixed": _format.fixed,
        "plural": _format.plural,
        "tight": _format.tight,
        "read": reading,
        "group_speedup": _view.group_speedup,
        "marginal": _view.marginal,
        "words": _view.WORDS,
        "tones": TONES,
        "severities": SEVERITY,
        "methods": METHODS,
        "version": __version__,
    }
    return env


def _asset(name: str) -> str:
    """A file of the templates that holds no expressions of its own."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0].strip()


def _drawings(summary: Summary) -> dict[str, figures.Drawing | None]:
    return {
        "speedup": figures.speedup(summary),
        "groups": figures.groups(summary),
        "engines": figures.engines(summary),
        "acceptance": figures.acceptance(summary),
        "latency": figures.latency(summary),
    }


def _facts(summary: Summary) -> list[tuple[str, str]]:
    """The line under the verdict: what was compared, and how much of it there is."""
    dropped = f", {summary.dropped_blocks:,} dropped" if summary.dropped_blocks else ""
    streams = sorted({arm.concurrency for arm in summary.arms})
    return [
        ("Model", summary.model),
        ("Engine", f"{summary.engine} {summary.engine_version or ''}".strip()),
        ("Arms", f"{len(summary.arms):,}"),
        ("Blocks", f"{summary.blocks:,}{dropped}"),
        ("Concurrency", ", ".join(map(str, streams)) or _format.MISSING),
    ]


def _sections(summary: Summary) -> list[tuple[str, str]]:
    """Anchors and titles, in the page's order."""
    pinned = [("pinned", "Pinned acceptance")] if _view.pinned(summary) else []
    return [
        ("validity", "Validity"),
        ("speedup", "Speedup"),
        *([("engines", "Engines side by side")] if summary.side_by_side else []),
        *pinned,
        ("why", "Why"),
        ("acceptance", "Acceptance"),
        ("latency", "Latency"),
        ("output", "Output equality"),
        ("environment", "Environment"),
        ("metrics", "Every metric"),
        ("terms", "Terms"),
    ]


def _surroundings(summary: Summary) -> dict[str, Any]:
    """Model and engine, then the environment as the summary orders it."""
    named = {
        "Run directory": summary.path,
        "Model": summary.model,
        "Model SHA-256": summary.model_sha256,
        "Engine": f"{summary.engine} {summary.engine_version or ''}".strip(),
    }
    return named | summary.environment


def _metric_rows(arms: tuple[Arm, ...]) -> list[dict[str, str]]:
    """Every metric that any arm names, in the metrics table's order, strangers last; of meters only what is known."""
    known = {name for arm in arms for name, value in arm.metrics.items() if value is not None}
    unmetered = {name for name, metric in METRICS.items() if METERED in metric.needs} - known
    seen = dict.fromkeys(name for arm in arms for name in arm.metrics if name not in unmetered)
    ordered = [name for name in METRICS if name in seen] + [name for name in seen if name not in METRICS]
    return [
        {
            "name": name,
            "unit": METRICS[name].unit if name in METRICS else "",
            "description": METRICS[name].description if name in METRICS else "",
        }
        for name in ordered
    ]


def _embedded(summary: Summary) -> tuple[Markup, bool]:
    """The summary as JSON that cannot end its script element, and whether curve values were left out."""
    record = to_dict(summary)
    text = orjson.dumps(record)
    thinned = len(text) > EMBED_LIMIT_BYTES
    if thinned:
        for arm in record["arms"]:
            arm["tpot_s"].pop("values")
            arm["ttft_s"].pop("values")
        text = orjson.dumps(record)
    safe = text.decode().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(safe), thinned


def _file_stem(run: str) -> str:
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in run)
    return kept.strip("-") or "specbench"
