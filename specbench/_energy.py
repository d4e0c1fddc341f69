"""Energy of a view's cells: joules, mean power, and what a token took of them.

Boundary: metrics of what `telemetry` metered, which also says whose energy it is. It is of a cell's whole
window, so its tokens are those of every answered request, and what failed requests burnt is in it.
"""

from __future__ import annotations

from specbench._view import CellView, Missing

Value = tuple[float, str | None]


def energy_j(view: CellView) -> Value:
    """Joules of all cells together; the remark says whose. Raises Missing where one cell's are unknown."""
    if not view.metered:
        raise Missing("energy is metered for a whole cell, not for a part of its requests")
    for cell in view.metered:
        if cell.energy_j is None:
            raise Missing(cell.note)
    total = sum(cell.energy_j or 0.0 for cell in view.metered)
    return total, "; ".join(dict.fromkeys(cell.note for cell in view.metered))


def power_mean_w(view: CellView) -> Value:
    """Joules over the seconds in which they were metered."""
    joules, remark = energy_j(view)
    seconds = sum(cell.seconds or 0.0 for cell in view.metered)
    if seconds <= 0:
        raise Missing("the time in which energy was metered is unknown")
    return joules / seconds, remark


def energy_per_token_j(view: CellView) -> Value:
    """Joules over output tokens; undefined where none was produced."""
    joules, remark = energy_j(view)
    tokens = view.total("output_tokens")
    if tokens <= 0:
        raise Missing("no token was produced")
    return joules / tokens, remark


def tokens_per_j(view: CellView) -> Value:
    """Output tokens over joules."""
    each, remark = energy_per_token_j(view)
    return 1 / each, remark
