"""A figure as SVG: Gantt charts with a lane for each device, and what the lanes hold over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from funcpipe.core.result import Timeline
from funcpipe.view import summary
from funcpipe.view.figure import MARGIN, Frame, Panel, frame_of
from funcpipe.view.palette import By, Shade, legend
from funcpipe.view.svg_lanes import chart_of, lanes_of, pixels

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
    ".funcpipe rect:hover{stroke:currentColor;stroke-width:1.5}"
)
"""The same in every drawing, as are the rules for shades: several drawings in one page cannot disturb each other."""

_ALONE = (
    f".funcpipe.alone{{color:{_INK};color-scheme:light dark}}"
    "@media (prefers-color-scheme:dark){.funcpipe.alone{color:#e6edf3}}"
)
"""Text colours for a file (the scheme lets browsers darken what is behind it); in a page they are those of the page."""

_LETTER = 6.4
"""The width of a letter, on average, at the size of most of the text."""
_SMALLEST = 0.75
"""How far a page may shrink a picture, of its width: letters of 9 pixels can be read. Pages scroll what is wider."""
_MOST = 10_000
"""Actions of a figure, and levels of memory: with more a file would pass two megabytes, and nobody could tell them apart."""


def too_many(timelines: Sequence[Timeline], call: str) -> str:
    """Why timelines have too many actions for one figure, and what to call instead; "" where they do not."""
    count = sum(len(timeline.spans) for timeline in timelines)
    if count <= _MOST:
        return ""
    return (
        f"{count:,} actions are too many for a picture, which has at most {_MOST:,}; save a Perfetto trace instead: "
        f"{call}, and open it at ui.perfetto.dev"
    )


def svg(
    panels: Sequence[Panel],
    timelines: Sequence[Timeline],
    *,
    by: By = "kind",
    inline: bool = False,
    explained: bool = True,
) -> str:
    """A figure as SVG.

    Args:
        panels: what to draw, from top to bottom.
        timelines: all on whose axis this is drawn; pictures with the same timelines have the same scale.
        by: what colours tell.
        inline: True: for a place inside an HTML page, whose text colour it takes. False: a file of its own, which
            follows the viewer's light or dark mode.
        explained: is there a legend; False: another picture on the page has it.
    """
    frame = frame_of(timelines, by)
    last = max((span.action.stage for panel in panels for span in panel.timeline.spans), default=0)
    charts = [chart_of(panel, frame, last) for panel in panels]
    entries = list(legend([panel.timeline for panel in panels if panel.levels is None], by))
    shades = {shade for swatches, _ in entries for shade in swatches}
    shades |= {shade for chart in charts for shade in chart.shades.values()}
    body: list[str] = []
    y = 0.0
    for number, (panel, chart) in enumerate(zip(panels, charts, strict=True)):
        heading, y = _heading(panel, frame, y, small=number > 0 and panel.levels is not None)
        body += heading
        if not panel.has_lanes:
            y += 4
            continue
        if explained and number == 0 and panel.levels is None:
            swatches, y = _legend(entries, frame, y - 16)
            body += swatches
        bottom = y + panel.timeline.num_devices * panel.lane.pitch
        body += [
            *_axis(panel, frame, y, bottom),
            *_lanes(lanes_of(chart, frame, _MOST // len(panels)), panel, frame, y),
        ]
        y = bottom + 30
    label = "; ".join(f"{panel.title}: {', '.join(panel.words)}" for panel in panels)
    width, height = pixels(frame.width), pixels(y + 12)
    least = f"min-width:{pixels(_SMALLEST * frame.width)}px;" if inline else ""  # a file is scaled by whoever shows it
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="funcpipe{"" if inline else " alone"}" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
            f'style="max-width:100%;{least}height:auto">',
            f"<style>{_STYLE}{'' if inline else _ALONE}{''.join(shade.rule for shade in sorted(shades))}</style>",
            *body,
            "</svg>",
        ]
    )


def _heading(panel: Panel, frame: Frame, top: float, *, small: bool) -> tuple[list[str], float]:
    """The title and the words below it, or behind it in one line; and where the lanes begin."""
    title, x = panel.title, pixels(MARGIN)
    if small:
        words = escape(" · ".join(panel.words))
        words = f'<tspan class="soft" font-size="12" font-weight="400" dx="8">{words}</tspan>'
        return [f'<text class="part" x="{x}" y="{pixels(top + 15)}">{escape(title)}{words}</text>'], top + 26
    letters = int((frame.width - 2 * MARGIN) / 9.5)
    title = title if len(title) <= letters else f"{title[: letters - 1]}…"
    out = [f'<text class="name" x="{x}" y="{pixels(top + 28)}">{escape(title)}</text>']
    y = top + 32
    for line in summary.fill(panel.words, (frame.width - 2 * MARGIN) / _LETTER, " · "):
        y += 16
        out.append(f'<text class="soft" x="{x}" y="{pixels(y)}">{escape(line)}</text>')
    return out, y + (28 if panel.has_lanes else 6)


def _legend(entries: Sequence[tuple[tuple[Shade, ...], str]], frame: Frame, y: float) -> tuple[list[str], float]:
    """Swatches and words above the first chart, and where its lanes begin."""
    out = ['<g class="legend">']
    x = MARGIN
    for shades, word in entries:
        swatches = 12 * len(shades) + (6 if shades else 0)
        width = swatches + _LETTER * len(word)
        if x > MARGIN and x + width > frame.width - MARGIN:
            x, y = MARGIN, y + 18
        for at, shade in enumerate(shades):
            out.append(f'<path class="{shade.name}" d="M{pixels(x + 12 * at)} {pixels(y)}h12v12h-12z"/>')
        soft = "" if shades else 'class="soft" '
        out.append(f'<text {soft}x="{pixels(x + swatches)}" y="{pixels(y + 10.5)}">{word}</text>')
        x += width + 18
    return [*out, "</g>"], y + 32


def _axis(panel: Panel, frame: Frame, top: float, bottom: float) -> list[str]:
    """Grid lines, their times below the lanes, and the headings of the right columns."""
    ticks = summary.ticks(frame.axis, int(frame.chart / 80))
    marks = [(pixels(frame.left + time * frame.scale), label) for time, label in ticks]
    lines = "".join(f"M{x} {pixels(top - 4)}V{pixels(bottom + 3)}" for x, _ in marks)
    labels = [f'<text x="{x}" y="{pixels(bottom + 18)}">{label}</text>' for x, label in marks]
    unit = summary.time_text(frame.axis).unit
    unit = escape(unit if len(unit) <= 10 else f"{unit[:9]}…")
    words = [(frame.left - 10, bottom + 18, unit)]
    if panel.levels is None:
        words.append((frame.left + frame.chart + 44, top - 8, "busy"))
    if summary.side_columns(panel.timeline)[1]:
        words.append((frame.width - MARGIN, top - 8, "peak"))
    sides = [f'<text class="soft end" x="{pixels(x)}" y="{pixels(y)}">{word}</text>' for x, y, word in words]
    return [f'<path class="grid" d="{lines}"/>', '<g class="soft mid">', *labels, "</g>", *sides]


def _lanes(lanes: list[list[str]], panel: Panel, frame: Frame, top: float) -> list[str]:
    """One group per device: its name, its idle track, what is in it, busy and peak."""
    busy, peak = summary.side_columns(panel.timeline)
    size = "" if panel.lane.letters == 12 else f' font-size="{pixels(panel.lane.letters)}"'
    base = pixels(panel.lane.height / 2 + panel.lane.letters / 3)
    length = pixels(panel.timeline.makespan * frame.scale)
    out: list[str] = []
    for device, lane in enumerate(lanes):
        name = escape(summary.device_name(panel.timeline, device))
        out.append(f'<g transform="translate({pixels(frame.left)} {pixels(top + device * panel.lane.pitch)})"{size}>')
        out.append(f'<text class="end" x="-10" y="{base}">{name}</text>')
        out += [f'<path class="lane" d="M0 0h{length}v{pixels(panel.lane.height)}H0z"/>', *lane]
        if panel.levels is None:
            out.append(f'<text class="end" x="{pixels(frame.chart + 44)}" y="{base}">{busy[device]}</text>')
        if peak:
            x = pixels(frame.width - frame.left - MARGIN)
            out.append(f'<text class="end" x="{x}" y="{base}">{peak[device]}</text>')
        out.append("</g>")
    return out
