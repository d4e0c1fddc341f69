"""A view of requests as arrays: one cell's measured rows, or several cells' together.

Boundary: columns, masks, sums over time and the counts behind acceptance; what is reported from them, and
under which name, is the metrics table's. Unknown is NaN here, never 0. Shapes: [requests] unless said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

    from specbench.cell import CellRecord

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]


_CELL = "_cell"
"""Column of a pooled table: which cell a row is of, since each numbers its requests from 0."""


class Missing(Exception):
    """What a metric needs is not there; the message is the reason shown to the user."""


@dataclass(frozen=True)
class Metered:
    """Energy of one cell's window; `note` says whose it is, or why it is unknown."""

    energy_j: float | None
    seconds: float | None
    note: str


@dataclass(frozen=True)
class CellView:
    """Requests of one cell (or of several, see `pool`) with the server's totals over the same window.

    `requests` is a table of `specbench.trace.REQUEST_SCHEMA`; warm-up rows may be in it and are left out.
    """

    requests: pd.DataFrame
    concurrency: int = 1
    steps_with_draft: int | None = None
    drafted: int | None = None
    accepted_verified: int | None = None
    k: int | None = None
    """Tokens drafted at most at a time, where the config says so."""
    cells: tuple[CellView, ...] = field(default=(), repr=False)
    category: str | None = None
    max_tokens: int | None = None
    metered: tuple[Metered, ...] = ()
    """One of each cell; none where the view is a part of them."""

    @classmethod
    def of(cls, record: CellRecord, requests: pd.DataFrame) -> CellView:
        """The view of one cell."""
        totals = (record.steps_with_draft, record.drafted, record.accepted_verified)
        figures, note = record.telemetry, record.reasons.get("telemetry.energy_j", "no meter was read")
        metered = Metered(figures.get("energy_j"), figures.get("telemetry_s"), note)
        limit, method = record.config.workload.max_tokens, record.config.method
        k = method.k or (len(method.pinned) if method.pinned else None)
        return cls(requests, record.config.concurrency, *totals, k=k, max_tokens=limit, metered=(metered,))

    @classmethod
    def pool(cls, views: Sequence[CellView]) -> CellView:
        """Several cells of one config taken together; a total is known where every cell knows it."""
        import pandas as pd

        if len(views) == 1:
            return views[0]
        table = pd.concat([view.requests for view in views], ignore_index=True)
        table[_CELL] = np.repeat(np.arange(len(views)), [len(view.requests) for view in views])
        totals = (
            _sum_known([view.steps_with_draft for view in views]),
            _sum_known([view.drafted for view in views]),
            _sum_known([view.accepted_verified for view in views]),
        )
        metered = tuple(of_cell for view in views for of_cell in view.metered)
        one: dict[str, Any] = {"k": views[0].k, "max_tokens": views[0].max_tokens}
        return cls(table, views[0].concurrency, *totals, cells=tuple(views), metered=metered, **one)

    def only(self, category: str) -> CellView:
        """The rows of one category; the server's totals do not divide, so they are unknown there."""
        mine = self.requests[(self.requests["category"] == category).to_numpy(dtype=bool)]
        one: dict[str, Any] = {"k": self.k, "max_tokens": self.max_tokens}
        return CellView(mine, self.concurrency, cells=self.cells, category=category, **one)

    def parts(self) -> tuple[CellView, ...]:
        """The single cells: sums over time are made within each."""
        if self.category is None:
            return self.cells or (self,)
        return tuple(view.only(self.category) for view in self.cells) or (self,)

    # --- columns and masks ---------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The measured rows."""
        return self.requests[~self.requests["warmup"].to_numpy(dtype=bool)]

    def column(self, name: str) -> Floats:
        """A numeric column, NaN where unknown."""
        return self.rows[name].to_numpy(dtype=float, na_value=np.nan)

    def seconds(self, name: str) -> Floats:
        """A time column in seconds from the cell's start."""
        return self.column(name) / 1e9

    @cached_property
    def status(self) -> NDArray[np.object_]:
        """The status column."""
        return self.rows["status"].to_numpy(dtype=object)

    @cached_property
    def ok(self) -> Mask:
        """Answered and streamed: the population of every latency."""
        return np.asarray(self.status == "ok", dtype=bool)

    @cached_property
    def answered(self) -> Mask:
        """Answered with tokens, streamed or not."""
        whole: Mask = np.asarray(self.status == "not_streamed", dtype=bool)
        return self.ok | whole

    def count(self, what: str) -> int:
        """`requests`, `failed`, `throttled`, or rows of a status; a retried request is one request."""
        if what == "throttled":
            return int(np.sum(self.column("http_status") == 429))
        if what not in ("requests", "failed"):
            return int(np.sum(self.status == what))
        keys = [name for name in (_CELL, "request") if name in self.rows]
        every = len(self.rows[keys].drop_duplicates())
        if what == "requests":
            return every
        return every - len(self.rows.loc[self.status != "failed", keys].drop_duplicates())

    def total(self, name: str) -> float:
        """Sum of a token column over answered rows. Raises Missing where nothing or not all is known."""
        values = self.column(name)[self.answered]
        if not len(values):
            raise Missing("no request succeeded")
        unknown = int(np.isnan(values).sum())
        if unknown:
            raise Missing(f"{name} is unknown for {unknown} of {len(values)} replies")
        return float(values.sum())

    # --- frames --------------------------------------------------------------------------------------------

    def _lists(self, name: str) -> list[Floats]:
        return [np.asarray(value, dtype=float) for value in self.rows[name]]

    @cached_property
    def _frame_times(self) -> list[Floats]:
        return [t / 1e9 for t in self._lists("frame_ns")]

    @cached_property
    def frame_counts(self) -> Floats:
        """Output-carrying frames of each request."""
        return np.array([len(value) for value in self.rows["frame_ns"]], dtype=float)

    @cached_property
    def frame_gaps_s(self) -> Floats:
        """Gaps between consecutive frames of ok requests, all requests in one array, shape [gaps]."""
        gaps = [np.diff(t) for t, ok in zip(self._frame_times, self.ok, strict=True) if ok]
        return np.concatenate(gaps) if gaps else np.empty(0)

    @cached_property
    def tokens_after_first(self) -> Floats:
        """Tokens after the first frame: counted by frames where all are known, else by totals.

        An unknown first frame counts one token.
        """
        counted = [t[1:].sum() if len(t) else np.nan for t in self._lists("frame_tokens")]
        first = np.nan_to_num(self.column("first_frame_tokens"), nan=1.0)
        by_total = self.column("output_tokens") - first
        return np.where(np.isnan(counted), by_total, counted)

    @cached_property
    def _tokens_by_frame(self) -> list[Floats]:
        """Tokens of each frame; where frames do not say, the reply's tokens spread evenly over them."""
        shares = self.column("output_tokens") / np.maximum(self.frame_counts, 1)
        lists = self._lists("frame_tokens")
        pairs = zip(lists, shares, strict=True)
        return [np.full(len(t), share) if np.isnan(t).any() else t for t, share in pairs]

    # --- sums over time, of one cell -----------------------------------------------------------------------

    def span_s(self) -> float:
        """First send to last end."""
        sent, done = self._in_flight()
        return float(done.max() - sent.min()) if len(sent) else 0.0

    def steady(self) -> tuple[float, float]:
        """Tokens emitted, and seconds, while exactly `concurrency` requests were in flight."""
        edges, level = _levels(*self._in_flight())
        if not len(level):
            return 0.0, 0.0
        full = level == self.concurrency
        seconds = float(np.diff(edges)[full].sum())
        at, tokens = np.concatenate(self._frame_times), np.concatenate(self._tokens_by_frame)
        # A frame belongs to the interval that it ends: (edge, next edge].
        slot = np.searchsorted(edges, at, side="left") - 1
        inside = (slot >= 0) & (slot < len(level))
        kept = inside & full[np.clip(slot, 0, len(level) - 1)]
        if np.isnan(tokens[kept]).any():
            raise Missing("output_tokens is unknown for a reply that was in flight")
        return float(tokens[kept].sum()), seconds

    def _in_flight(self) -> tuple[Floats, Floats]:
        sent, done = self.seconds("sent_ns"), self.seconds("done_ns")
        done = np.where(np.isnan(done), self.seconds("last_output_ns"), done)
        known = np.isfinite(sent) & np.isfinite(done)
        return sent[known], done[known]

    def decoding(self) -> tuple[float, float]:
        """Stream-seconds between first and last output, and the seconds in which any stream decoded."""
        first, last = self.seconds("first_output_ns"), self.seconds("last_output_ns")
        known = self.ok & (last > first)
        edges, level = _levels(first[known], last[known])
        return float((last - first)[known].sum()), float(np.diff(edges)[level > 0].sum())

    def context_seconds(self) -> tuple[float, float]:
        """Token-seconds of context, and stream-seconds, over decoding streams."""
        prompt = self.column("prompt_tokens")
        weighted = seconds = 0.0
        for index in np.flatnonzero(self.ok & np.isfinite(prompt)):
            times, tokens = self._frame_times[index], self._tokens_by_frame[index]
            gaps = np.diff(times)
            if len(gaps) and np.isfinite(tokens).all():
                held = prompt[index] + np.cumsum(tokens)[:-1]
                weighted += float((held * gaps).sum())
                seconds += float(gaps.sum())
        return weighted, seconds

    # --- what steps emitted --------------------------------------------------------------------------------

    @cached_property
    def emitted(self) -> Floats:
        """Output tokens less those of prefill: steps + accepted_emitted by the engine, else all but one."""
        counted = self.column("steps") + self.column("accepted_emitted")
        by_total = np.maximum(self.column("output_tokens") - 1, 0.0)
        return np.where(np.isnan(counted), by_total, counted)


