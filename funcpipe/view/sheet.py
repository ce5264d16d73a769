"""Where things are in a picture: panels below each other on one time axis, in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from funcpipe.core.result import Span, Timeline
from funcpipe.view import facts
from funcpipe.view.align import Aligned
from funcpipe.view.held import Levels, levels
from funcpipe.view.legend import Item, legend
from funcpipe.view.palette import By, Palette

FOOT, MARGIN = 42.0, 16.0
LETTER = 6.4
"""The width of a letter, on average, at the size of most of the text."""


class Row(NamedTuple):
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
    """A row and its place.

    Attributes:
        row: what it shows.
        palette: the colours of its actions.
        lines: the words below the heading.
        top: of the heading.
        legend: of the legend, where this panel has it.
        lanes: of the first lane.
        bar: height of a lane.
        pitch: from lane to lane.
        label: size of the letters beside the lanes.
        font: size of those in the actions.
        least: the width that an action needs to show its number.
    """

    row: Row
    palette: Palette
    lines: tuple[str, ...]
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
        return self.lanes + (self.row.timeline.num_devices * self.pitch if self.row.has_lanes else 0.0)

    def tracks(self) -> list[Track]:
        """What runs in its lanes; what moves to the host (O) and back (L) has thin strips at the bottom."""
        timeline = self.row.timeline
        moves = [kind for kind in facts.kinds(timeline) if kind in facts.MOVES]
        thin = max(2.0, round(self.bar * 0.14))
        work = self.bar - len(moves) * thin - (1 if moves else 0)
        places = {kind: (self.bar - (len(moves) - at) * thin, thin) for at, kind in enumerate(moves)}
        found: dict[tuple[int, int], Track] = {}
        for span in sorted(timeline.spans, key=lambda span: (span.start, span.end)):
            kind = span.action.kind
            top, height = places.get(kind, (0.0, work))
            key = (span.device, moves.index(kind) + 1 if kind in places else 0)
            found.setdefault(key, Track(span.device, top, height, [])).spans.append(span)
        return [track for _, track in sorted(found.items())]


class Sheet(NamedTuple):
    """A whole picture.

    Attributes:
        axis: the timeline that gives the time axis.
        by: what colours tell.
        left: of the charts.
        chart: their width.
        width, height: of the picture.
        scale: pixels per unit of time.
        panels: from top to bottom.
        legend: lines of entries.
    """

    axis: Timeline
    by: By
    left: float
    chart: float
    width: float
    height: float
    scale: float
    panels: tuple[Panel, ...]
    legend: list[list[Item]]


def rows(found: Aligned, *, memory: bool) -> list[Row]:
    """A row for each timeline, and one for its memory."""
    out: list[Row] = []
    axis = found.axis
    held = [levels(timeline) if memory else () for timeline in found.timelines]
    highest = [max((level.amount for lane in one for level in lane), default=0.0) or 1.0 for one in held]
    if not any(found.notes):  # one unit of memory, as far as anybody can know
        highest = [max(highest)] * len(highest)
    for timeline, note, one, most in zip(found.timelines, found.notes, held, highest, strict=True):
        words = (*counts(timeline), *facts.facts(timeline, axis), *([note] if note else []))
        if not timeline.spans:
            words = (counts(timeline)[0], "no actions")
        out.append(Row(timeline, facts.title(timeline), words))
        if memory and timeline.spans:
            out.append(Row(timeline, "memory", (height(most),) if one else ("not known for this timeline",), one, most))
    return out


def height(most: float) -> str:
    """How a picture says its scale of memory."""
    return f"the height of a lane is {facts.amount(most)}"


def counts(timeline: Timeline) -> tuple[str, str, str]:
    """How many devices, stages and microbatches there are."""
    count = len({span.action.microbatch for span in timeline.spans})
    stages = len({span.action.stage for span in timeline.spans})
    return _many(timeline.num_devices, "device"), _many(stages, "stage"), _many(count, "microbatch")


def lay(found: Sequence[Row], axes: Sequence[Timeline], *, by: By = "kind") -> Sheet:
    """Give everything its place.

    Args:
        found: what to show, from top to bottom.
        axes: all timelines on whose axis this is drawn; pictures with the same axes have the same scale.
        by: what colours tell.
    """
    axis = max(axes, key=lambda timeline: timeline.makespan)
    end = axis.makespan or 1.0
    short = min((facts.quantile(_times(one), 0.1) for one in axes if one.spans), default=end)
    chart = min(1240.0, max(640.0, 24 * end / short)) if axis.spans else 640.0
    names = [facts.called(one, at) for one in axes for at in range(max(1, one.num_devices))]
    left = MARGIN + 5 + 7 * max(map(len, names))
    peaks = [text for one in axes for text in facts.sides(one)[1]]
    width = left + chart + MARGIN + 44 + (16 + 7 * max(4, *map(len, peaks)) if peaks else 0)
    entries = legend([row.timeline for row in found if row.levels is None], by, MARGIN, width - MARGIN, LETTER)
    last = max((span.action.stage for row in found for span in row.timeline.spans), default=0)
    panels: list[Panel] = []
    top = 0.0
    for row in found:
        panel = _panel(row, top, width, Palette(row.timeline, by, last), chart / end, 0 if panels else len(entries))
        panels.append(panel)
        top = panel.bottom + (FOOT - 12 if row.has_lanes else 4)
    return Sheet(axis, by, left, chart, width, top + 12, chart / end, tuple(panels), entries)


def _panel(row: Row, top: float, width: float, palette: Palette, scale: float, entries: int) -> Panel:
    """Choose the sizes of a panel; the legend, so many lines, is in the first."""
    bar, pitch, label = _sizes(row.timeline.num_devices, row.levels is not None)
    if row.levels is not None and not entries:
        return Panel(row, palette, row.words, top, None, top + 26, bar, pitch, label, 0, 0)
    font, least = _letters(row.timeline, scale, bar, palette.by)
    lines = wrapped(row.words, width - 2 * MARGIN)
    under = top + 48 + 16 * (len(lines) - 1)
    if not entries or row.levels is not None or not row.timeline.spans:
        return Panel(
            row, palette, lines, top, None, under + (28 if row.has_lanes else 6), bar, pitch, label, font, least
        )
    return Panel(row, palette, lines, top, under + 12, under + 26 + 18 * entries, bar, pitch, label, font, least)


def _letters(timeline: Timeline, scale: float, bar: float, by: By) -> tuple[float, float]:
    """Size of the numbers in the actions, and the width that one needs."""
    room = facts.quantile(_times(timeline), 0.75) * scale - 4
    # The longest number decides for all: a row that shows 8 and 9 but not 10 looks broken.
    longest = 0.6 * (max((len(str(span.action.microbatch)) for span in timeline.spans), default=1) + (by == "stage"))
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


def wrapped(words: Sequence[str], width: float) -> tuple[str, ...]:
    """The words on as many lines as they need, with dots between them."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]} · {word}" if lines else word
        if lines and len(longer) * LETTER <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return tuple(lines) or ("",)


def _many(count: int, word: str) -> str:
    plural = word + ("es" if word.endswith("ch") else "s")
    return f"{count} {word if count == 1 else plural}"
