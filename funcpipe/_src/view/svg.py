"""Draw a figure as SVG: Gantt charts with a row for each device, and memory over time.

Each shape has its colour as an attribute, or inherits it from a group, because renderers outside of
browsers support little CSS. The style sheet contains only what a renderer may ignore: dark mode and
hover. `svg_lanes.py` draws the content of the lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from funcpipe._src.data.result import Timeline
from funcpipe._src.view import summary
from funcpipe._src.view.figure import MARGIN, Frame, Panel, frame_of
from funcpipe._src.view.palette import By, Colour, hexadecimal, legend
from funcpipe._src.view.svg_lanes import INK, action_lanes, level_lanes, pixels

_FONT = "system-ui,-apple-system,Segoe UI,Roboto,Helvetica Neue,Arial,sans-serif"
_STYLE = (
    ".funcpipe{font-variant-numeric:tabular-nums}.funcpipe "
    "rect:hover{stroke:currentColor;stroke-width:1.5}"
)
"""The style sheet. It is equal in all drawings, so several drawings on a page do not conflict."""
_ALONE = (
    ".funcpipe.alone{color-scheme:light dark}@media "
    "screen{.funcpipe.alone{max-width:100%;height:auto}}@media "
    "(prefers-color-scheme:dark){.funcpipe.alone{fill:#e6edf3;color:#e6edf3}}"
)
"""The style sheet of a file. Only browsers read rules inside "@media": cairosvg would read
``height:auto`` as a height of 0."""
_SOFT, _END = 'opacity=".72"', 'text-anchor="end"'
_LETTER = 6.4  # the mean width of a letter in pixels, at the size of most of the text
_SMALLEST = 0.75
"""The smallest share of its width to which a page may shrink a picture: letters then have 9
pixels."""
_MOST = 10_000
"""The most actions, and the most memory levels, of a figure. A larger file would exceed 2 MB."""


def too_many(timelines: Sequence[Timeline], call: str) -> str:
    """Say that timelines have too many actions for a figure, and what to call instead; "" if
    not."""
    count = sum(len(timeline.spans) for timeline in timelines)
    if count <= _MOST:
        return ""
    return (
        f"{count:,} actions are too many for a picture, which has at most {_MOST:,}; save a "
        f"Perfetto trace instead: {call}, and open it at ui.perfetto.dev"
    )


def svg(
    panels: Sequence[Panel],
    timelines: Sequence[Timeline],
    *,
    by: By = "kind",
    inline: bool = False,
    explained: bool = True,
) -> str:
    """Draw a figure as SVG.

    Args:
        panels: what to draw, from top to bottom.
        timelines: all timelines on the axis; pictures of the same timelines have the same scale.
        by: what colours tell.
        inline: True: for a place inside an HTML page, with the page's text colour. False: a file of
            its own, which follows the viewer's light or dark mode.
        explained: draw a legend. False: another picture on the page has it.
    """
    frame = frame_of(timelines, by)
    entries = legend([panel.timeline for panel in panels if panel.levels is None], by, frame.last)
    body: list[str] = []
    y = 0.0
    for number, panel in enumerate(panels):
        heading, y = _heading(panel, frame, y, small=number > 0 and panel.levels is not None)
        body += heading
        if not panel.has_lanes:
            y += 4
            continue
        if explained and number == 0 and panel.levels is None:
            swatches, y = _legend(entries, frame, y - 16)
            body += swatches
        bottom = y + panel.timeline.num_devices * panel.lane.pitch
        lanes = (
            action_lanes(panel, frame)
            if panel.levels is None
            else level_lanes(panel, frame, _MOST // len(panels))
        )
        body += [*_axis(panel, frame, y, bottom), *_lanes(lanes, panel, frame, y)]
        y = bottom + 30
    label = "; ".join(f"{panel.name}{panel.origin}: {', '.join(panel.words)}" for panel in panels)
    width, height = pixels(frame.width), pixels(y + 12)
    style = (
        f' style="max-width:100%;min-width:{pixels(_SMALLEST * frame.width)}px;height:auto"'
        if inline
        else ""
    )
    ink = "currentColor" if inline else INK
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="funcpipe{"" if inline else " alone"}" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" fill="{ink}" '
        f'font-family="{_FONT}" font-size="12" role="img" aria-label="{escape(label)}"{style}>'
    )
    return "\n".join([head, f"<style>{_STYLE}{'' if inline else _ALONE}</style>", *body, "</svg>"])


def _text(x: float, y: float, words: str, attributes: str = "") -> str:
    """Return a text element; ``words`` must be escaped."""
    return f'<text x="{pixels(x)}" y="{pixels(y)}" {attributes}'.rstrip() + f">{words}</text>"


def _heading(panel: Panel, frame: Frame, top: float, *, small: bool) -> tuple[list[str], float]:
    """Return the title and caption of a panel, and the top of its lanes.

    The caption is below the title, or beside a small title.
    """
    if small:
        words = escape(" · ".join(panel.words))
        words = f'<tspan {_SOFT} font-size="12" font-weight="400" dx="8">{words}</tspan>'
        title = _text(
            MARGIN,
            top + 15,
            escape(panel.name + panel.origin) + words,
            'font-size="13" font-weight="600"',
        )
        return [title], top + 26
    name = summary.clip(panel.name, int((frame.width - 2 * MARGIN) / 9.5) - len(panel.origin))
    title = escape(name + panel.origin)
    out = [_text(MARGIN, top + 28, title, 'font-size="17" font-weight="600"')]
    y = top + 32
    for line in summary.fill(panel.words, (frame.width - 2 * MARGIN) / _LETTER, " · "):
        y += 16
        out.append(_text(MARGIN, y, escape(line), _SOFT))
    return out, y + (28 if panel.has_lanes else 6)


def _legend(
    entries: Iterable[tuple[tuple[Colour, ...], str]], frame: Frame, y: float
) -> tuple[list[str], float]:
    """Return the legend above the first chart, and the top of the chart's lanes."""
    out = ['<g class="legend">']
    x = MARGIN
    for colours, word in entries:
        # Text widths are estimated: an SVG without scripts cannot measure its letters.
        swatches = 12 * len(colours) + (6 if colours else 0)
        width = swatches + _LETTER * len(word)
        if x > MARGIN and x + width > frame.width - MARGIN:
            x, y = MARGIN, y + 18
        for at, colour in enumerate(colours):
            shape = f"M{pixels(x + 12 * at)} {pixels(y)}h12v12h-12z"
            out.append(f'<path fill="{hexadecimal(colour)}" d="{shape}"/>')
        out.append(_text(x + swatches, y + 10.5, word, "" if colours else _SOFT))
        x += width + 18
    return [*out, "</g>"], y + 32


