"""Level of detail: actions too narrow to see, side by side, become one bar that shows their shares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from funcpipe.core.result import Span

_LEAST = 1.5
"""Pixels. The narrowest action that is drawn as itself where there are too many."""
_WIDE = 4
"""A bar is at least this many times as wide as the narrowest action."""
_ALIKE = 0.08
"""Bars that touch become one if no share of theirs differs more."""


class Piece(NamedTuple):
    """One action, or several as one bar.

    Attributes:
        start, end: in the timeline's unit.
        spans: what it stands for.
    """

    start: float
    end: float
    spans: Sequence[Span]


class _Bar(NamedTuple):
    """A bar while it is made: the spans from ``first`` to ``last`` of a lane, and its shares when it began."""

    start: float
    end: float
    first: int
    last: int
    shares: dict[Hashable, float]


def pieces(
    lanes: Sequence[Sequence[Span]], scale: float, most: int, key: Callable[[Span], Hashable]
) -> list[list[Piece]]:
    """What to draw in each lane.

    Args:
        lanes: spans that do not overlap, by start.
        scale: pixels per unit of time.
        most: more pieces than this are too many. If all actions fit, each is a piece; else those narrower than some
            width, the smallest that does, are joined.
        key: what a span shows as; bars show the shares of these.
    """
    if sum(map(len, lanes)) <= most:
        return [[Piece(span.start, span.end, (span,)) for span in lane] for lane in lanes]
    least = _LEAST / scale
    while True:
        bars = [_bars(lane, least, key) for lane in lanes]
        # Where all are as wide as the picture there is nothing left to join.
        if sum(map(len, bars)) <= most or all(len(row) <= 1 for row in bars):
            return [[Piece(bar.start, bar.end, lane[bar.first : bar.last + 1]) for bar in row]
                    for lane, row in zip(lanes, bars, strict=True)]  # fmt: skip
        least *= 2


def _bars(lane: Sequence[Span], least: float, key: Callable[[Span], Hashable]) -> list[_Bar]:
    """The lane's actions and bars: a bar begins and ends with an action, and no long idle time is in it."""
    out: list[_Bar] = []
    at = 0
    while at < len(lane):
        first, start, end = at, lane[at].start, lane[at].end
        shares: dict[Hashable, float] = {}
        while at < len(lane):
            span = lane[at]
            length = span.end - span.start
            if at > first and (length >= least or span.start - end >= least or end - start >= _WIDE * least):
                break
            shares[key(span)] = shares.get(key(span), 0.0) + length
            end, at = max(end, span.end), at + 1
            if length >= least:
                break
        whole = end - start
        bar = _Bar(start, end, first, at - 1, {name: time / whole for name, time in shares.items()} if whole else {})
        if out and at - first > 1 and _alike(out[-1], bar, least):
            bar = bar._replace(start=out[-1].start, first=out[-1].first, shares=out[-1].shares)
            out.pop()
        out.append(bar)
    return out


def _alike(one: _Bar, other: _Bar, least: float) -> bool:
    """Can they become one: both are joined, they touch, and look the same."""
    if one.last == one.first or other.start - one.end >= least:
        return False
    return all(
        abs(one.shares.get(name, 0.0) - other.shares.get(name, 0.0)) <= _ALIKE for name in {*one.shares, *other.shares}
    )
