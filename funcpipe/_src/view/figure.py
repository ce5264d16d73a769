"""The content of a figure: panels below each other with a common axis. `svg.py` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from funcpipe._src.core.shown import count_text
from funcpipe._src.data.result import Timeline
from funcpipe._src.view import summary
from funcpipe._src.view.align import aligned
from funcpipe._src.view.memory_levels import Levels, highest, levels
from funcpipe._src.view.palette import By

MARGIN = 16.0
"""Pixels around a figure."""


class LaneSizes(NamedTuple):
    """Pixels: the height of a lane, the distance between the tops of two lanes, the font size."""

    height: float
    pitch: float
    letters: float


class Panel(NamedTuple):
    """The content of one panel.

    Attributes:
        timeline: the timeline, in the unit of the axis.
        name: the first part of the title: the name of the timeline.
        origin: the second part of the title: simulated or measured, and the unit.
        words: the caption below the title.
        levels: the memory of the devices, drawn in place of the actions; None: draw actions.
        most: the amount of memory that fills a lane's height.
    """

    timeline: Timeline
    name: str
    origin: str
    words: tuple[str, ...]
    levels: Levels | None = None
    most: float = 1.0

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
    """The facts that all panels of a figure share.

    Attributes:
        axis: the timeline that sets the time axis.
        by: the meaning of colours.
        last: the index of the last stage of all timelines.
        left: the left edge of the charts, in pixels.
        chart: the width of the charts, in pixels.
        width: the width of the figure, in pixels.
    """

    axis: Timeline
    by: By
    last: int
    left: float
    chart: float
    width: float

    @property
    def scale(self) -> float:
        """Pixels per unit of time."""
        return self.chart / (self.axis.makespan or 1.0)


def panels_of(timelines: Sequence[Timeline], *, memory: bool) -> list[Panel]:
    """Return a panel for each timeline, and with ``memory`` one for its memory.

    Raises:
        ValueError: the timelines have no common axis.
    """
    drawn = aligned(timelines)
    held = [levels(timeline) if memory else () for timeline in drawn.timelines]
    peaks = [highest(devices) or 1.0 for devices in held]
    # Without a scaled timeline, all memory is assumed to be in one unit, and gets one scale.
    if not any(drawn.notes):
        peaks = [max(peaks)] * len(peaks)
    panels: list[Panel] = []
    rows = zip(timelines, drawn.timelines, drawn.notes, held, peaks, strict=True)
    for source, timeline, note, devices, peak in rows:
        counts = _counts(timeline)
        words = (*counts, *summary.numbers(timeline, drawn.axis), *([note] if note else []))
        if not timeline.spans:
            words = (counts[0], "no actions")
        origin = summary.origin(source, drawn.axis)
        panels.append(Panel(timeline, summary.title(source), origin, words))
        if memory and timeline.spans:
            scale = memory_scale(peak) if devices else "not known for this timeline"
            panels.append(Panel(timeline, "memory", "", (scale,), devices, peak))
    return panels


def memory_scale(peak: float) -> str:
    """The words that say how much memory fills a lane's height."""
    return f"the height of a lane is {summary.amount_text(peak)}"


def _counts(timeline: Timeline) -> tuple[str, ...]:
    """How many devices, stages and microbatches there are."""
    stages = {span.action.stage for span in timeline.spans}
    microbatches = {span.action.microbatch for span in timeline.spans}
    slices = {span.action.slice for span in timeline.spans if span.action.slice is not None}
    counts = {"device": timeline.num_devices, "stage": len(stages), "microbatch": len(microbatches)}
    counts |= {"slice": len(slices)} if slices else {}
    return tuple([count_text(count, word) for word, count in counts.items()])


def frame_of(timelines: Sequence[Timeline], by: By) -> Frame:
    """The frame that fits all of the timelines. Short actions get room for their numbers, if there
    is any."""
    axis = max(timelines, key=lambda timeline: timeline.makespan)
    end = axis.makespan or 1.0
    drawn = [timeline for timeline in timelines if timeline.spans]
    short = min(
        (summary.quantile(summary.lengths(timeline), 0.1) for timeline in drawn), default=end
    )
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
