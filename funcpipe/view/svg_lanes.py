"""What is in the lanes of a figure, as SVG: actions and levels of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from funcpipe.core.kinds import COUNTED, KINDS, MOVES, ONCE, Kind
from funcpipe.core.overlapping import pairs_in
from funcpipe.core.result import Span
from funcpipe.view import summary
from funcpipe.view.figure import Frame, Panel
from funcpipe.view.memory_levels import Level, coarse, highest
from funcpipe.view.palette import Shade, kind_shade, shade_key, shades_of


class Track(NamedTuple):
    """Actions of a device that do not overlap, by start, and their place in its lane, in pixels from its top."""

    device: int
    top: float
    height: float
    spans: list[Span]


class Chart(NamedTuple):
    """What the lanes of a panel show: its actions, their shades by `shade_key`; no tracks where it shows levels."""

    panel: Panel
    shades: dict[tuple[int, Kind, int], Shade]
    tracks: list[Track]

    def shade(self, span: Span) -> Shade:
        """The shade of an action."""
        return self.shades[shade_key(span)]


def chart_of(panel: Panel, frame: Frame, last: int) -> Chart:
    """What runs in the lanes of a panel; what moves to the host (O) and back (L) has thin strips at the bottom.

    Two that overlap have half of the height each.

    ``last`` is the last stage of all in the figure.
    """
    if panel.levels is not None:
        return Chart(panel, {}, [])
    height = panel.lane.height
    moves = [kind for kind in summary.kinds_in(panel.timeline) if kind in MOVES]
    thin = max(2.0, round(height * 0.14))
    places = {kind: (height - (len(moves) - at) * thin, thin) for at, kind in enumerate(moves)}
    full = height - len(moves) * thin - (1 if moves else 0)
    joined = pairs_in(panel.timeline.spans)
    halves = {action: (second * full / 2, full / 2 - 0.5) for action, second in joined.items()}
    rows: dict[tuple[int, float, float], list[Span]] = {}
    for span in sorted(panel.timeline.spans, key=lambda span: (span.start, span.end)):
        place = places.get(span.action.kind) or halves.get(span.action, (0.0, full))
        rows.setdefault((span.device, *place), []).append(span)
    shades = shades_of(panel.timeline, frame.by, last)
    return Chart(panel, shades, [Track(*place, spans) for place, spans in sorted(rows.items())])


def lanes_of(chart: Chart, frame: Frame, most_levels: int) -> list[list[str]]:
    """The SVG elements in the lane of each device; more levels of memory than ``most_levels`` become fewer."""
    if chart.panel.levels is not None:
        return [_levels(levels, chart.panel, frame) for levels in _fewer(chart.panel.levels, frame, most_levels)]
    lanes: list[list[str]] = [[] for _ in range(chart.panel.timeline.num_devices)]
    font, least = _numbers(chart.panel, frame)
    for track in chart.tracks:
        lanes[track.device] += _actions(track, chart, frame, font, least)
    return lanes


def _actions(track: Track, chart: Chart, frame: Frame, font: float, least: float) -> Iterable[str]:
    """The actions of a track in one group per shade, and over them numbers where they fit."""
    times = summary.time_text(frame.axis)
    by_stage = frame.by == "stage"
    groups: defaultdict[Shade, list[str]] = defaultdict(list)
    edges: defaultdict[Kind, list[str]] = defaultdict(list)
    numbers: list[str] = []
    edge = max(3.0, 0.2 * track.height)
    top = f' y="{pixels(track.top)}"' if track.top else ""
    for span in track.spans:
        x, width = span.start * frame.scale, (span.end - span.start) * frame.scale
        # A hair of the lane stays between neighbours, and nothing is invisible.
        width = max(0.3, width - min(1.0, 0.12 * width))
        place = f'x="{pixels(x)}"{top} width="{pixels(width)}" height="{pixels(track.height)}"'
        groups[chart.shade(span)].append(f"<rect {place}><title>{_hover(span, times)}</title></rect>")
        if by_stage and span.action.kind not in MOVES:
            edges[span.action.kind].append(
                f"M{_fine(x)} {pixels(track.top)}h{_fine(width)}v{pixels(edge)}h-{_fine(width)}z"
            )
        if width >= least and track.height >= font:
            numbers.append(f'<text x="{pixels(x + width / 2)}">{_number(span, by_stage)}</text>')
    for shade in sorted(groups):
        yield from (f'<g class="{shade.name}">', *groups[shade], "</g>")
    for kind, paths in edges.items():
        yield f'<path class="{kind_shade(kind).name}" pointer-events="none" d="{"".join(paths)}"/>'
    if numbers:
        down = pixels(track.top + track.height / 2 + (edge / 2 if by_stage else 0) + 0.36 * font)
        yield f'<g class="num" transform="translate(0 {down})" font-size="{pixels(font)}">'
        yield from (*numbers, "</g>")


def _number(span: Span, by_stage: bool) -> str:
    """What an action has written in it: its microbatch, and slice; its kind too, where the colour tells the stage."""
    kind, _, microbatch, number = span.action
    letter = kind.value if by_stage or kind in ONCE else ""
    return f"{letter}{'' if kind in ONCE else microbatch}{'' if number is None else f'.{number}'}"


def _numbers(panel: Panel, frame: Frame) -> tuple[float, float]:
    """Size of the numbers in the actions, and the width that one needs."""
    height = panel.lane.height
    room = summary.quantile(summary.lengths(panel.timeline), 0.75) * frame.scale - 4
    # The longest number decides for all: a row that shows 8 and 9 but not 10 looks broken.
    digits = max(len(_number(span, by_stage=False)) for span in panel.timeline.spans)
    longest = 0.6 * (digits + (frame.by == "stage"))
    font = min(12.0 if height >= 30 else 11.0 if height >= 22 else 9.0, max(8.0, room / longest))
    return font, longest * font + 3


def _fewer(devices: Sequence[Sequence[Level]], frame: Frame, most: int) -> Sequence[Sequence[Level]]:
    """The levels, in slices wide enough that there are not too many."""
    step = max(1.0, len(devices) * frame.chart / (8 * most))  # neighbours of one height will be joined
    while sum(map(len, devices)) > most and step < frame.chart:
        devices = [coarse(device, step / frame.scale) for device in devices]
        step *= 2
    return devices


def _levels(device: Sequence[Level], panel: Panel, frame: Frame) -> list[str]:
    """The levels of a device as bars that stand on its lane's floor, and a line on the highest ones."""
    times, floor = summary.time_text(frame.axis), panel.lane.height
    out: list[str] = []
    peak = highest([device])
    lines: list[str] = []
    for start, end, amount in device:
        if amount <= 0:
            continue
        # Both ends rounded as they are written: neighbours touch, or a hairline would look like a moment without any.
        x, right = round(start * frame.scale, 1), round(end * frame.scale, 1)
        width = max(0.3, right - x)
        height = floor * min(1.0, amount / panel.most)
        place = f'x="{pixels(x)}" y="{pixels(floor - height)}" width="{pixels(width)}" height="{pixels(height)}"'
        words = f"holds {summary.amount_text(amount)}: {escape(times.interval(start, end))}"
        out.append(f'<rect class="held" {place}><title>{words}</title></rect>')
        if amount == peak:
            lines.append(f"M{pixels(x)} {pixels(max(1.0, floor - height))}h{pixels(max(2.0, width))}")
    return [*out, f'<path class="top" pointer-events="none" d="{"".join(lines)}"/>'] if lines else out


def _hover(span: Span, times: summary.TimeText) -> str:
    """The tooltip of an action."""
    kind, stage, microbatch, slice_ = span.action
    when = escape(times.interval(span.start, span.end))
    number = "time" if kind in COUNTED else "microbatch"
    which = f"stage {stage}" if kind in ONCE else f"stage {stage}, {number} {microbatch}"
    which += "" if slice_ is None else f", slice {slice_}"
    return f"{span.action} {KINDS[kind].word}, {which}: {when}"


def _fine(number: float) -> str:
    """Pixels where thousands of shapes stand side by side: a hundredth counts."""
    return summary.number_text(number, 2)


def pixels(number: float) -> str:
    """A number of pixels: a tenth is fine enough, and files stay small."""
    return summary.number_text(number, 1)
