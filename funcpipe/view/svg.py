"""A timeline as SVG: a Gantt chart with a lane for each device, or what the lanes hold over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Kind
from funcpipe.view import facts

_INK = "#1f2328"
_STYLE = (
    ".funcpipe{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;"
    "font-variant-numeric:tabular-nums}"
    ".funcpipe text{fill:currentColor}"
    ".funcpipe .name{font-size:17px;font-weight:600}"
    ".funcpipe .soft{opacity:.72}"
    ".funcpipe .end{text-anchor:end}"
    ".funcpipe .mid{text-anchor:middle}"
    ".funcpipe .lane{fill:currentColor;opacity:.06}"
    ".funcpipe .held{fill:#8b95d6;shape-rendering:crispEdges}"
    ".funcpipe .grid{stroke:currentColor;opacity:.16;fill:none}"
    f".funcpipe .num text{{fill:{_INK};text-anchor:middle;pointer-events:none}}"
    ".funcpipe rect:hover{stroke:currentColor;stroke-width:1.5}"
)
"""The same in every drawing, as are the rules for shades: several drawings in one page cannot disturb each other."""

_ALONE = (
    f".funcpipe.alone{{color:{_INK};color-scheme:light dark}}"
    "@media (prefers-color-scheme:dark){.funcpipe.alone{color:#e6edf3}}"
)
"""Text colours for a file (the scheme lets browsers darken what is behind it); in a page they are those of the page."""

_TOP, _BOTTOM, _MARGIN = 92.0, 42.0, 16.0


class Frame(NamedTuple):
    """Where things are, in pixels.

    Attributes:
        left: of the chart.
        chart: its width.
        width, height: of the whole picture.
        scale: pixels per unit of time.
        bar: height of a lane.
        pitch: from lane to lane.
        font: size of the numbers in the actions.
        least: the width that an action needs to show its number.
    """

    left: float
    chart: float
    width: float
    height: float
    scale: float
    bar: float
    pitch: float
    font: float
    least: float


class Level(NamedTuple):
    """What a lane holds for some time.

    Attributes:
        start, end: in the timeline's unit.
        amount: how much, in the unit of `Timeline.peak`.
    """

    start: float
    end: float
    amount: float


def svg(timeline: Timeline, *, inline: bool = False, axis: Timeline | None = None, plain: bool = False) -> str:
    """The picture.

    Args:
        timeline: what to draw.
        inline: True: for a place inside an HTML page, whose text colour it takes. False: a file of its own, which
            follows the viewer's light or dark mode.
        axis: another timeline, at least as long, on whose time scale this one is drawn: pictures below each other can
            be compared.
        plain: True: actions tell nothing under a mouse and show no numbers; the file is five times smaller.
    """
    axis = axis or timeline
    frame = _frame(axis)
    ranks = facts.ranks(timeline)
    most = max(ranks.values(), default=0)
    shades = {(kind, _tint(rank, most)) for kind in facts.kinds(timeline) for rank in range(most + 1)}
    rules = "".join(_rule(kind, tint) for kind, tint in sorted(shades, key=lambda one: (one[0].value, one[1])))
    name, words = facts.title(timeline), _counts(timeline)
    words = [*words, *facts.facts(timeline, axis)] if timeline.spans else [words[0], "no actions"]
    parts = [*_open(name, words, frame, f"{'' if inline else _ALONE}{rules}", inline=inline)]
    if timeline.spans:
        bodies = _bodies(timeline, frame, ranks, most, None if plain else facts.time_text(axis))
        busy, peak = facts.sides(timeline)
        parts += [*_legend(timeline, frame, most), *_axis(axis, frame), *_lanes(bodies, frame, busy, peak)]
    return "\n".join([*parts, "</svg>"])


def held(
    timeline: Timeline,
    levels: Sequence[Sequence[Level]],
    *,
    name: str,
    axis: Timeline | None = None,
    plain: bool = False,
) -> str:
    """What each lane holds over time, as steps, for a place inside an HTML page.

    Args:
        timeline: whose lanes these are; its peaks stand beside them.
        levels: for each lane what it holds, by start.
        name: what is held.
        axis, plain: as in `svg`.
    """
    axis = axis or timeline
    frame = _frame(axis)
    shown = facts.time_text(axis)
    most = max((level.amount for lane in levels for level in lane), default=0.0) or 1.0
    if plain:
        bodies = [[_area(lane, frame, most)] for lane in levels]
    else:
        bodies = [[_step(level, frame, shown, most) for level in lane if level.amount > 0] for lane in levels]
    words = [_counts(timeline)[0], f"the height of a lane is {facts.plain(most, 1)}"]
    parts = [*_open(name, words, frame, "", inline=True), *_axis(axis, frame, busy=False)]
    _, peak = facts.sides(timeline)
    return "\n".join([*parts, *_lanes(bodies, frame, (), peak), "</svg>"])


def _open(name: str, words: list[str], frame: Frame, rules: str, *, inline: bool) -> list[str]:
    """The beginning of a picture, its style and its heading."""
    size = f'width="{_px(frame.width)}" height="{_px(frame.height)}"'
    label = escape(f"{name}: {', '.join(words)}")
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="funcpipe{"" if inline else " alone"}" {size} '
        f'viewBox="0 0 {_px(frame.width)} {_px(frame.height)}" role="img" '
        f'aria-label="{label}" style="max-width:100%;height:auto">',
        f"<style>{_STYLE}{rules}</style>",
        *_heading(name, words, frame),
    ]


def page(timeline: Timeline) -> str:
    """The picture as an HTML page of its own, light or dark as the viewer likes."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(facts.title(timeline))}</title></head>\n<body>\n{svg(timeline, inline=True)}\n</body></html>\n"
    )


