"""A timeline as text: a row for each device, time from left to right, never wider than asked."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import ceil, floor, gcd
from operator import index
from typing import NamedTuple
from unicodedata import east_asian_width

from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Kind
from funcpipe.view import facts
from funcpipe.view.align import aligned
from funcpipe.view.held import lanes, levels

LEAST_WIDTH = 40
"""Narrower pictures show nothing."""

_IDLE, _FILL = "·", "─"
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_MOST_FIT = 0.75
"""Labels are written if they fit in this share of the actions."""


class Piece(NamedTuple):
    """Some letters of a row and their terminal colour, None for none."""

    text: str
    code: int | None = None


class Layout(NamedTuple):
    """How the rows are laid out; the same for all timelines of a picture.

    Attributes:
        word: what a device is called.
        digits: of its number.
        names: how wide the names of devices are.
        right: how wide busy and peak are.
        scale: columns per unit of time.
        columns: of the chart.
        stages: do the labels of actions have stages.
        labelled: do actions have labels; if not, each column shows one letter.
    """

    word: str
    digits: int
    names: int
    right: int
    scale: float
    columns: int
    stages: bool
    labelled: bool

    @property
    def left(self) -> int:
        """How wide the names of the devices are."""
        return self.names + 1


def columns(width: int | None, what: str) -> int:
    """How wide to print: as asked, or as the terminal is.

    Raises:
        TypeError: the width is no whole number.
        ValueError: the width is less than `LEAST_WIDTH`.
    """
    if width is None:
        # A terminal may say that it is narrower than any drawing; then lines wrap, and printing still works.
        return max(LEAST_WIDTH, shutil.get_terminal_size((80, 24)).columns)
    if index(width) < LEAST_WIDTH:
        raise ValueError(f"a {what} is at least {LEAST_WIDTH} columns wide; got width={width}")
    return index(width)


def text(timelines: Sequence[Timeline], width: int, *, color: bool = False, memory: bool = False) -> str:
    """The picture.

    Args:
        timelines: what to draw, below each other on one time axis.
        width: no line is longer; at least `LEAST_WIDTH`.
        color: paint actions with a terminal's 256 colours. Without it the letters are the same.
        memory: show what the devices hold, too.
    """
    found = aligned(timelines)
    some = [timeline for timeline in found.timelines if timeline.spans]
    layout = _layout(some, found.axis, width) if some else None
    lines: list[str] = []
    for timeline, note in zip(found.timelines, found.notes, strict=True):
        lines += [""] if lines else []
        name = _clip(facts.title(timeline), width - 1)
        if layout is None or not timeline.spans:
            lines.append(_wrap([f"{name}:", "no actions", f"on {timeline.num_devices} devices"], width, " "))
            continue
        words = ", ".join([*facts.facts(timeline, found.axis), *([note] if note else [])]).split(", ")
        lines.append(_wrap([f"{name}:", *(f"{word}," for word in words[:-1]), words[-1]], width, " "))
        lines += _rows(timeline, layout, color)
        lines += _held(timeline, layout) if memory else []
        lines += [" " * layout.left + line for line in _ruler(found.axis, layout, width - layout.left)]
    if layout is not None:
        lines.append(_legend(some, found.axis, layout, width, color))
    return "\n".join(line.rstrip() for line in lines)


def _rows(timeline: Timeline, layout: Layout, color: bool) -> list[str]:
    """A row for each device, and below it one for what it moves to its host (O) and one for what comes back (L)."""
    busy, peak = facts.sides(timeline)
    wide = layout.right - 9  # what is left for peaks
    heading = "  busy" + (f"  {'peak':>{wide}}" if peak else "")
    lines = [" " * (layout.left + 1 + layout.columns) + heading]
    ranks = facts.ranks(timeline)
    for device, lane in enumerate(lanes(timeline)):
        right = f" {busy[device]:>4}" + (f"  {peak[device]:>{wide}}" if peak else "")
        for kind in (None, *facts.MOVES):
            spans = [span for span in lane if (span.action.kind if span.action.kind in facts.MOVES else None) is kind]
            if kind is not None and not spans:
                continue
            pieces = _labelled(spans, layout, ranks) if layout.labelled else _columns(spans, layout)
            label = f"{_name(timeline, device, layout)} " if kind is None else f"{kind.value} ".rjust(layout.left)
            row = "".join(_paint(_ended(pieces, max(1, _column(timeline.makespan, layout.scale))), color))
            lines.append(f"{label}│{row}│{right if kind is None else ''}")
    return lines


def _held(timeline: Timeline, layout: Layout) -> list[str]:
    """A row for each device: in each column the most that it holds, in eighths of the most that any does."""
    found = levels(timeline)
    most = max((level.amount for lane in found for level in lane), default=0.0)
    if not most:
        return ["memory is not known" if not found else "nothing is held"]
    lines = [_clip(f"memory, {_EIGHTHS[-1]} is {facts.amount(most)}:", layout.left + layout.columns)]
    for device, lane in enumerate(found):
        row = [0.0] * layout.columns
        for start, end, amount in lane:
            first = min(floor(start * layout.scale + 1e-9), layout.columns - 1)
            for at in range(first, max(first + 1, min(layout.columns, ceil(end * layout.scale - 1e-9)))):
                row[at] = max(row[at], amount)
        letters = "".join(_EIGHTHS[ceil(8 * amount / most - 1e-9)] for amount in row)
        lines.append(f"{_name(timeline, device, layout)} │{letters}│")
    return lines


def _ended(pieces: Iterable[Piece], end: int) -> Iterable[Piece]:
    """The row without idle marks where its timeline is over and others go on."""
    at = 0
    for piece in pieces:
        if piece.code is None and piece.text.strip(_IDLE) == "":
            kept = max(0, min(len(piece.text), end - at))
            yield Piece(_IDLE * kept + " " * (len(piece.text) - kept))
        else:
            yield piece
        at += len(piece.text)


def _layout(timelines: Sequence[Timeline], axis: Timeline, width: int) -> Layout:
    """Choose the scale, and what the actions show, so that all fits."""
    word = "device" if width >= 80 else "dev"
    digits = max(len(str(timeline.num_devices - 1)) for timeline in timelines)
    peaks = [one for timeline in timelines for one in facts.sides(timeline)[1]]
    right = 6 + (2 + max(4, *map(len, peaks)) if peaks else 0)
    names = max(_wide(facts.called(one, at, word, digits)) for one in timelines for at in range(one.num_devices))
    names = min(names, max(len(word) + digits + 1, width // 4))
    room = width - names - 3 - right
    spans = [span for timeline in timelines for span in timeline.spans]
    several = any(max(facts.ranks(timeline).values()) > 0 for timeline in timelines)
    scale = _scale(spans, axis.makespan, room, _longest(spans, several) + 1)
    columns = max(1, _column(axis.makespan, scale))
    stages = several and _fit(spans, scale, stages=True)
    labelled = stages or _fit(spans, scale, stages=False)
    return Layout(word, digits, names, right + 1, scale, columns, stages, labelled)


def _name(timeline: Timeline, device: int, layout: Layout) -> str:
    name = _clip(facts.called(timeline, device, layout.word, layout.digits), layout.names)
    return name + " " * (layout.names - _wide(name))


def _scale(spans: Sequence[Span], end: float, room: int, wanted: int) -> float:
    """Columns per unit of time: as many as short actions want for their labels, or as there is room for.

    Where all times are whole multiples of a step, a step takes a whole number of columns (if it gets one at all), so
    that equal actions look equal.
    """
    if end <= 0:
        return 1.0
    short = facts.quantile((span.end - span.start for span in spans), 0.1)
    most = min(room / end, wanted / short)
    times = {time for span in spans for time in (span.start, span.end)}
    if all(float(time).is_integer() for time in times):
        step = gcd(*map(int, times))
        if step * most >= 1:
            return floor(step * most + 1e-9) / step
    return most


def _column(time: float, scale: float) -> int:
    """The column border nearest to a time: cells that touch in time touch on the page."""
    return max(0, floor(time * scale + 0.5))


def _label(span: Span, stages: bool) -> str:
    kind, stage, microbatch = span.action
    return f"{stage if stages else ''}{kind.value}{microbatch}"


def _longest(spans: Sequence[Span], stages: bool) -> int:
    return max(len(_label(span, stages)) for span in spans)


def _fit(spans: Sequence[Span], scale: float, *, stages: bool) -> bool:
    """Do the labels of most actions fit. With stages they need a blank behind: ``0F02F0`` reads two ways."""
    fit = sum(
        _column(span.end, scale) - _column(span.start, scale) >= len(_label(span, stages)) + stages for span in spans
    )
    return fit >= _MOST_FIT * len(spans)


def _labelled(lane: list[Span], layout: Layout, ranks: dict[tuple[int, int], int]) -> list[Piece]:
    """A row of cells, each as wide as its action is long."""
    out: list[Piece] = []
    done = 0
    for span in lane:
        start = max(done, _column(span.start, layout.scale))
        size = min(layout.columns, _column(span.end, layout.scale)) - start
        if size <= 0:
            continue
        kind = span.action.kind
        names = [_label(span, True)] if layout.stages else []
        names = [name for name in (*names, _label(span, False)) if len(name) + layout.stages <= size]
        cell = (names[0] if names else kind.value).ljust(size, _FILL)
        codes = facts.look(kind).codes
        code = codes[ranks[span.device, span.action.stage] % len(codes)]
        out.append(Piece(_IDLE * (start - done)))
        # The last column stays open where it is not needed, so that neighbours do not run into each other.
        out += [Piece(cell[:-1], code), Piece(" ")] if cell.endswith(_FILL) else [Piece(cell, code)]
        done = start + size
    return [*out, Piece(_IDLE * (layout.columns - done))]


def _columns(lane: list[Span], layout: Layout) -> list[Piece]:
    """A row of single letters: each column shows a kind that is in it.

    Where a column holds several, what was shown too little so far comes first; so over a few columns the share of each
    letter is the share of its kind, also where every column holds one F and one B.
    """
    shares: list[dict[Kind | None, float]] = [{} for _ in range(layout.columns)]
    for span in lane:
        start, end = (max(0.0, time * layout.scale) for time in (span.start, span.end))
        for at in range(floor(start), min(layout.columns, floor(end) + 1)):
            share = min(end, at + 1) - max(start, at)
            if share > 1e-9:
                shares[at][span.action.kind] = shares[at].get(span.action.kind, 0.0) + share
    owed: dict[Kind | None, float] = {}
    shown: list[Kind | None] = []
    for column in shares:
        idle = 1.0 - sum(column.values())
        if idle > 1e-9:
            column[None] = idle
        for kind, share in column.items():
            owed[kind] = owed.get(kind, 0.0) + share
        best = max(column, key=lambda kind: round(owed[kind], 6))
        owed[best] -= 1.0
        shown.append(best)
    runs = ((kind, len(list(run))) for kind, run in groupby(shown))
    return [Piece(kind.value * size, facts.look(kind).codes[0]) if kind else Piece(_IDLE * size) for kind, size in runs]


def _ruler(timeline: Timeline, layout: Layout, room: int) -> list[str]:
    """The time axis: a line with ticks, and their labels with the unit behind the last."""
    marks = facts.ticks(timeline, max(3, layout.columns // 10))
    at = [_column(time, layout.scale) for time, _ in marks]
    line = "".join("┴" if column in at[1:] else "─" for column in range(layout.columns))
    labels = ""
    for column, (_, label) in zip(at, marks, strict=True):
        start = column + 1  # the axis begins below the left border
        if len(labels) < start and start + len(label) <= room:
            labels = labels.ljust(start) + label
    unit = facts.time_text(timeline).unit
    labels += f" {unit}" if len(labels) + 1 + len(unit) <= room else ""
    return [f"└{line}┘", labels]


def _legend(timelines: Sequence[Timeline], axis: Timeline, layout: Layout, width: int, color: bool) -> str:
    """The meaning of every letter in the picture."""
    there = {kind for timeline in timelines for kind in facts.kinds(timeline)}
    found = [kind for kind in Kind if kind in there]
    words = [f"{kind.value} {facts.look(kind).word}" for kind in found]
    words.append(f"{_IDLE} idle")
    if layout.stages:
        first = timelines[0].spans[0].action
        words.append(f"{first} stage {first.stage}, microbatch {first.microbatch}")
    elif not layout.labelled:
        words.append(f"1 column = {_clip(facts.time_text(axis)(1 / layout.scale), 20)}")
    lines = _wrap(words, width, "  ").split("\n")
    if color:
        for kind in found:
            letter = "".join(_paint([Piece(kind.value, facts.look(kind).codes[0])], color))
            word = f"{kind.value} {facts.look(kind).word}"
            lines = [line.replace(word, letter + word[1:], 1) for line in lines]
    return "\n".join(lines)


def _paint(pieces: Iterable[Piece], color: bool) -> Iterable[str]:
    """The letters, with colour codes if asked for: dark on the colour of the kind."""
    for piece in pieces:
        if color and piece.code is not None and piece.text:
            yield f"\x1b[38;5;16;48;5;{piece.code}m{piece.text}\x1b[0m"
        else:
            yield piece.text


def _wrap(words: Sequence[str], width: int, gap: str) -> str:
    """The words on as few lines as they need; a word is broken nowhere and clipped if it must."""
    lines: list[str] = []
    for word in words:
        word = _clip(word, width)
        if lines and _wide(lines[-1] + gap + word) <= width:
            lines[-1] += gap + word
        else:
            lines.append(word)
    return "\n".join(lines)


def _wide(words: str) -> int:
    """Columns that a terminal needs: two for a wide letter."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in words)


def _clip(words: str, width: int) -> str:
    """The words, cut where they are too wide."""
    if _wide(words) <= width:
        return words
    while _wide(words) > width - 1:
        words = words[:-1]
    return words + "…"