def _levels(start: Floats, end: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Edges of time, shape [n+1], and how many of the intervals [start, end) are open between them, [n]."""
    edges = np.unique(np.concatenate([start, end]))
    opened = np.searchsorted(np.sort(start), edges[:-1], side="right")
    closed = np.searchsorted(np.sort(end), edges[:-1], side="right")
    return edges, opened - closed


def _sum_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


# --- steps and acceptance ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Steps and the tokens they emitted (NaN where the replies' tokens are unknown).

    `remark` says so where some were not counted one by one, `server` whether they are the server's totals then.
    """

    steps: float
    emitted: float
    remark: str | None = None
    server: bool = False


@dataclass(frozen=True)
class Totals:
    """Sums of acceptance counts; `remark` says so where they are the server's over the whole cell."""

    values: dict[str, float]
    remark: str | None = None

    def __getitem__(self, name: str) -> float:
        return self.values[name]


CELL_LEVEL = "counted by the server over the whole cell, not per request"
CLOSE = 0.01
"""Steps that lie between two numbers as close as this are taken for the larger, so that AL_all is never too high."""


def steps_of(view: CellView) -> Steps:
    """Steps of all answered requests. Raises Missing where they are unknown and not narrowed down either.

    A reply whose frames hold several steps (a slow reader's) does not show them. It emitted its steps and what it
    accepted of drafts, but engines count what they accepted past its end too: the last draft's, at most k tokens.
    So its steps are emitted − accepted_verified, at least, and as many more as were cut off.
    """
    steps, emitted = view.column("steps")[view.answered], view.emitted[view.answered]
    if not len(steps):
        raise Missing("no request succeeded")
    unknown = np.isnan(steps)
    if not unknown.any():
        return Steps(float(steps.sum()), float(emitted.sum()))
    low, high, server = _between(view, emitted, unknown)
    whom = f"{int(unknown.sum())} of {len(steps)} replies"
    if high <= 0 or low > high:
        raise Missing(f"steps are unknown for {whom}, and the server's totals do not fit their tokens")
    bounds = f"{low:.0f} to {high:.0f} steps: unknown for {whom}, as accepted tokens past their end are counted too"
    if high - low > CLOSE * high:
        raise Missing(bounds)
    remark = bounds if low < high else CELL_LEVEL if server else None
    return Steps(high, float(emitted.sum()), remark, server)


def _between(view: CellView, emitted: Floats, unknown: Mask) -> tuple[float, float, bool]:
    """The least and the most that all steps can be, and whether they are the server's totals."""
    whom = f"steps are unknown for {int(unknown.sum())} of {len(unknown)} replies"
    steps, accepted, drafts = (
        view.column(name)[view.answered] for name in ("steps", "accepted_verified", "steps_with_draft")
    )
    if not np.isnan(accepted + drafts + emitted)[unknown].any():
        found = _bounds(emitted[unknown], accepted[unknown], drafts[unknown], replies=1, k=view.k)
        known = float(steps[~unknown].sum())
        return known + found[0], known + found[1], False
    if view.accepted_verified is None:
        raise Missing(whom)
    if np.isnan(emitted).any():
        raise Missing("output_tokens is unknown for a reply, and steps are not known per request")
    if view.count("failed"):
        raise Missing("the server's totals include requests that failed, and steps are not known per request")
    totals = (view.accepted_verified, view.steps_with_draft or 0)
    of_cell = (np.array([float(total)]) for total in (emitted.sum(), *totals))
    return *_bounds(*of_cell, replies=len(steps), k=view.k), True


def _bounds(
    emitted: Floats, accepted: Floats, drafts: Floats, *, replies: int, k: int | None
) -> tuple[float, float]:
    """Sums of the least and the most steps; each entry stands for so many replies, each cut within its last draft."""
    cut = accepted if k is None else np.minimum(accepted, k * replies)
    low = np.maximum(emitted - accepted, drafts)
    return float(low.sum()), float(np.minimum(emitted, emitted - accepted + cut).sum())


def totals_of(view: CellView, *names: str, server: bool = False) -> Totals:
    """Sums of `steps_with_draft`, `drafted` or `accepted_verified` over answered requests.

    Where a request does not know one of them (or `server` asks for it) all come from the server's totals,
    so that a ratio never mixes two counts. Raises Missing where neither is known.
    """
    columns = {name: view.column(name)[view.answered] for name in names}
    if not view.answered.any():
        raise Missing("no request succeeded")
    if not server and not any(np.isnan(values).any() for values in columns.values()):
        return Totals({name: float(values.sum()) for name, values in columns.items()})
    totals: dict[str, Any] = {name: getattr(view, name) for name in names}
    unknown = ", ".join(name for name in _unknown(totals))
    if unknown:
        raise Missing(f"{unknown}: known neither per request nor from the server's counters")
    return Totals({name: float(value) for name, value in totals.items()}, CELL_LEVEL)


def _unknown(totals: dict[str, Any]) -> Iterator[str]:
    return (name for name, value in totals.items() if value is None)
