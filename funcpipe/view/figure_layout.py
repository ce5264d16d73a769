"""Where things are in a figure: panels below each other on one time axis, in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Kind
from funcpipe.view import summary
from funcpipe.view.align import Aligned
from funcpipe.view.memory_levels import Levels, highest, levels
from funcpipe.view.palette import MOVES, By, Shade, legend, shades_of

MARGIN = 16.0
_FOOT = 30.0
"""The room for the times below a panel."""
_LETTER = 6.4
"""The width of a letter, on average, at the size of most of the text."""


class Content(NamedTuple):
    """What a panel shows.

    Attributes:
        timeline: in the unit of the axis.
        title: its heading.
        words: what stands below that.
        levels: what the devices hold, to be drawn instead of what they do.
        most: the amount that fills a lane's height, where levels are drawn.
    """

    timeline: Timeline
    title: str
    words: tuple[str, ...]
    levels: Levels | None = None
    most: float = 1.0

    @property
    def has_lanes(self) -> bool:
        """Is there anything to draw."""
        return bool(self.timeline.spans) and self.levels != ()


class Track(NamedTuple):
    """Actions of a device that do not overlap, and their place in its lane.

    Attributes:
        device: whose.
        top, height: in pixels from the top of the lane.
        spans: by start.
    """

    device: int
    top: float
    height: float
    spans: list[Span]


class Panel(NamedTuple):
    """A content and its place.

    Attributes:
        content: what it shows.
        shades: of its actions, by (device, kind, stage).
        lines: the words below the heading; behind it where the panel is one of memory below another.
        top: of the heading.
        legend: of the legend, where this panel has it.
        lanes: of the first lane.
        bar: height of a lane.
        pitch: from lane to lane.
        label: size of the letters beside the lanes.
        font: size of those in the actions.
        least: the width that an action needs to show its number.
    """

    content: Content
    shades: dict[tuple[int, Kind, int], Shade]
    lines: list[str]
    top: float
    legend: float | None
    lanes: float
    bar: float
    pitch: float
    label: float
    font: float
    least: float

    @property
    def bottom(self) -> float:
        """Of its last lane."""
        return self.lanes + (self.content.timeline.num_devices * self.pitch if self.content.has_lanes else 0.0)

    def shade(self, span: Span) -> Shade:
        """Of an action."""
        kind, stage, _ = span.action
        return self.shades[span.device, kind, stage]

    def tracks(self) -> list[Track]:
        """What runs in its lanes; what moves to the host (O) and back (L) has thin strips at the bottom."""
        moves = [kind for kind in summary.kinds_in(self.content.timeline) if kind in MOVES]
        thin = max(2.0, round(self.bar * 0.14))
        places: dict[Kind, tuple[int, float, float]] = {
            kind: (at + 1, self.bar - (len(moves) - at) * thin, thin) for at, kind in enumerate(moves)
        }
        work = (0, 0.0, self.bar - len(moves) * thin - (1 if moves else 0))
        tracks: dict[tuple[int, int], Track] = {}
        for span in sorted(self.content.timeline.spans, key=lambda span: (span.start, span.end)):
            strip, top, height = places.get(span.action.kind, work)
            tracks.setdefault((span.device, strip), Track(span.device, top, height, [])).spans.append(span)
        return [track for _, track in sorted(tracks.items())]


class LegendEntry(NamedTuple):
    """A colour's meaning.

    Attributes:
        x: of its left edge.
        shades: its swatches.
        word: what they mean.
    """

    x: float
    shades: tuple[Shade, ...]
    word: str


class Figure(NamedTuple):
    """A whole picture.

    Attributes:
        axis: the timeline that gives the time axis.
        by: what colours tell.
        left: of the charts.
        chart: their width.
        width, height: of the picture.
        panels: from top to bottom.
        legend: lines of entries.
    """

    axis: Timeline
    by: By
    left: float
    chart: float
    width: float
    height: float
    panels: tuple[Panel, ...]
    legend: list[list[LegendEntry]]

    @property
    def scale(self) -> float:
        """Pixels per unit of time."""
        return self.chart / (self.axis.makespan or 1.0)


def contents(aligned: Aligned, *, memory: bool) -> list[Content]:
    """A content for each timeline, and one for its memory."""
    drawn: list[Content] = []
    held = [levels(timeline) if memory else () for timeline in aligned.timelines]
    scales = [highest(devices) or 1.0 for devices in held]
    if not any(aligned.notes):  # one unit of memory, as far as anybody can know
        scales = [max(scales)] * len(scales)
    for timeline, note, devices, most in zip(aligned.timelines, aligned.notes, held, scales, strict=True):
        words = (*_counts(timeline), *summary.numbers(timeline, aligned.axis), *([note] if note else []))
        if not timeline.spans:
            words = (words[0], "no actions")
        drawn.append(Content(timeline, summary.title(timeline), words))
        if memory and timeline.spans:
            scale = memory_scale(most) if devices else "not known for this timeline"
            drawn.append(Content(timeline, "memory", (scale,), devices, most))
    return drawn


def memory_scale(most: float) -> str:
    """How a picture says its scale of memory."""
    return f"the height of a lane is {summary.amount_text(most)}"


def _counts(timeline: Timeline) -> tuple[str, ...]:
    """How many devices, stages and microbatches there are."""
    stages = {span.action.stage for span in timeline.spans}
    microbatches = {span.action.microbatch for span in timeline.spans}
    counts = (timeline.num_devices, len(stages), len(microbatches))
    return tuple(map(summary.count_text, counts, ("device", "stage", "microbatch")))


def layout(contents: Sequence[Content], timelines: Sequence[Timeline], *, by: By = "kind") -> Figure:
    """Give everything its place.

    Args:
        contents: what to show, from top to bottom.
        timelines: all on whose axis this is drawn; pictures with the same timelines have the same scale.
        by: what colours tell.
    """
    axis = max(timelines, key=lambda timeline: timeline.makespan)
    end = axis.makespan or 1.0
    short = min((summary.quantile(_times(timeline), 0.1) for timeline in timelines if timeline.spans), default=end)
    chart = min(1240.0, max(640.0, 24 * end / short)) if axis.spans else 640.0
    names = [summary.device_name(line, device) for line in timelines for device in range(max(1, line.num_devices))]
    left = MARGIN + 5 + 7 * max(map(len, names))
    peaks = [text for timeline in timelines for text in summary.side_columns(timeline)[1]]
    width = left + chart + MARGIN + 44 + (16 + 7 * max(4, *map(len, peaks)) if peaks else 0)
    entries = _legend_lines([content.timeline for content in contents if content.levels is None], by, width)
    last = max((span.action.stage for content in contents for span in content.timeline.spans), default=0)
    panels: list[Panel] = []
    top = 0.0
    for content in contents:
        shades = shades_of(content.timeline, by, last)
        panels.append(_panel(content, shades, top, width, chart / end, by, 0 if panels else len(entries)))
        top = panels[-1].bottom + (_FOOT if content.has_lanes else 4)
    return Figure(axis, by, left, chart, width, top + 12, tuple(panels), entries)


def _legend_lines(timelines: Sequence[Timeline], by: By, width: float) -> list[list[LegendEntry]]:
    """Lines of entries that fit."""
    lines: list[list[LegendEntry]] = [[]]
    x = MARGIN
    for shades, word in legend(timelines, by):
        wide = 12 * len(shades) + (6 if shades else 0) + _LETTER * len(word)
        if lines[-1] and x + wide > width - MARGIN:
            lines.append([])
            x = MARGIN
        lines[-1].append(LegendEntry(x, shades, word))
        x += wide + 18
    return lines


def _panel(
    content: Content,
    shades: dict[tuple[int, Kind, int], Shade],
    top: float,
    width: float,
    scale: float,
    by: By,
    legend_lines: int,
) -> Panel:
    """Choose the sizes of a panel; the legend, of so many lines, is in the first."""
    held = content.levels is not None
    bar, pitch, label = _sizes(content.timeline.num_devices, held)
    if held and not legend_lines:
        return Panel(content, shades, list(content.words), top, None, top + 26, bar, pitch, label, 0, 0)
    font, least = _letters(content.timeline, scale, bar, by)
    lines = summary.fill(content.words, (width - 2 * MARGIN) / _LETTER, " · ")
    under = top + 48 + 16 * (len(lines) - 1)
    if legend_lines and not held and content.timeline.spans:
        key, lanes = under + 12, under + 26 + 18 * legend_lines
    else:
        key, lanes = None, under + (28 if content.has_lanes else 6)
    return Panel(content, shades, lines, top, key, lanes, bar, pitch, label, font, least)


def _letters(timeline: Timeline, scale: float, bar: float, by: By) -> tuple[float, float]:
    """Size of the numbers in the actions, and the width that one needs."""
    room = summary.quantile(_times(timeline), 0.75) * scale - 4
    # The longest number decides for all: a row that shows 8 and 9 but not 10 looks broken.
    digits = max((len(str(span.action.microbatch)) for span in timeline.spans), default=1)
    longest = 0.6 * (digits + (by == "stage"))
    font = min(12.0 if bar >= 30 else 11.0 if bar >= 22 else 9.0, max(8.0, room / longest))
    return font, longest * font + 3


def _times(timeline: Timeline) -> list[float]:
    return [span.end - span.start for span in timeline.spans]


def _sizes(num_devices: int, held: bool) -> tuple[float, float, float]:
    """Height of a lane, from lane to lane, of the letters beside it: smaller where there are many."""
    if num_devices <= 8:
        return 30, 35, 12
    if num_devices <= 16:
        return 22, 25, 12
    return (11, 13, 10) if held else (16, 18, 12)
