"""Draw the content of the lanes of a figure as SVG: actions and levels of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from funcpipe._src.data.kinds import COUNTED, KINDS, MOVES, ONCE, Kind
from funcpipe._src.data.overlapping import pairs_in
from funcpipe._src.data.result import Span
from funcpipe._src.view import summary
from funcpipe._src.view.figure import Frame, Panel
from funcpipe._src.view.memory_levels import Level, coarse, highest
from funcpipe._src.view.palette import Colour, colour_key, colours_of, hexadecimal, kind_colour

INK = "#1f2328"
"""The colour of letters on actions, and of all letters in a file: dark, for light backgrounds."""
_HELD = "#8b95d6"


class Track(NamedTuple):
    """The vertical place of actions in their lane: pixels from the lane's top, and the height."""

    top: float
    height: float


def action_lanes(panel: Panel, frame: Frame) -> list[list[str]]:
    """Return the actions of each device as SVG.

    Overlapping actions have half of the height each. Actions on links (O, L, G, U) have thin strips
    at the bottom.
    """
    height = panel.lane.height
    moves = [kind for kind in summary.kinds_in(panel.timeline) if kind in MOVES]
    thin = max(2.0, round(height * 0.14))
    strips = {kind: Track(height - (len(moves) - at) * thin, thin) for at, kind in enumerate(moves)}
    full = height - len(moves) * thin - (1 if moves else 0)
    halves = {
        action: Track(second * full / 2, full / 2 - 0.5)
        for action, second in pairs_in(panel.timeline.spans).items()
    }
    tracks: defaultdict[tuple[int, Track], list[Span]] = defaultdict(list)
    for span in sorted(panel.timeline.spans, key=lambda span: (span.start, span.end)):
        track = strips.get(span.action.kind) or halves.get(span.action, Track(0.0, full))
        tracks[span.device, track].append(span)
    colours = colours_of(panel.timeline, frame.by, frame.last)
    lanes: list[list[str]] = [[] for _ in range(panel.timeline.num_devices)]
    font, least = _number_size(panel, frame)
    for (device, track), spans in sorted(tracks.items()):
        by_colour: defaultdict[Colour, list[Span]] = defaultdict(list)
        for span in spans:
            by_colour[colours[colour_key(span)]].append(span)
        lane = lanes[device]
        for colour, group in sorted(by_colour.items()):
            shapes = [_action(span, track, frame) for span in group]
            lane += [f'<g fill="{hexadecimal(colour)}">', *shapes, "</g>"]
        if frame.by == "stage":
            lane += _edges(spans, track, frame)
        lane += _numbers(spans, track, frame, font, least)
    return lanes


def _extent(span: Span, frame: Frame) -> tuple[float, float]:
    """Return left edge and width in pixels, with a gap to the next action and a least width."""
    x, width = span.start * frame.scale, (span.end - span.start) * frame.scale
    return x, max(0.3, width - min(1.0, 0.12 * width))


def _action(span: Span, track: Track, frame: Frame) -> str:
    """Return an action as a rectangle with a tooltip."""
    kind, stage, microbatch, slice_ = span.action
    x, width = _extent(span, frame)
    top = f' y="{pixels(track.top)}"' if track.top else ""
    place = f'x="{pixels(x)}"{top} width="{pixels(width)}" height="{pixels(track.height)}"'
    number = "time" if kind in COUNTED else "microbatch"
    which = f"stage {stage}" if kind in ONCE else f"stage {stage}, {number} {microbatch}"
    which += "" if slice_ is None else f", slice {slice_}"
    when = escape(summary.time_text(frame.axis).interval(span.start, span.end))
    return f"<rect {place}><title>{span.action} {KINDS[kind].word}, {which}: {when}</title></rect>"


def _edges(spans: Iterable[Span], track: Track, frame: Frame) -> Iterable[str]:
    """Yield the upper edges of actions in the colours of their kinds."""
    paths: defaultdict[Kind, str] = defaultdict(str)
    for span in spans:
        if span.action.kind not in MOVES:
            # Two decimals, because rounding errors add up over thousands of neighbouring shapes.
            x, width = (summary.number_text(number, 2) for number in _extent(span, frame))
            paths[span.action.kind] += (
                f"M{x} {pixels(track.top)}h{width}v{pixels(_edge(track))}h-{width}z"
            )
    for kind, path in paths.items():
        colour = hexadecimal(kind_colour(kind))
        yield f'<path class="edge" fill="{colour}" pointer-events="none" d="{path}"/>'


