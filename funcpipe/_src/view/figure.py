"""Bring several timelines to one time unit, with captions: the panels of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from funcpipe._src.core.shown import count_text
from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.view import summary
from funcpipe._src.view.memory_levels import Levels, highest, levels
from funcpipe._src.view.palette import By

MARGIN = 16.0  # pixels around a figure
_FREE = "units"
"""The unit of simulated timelines. Its meaning is free, so such timelines may be scaled."""


class LaneSizes(NamedTuple):
    """Pixels: the height of a lane, the distance between the tops of two lanes, the font size."""

    height: float
    pitch: float
    letters: float


class Panel(NamedTuple):
    """The content of one panel."""

    timeline: Timeline  # the timeline, in the unit of the axis
    name: str  # the first part of the title: the name of the timeline
    origin: str  # the second part of the title: simulated or measured, and the unit
    words: tuple[str, ...]  # the caption below the title
    # The memory of the devices, drawn in place of the actions; None: draw actions.
    levels: Levels | None = None
    most: float = 1.0  # the amount of memory that fills a lane's height

    @property
    def has_lanes(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.timeline.spans) and self.levels != ()

    @property
    def lane(self) -> LaneSizes:
        """The sizes of a lane: smaller where there are many."""
        if self.timeline.num_devices <= 8:
            return LaneSizes(30, 35, 12)
        if self.timeline.num_devices <= 16:
            return LaneSizes(22, 25, 12)
        return LaneSizes(16, 18, 12) if self.levels is None else LaneSizes(11, 13, 10)


class Frame(NamedTuple):
    """The facts that all panels of a figure share."""

    axis: Timeline  # the timeline that sets the time axis
    by: By  # the meaning of colours
    last: int  # the index of the last stage of all timelines
    left: float  # the left edge of the charts, in pixels
    chart: float  # the width of the charts, in pixels
    width: float  # the width of the figure, in pixels

    @property
    def scale(self) -> float:
        """Pixels per unit of time."""
        return self.chart / (self.axis.makespan or 1.0)


class Aligned(NamedTuple):
    """A panel for each timeline, the longest timeline, and whether some were scaled to its unit."""

    panels: list[Panel]
    axis: Timeline
    is_scaled: bool


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
    drawn, notes = [*timelines], [""] * len(timelines)
    if units:
        unit = units[0]
        fixed = next(timeline for timeline in timelines if timeline.unit == unit)
        for at, timeline in enumerate(timelines):
            if timeline.unit == _FREE:
                factor = _factor(timeline, fixed)
                drawn[at] = _scaled(timeline, factor, unit)
                # A factor of 1 up to rounding (simulated with mean measured times) needs no note.
                if abs(factor - 1) > 1e-9:
                    length = summary.time_text_to(factor, unit)(factor)
                    notes[at] = f"scaled to the same work, 1 unit is {length}"
    axis = max(drawn, key=lambda timeline: timeline.makespan)
    panels: list[Panel] = []
    for source, timeline, note in zip(timelines, drawn, notes, strict=True):
        words = (*summary.numbers(timeline, axis), *([note] if note else []))
        origin = summary.origin(source, axis)
        panels.append(Panel(timeline, summary.title(source), origin, words))
    return Aligned(panels, axis, any(notes))


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


def panels_of(timelines: Sequence[Timeline], *, memory: bool) -> list[Panel]:
    """Return a panel for each timeline, and with ``memory`` one for its memory.

    Raises:
        ValueError: the timelines have no common axis.
    """
    drawn = aligned(timelines)
    held = [levels(panel.timeline) if memory else () for panel in drawn.panels]
    peaks = [highest(devices) or 1.0 for devices in held]
    # Without a scaled timeline, all memory is assumed to be in one unit, and gets one scale.
    if not drawn.is_scaled:
        peaks = [max(peaks)] * len(peaks)
    panels: list[Panel] = []
    for panel, devices, peak in zip(drawn.panels, held, peaks, strict=True):
        timeline = panel.timeline
        counts = _counts(timeline)
        words = (*counts, *panel.words) if timeline.spans else (counts[0], "no actions")
        panels.append(panel._replace(words=words))
        if memory and timeline.spans:
            scale = memory_scale(peak) if devices else "not known for this timeline"
            panels.append(Panel(timeline, "memory", "", (scale,), devices, peak))
    return panels


def memory_scale(peak: float) -> str:
    """The words that say how much memory fills a lane's height."""
    return f"the height of a lane is {summary.amount_text(peak)}"


def _counts(timeline: Timeline) -> tuple[str, ...]:
    """How many devices, stages and microbatches there are."""
    actions = [span.action for span in timeline.spans]
    counts = {
        "device": timeline.num_devices,
        "stage": len({action.stage for action in actions}),
        "microbatch": len({action.microbatch for action in actions}),
    }
    if slices := {action.slice for action in actions} - {None}:
        counts["slice"] = len(slices)
    return tuple([count_text(count, word) for word, count in counts.items()])


def frame_of(timelines: Sequence[Timeline], by: By) -> Frame:
    """The frame that fits all of the timelines. Short actions get room for their numbers, if there
    is any."""
    axis = max(timelines, key=lambda timeline: timeline.makespan)
    end = axis.makespan or 1.0
    drawn = [timeline.spans for timeline in timelines if timeline.spans]
    short = min((summary.length_quantile(spans, 0.1) for spans in drawn), default=end)
    chart = min(1240.0, max(640.0, 24 * end / short))
    names = [
        summary.device_name(timeline, device)
        for timeline in timelines
        for device in range(max(1, timeline.num_devices))
    ]
    left = MARGIN + 5 + 7 * max(map(len, names))
    peaks = [text for timeline in timelines for text in summary.side_columns(timeline)[1]]
    width = left + chart + MARGIN + 44 + (16 + 7 * max(4, *map(len, peaks)) if any(peaks) else 0)
    last = max((span.action.stage for timeline in timelines for span in timeline.spans), default=0)
    return Frame(axis, by, last, left, chart, width)
