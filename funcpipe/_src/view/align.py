"""Bring several timelines to one time unit, for pictures with a common axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.view import summary

_FREE = "units"
"""The unit of simulated timelines. Its meaning is free, so such timelines may be scaled."""


class Aligned(NamedTuple):
    """Timelines in one unit with different names, and a note on the scale of each ("" for none)."""

    timelines: tuple[Timeline, ...]
    notes: tuple[str, ...]

    @property
    def axis(self) -> Timeline:
        """The longest timeline, which sets the time axis."""
        return max(self.timelines, key=lambda timeline: timeline.makespan)


def aligned(timelines: Sequence[Timeline]) -> Aligned:
    """Return the timelines in one unit.

    If some timelines are in seconds, simulated timelines in units are scaled. Their devices then
    work as long in total as the devices of the first timeline in seconds.

    Raises:
        ValueError: the units are incompatible, or a timeline has no work to scale by.
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
            # A factor of 1 up to rounding (simulated with mean measured times) needs no note.
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
    """Return the factor that makes a timeline's work equal to another's."""
    if not timeline.spans:
        return 1.0
    for worker in (timeline, fixed):
        if sum(worker.busy) <= 0:
            raise ValueError(
                f"times in units are scaled to {fixed.unit!r} by the work of both timelines, but "
                f"{summary.title(worker)!r} has no work; simulate with times in that unit, and set "
                "the unit of the timeline"
            )
    return sum(fixed.busy) / sum(timeline.busy)


def _scaled(timeline: Timeline, factor: float, unit: str) -> Timeline:
    """Return the timeline with all times multiplied by a factor, in another unit."""
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