def _frame(timeline: Timeline) -> Frame:
    """Choose the sizes: short actions get room for their number, up to a width that screens have."""
    digits = len(str(max(0, timeline.num_devices - 1)))
    left = _MARGIN + 50 + 7 * digits
    end = timeline.makespan or 1.0
    times = [span.end - span.start for span in timeline.spans]
    chart = min(1240.0, max(640.0, 24 * end / facts.quantile(times, 0.1))) if times else 640.0
    bar, pitch, font = _sizes(timeline.num_devices)
    # The longest number decides for all: a row that shows 8 and 9 but not 10 looks broken.
    longest = 0.6 * max((len(str(span.action.microbatch)) for span in timeline.spans), default=1)
    room = facts.quantile(times, 0.75) * chart / end - 4
    font = min(font, max(8.0, room / longest))
    _, peak = facts.sides(timeline)
    right = _MARGIN + 44 + (16 + 7 * max(4, *map(len, peak)) if peak else 0)
    height = _TOP + timeline.num_devices * pitch + _BOTTOM if times else 66.0
    return Frame(left, chart, left + chart + right, height, chart / end, bar, pitch, font, longest * font + 3)


def _sizes(num_devices: int) -> tuple[float, float, float]:
    """Height of a lane, from lane to lane, of the letters: smaller where there are many."""
    if num_devices <= 8:
        return 30, 35, 12
    return (22, 25, 11) if num_devices <= 16 else (16, 18, 9)


def _counts(timeline: Timeline) -> list[str]:
    count = len({span.action.microbatch for span in timeline.spans})
    stages = len({span.action.stage for span in timeline.spans})
    return [_many(timeline.num_devices, "device"), _many(stages, "stage"), _many(count, "microbatch")]


def _heading(name: str, words: list[str], frame: Frame) -> list[str]:
    most = int((frame.width - 2 * _MARGIN) / 9.5)
    name = name if len(name) <= most else name[: most - 1] + "…"
    return [
        f'<text class="name" x="{_px(_MARGIN)}" y="28">{escape(name)}</text>',
        f'<text class="soft" x="{_px(_MARGIN)}" y="48">{escape(" · ".join(words))}</text>',
    ]