def _edge(track: Track) -> float:
    return max(3.0, 0.2 * track.height)


def _numbers(
    spans: Iterable[Span], track: Track, frame: Frame, font: float, least: float
) -> Iterable[str]:
    """Yield the numbers of the actions that are at least ``least`` pixels wide."""
    by_stage = frame.by == "stage"
    numbers: list[str] = []
    for span in spans:
        x, width = _extent(span, frame)
        if width >= least and track.height >= font:
            numbers.append(f'<text x="{pixels(x + width / 2)}">{_number(span, by_stage)}</text>')
    if numbers:
        down = track.top + (track.height + (_edge(track) if by_stage else 0)) / 2 + 0.36 * font
        yield (
            f'<g class="num" transform="translate(0 {pixels(down)})" font-size="{pixels(font)}" '
            f'fill="{INK}" text-anchor="middle" pointer-events="none">'
        )
        yield from (*numbers, "</g>")


def _number(span: Span, by_stage: bool) -> str:
    """Return the text on an action: microbatch and slice, and the kind if colours mean stages."""
    kind, _, microbatch, number = span.action
    letter = kind.value if by_stage or kind in ONCE else ""
    return f"{letter}{'' if kind in ONCE else microbatch}{'' if number is None else f'.{number}'}"


def _number_size(panel: Panel, frame: Frame) -> tuple[float, float]:
    """Return the font size of numbers on actions, and the least width of an action with a
    number."""
    height = panel.lane.height
    room = summary.length_quantile(panel.timeline.spans, 0.75) * frame.scale - 4
    # The longest number decides for all: a row that shows 8 and 9 but not 10 looks broken.
    digits = max(len(_number(span, by_stage=False)) for span in panel.timeline.spans)
    longest = 0.6 * (digits + (frame.by == "stage"))
    font = min(12.0 if height >= 30 else 11.0 if height >= 22 else 9.0, max(8.0, room / longest))
    return font, longest * font + 3


def level_lanes(panel: Panel, frame: Frame, most: int) -> list[list[str]]:
    """Return the memory of each device as SVG, with at most about ``most`` levels."""
    devices: Sequence[Sequence[Level]] = panel.levels or ()
    step = max(1.0, len(devices) * frame.chart / (8 * most))  # equal neighbours will be joined
    while sum(map(len, devices)) > most and step < frame.chart:
        devices = [coarse(device, step / frame.scale) for device in devices]
        step *= 2
    return [_levels(device, panel, frame) for device in devices]


def _levels(device: Sequence[Level], panel: Panel, frame: Frame) -> list[str]:
    """Return the levels of a device as bars, and a line on the highest bars."""
    times, floor = summary.time_text(frame.axis), panel.lane.height
    peak = highest([device])
    bars: list[str] = []
    lines = ""
    for start, end, amount in device:
        if amount <= 0:
            continue
        # Edges are rounded as they are written, so that neighbours touch. A gap between bars would
        # look like an empty device.
        x, right = round(start * frame.scale, 1), round(end * frame.scale, 1)
        width, height = max(0.3, right - x), floor * min(1.0, amount / panel.most)
        place = f'x="{pixels(x)}" y="{pixels(floor - height)}"'
        size = f'width="{pixels(width)}" height="{pixels(height)}"'
        words = f"holds {summary.amount_text(amount)}: {escape(times.interval(start, end))}"
        bars.append(f"<rect {place} {size}><title>{words}</title></rect>")
        if amount == peak:
            line = pixels(max(2.0, width))
            lines += f"M{pixels(x)} {pixels(max(0.0, floor - height - 1))}h{line}v2h-{line}z"
    if not bars:
        return []
    top = f'<path class="top" pointer-events="none" d="{lines}"/>'
    return [f'<g class="held" fill="{_HELD}" shape-rendering="crispEdges">', *bars, "</g>", top]


def pixels(number: float) -> str:
    """Write a number of pixels with one decimal, to keep files small."""
    return summary.number_text(number, 1)
