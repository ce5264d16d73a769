"""A figure as SVG: Gantt charts with a lane for each device, and what the lanes hold over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from funcpipe.core.result import Span
from funcpipe.core.schedule import Kind
from funcpipe.view import summary
from funcpipe.view.figure_layout import MARGIN, Figure, Panel, Track
from funcpipe.view.joined_bars import ActionBar, joined_bars
from funcpipe.view.memory_levels import Level, coarse, highest
from funcpipe.view.palette import Shade, kind_shade, style_of

_INK = "#1f2328"
_STYLE = (
    ".funcpipe{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;"
    "font-variant-numeric:tabular-nums}"
    ".funcpipe text{fill:currentColor}"
    ".funcpipe .name{font-size:17px;font-weight:600}"
    ".funcpipe .part{font-size:13px;font-weight:600}"
    ".funcpipe .soft{opacity:.72}"
    ".funcpipe .end{text-anchor:end}"
    ".funcpipe .mid{text-anchor:middle}"
    ".funcpipe .lane{fill:currentColor;opacity:.06}"
    ".funcpipe .held{fill:#8b95d6;shape-rendering:crispEdges}"
    ".funcpipe .top{stroke:currentColor;stroke-width:2;fill:none}"
    ".funcpipe .grid{stroke:currentColor;opacity:.16;fill:none}"
    f".funcpipe .num text{{fill:{_INK};text-anchor:middle;pointer-events:none}}"
    ".funcpipe rect:hover,.funcpipe .mix:hover path{stroke:currentColor;stroke-width:1.5}"
)
"""The same in every drawing, as are the rules for shades: several drawings in one page cannot disturb each other."""

_ALONE = (
    f".funcpipe.alone{{color:{_INK};color-scheme:light dark}}"
    "@media (prefers-color-scheme:dark){.funcpipe.alone{color:#e6edf3}}"
)
"""Text colours for a file (the scheme lets browsers darken what is behind it); in a page they are those of the page."""

_JOINED = "narrow actions are joined: the height of a colour is its share of the time"
_ORDER = {kind: number for number, kind in enumerate(Kind)}

_MOST = 10_000
"""Shapes of a picture: with more a file would pass two megabytes, and nobody could tell them apart."""


def svg(figure: Figure, *, inline: bool = False, most: int = _MOST) -> str:
    """The picture.

    Args:
        figure: what to draw and where.
        inline: True: for a place inside an HTML page, whose text colour it takes. False: a file of its own, which
            follows the viewer's light or dark mode.
        most: about how many shapes it may have; where there are more actions, those too narrow to see are joined.
    """
    most //= max(1, len(figure.panels))
    bars = [_bars(panel, figure, most) for panel in figure.panels]
    joined = any(len(bar.spans) > 1 for tracks in bars for _, row in tracks for bar in row)
    parts = _open(figure, inline=inline)
    for panel, tracks in zip(figure.panels, bars, strict=True):
        parts += _heading(panel, figure)
        if panel.content.has_lanes:
            held = panel.content.levels
            lanes = _actions(panel, tracks, figure) if held is None else _held(panel, held, figure, most)
            parts += _legend(figure, panel.legend, joined=joined) if panel.legend is not None else []
            parts += [*_axis(panel, figure), *_lanes(lanes, panel, figure)]
    return "\n".join([*parts, "</svg>"])


def _open(figure: Figure, *, inline: bool) -> list[str]:
    """The beginning of a picture, and its style."""
    shades = {shade for panel in figure.panels if panel.content.levels is None for shade in panel.shades.values()}
    shades |= {shade for line in figure.legend for entry in line for shade in entry.shades}
    rules = "".join(shade.rule for shade in sorted(shades))
    size = f'width="{_px(figure.width)}" height="{_px(figure.height)}"'
    label = "; ".join(f"{panel.content.title}: {', '.join(panel.content.words)}" for panel in figure.panels)
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="funcpipe{"" if inline else " alone"}" {size} '
        f'viewBox="0 0 {_px(figure.width)} {_px(figure.height)}" role="img" '
        f'aria-label="{escape(label)}" style="max-width:100%;height:auto">',
        f"<style>{_STYLE}{'' if inline else _ALONE}{rules}</style>",
    ]


def _heading(panel: Panel, figure: Figure) -> list[str]:
    """The title and the words below it, or behind it where the panel belongs to the one above."""
    name, x = panel.content.title, _px(MARGIN)
    if panel.content.levels is not None and panel is not figure.panels[0]:
        words = f'<tspan class="soft" font-size="12" font-weight="400" dx="8">{escape(" · ".join(panel.lines))}</tspan>'
        return [f'<text class="part" x="{x}" y="{_px(panel.top + 15)}">{escape(name)}{words}</text>']
    most = int((figure.width - 2 * MARGIN) / 9.5)
    name = name if len(name) <= most else f"{name[: most - 1]}…"
    lines = [
        f'<text class="soft" x="{x}" y="{_px(panel.top + 48 + 16 * at)}">{escape(line)}</text>'
        for at, line in enumerate(panel.lines)
    ]
    return [f'<text class="name" x="{x}" y="{_px(panel.top + 28)}">{escape(name)}</text>', *lines]


def _legend(figure: Figure, top: float, *, joined: bool) -> list[str]:
    """Swatches and words above the first chart."""
    out = ['<g class="legend">']
    for number, line in enumerate(figure.legend):
        y = top + 18 * number
        for x, shades, word in line:
            for at, shade in enumerate(shades):
                out.append(f'<path class="{shade.name}" d="M{_px(x + 12 * at)} {_px(y)}h12v12h-12z"/>')
            place = f'x="{_px(x + 12 * len(shades) + (6 if shades else 0))}" y="{_px(y + 10.5)}"'
            soft = "" if shades else 'class="soft" '
            out.append(f"<text {soft}{place}>{word}</text>")
    if joined:
        place = f'x="{_px(figure.left + figure.chart)}" y="{_px(top - 12)}"'
        out.append(f'<text class="soft end" {place}>{_JOINED}</text>')
    return [*out, "</g>"]


def _axis(panel: Panel, figure: Figure) -> list[str]:
    """Grid lines, their times below the lanes, and the headings of the right columns."""
    left, bottom = figure.left, panel.bottom
    marks = [
        (_px(left + time * figure.scale), label) for time, label in summary.ticks(figure.axis, int(figure.chart / 80))
    ]
    lines = "".join(f"M{x} {_px(panel.lanes - 4)}V{_px(bottom + 3)}" for x, _ in marks)
    labels = [f'<text x="{x}" y="{_px(bottom + 18)}">{label}</text>' for x, label in marks]
    unit = summary.time_text(figure.axis).unit
    unit = escape(unit if len(unit) <= 10 else f"{unit[:9]}…")
    out = [f'<path class="grid" d="{lines}"/>', '<g class="soft mid">', *labels, "</g>"]
    out.append(f'<text class="soft end" x="{_px(left - 10)}" y="{_px(bottom + 18)}">{unit}</text>')
    y = _px(panel.lanes - 8)
    if panel.content.levels is None:
        out.append(f'<text class="soft end" x="{_px(left + figure.chart + 44)}" y="{y}">busy</text>')
    if summary.side_columns(panel.content.timeline)[1]:
        out.append(f'<text class="soft end" x="{_px(figure.width - MARGIN)}" y="{y}">peak</text>')
    return out


def _lanes(lanes: list[list[str]], panel: Panel, figure: Figure) -> list[str]:
    """One group per device: its name, its idle track, what is in it, busy and peak."""
    timeline = panel.content.timeline
    busy, peak = summary.side_columns(timeline)
    size = "" if panel.label == 12 else f' font-size="{_px(panel.label)}"'
    base = _px(panel.bar / 2 + panel.label / 3)
    track = _px(timeline.makespan * figure.scale)
    out: list[str] = []
    for device, lane in enumerate(lanes):
        out.append(f'<g transform="translate({_px(figure.left)} {_px(panel.lanes + device * panel.pitch)})"{size}>')
        out.append(f'<text class="end" x="-10" y="{base}">{escape(summary.device_name(timeline, device))}</text>')
        out += [f'<path class="lane" d="M0 0h{track}v{_px(panel.bar)}H0z"/>', *lane]
        if panel.content.levels is None:
            out.append(f'<text class="end" x="{_px(figure.chart + 44)}" y="{base}">{busy[device]}</text>')
        if peak:
            x = figure.width - figure.left - MARGIN
            out.append(f'<text class="end" x="{_px(x)}" y="{base}">{peak[device]}</text>')
        out.append("</g>")
    return out


def _bars(panel: Panel, figure: Figure, most: int) -> list[tuple[Track, list[ActionBar]]]:
    """The tracks of a panel of actions, and what to draw in each."""
    tracks = panel.tracks() if panel.content.levels is None else []
    return list(
        zip(tracks, joined_bars([track.spans for track in tracks], figure.scale, most, panel.shade), strict=True)
    )


def _actions(panel: Panel, tracks: list[tuple[Track, list[ActionBar]]], figure: Figure) -> list[list[str]]:
    """What the devices do, for each device."""
    lanes: list[list[str]] = [[] for _ in range(panel.content.timeline.num_devices)]
    for track, bars in tracks:
        lanes[track.device] += _track(track, bars, panel, figure)
    return lanes


def _track(track: Track, bars: list[ActionBar], panel: Panel, figure: Figure) -> Iterable[str]:
    """Its actions in one group per shade, bars of joined ones, and over them numbers where they fit."""
    times = summary.time_text(figure.axis)
    groups: defaultdict[Shade, list[str]] = defaultdict(list)
    edges: defaultdict[Kind, list[str]] = defaultdict(list)
    mixed: list[str] = []
    numbers: list[str] = []
    edge = max(3.0, 0.2 * track.height)
    top = f' y="{_px(track.top)}"' if track.top else ""
    for bar in bars:
        if len(bar.spans) > 1:
            mixed += _mixed(bar, track, panel, figure, times)
            continue
        (span,) = bar.spans
        # A hair of the lane stays between neighbours, and nothing is invisible.
        x, width = bar.start * figure.scale, (bar.end - bar.start) * figure.scale
        width = max(0.3, width - min(1.0, 0.12 * width))
        place = f'x="{_px(x)}"{top} width="{_px(width)}" height="{_px(track.height)}"'
        groups[panel.shade(span)].append(f"<rect {place}><title>{_hover(span, times)}</title></rect>")
        if figure.by == "stage" and not track.top:
            edges[span.action.kind].append(f"M{_fine(x)} 0h{_fine(width)}v{_px(edge)}h-{_fine(width)}z")
        if width >= panel.least and track.height >= panel.font:
            letter = span.action.kind.value if figure.by == "stage" else ""
            numbers.append(f'<text x="{_px(x + width / 2)}">{letter}{span.action.microbatch}</text>')
    for shade in sorted(groups):
        yield from (f'<g class="{shade.name}">', *groups[shade], "</g>")
    yield from mixed
    for kind, paths in edges.items():
        yield f'<path class="{kind_shade(kind).name}" pointer-events="none" d="{"".join(paths)}"/>'
    if numbers:
        down = track.height / 2 + (edge / 2 if figure.by == "stage" else 0) + 0.36 * panel.font
        yield f'<g class="num" transform="translate(0 {_px(down)})" font-size="{_px(panel.font)}">'
        yield from (*numbers, "</g>")


def _mixed(bar: ActionBar, track: Track, panel: Panel, figure: Figure, times: summary.TimeText) -> Iterable[str]:
    """Joined actions as a bar: the height of each shade is its share of the time."""
    work: defaultdict[Shade, float] = defaultdict(float)
    first: dict[Shade, tuple[int, int]] = {}
    for span in bar.spans:
        shade = panel.shade(span)
        work[shade] += span.end - span.start
        place = (_ORDER[span.action.kind], span.action.stage)
        first[shade] = min(first.get(shade, place), place)
    x, width = _px(bar.start * figure.scale), _px((bar.end - bar.start) * figure.scale)
    y, whole = track.top + track.height, bar.end - bar.start or 1.0
    yield f'<g class="mix"><title>{_hover_all(bar, times)}</title>'
    for shade in sorted(work, key=first.__getitem__):
        height = track.height * work[shade] / whole
        y -= height
        if height >= 0.05:
            yield f'<path class="{shade.name}" d="M{x} {_px(y)}h{width}v{_px(height)}h-{width}z"/>'
    yield "</g>"


def _held(panel: Panel, held: Sequence[Sequence[Level]], figure: Figure, most: int) -> list[list[str]]:
    """What the devices hold, for each device, in slices wide enough that there are not too many."""
    times = summary.time_text(figure.axis)
    devices = held
    step = max(1.0, len(held) * figure.chart / (8 * most))  # neighbours of one height will be joined
    while sum(map(len, devices)) > most and step < figure.chart:
        devices = [coarse(device, step / figure.scale) for device in devices]
        step *= 2
    return [_levels(device, panel, figure, times) for device in devices]


def _levels(device: Sequence[Level], panel: Panel, figure: Figure, times: summary.TimeText) -> list[str]:
    """The levels of a device as bars that stand on its lane's floor, and a line on the highest ones."""
    out: list[str] = []
    peak = highest([device])
    lines: list[str] = []
    for start, end, amount in device:
        if amount <= 0:
            continue
        # Both ends rounded as they are written: neighbours touch, or a hairline would look like a moment without any.
        x, right = round(start * figure.scale, 1), round(end * figure.scale, 1)
        width = max(0.3, right - x)
        height = panel.bar * min(1.0, amount / panel.content.most)
        place = f'x="{_px(x)}" y="{_px(panel.bar - height)}" width="{_px(width)}" height="{_px(height)}"'
        words = f"holds {summary.amount_text(amount)}: {escape(times.interval(start, end))}"
        out.append(f'<rect class="held" {place}><title>{words}</title></rect>')
        if amount == peak:
            lines.append(f"M{_px(x)} {_px(max(1.0, panel.bar - height))}h{_px(max(2.0, width))}")
    return [*out, f'<path class="top" pointer-events="none" d="{"".join(lines)}"/>'] if lines else out


def _hover(span: Span, times: summary.TimeText) -> str:
    """What an action is."""
    kind, stage, microbatch = span.action
    when = escape(times.interval(span.start, span.end))
    return f"{span.action} {style_of(kind).word}, stage {stage}, microbatch {microbatch}: {when}"


def _hover_all(bar: ActionBar, times: summary.TimeText) -> str:
    """What joined actions are: how many of each kind, and the range of their stages and microbatches."""
    actions = [span.action for span in bar.spans]
    counts = Counter(action.kind for action in actions)
    kinds = " ".join(f"{counts[kind]} {kind.value}" for kind in Kind if counts[kind])
    stages = _range("stage", [action.stage for action in actions])
    microbatches = _range("microbatch", [action.microbatch for action in actions])
    return f"{kinds}, {stages}, {microbatches}: {escape(times.interval(bar.start, bar.end))}"


def _range(word: str, numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{word} {low}" if low == high else f"{summary.plural(word)} {low} to {high}"


def _fine(number: float) -> str:
    """Pixels where thousands of shapes stand side by side: a hundredth counts."""
    return summary.number_text(number, 2)


def _px(number: float) -> str:
    """Pixels: a tenth is fine enough, and files stay small."""
    return summary.number_text(number, 1)
