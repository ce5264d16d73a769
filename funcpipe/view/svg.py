"""A sheet as SVG: Gantt charts with a lane for each device, and what the lanes hold over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape

from funcpipe.core.result import Span
from funcpipe.core.schedule import Kind
from funcpipe.view import facts
from funcpipe.view.held import Level, coarse
from funcpipe.view.palette import Shade, kind_shade
from funcpipe.view.pieces import Piece, pieces
from funcpipe.view.sheet import MARGIN, Panel, Sheet, Track

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


def svg(sheet: Sheet, *, inline: bool = False, most: int = _MOST) -> str:
    """The picture.

    Args:
        sheet: what to draw and where.
        inline: True: for a place inside an HTML page, whose text colour it takes. False: a file of its own, which
            follows the viewer's light or dark mode.
        most: about how many shapes it may have; where there are more actions, those too narrow to see are joined.
    """
    most //= max(1, len(sheet.panels))
    drawn = [_bodies(panel, sheet, most) for panel in sheet.panels]
    shades = {shade for _, used in drawn for shade in used}
    shades |= {shade for line in sheet.legend for item in line for shade in item.shades}
    rules = "".join(shade.rule for shade in sorted(shades))
    parts = _open(sheet, f"{'' if inline else _ALONE}{rules}", inline=inline)
    for panel, (bodies, _) in zip(sheet.panels, drawn, strict=True):
        parts += _heading(panel, sheet, small=panel is not sheet.panels[0])
        if panel.row.has_lanes:
            joined = any('class="mix"' in line for bodies, _ in drawn for body in bodies for line in body)
            legend = _legend(sheet, panel.legend, joined=joined) if panel.legend is not None else []
            parts += [*legend, *_axis(panel, sheet), *_lanes(bodies, panel, sheet)]
    return "\n".join([*parts, "</svg>"])


def _open(sheet: Sheet, rules: str, *, inline: bool) -> list[str]:
    """The beginning of a picture, and its style."""
    size = f'width="{_px(sheet.width)}" height="{_px(sheet.height)}"'
    label = "; ".join(f"{panel.row.title}: {', '.join(panel.row.words)}" for panel in sheet.panels)
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="funcpipe{"" if inline else " alone"}" {size} '
        f'viewBox="0 0 {_px(sheet.width)} {_px(sheet.height)}" role="img" '
        f'aria-label="{escape(label)}" style="max-width:100%;height:auto">',
        f"<style>{_STYLE}{rules}</style>",
    ]


def _heading(panel: Panel, sheet: Sheet, *, small: bool) -> list[str]:
    """The title and the words below it, or behind it where the panel belongs to the one above."""
    if small and panel.row.levels is not None:
        words = f'<tspan class="soft" font-size="12" font-weight="400" dx="8">{escape(" · ".join(panel.lines))}</tspan>'
        return [
            f'<text class="part" x="{_px(MARGIN)}" y="{_px(panel.top + 15)}">{escape(panel.row.title)}{words}</text>'
        ]
    most = int((sheet.width - 2 * MARGIN) / 9.5)
    name = panel.row.title if len(panel.row.title) <= most else panel.row.title[: most - 1] + "…"
    lines = [
        f'<text class="soft" x="{_px(MARGIN)}" y="{_px(panel.top + 48 + 16 * at)}">{escape(line)}</text>'
        for at, line in enumerate(panel.lines)
    ]
    return [f'<text class="name" x="{_px(MARGIN)}" y="{_px(panel.top + 28)}">{escape(name)}</text>', *lines]


def _legend(sheet: Sheet, top: float, *, joined: bool) -> list[str]:
    """Swatches and words above the first chart."""
    out = ['<g class="legend">']
    for number, line in enumerate(sheet.legend):
        y = top + 18 * number
        for x, shades, word in line:
            for at, shade in enumerate(shades):
                out.append(f'<path class="{shade.name}" d="M{_px(x + 12 * at)} {_px(y)}h12v12h-12z"/>')
            place = f'x="{_px(x + 12 * len(shades) + (6 if shades else 0))}" y="{_px(y + 10.5)}"'
            soft = "" if shades else 'class="soft" '
            out.append(f"<text {soft}{place}>{word}</text>")
    if joined:
        place = f'x="{_px(sheet.left + sheet.chart)}" y="{_px(top - 12)}"'
        out.append(f'<text class="soft end" {place}>{_JOINED}</text>')
    return [*out, "</g>"]


def _axis(panel: Panel, sheet: Sheet) -> list[str]:
    """Grid lines, their times below the lanes, and the headings of the right columns."""
    left, scale, bottom = sheet.left, sheet.scale, panel.bottom
    marks = facts.ticks(sheet.axis, int(sheet.chart / 80))
    lines = "".join(f"M{_px(left + time * scale)} {_px(panel.lanes - 4)}V{_px(bottom + 3)}" for time, _ in marks)
    out = [f'<path class="grid" d="{lines}"/>', '<g class="soft mid">']
    for time, label in marks:
        out.append(f'<text x="{_px(left + time * scale)}" y="{_px(bottom + 18)}">{label}</text>')
    out.append("</g>")
    unit = facts.time_text(sheet.axis).unit
    unit = escape(unit if len(unit) <= 10 else f"{unit[:9]}…")
    out.append(f'<text class="soft end" x="{_px(left - 10)}" y="{_px(bottom + 18)}">{unit}</text>')
    y = _px(panel.lanes - 8)
    if panel.row.levels is None:
        out.append(f'<text class="soft end" x="{_px(left + sheet.chart + 44)}" y="{y}">busy</text>')
    if facts.sides(panel.row.timeline)[1]:
        out.append(f'<text class="soft end" x="{_px(sheet.width - MARGIN)}" y="{y}">peak</text>')
    return out


def _lanes(bodies: list[list[str]], panel: Panel, sheet: Sheet) -> list[str]:
    """One group per device: its name, its idle track, what is in it, busy and peak."""
    busy, peak = facts.sides(panel.row.timeline)
    size = "" if panel.label == 12 else f' font-size="{_px(panel.label)}"'
    base = _px(panel.bar / 2 + panel.label / 3)
    track = _px(panel.row.timeline.makespan * sheet.scale)
    out: list[str] = []
    for device, body in enumerate(bodies):
        out.append(f'<g transform="translate({_px(sheet.left)} {_px(panel.lanes + device * panel.pitch)})"{size}>')
        out.append(f'<text class="end" x="-10" y="{base}">{escape(facts.called(panel.row.timeline, device))}</text>')
        out += [f'<path class="lane" d="M0 0h{track}v{_px(panel.bar)}H0z"/>', *body]
        if panel.row.levels is None:
            out.append(f'<text class="end" x="{_px(sheet.chart + 44)}" y="{base}">{busy[device]}</text>')
        if peak:
            x = sheet.width - sheet.left - MARGIN
            out.append(f'<text class="end" x="{_px(x)}" y="{base}">{peak[device]}</text>')
        out.append("</g>")
    return out


def _bodies(panel: Panel, sheet: Sheet, most: int) -> tuple[list[list[str]], set[Shade]]:
    """What is in the lane of each device, and the shades of it."""
    timeline = panel.row.timeline
    bodies: list[list[str]] = [[] for _ in range(timeline.num_devices)]
    if panel.row.levels is not None:
        return [_held(lane, panel, sheet) for lane in _fewer(panel.row.levels, sheet, most)], set()
    tracks = panel.tracks()
    used: set[Shade] = set()
    found = pieces([track.spans for track in tracks], sheet.scale, most, panel.palette.of)
    for track, lane in zip(tracks, found, strict=True):
        bodies[track.device] += _actions(track, lane, panel, sheet, used)
    return bodies, used


def _actions(track: Track, lane: list[Piece], panel: Panel, sheet: Sheet, used: set[Shade]) -> list[str]:
    """The actions of a track in one group per shade, bars of joined ones, and over them numbers where they fit."""
    shown = facts.time_text(sheet.axis)
    groups: defaultdict[Shade, list[str]] = defaultdict(list)
    edges: defaultdict[Kind, list[str]] = defaultdict(list)
    joined: list[str] = []
    numbers: list[str] = []
    strip = max(3.0, 0.2 * track.height)
    top = f' y="{_px(track.top)}"' if track.top else ""
    for piece in lane:
        x, width = _place(piece, sheet)
        if len(piece.spans) > 1:
            joined += _mix(piece, track, panel, x, width, shown, used)
            continue
        (span,) = piece.spans
        place = f'x="{_px(x)}"{top} width="{_px(width)}" height="{_px(track.height)}"'
        groups[panel.palette.of(span)].append(f"<rect {place}><title>{_hover(span, shown)}</title></rect>")
        if sheet.by == "stage" and not track.top:
            edges[span.action.kind].append(f"M{_fine(x)} 0h{_fine(width)}v{_px(strip)}h-{_fine(width)}z")
        if width >= panel.least and track.height >= panel.font:
            letter = span.action.kind.value if sheet.by == "stage" else ""
            numbers.append(f'<text x="{_px(x + width / 2)}">{letter}{span.action.microbatch}</text>')
    used.update(groups)
    out = [line for shade in sorted(groups) for line in (f'<g class="{shade.name}">', *groups[shade], "</g>")] + joined
    for kind, paths in edges.items():
        used.add(kind_shade(kind))
        out.append(f'<path class="{kind_shade(kind).name}" pointer-events="none" d="{"".join(paths)}"/>')
    if numbers:
        room = strip / 2 if sheet.by == "stage" else 0
        down = _px(track.height / 2 + room + 0.36 * panel.font)
        out.append(f'<g class="num" transform="translate(0 {down})" font-size="{_px(panel.font)}">')
        out += [*numbers, "</g>"]
    return out


def _mix(
    piece: Piece, track: Track, panel: Panel, x: float, width: float, shown: facts.TimeText, used: set[Shade]
) -> Iterable[str]:
    """Joined actions as a bar: the height of each shade is its share of the time."""
    times: defaultdict[Shade, float] = defaultdict(float)
    first: dict[Shade, tuple[int, int]] = {}
    for span in piece.spans:
        shade = panel.palette.of(span)
        times[shade] += span.end - span.start
        place = (_ORDER[span.action.kind], span.action.stage)
        first[shade] = min(first.get(shade, place), place)
    used.update(times)
    y, whole = track.top + track.height, piece.end - piece.start or 1.0
    yield f'<g class="mix"><title>{_hover_all(piece, shown)}</title>'
    for shade in sorted(times, key=first.__getitem__):
        tall = track.height * times[shade] / whole
        y -= tall
        if tall >= 0.05:
            yield f'<path class="{shade.name}" d="M{_px(x)} {_px(y)}h{_px(width)}v{_px(tall)}h-{_px(width)}z"/>'
    yield "</g>"


def _fewer(found: Sequence[Sequence[Level]], sheet: Sheet, most: int) -> Sequence[Sequence[Level]]:
    """The levels, in slices wide enough that there are not too many."""
    some = found
    step = max(1.0, len(found) * sheet.chart / (8 * most))  # neighbours of one height will be joined
    while sum(map(len, some)) > most and step < sheet.chart:
        some = [coarse(lane, step / sheet.scale) for lane in some]
        step *= 2
    return some


def _held(lane: Sequence[Level], panel: Panel, sheet: Sheet) -> list[str]:
    """The levels of a lane as bars that stand on its floor, and a line on the highest ones."""
    shown = facts.time_text(sheet.axis)
    out: list[str] = []
    peak = max((level.amount for level in lane), default=0.0)
    lines: list[str] = []
    for start, end, amount in lane:
        if amount <= 0:
            continue
        # Both ends rounded as they are written: neighbours touch, or a hairline would look like a moment without any.
        x, right = round(start * sheet.scale, 1), round(end * sheet.scale, 1)
        width = max(0.3, right - x)
        height = panel.bar * min(1.0, amount / panel.row.most)
        times = f"{shown.number(start, 1)} to {shown.number(end, 1)} {escape(shown.unit)}"
        out.append(
            f'<rect class="held" x="{_px(x)}" y="{_px(panel.bar - height)}" width="{_px(width)}" height="{_px(height)}">'
            f"<title>holds {facts.amount(amount)}: {times}</title></rect>"
        )
        if amount == peak:
            lines.append(f"M{_px(x)} {_px(max(1.0, panel.bar - height))}h{_px(max(2.0, width))}")
    return [*out, f'<path class="top" pointer-events="none" d="{"".join(lines)}"/>'] if lines else out


def _place(piece: Piece, sheet: Sheet) -> tuple[float, float]:
    """Left edge and width of an action: a hair of the lane stays between neighbours, and nothing is invisible."""
    width = (piece.end - piece.start) * sheet.scale
    if len(piece.spans) > 1:
        return piece.start * sheet.scale, width
    return piece.start * sheet.scale, max(0.3, width - min(1.0, 0.12 * width))


def _hover(span: Span, shown: facts.TimeText) -> str:
    kind, stage, microbatch = span.action
    times = f"{shown.number(span.start, 1)} to {shown.number(span.end, 1)} {escape(shown.unit)}"
    return f"{span.action} {facts.look(kind).word}, stage {stage}, microbatch {microbatch}: {times}"


def _hover_all(piece: Piece, shown: facts.TimeText) -> str:
    """What joined actions are: how many of each kind, and the range of their stages and microbatches."""
    actions = [span.action for span in piece.spans]
    counts = [(kind, sum(one.kind is kind for one in actions)) for kind in Kind]
    many = " ".join(f"{count} {kind.value}" for kind, count in counts if count)
    stages = _range("stage", [one.stage for one in actions])
    microbatches = _range("microbatch", [one.microbatch for one in actions])
    times = f"{shown.number(piece.start, 1)} to {shown.number(piece.end, 1)} {escape(shown.unit)}"
    return f"{many}, {stages}, {microbatches}: {times}"


def _range(word: str, numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    plural = word + ("es" if word.endswith("ch") else "s")
    return f"{word} {low}" if low == high else f"{plural} {low} to {high}"


def _fine(number: float) -> str:
    """Pixels where thousands of shapes stand side by side: a hundredth counts."""
    return facts.plain(number, 2)


def _px(number: float) -> str:
    """Pixels: a tenth is fine enough, and files stay small."""
    return facts.plain(number, 1)