def _axis(panel: Panel, frame: Frame, top: float, bottom: float) -> list[str]:
    """Return the grid lines, the times below the lanes, and the headings of the right columns."""
    ticks = summary.ticks(frame.axis, int(frame.chart / 80))
    marks = [(frame.left + time * frame.scale, label) for time, label in ticks]
    # Lines are thin filled shapes, so that the figure's fill is the only attribute for ink.
    down = f"{pixels(top - 4)}h1V{pixels(bottom + 3)}h-1z"
    lines = "".join(f"M{pixels(x - 0.5)} {down}" for x, _ in marks)
    unit = escape(summary.clip(summary.time_text(frame.axis).unit, 10))
    sides = [_text(frame.left - 10, bottom + 18, unit, f"{_SOFT} {_END}")]
    if panel.levels is None:
        sides.append(_text(frame.left + frame.chart + 44, top - 8, "busy", f"{_SOFT} {_END}"))
    if any(summary.side_columns(panel.timeline)[1]):
        sides.append(_text(frame.width - MARGIN, top - 8, "peak", f"{_SOFT} {_END}"))
    return [
        f'<path class="grid" opacity=".16" d="{lines}"/>',
        f'<g {_SOFT} text-anchor="middle">',
        *(_text(x, bottom + 18, label) for x, label in marks),
        "</g>",
        *sides,
    ]


def _lanes(lanes: list[list[str]], panel: Panel, frame: Frame, top: float) -> list[str]:
    """Return one group per device: its name, its idle track, its content, busy and peak."""
    busy, peak = summary.side_columns(panel.timeline)
    size = panel.lane.letters
    base = panel.lane.height / 2 + size / 3
    track = f"M0 0h{pixels(panel.timeline.makespan * frame.scale)}v{pixels(panel.lane.height)}H0z"
    out: list[str] = []
    for device, lane in enumerate(lanes):
        place = f"{pixels(frame.left)} {pixels(top + device * panel.lane.pitch)}"
        name = escape(summary.device_name(panel.timeline, device))
        out += [
            f'<g transform="translate({place})" font-size="{pixels(size)}">',
            _text(-10, base, name, _END),
            f'<path class="lane" opacity=".06" d="{track}"/>',
            *lane,
        ]
        if panel.levels is None:
            out.append(_text(frame.chart + 44, base, busy[device], _END))
        if peak[device]:
            out.append(_text(frame.width - frame.left - MARGIN, base, peak[device], _END))
        out.append("</g>")
    return out
