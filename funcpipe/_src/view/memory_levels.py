"""The memory of devices over time, as levels for pictures.

`schedules/memory.py` has the rules of residuals, `play.py` simulates memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple

from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.schedules.memory import residual_levels


class Level(NamedTuple):
    """A constant amount of memory of a device for some time."""

    # `start`, `end`: the interval, in the timeline's unit. They are equal for a peak without
    # duration.
    start: float
    end: float
    amount: float  # the amount, in the unit of `Timeline.peak`


Levels = tuple[tuple[Level, ...], ...]  # for each device, by start


def levels(timeline: Timeline) -> Levels:
    """Return the memory of each device over time; () if it is not known.

    Simulated timelines have it. For measured timelines, residuals are counted.
    """
    if timeline.memory:
        return tuple(_levels(steps, timeline.makespan) for steps in timeline.memory)
    orders = tuple(tuple(span.action for span in spans) for spans in spans_by_device(timeline))
    counted = count_residuals(Schedule(orders), timeline)
    peaks = tuple(highest([device]) for device in counted)
    # If the counted peaks differ, the timeline's peaks are in another unit than residuals.
    return counted if timeline.peak == peaks else ()


def count_residuals(schedule: Schedule, timeline: Timeline) -> Levels:
    """Count the residuals of each device over time, by the rules of `Timeline.peak`."""
    counted: list[tuple[Level, ...]] = []
    for spans in spans_by_device(timeline, schedule):
        order = tuple(span.action for span in spans)
        residuals = zip(spans, residual_levels(order, schedule), strict=True)
        steps = [
            step
            for span, (during, after) in residuals
            for step in ((span.start, during), (span.end, after))
        ]
        counted.append(_levels(steps, timeline.makespan))
    return tuple(counted)


def spans_by_device(timeline: Timeline, schedule: Schedule | None = None) -> list[list[Span]]:
    """Return the spans of each device, ordered by start.

    The two spans of a pair are in the order of the schedule, whichever began first.
    """
    devices: list[list[Span]] = [[] for _ in range(timeline.num_devices)]
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        devices[span.device].append(span)
    pairs = frozenset[object]() if schedule is None else schedule.pairs
    for spans in devices if pairs else ():
        for at in range(len(spans) - 1):
            one, other = spans[at : at + 2]
            if (other.action, one.action) in pairs:
                spans[at : at + 2] = [other, one]
    return devices


def highest(devices: Iterable[Sequence[Level]]) -> float:
    """Return the most memory of any device; 0 if nothing is known."""
    return max((level.amount for device in devices for level in device), default=0.0)


def highest_in_slices(device: Sequence[Level], scale: float, count: int) -> list[float]:
    """Return the most memory in each of ``count`` intervals; ``scale`` intervals make one unit."""
    peaks = [0.0] * count
    for start, end, amount in device:
        # With the slack, a level that ends at the begin of an interval, up to rounding, does not
        # count in this interval.
        first = min(floor(start * scale + 1e-9), count - 1)
        for at in range(first, max(first + 1, min(count, ceil(end * scale - 1e-9)))):
            peaks[at] = max(peaks[at], amount)
    return peaks


def coarse(device: Sequence[Level], step: float) -> tuple[Level, ...]:
    """Return levels of at least a given length, each with the most memory in its interval."""
    if not device:
        return ()
    end = max(level.end for level in device)
    peaks = highest_in_slices(device, 1 / step, max(1, ceil(end / step)))
    edges = [*(at * step for at in range(len(peaks))), end]
    return _joined(
        [Level(a, b, amount) for (a, b), amount in zip(pairwise(edges), peaks, strict=True)]
    )


def _levels(steps: Iterable[tuple[float, float]], end: float) -> tuple[Level, ...]:
    """Return the levels between steps.

    Levels without duration are dropped, except the highest level of all if it has no duration.
    """
    changes = list(steps)
    if not changes:
        return ()
    ends = [*(time for time, _ in changes[1:]), max(end, changes[-1][0])]
    every = [
        Level(start, until, amount) for (start, amount), until in zip(changes, ends, strict=True)
    ]
    lasting = [level for level in every if level.end > level.start]
    peak = max(every, key=lambda level: level.amount)
    return _joined(
        sorted([*lasting, peak]) if highest([lasting]) < peak.amount or not lasting else lasting
    )


def _joined(device: Sequence[Level]) -> tuple[Level, ...]:
    """Join neighbouring levels of equal height."""
    joined: list[Level] = []
    for level in device:
        if joined and joined[-1].amount == level.amount and joined[-1].end == level.start:
            joined[-1] = joined[-1]._replace(end=level.end)
        else:
            joined.append(level)
    return tuple(joined)
