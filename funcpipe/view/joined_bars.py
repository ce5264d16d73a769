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


class ActionBar(NamedTuple):
    """One action, or several as one bar, from when to when in the timeline's unit."""

    start: float
    end: float
    spans: Sequence[Span]


class _OpenBar(NamedTuple):
    """A bar while it is made: the spans from ``first`` to ``last`` of a track, and its shares when it began."""

    start: float
    end: float
    first: int
    last: int
    shares: dict[Hashable, float]


def joined_bars(
    tracks: Sequence[Sequence[Span]], scale: float, limit: int, key: Callable[[Span], Hashable]
) -> list[list[ActionBar]]:
    """What to draw in each track.

    Args:
        tracks: spans that do not overlap, by start.
        scale: pixels per unit of time.
        limit: more bars than this are too many. If all actions fit, each is a bar; else those narrower than some
            width, the smallest that does, are joined.
        key: what a span shows as; bars show the shares of these.
    """
    if sum(map(len, tracks)) <= limit:
        return [[ActionBar(span.start, span.end, (span,)) for span in spans] for spans in tracks]
    least = _LEAST / scale
    while True:
        runs = [_runs(spans, least, key) for spans in tracks]
        # Where all are as wide as the picture there is nothing left to join.
        if sum(map(len, runs)) <= limit or all(len(row) <= 1 for row in runs):
            return [
                [ActionBar(run.start, run.end, spans[run.first : run.last + 1]) for run in row]
                for spans, row in zip(tracks, runs, strict=True)
            ]
        least *= 2


def _runs(spans: Sequence[Span], least: float, key: Callable[[Span], Hashable]) -> list[_OpenBar]:
    """The track's actions and bars: a bar begins and ends with an action, and no long idle time is in it."""
    runs: list[_OpenBar] = []
    index = 0
    while index < len(spans):
        first, start, end = index, spans[index].start, spans[index].end
        times: dict[Hashable, float] = {}
        while index < len(spans):
            span = spans[index]
            length = span.end - span.start
            if index > first and (length >= least or span.start - end >= least or end - start >= _WIDE * least):
                break
            times[key(span)] = times.get(key(span), 0.0) + length
            end, index = max(end, span.end), index + 1
            if length >= least:
                break
        whole = end - start
        run = _OpenBar(
            start, end, first, index - 1, {name: time / whole for name, time in times.items()} if whole else {}
        )
        if runs and index - first > 1 and _alike(runs[-1], run, least):
            before = runs.pop()
            run = run._replace(start=before.start, first=before.first, shares=before.shares)
        runs.append(run)
    return runs


def _alike(before: _OpenBar, after: _OpenBar, least: float) -> bool:
    """Whether two bars can become one: both are joined, they touch, and look the same."""
    if before.last == before.first or after.start - before.end >= least:
        return False
    names = {*before.shares, *after.shares}
    return all(abs(before.shares.get(name, 0.0) - after.shares.get(name, 0.0)) <= _ALIKE for name in names)
