"""What devices hold over time, as levels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple

from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Schedule
from funcpipe.schedules.memory import residual_levels


class Level(NamedTuple):
    """What a device holds for some time.

    Attributes:
        start, end: in the timeline's unit. They are the same where what is held for no time is the most.
        amount: how much, in the unit of `Timeline.peak`.
    """

    start: float
    end: float
    amount: float


Levels = tuple[tuple[Level, ...], ...]
"""For each device, by start."""


def levels(timeline: Timeline) -> Levels:
    """What each device holds: as simulated, or counted where only the peaks were; empty where neither is known."""
    if timeline.memory:
        return tuple(_levels(steps, timeline.makespan) for steps in timeline.memory)
    orders = tuple(tuple(span.action for span in lane) for lane in lanes(timeline))
    counted = count(Schedule(orders), timeline)
    most = tuple(max((level.amount for level in lane), default=0.0) for lane in counted)
    return counted if timeline.peak == most else ()  # else the peaks are in another unit than residuals


def count(schedule: Schedule, timeline: Timeline) -> Levels:
    """How many residuals each device holds when, by the rules of `Timeline.peak`."""
    out: list[tuple[Level, ...]] = []
    for lane, order in zip(lanes(timeline), schedule.orders, strict=True):
        pairs = zip(lane, residual_levels(order, schedule), strict=True)
        steps = [step for span, (during, after) in pairs for step in ((span.start, during), (span.end, after))]
        out.append(_levels(steps, timeline.makespan))
    return tuple(out)


def lanes(timeline: Timeline) -> list[list[Span]]:
    """The spans of each device, by start."""
    out: list[list[Span]] = [[] for _ in range(timeline.num_devices)]
    for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
        out[span.device].append(span)
    return out


def _levels(steps: Iterable[tuple[float, float]], end: float) -> tuple[Level, ...]:
    """The levels between the steps; of those that last no time only the highest of all, and only if it is the peak."""
    changes: list[tuple[float, float]] = []
    for time, amount in steps:
        if not changes or amount != changes[-1][1]:
            changes.append((time, amount))
    ends = [*changes[1:], (max(end, changes[-1][0]), 0.0)] if changes else []
    made = [Level(start, until, amount) for (start, amount), (until, _) in zip(changes, ends, strict=True)]
    lasting = [level for level in made if level.end > level.start]
    highest = max(made, key=lambda level: level.amount, default=None)
    if highest is not None and all(level.amount < highest.amount for level in lasting):
        lasting = sorted([*lasting, highest])
    return _joined(lasting)


def _joined(found: Sequence[Level]) -> tuple[Level, ...]:
    """Neighbours of one height as one level."""
    out: list[Level] = []
    for level in found:
        if out and out[-1].amount == level.amount and out[-1].end == level.start:
            out[-1] = out[-1]._replace(end=level.end)
        else:
            out.append(level)
    return tuple(out)


def coarse(found: Sequence[Level], step: float) -> tuple[Level, ...]:
    """The most that is held in each slice of this length: never less than what is held."""
    if not found:
        return ()
    most = [0.0] * max(1, ceil(max(level.end for level in found) / step))
    for start, end, amount in found:
        for at in range(floor(start / step), max(floor(start / step) + 1, ceil(end / step))):
            most[min(at, len(most) - 1)] = max(most[min(at, len(most) - 1)], amount)
    edges = [at * step for at in range(len(most))] + [max(level.end for level in found)]
    return _joined([Level(a, b, amount) for (a, b), amount in zip(pairwise(edges), most, strict=True)])