def _legend(timeline: Timeline, frame: Frame, most: int) -> list[str]:
    """Swatches and words in one line above the chart: all shades of each kind."""
    out = ['<g class="legend">']
    x, y = _MARGIN, 60.0
    few = min(most, 3)  # of many shades four show the idea
    tints = sorted({_tint(rank * most // few, most) for rank in range(few + 1)}) if most else [0]
    for kind in facts.kinds(timeline):
        for tint in tints:
            out.append(f'<path class="{kind.value}{tint}" d="M{_px(x)} {_px(y)}h12v12h-12z"/>')
            x += 12
        word = f"{kind.value} {facts.look(kind).word}"
        out.append(f'<text x="{_px(x + 6)}" y="{_px(y + 10.5)}">{word}</text>')
        x += 6 + 6.4 * len(word) + 18
    if most:
        out.append(f'<text class="soft" x="{_px(x)}" y="{_px(y + 10.5)}">lighter: later stages</text>')
    return [*out, "</g>"]


def _axis(timeline: Timeline, frame: Frame, *, busy: bool = True) -> list[str]:
    """Grid lines, their times below the lanes, and the headings of the right columns."""
    bottom = _TOP + timeline.num_devices * frame.pitch
    marks = facts.ticks(timeline, int(frame.chart / 80))
    lines = "".join(f"M{_px(frame.left + time * frame.scale)} {_px(_TOP - 4)}V{_px(bottom + 3)}" for time, _ in marks)
    out = [f'<path class="grid" d="{lines}"/>', '<g class="soft mid">']
    for time, label in marks:
        out.append(f'<text x="{_px(frame.left + time * frame.scale)}" y="{_px(bottom + 18)}">{label}</text>')
    out.append("</g>")
    unit = facts.time_text(timeline).unit
    unit = escape(unit if len(unit) <= 10 else f"{unit[:9]}…")
    out.append(f'<text class="soft end" x="{_px(frame.left - 10)}" y="{_px(bottom + 18)}">{unit}</text>')
    _, peak = facts.sides(timeline)
    if busy:
        out.append(f'<text class="soft end" x="{_px(frame.left + frame.chart + 44)}" y="{_px(_TOP - 8)}">busy</text>')
    if peak:
        x = frame.width - _MARGIN
        out.append(f'<text class="soft end" x="{_px(x)}" y="{_px(_TOP - 8)}">peak</text>')
    return out


def _bodies(
    timeline: Timeline, frame: Frame, ranks: dict[tuple[int, int], int], most: int, shown: facts.TimeText | None
) -> list[list[str]]:
    """The actions of each device."""
    lanes: list[dict[str, list[Span]]] = [defaultdict(list) for _ in range(timeline.num_devices)]
    for span in timeline.spans:
        kind, stage, _ = span.action
        lanes[span.device][f"{kind.value}{_tint(ranks[span.device, stage], most)}"].append(span)
    return [_actions(shades, frame, shown) if shown else _shapes(shades, frame) for shades in lanes]


def _lanes(bodies: list[list[str]], frame: Frame, busy: Sequence[str], peak: Sequence[str]) -> list[str]:
    """One group per device: its name, its idle track, what is in it, busy and peak."""
    base = _px(frame.bar / 2 + 4)
    out: list[str] = []
    for device, body in enumerate(bodies):
        out.append(f'<g transform="translate({_px(frame.left)} {_px(_TOP + device * frame.pitch)})">')
        out.append(f'<text class="end" x="-10" y="{base}">device {device}</text>')
        out.append(f'<path class="lane" d="M0 0h{_px(frame.chart)}v{_px(frame.bar)}H0z"/>')
        out += body
        if busy:
            out.append(f'<text class="end" x="{_px(frame.chart + 44)}" y="{base}">{busy[device]}</text>')
        if peak:
            x = frame.width - frame.left - _MARGIN
            out.append(f'<text class="end" x="{_px(x)}" y="{base}">{peak[device]}</text>')
        out.append("</g>")
    return out


def _step(level: Level, frame: Frame, shown: facts.TimeText, most: float) -> str:
    """One level as a bar that stands on the lane's floor."""
    # Both ends rounded as they are written: neighbours touch, or a hairline would look like a moment without any.
    x, right = round(level.start * frame.scale, 1), round(level.end * frame.scale, 1)
    width = max(0.3, right - x)
    height = frame.bar * level.amount / most
    times = f"{shown.number(level.start, 1)} to {shown.number(level.end, 1)} {escape(shown.unit)}"
    return (
        f'<rect class="held" x="{_px(x)}" y="{_px(frame.bar - height)}" width="{_px(width)}" height="{_px(height)}">'
        f"<title>holds {facts.plain(level.amount, 1)}: {times}</title></rect>"
    )


def _actions(shades: dict[str, list[Span]], frame: Frame, shown: facts.TimeText) -> list[str]:
    """The actions of a lane in one group per shade, and over them their numbers where they fit."""
    out: list[str] = []
    numbers: list[str] = []
    for shade, spans in sorted(shades.items()):
        out.append(f'<g class="{shade}">')
        for span in spans:
            x, width = _place(span, frame)
            place = f'x="{_px(x)}" width="{_px(width)}" height="{_px(frame.bar)}"'
            out.append(f"<rect {place}><title>{_hover(span, shown)}</title></rect>")
            if width >= frame.least:
                numbers.append(f'<text x="{_px(x + width / 2)}">{span.action.microbatch}</text>')
        out.append("</g>")
    if numbers:
        down = _px(frame.bar / 2 + 0.36 * frame.font)
        out.append(f'<g class="num" transform="translate(0 {down})" font-size="{_px(frame.font)}">')
        out += [*numbers, "</g>"]
    return out


def _shapes(shades: dict[str, list[Span]], frame: Frame) -> list[str]:
    """The actions of a lane as one path per shade."""
    bar = _px(frame.bar)
    out: list[str] = []
    for shade, spans in sorted(shades.items()):
        places = (map(_fine, _place(span, frame)) for span in spans)
        out.append(f'<path class="{shade}" d="{"".join(f"M{x} 0h{width}v{bar}h-{width}z" for x, width in places)}"/>')
    return out


def _area(levels: Sequence[Level], frame: Frame, most: float) -> str:
    """All levels of a lane as one path."""
    floor = _px(frame.bar)
    steps = (
        f"M{_fine(start * frame.scale)} {floor}V{_px(frame.bar * (1 - amount / most))}H{_fine(end * frame.scale)}V{floor}z"
        for start, end, amount in levels
        if amount > 0
    )
    return f'<path class="held" d="{"".join(steps)}"/>'


def _place(span: Span, frame: Frame) -> tuple[float, float]:
    """Left edge and width of an action: a hair of the lane stays between neighbours, and nothing is invisible."""
    width = (span.end - span.start) * frame.scale
    return span.start * frame.scale, max(0.3, width - min(1.0, 0.12 * width))


def _hover(span: Span, shown: facts.TimeText) -> str:
    kind, stage, microbatch = span.action
    times = f"{shown.number(span.start, 1)} to {shown.number(span.end, 1)} {escape(shown.unit)}"
    return f"{span.action} {facts.look(kind).word}, stage {stage}, microbatch {microbatch}: {times}"


def _tint(rank: int, most: int) -> int:
    """How many percent of white a device's stage gets: none for its first."""
    return round(min(62, 38 + 8 * (most - 1)) * rank / most) if most else 0


def _rule(kind: Kind, tint: int) -> str:
    """The rule of one shade. Its name says its colour, so it means the same in every drawing."""
    mixed = (round(part + (255 - part) * tint / 100) for part in facts.look(kind).colour)
    return f".funcpipe .{kind.value}{tint}{{fill:#{''.join(f'{part:02x}' for part in mixed)}}}"


def _many(count: int, word: str) -> str:
    plural = word + ("es" if word.endswith("ch") else "s")
    return f"{count} {word if count == 1 else plural}"


def _fine(number: float) -> str:
    """Pixels where thousands of shapes stand side by side: a hundredth counts."""
    return facts.plain(number, 2)


def _px(number: float) -> str:
    """Pixels: a tenth is fine enough, and files stay small."""
    return facts.plain(number, 1)
