"""How numbers look: one function per kind of quantity, shared by HTML, Markdown and figures.

Boundary: turns a value into text and nothing else. What is unknown (None, NaN, infinite) prints as an en
dash, never as 0. Times print in milliseconds, shares in per cent; the unit itself stands in the header.
"""

from __future__ import annotations

import math
import re

from specbench.results import Ratio

MISSING = "–"


def known(value: float | None) -> bool:
    """True for a number that can be printed or drawn."""
    return value is not None and math.isfinite(value)


def number(value: float | None, digits: int = 4) -> str:
    """A plain number to `digits` significant digits; whole numbers in full, with thousands separators."""
    if value is None or not math.isfinite(value):
        return MISSING
    if float(value).is_integer() and abs(value) < 1e15:
        return _minus(f"{int(value):,}")
    magnitude = math.floor(math.log10(abs(value)))
    if -4 <= magnitude < 12:
        return _minus(f"{value:,.{max(digits - 1 - magnitude, 0)}f}")
    return _minus(f"{value:.{digits - 1}e}")


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds to three significant digits, without the unit."""
    return MISSING if seconds is None else number(seconds * 1e3, 3)


def percent(share: float | None) -> str:
    """A share (0 to 1) in per cent with one decimal, without the sign."""
    return MISSING if share is None or not math.isfinite(share) else _minus(f"{share * 100:.1f}")


def fixed(value: float | None) -> str:
    """A number near 1, such as an acceptance length, with two decimals."""
    return MISSING if value is None or not math.isfinite(value) else _minus(f"{value:.2f}")


def times(value: float | None) -> str:
    """A ratio with its sign, such as `1.21×`."""
    return MISSING if value is None or not math.isfinite(value) else f"{bare(value)}×"


def interval(ratio: Ratio | None) -> str:
    """An estimate with its interval, such as `1.21× [1.15, 1.27]`."""
    if ratio is None:
        return MISSING
    return f"{times(ratio.estimate)} [{bare(ratio.low)}, {bare(ratio.high)}]"


def tight(sentence: str) -> str:
    """A sentence whose intervals, such as `1.21× [1.15, 1.27]`, do not break across lines."""
    return re.sub(r"× \[(\S+), (\S+)\]", "×\u00a0[\\1,\u00a0\\2]", sentence)


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `1,200 blocks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bare(value: float) -> str:
    """A ratio without its sign, for the ends of an interval."""
    if not math.isfinite(value):
        return MISSING
    return f"{value:.2f}" if abs(value) < 10 else number(value, 3)


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text
