"""Several timelines on one time axis: one unit for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.view import summary

_FREE = "units"
"""The unit of simulated timelines: whatever their cost meant, so it may be scaled."""


class Aligned(NamedTuple):
    """Timelines in one unit, with names that tell them apart; for each a note how it was scaled, or
    none."""

    timelines: tuple[Timeline, ...]
    notes: tuple[str, ...]

    @property
    def axis(self) -> Timeline:
        """The longest, which gives the axis."""
        return max(self.timelines, key=lambda timeline: timeline.makespan)


def aligned(timelines: Sequence[Timeline]) -> Aligned:
    """The timelines in one unit.

    Simulated ones, in units, are scaled where others are in another unit (seconds): so that their
    devices together work as long as those of the first of the others.

    Raises:
        ValueError: their units have nothing to do with each other, or there is no work to scale by.
    """
    units = sorted({timeline.unit for timeline in timelines if timeline.unit != _FREE})
    if len(units) > 1:
        raise ValueError(
            f"one time axis has one unit; got {', '.join(map(repr, units))}: draw them one by one"
        )
    if not units:
        return Aligned(tuple(timelines), ("",) * len(timelines))
    (unit,) = units
    fixed = next(timeline for timeline in timelines if timeline.unit == unit)
    same_names = len({summary.title(timeline) for timeline in timelines}) < len(timelines)
    drawn: list[Timeline] = []
    notes: list[str] = []
    for timeline in timelines:
        note = ""
        name = f"{summary.title(timeline)}, {'simulated' if timeline.unit == _FREE else 'measured'}"
        if timeline.unit == _FREE:
            factor = _factor(timeline, fixed)
            # The mean measured times need no scaling, and rounding is no news.
            if abs(factor - 1) > 1e-9:
                note = (
                    "scaled to the same work, 1 unit is "
                    f"{summary.time_text_to(factor, unit)(factor)}"
                )
            timeline = _scaled(timeline, factor, unit)
        drawn.append(replace(timeline, name=name) if same_names and unit == "s" else timeline)
        notes.append(note)
    return Aligned(tuple(drawn), tuple(notes))


def _factor(timeline: Timeline, fixed: Timeline) -> float:
    """By how much to stretch a timeline so that its work is that of another."""
    if not timeline.spans:
        return 1.0
    for worker in (timeline, fixed):
        if sum(worker.busy) <= 0:
            raise ValueError(
                f"times in units are scaled to {fixed.unit!r} by the work of both, and "
                f"{summary.title(worker)!r} has none; simulate with times in that unit and give "
                "the timeline that unit"
            )
    return sum(fixed.busy) / sum(timeline.busy)


def _scaled(timeline: Timeline, factor: float, unit: str) -> Timeline:
    """The timeline with all times multiplied by a factor, in another unit."""
    comm = timeline.comm
    return replace(
        timeline,
        spans=tuple(
            Span(device, start * factor, end * factor, action)
            for device, start, end, action in timeline.spans
        ),
        unit=unit,
        comm=tuple(latency * factor for latency in comm)
        if isinstance(comm, Sequence)
        else comm * factor,
        memory=tuple(
            tuple((time * factor, amount) for time, amount in steps) for steps in timeline.memory
        ),
    )
