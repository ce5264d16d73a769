"""Draw timelines as text: a row for each device, time from left to right, within a width."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import ceil, floor, gcd
from operator import index
from typing import NamedTuple

from funcpipe._src.data.kinds import KINDS, MOVES, Kind
from funcpipe._src.data.overlapping import pairs_in
from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.view import summary
from funcpipe._src.view.figure import aligned
from funcpipe._src.view.memory_levels import highest, highest_in_slices, levels, spans_by_device
from funcpipe._src.view.palette import stage_ranks

LEAST_WIDTH = 40  # the least width of a picture: narrower pictures would show nothing

_IDLE, _FILL = "·", "─"
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MOST_FIT = 0.75  # actions get labels if the labels of at least this share of the actions fit


class TextLayout(NamedTuple):
    """The layout of the rows, equal for all timelines of a picture."""

    word: str  # the word before the number of a device
    names: int  # the columns for the names of devices
    peaks: int  # the columns for the peaks; 0 if no peak is known
    scale: float  # the columns per unit of time
    columns: int  # the columns of the chart
    stages: bool  # whether the labels of actions contain stages
    labelled: bool  # whether actions have labels. If not, each column shows one letter
    color: bool  # whether actions are painted with a terminal's colours

    def column(self, time: float) -> int:
        """Return the column border nearest to a time, so that cells that touch in time touch."""
        return _column(time, self.scale)

    def row(self, timeline: Timeline, device: int, letters: str) -> str:
        """Return a row of the chart after the name of its device."""
        name = summary.clip(summary.device_name(timeline, device, self.word), self.names)
        return f"{name}{' ' * (self.names - summary.size(name))} │{letters}│"

    def side(self, busy: str, peak: str) -> str:
        """Return the columns on the right."""
        return f"{busy:>5}" + (f"  {peak:>{self.peaks}}" if peak else "")

    def paint(self, letters: str, code: int) -> str:
        """Return letters, painted if colours are on: dark on the colour of their kind."""
        return f"\x1b[38;5;16;48;5;{code}m{letters}\x1b[0m" if self.color else letters


def width_of(width: int | None, word: str) -> int:
    """Return the width to print: the given width, or the width of the terminal. Raises TypeError
    or ValueError for a width that is no whole number, or less than `LEAST_WIDTH`."""
    if width is None:
        # In a terminal narrower than any drawing, lines wrap. Printing must not raise there.
        return max(LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    if index(width) < LEAST_WIDTH:
        raise ValueError(f"a {word} is at least {LEAST_WIDTH} columns wide; got width={width}")
    return index(width)


def text(
    timelines: Sequence[Timeline], width: int, *, color: bool = False, memory: bool = False
) -> str:
    """Draw timelines as text.

    Args:
        timelines: the timelines, drawn below each other on one time axis.
        width: the largest number of columns; at least `LEAST_WIDTH`.
        color: paint actions with a terminal's 256 colours. The letters stay the same.
        memory: also draw the memory of the devices.
    """
    drawn = aligned(timelines)
    busy = [panel.timeline for panel in drawn.panels if panel.timeline.spans]
    layout = _layout(busy, drawn.axis, width, color) if busy else None
    lines: list[str] = []
    for timeline, title, origin, facts, *_ in drawn.panels:
        lines += [""] if lines else []
        name = summary.clip(title, width - len(origin) - 1) + origin
        if layout is None or not timeline.spans:
            lines += _caption(name, [f"no actions on {timeline.num_devices} devices"], width)
            continue
        lines += _caption(name, facts, width)
        lines += _rows(timeline, layout)
        lines += _memory(timeline, layout) if memory else []
        lines += _ruler(drawn.axis, layout, width)
    if layout is not None:
        lines += _legend(busy, drawn.axis, layout, width)
    return "\n".join(line.rstrip() for line in lines)


def _caption(name: str, facts: Sequence[str], width: int) -> list[str]:
    """Return the lines of the caption, broken between facts if possible, else between words."""
    phrases = ", ".join(facts).split(", ")
    phrases = [f"{name}:", *(f"{phrase}," for phrase in phrases[:-1]), phrases[-1]]
    words: list[str] = []
    for phrase in phrases:
        words += [phrase] if summary.size(phrase) <= width else phrase.split()
    return _fill(words, width, " ")


def _rows(timeline: Timeline, layout: TextLayout) -> Iterable[str]:
    """Yield a row for each device, and further rows below it.

    The further rows have the second actions of pairs (+), and the actions on links (O, L, G, U).
    """
    busy, peak = summary.side_columns(timeline)
    yield " " * (layout.names + layout.columns + 3) + layout.side("busy", "peak" * any(peak))
    ranks = stage_ranks(timeline)
    end = max(1, layout.column(timeline.makespan))
    second = pairs_in(timeline.spans)

    def cells(row: list[Span]) -> str:
        parts = _labels(row, layout, end, ranks) if layout.labelled else _letters(row, layout, end)
        return "".join(parts)

    for device, spans in enumerate(spans_by_device(timeline)):
        rows: defaultdict[str, list[Span]] = defaultdict(list)
        for span in spans:
            kind = span.action.kind
            rows[kind.value if kind in MOVES else "+" * second.get(span.action, 0)].append(span)
        main = layout.row(timeline, device, cells(rows.pop("", [])))
        yield main + layout.side(busy[device], peak[device])
        for word in ("+", *(kind.value for kind in MOVES)):
            if word in rows:
                yield f"{' ' * (layout.names - 1)}{word} │{cells(rows[word])}│"


def _memory(timeline: Timeline, layout: TextLayout) -> Iterable[str]:
    """Yield a row for each device: the most memory in each column, in eighths of the highest
    peak."""
    devices = levels(timeline)
    peak = highest(devices)
    if not peak:
        yield "nothing is held" if devices else "memory is not known"
        return
    scale = f"memory, {_EIGHTHS[-1]} is {summary.amount_text(peak)}:"
    yield summary.clip(scale, layout.names + 1 + layout.columns)
    for device, device_levels in enumerate(devices):
        amounts = highest_in_slices(device_levels, layout.scale, layout.columns)
        letters = "".join(_EIGHTHS[ceil(8 * amount / peak - 1e-9)] for amount in amounts)
        yield layout.row(timeline, device, letters)


def _layout(timelines: Sequence[Timeline], axis: Timeline, width: int, color: bool) -> TextLayout:
    """Choose the scale and the labels so that all timelines fit into the width."""
    word = "device" if width >= 80 else "dev"
    peaks = max(len(peak) for timeline in timelines for peak in summary.side_columns(timeline)[1])
    peaks = max(len("peak"), peaks) if peaks else 0
    names = [
        summary.device_name(timeline, device, word)
        for timeline in timelines
        for device in range(timeline.num_devices)
    ]
    # Long names are clipped, but the numbers of devices must stay readable.
    numbered = max(len(f"{word} {timeline.num_devices - 1}") for timeline in timelines)
    name_width = min(max(map(summary.size, names)), max(numbered, width // 4))
    room = width - name_width - len(" ││  busy") - (len("  ") + peaks if peaks else 0)
    spans = [span for timeline in timelines for span in timeline.spans]
    several = any(max(stage_ranks(timeline).values()) > 0 for timeline in timelines)
    longest = max(len(_label(span, several)) for span in spans)
    scale = _scale(spans, axis.makespan, room, longest + 1)
    stages = several and _fit(spans, scale, stages=True)
    labelled = stages or _fit(spans, scale, stages=False)
    columns = max(1, _column(axis.makespan, scale))
    return TextLayout(word, name_width, peaks, scale, columns, stages, labelled, color)


def _scale(spans: Sequence[Span], end: float, room: int, label_width: int) -> float:
    """Return the columns per unit of time: enough for labels of short actions, if there is room.

    If all times are multiples of a step, a step takes a whole number of columns (if it takes at
    least one), so that equal actions look equal.
    """
    if end <= 0:
        return 1.0
    short = summary.length_quantile(spans, 0.1)
    scale = min(room / end, label_width / short)
    times = {time for span in spans for time in (span.start, span.end)}
    if all(float(time).is_integer() for time in times):
        step = gcd(*map(int, times))
        if step * scale >= 1:
            return floor(step * scale + 1e-9) / step
    return scale


def _column(time: float, scale: float) -> int:
    return max(0, floor(time * scale + 0.5))


def _label(span: Span, stages: bool) -> str:
    text = str(span.action)
    return text if stages else text.removeprefix(str(span.action.stage))


def _fit(spans: Sequence[Span], scale: float, *, stages: bool) -> bool:
    """Return whether the labels of most actions fit.

    Labels with stages need a blank after them, because ``0F02F0`` would be ambiguous.
    """
    fit = sum(
        _column(span.end, scale) - _column(span.start, scale) >= len(_label(span, stages)) + stages
        for span in spans
    )
    return fit >= _MOST_FIT * len(spans)


def _labels(
    spans: list[Span], layout: TextLayout, end: int, ranks: dict[tuple[int, int], int]
) -> Iterable[str]:
    """Yield a row of labels, each as wide as its action. Idle marks end at the column ``end``."""
    done = 0
    for span in spans:
        start = max(done, layout.column(span.start))
        size = min(layout.columns, layout.column(span.end)) - start
        if size <= 0:
            continue
        kind, stage, *_ = span.action
        labels = [_label(span, stages) for stages in ((True, False) if layout.stages else (False,))]
        label = next((label for label in labels if len(label) + layout.stages <= size), kind.value)
        codes = KINDS[kind].codes
        code = codes[ranks[span.device, stage] % len(codes)]
        word = label.ljust(size, _FILL)
        yield _IDLE * (start - done)
        # The last column stays blank if the label does not need it, to separate neighbours.
        is_open = word.endswith(_FILL)
        yield layout.paint(word[:-1] if is_open else word, code) + " " * is_open
        done = start + size
    yield (_IDLE * (end - done)).ljust(layout.columns - done)


def _letters(spans: list[Span], layout: TextLayout, end: int) -> Iterable[str]:
    """Yield a row of single letters: each column shows a kind that runs in it.

    If a column has several kinds, it shows the kind that earlier columns showed too rarely. So over
    a few columns, the share of each letter equals the share of its kind. Idle marks end at the
    column ``end``.
    """
    columns: list[defaultdict[Kind | None, float]] = [
        defaultdict(float) for _ in range(layout.columns)
    ]
    for span in spans:
        start, stop = (max(0.0, time * layout.scale) for time in (span.start, span.end))
        for column in range(floor(start), min(layout.columns, floor(stop) + 1)):
            share = min(stop, column + 1) - max(start, column)
            if share > 1e-9:
                columns[column][span.action.kind] += share
    owed: defaultdict[Kind | None, float] = defaultdict(float)
    shown: list[Kind | str] = []
    for column, shares in enumerate(columns):
        idle = 1.0 - sum(shares.values())
        if idle > 1e-9:
            shares[None] = idle
        for kind, share in shares.items():
            owed[kind] += share
        # Rounded, so that equal claims do not depend on rounding errors of sums.
        best = max(shares, key=lambda kind: round(owed[kind], 6))
        owed[best] -= 1.0
        shown.append(best or (_IDLE if column < end else " "))
    for letter, run in groupby(shown):
        size = len(list(run))
        if isinstance(letter, str):
            yield letter * size
        else:
            yield layout.paint(letter.value * size, KINDS[letter].codes[0])


def _ruler(axis: Timeline, layout: TextLayout, width: int) -> Iterable[str]:
    """Yield the time axis: a line with ticks, and the labels with the unit after the last."""
    left = " " * (layout.names + 1)
    times = summary.ticks(axis, max(3, layout.columns // 10))
    marks = [(layout.column(time), label) for time, label in times]
    ticks = {column for column, _ in marks[1:]}
    yield f"{left}└{''.join('┴' if column in ticks else '─' for column in range(layout.columns))}┘"
    labels = left
    for column, label in marks:
        start = len(left) + column + 1  # the axis begins below the left border
        if len(labels) < start and start + len(label) <= width:
            labels = labels.ljust(start) + label
    unit = summary.time_text(axis).unit
    yield labels + (f" {unit}" if len(labels) + 1 + len(unit) <= width else "")


def _legend(
    timelines: Sequence[Timeline], axis: Timeline, layout: TextLayout, width: int
) -> Iterable[str]:
    """Yield the lines of the legend."""
    kinds = {f"{kind.value} {KINDS[kind].word}": kind for kind in summary.kinds_in(*timelines)}
    words = [*kinds, f"{_IDLE} idle"]
    if any(pairs_in(timeline.spans) for timeline in timelines):
        words.append("+ beside the above")
    if layout.stages:
        first = timelines[0].spans[0].action
        piece = "" if first.slice is None else f", slice {first.slice}"
        words.append(f"{first} stage {first.stage}, microbatch {first.microbatch}{piece}")
    elif not layout.labelled:
        words.append(f"1 column = {summary.clip(summary.time_text(axis)(1 / layout.scale), 20)}")
    for line in _fill(words, width, "  "):
        for word, kind in kinds.items():
            line = line.replace(word, layout.paint(kind.value, KINDS[kind].codes[0]) + word[1:], 1)
        yield line


def _fill(words: Sequence[str], width: int, gap: str) -> list[str]:
    """Fill lines with words. Words are not broken, but clipped if they are too long."""
    return summary.fill([summary.clip(word, width) for word in words], width, gap, summary.size)
