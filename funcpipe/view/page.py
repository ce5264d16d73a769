"""A sheet as an HTML page of its own: the SVG, the numbers behind it, and a script that zooms into them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from funcpipe.core.result import Timeline
from funcpipe.core.schedule import Kind
from funcpipe.view import facts
from funcpipe.view.held import Level
from funcpipe.view.script import SCRIPT
from funcpipe.view.sheet import Panel, Sheet
from funcpipe.view.svg import INK, JOINED, svg

_FEW = 3_000
"""Shapes of the static picture where the script shows more."""
_MANY = 50_000
"""Actions. With more, times that fit no clock are rounded to fewer steps."""
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

_STYLE = """\
:root{color-scheme:light dark}
body{margin:16px;background:#fff;color:#1f2328;font:13px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
.funcpipe-page .live{position:relative;display:inline-block;max-width:100%;min-width:680px}
.funcpipe-page .live .still{display:none}
.funcpipe-page svg{display:block;min-width:680px}
.funcpipe-page canvas{position:absolute;touch-action:pan-y;cursor:grab}
.funcpipe-page canvas:focus-visible{outline:2px solid #4c8dff;outline-offset:-3px}
.funcpipe-page .tools{display:flex;gap:6px;align-items:center;margin-left:16px;flex-wrap:wrap}
.funcpipe-page button{font:inherit;color:inherit;background:none;border:1px solid rgba(128,128,128,.5);border-radius:5px;\
min-width:30px;padding:2px 8px;cursor:pointer}
.funcpipe-page .tools span{opacity:.72;margin-left:6px}
.funcpipe-page .tip{position:absolute;pointer-events:none;background:#1f2328;color:#fff;border:1px solid rgba(128,128,128,.6);\
border-radius:6px;padding:6px 9px;white-space:pre;line-height:1.4;font-variant-numeric:tabular-nums;z-index:1}
"""


def page(sheet: Sheet) -> str:
    """The page, light or dark as the viewer likes. Without scripts it is the static picture."""
    many = sum(len(panel.row.timeline.spans) for panel in sheet.panels) > _FEW
    content = svg(sheet, inline=True, most=_FEW) if many else svg(sheet, inline=True)
    # Within a script element HTML knows no escapes, and JSON has its own.
    data = json.dumps(numbers(sheet), separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(' / '.join(panel.row.title for panel in sheet.panels if panel.row.levels is None))}</title>\n"
        f"<style>{_STYLE}</style></head>\n"
        f'<body>\n<main class="funcpipe-page">\n<div>{content}</div>\n'
        f'<script type="application/json">{data}</script>\n<script>{SCRIPT}</script>\n</main>\n</body></html>\n'
    )


def numbers(sheet: Sheet) -> dict[str, Any]:
    """What the script draws from: every action and every level, a letter or a few each.

    Times are whole steps of ``step`` units. Codes are (kind, stage, colour); see `_spans` and `_steps` for the letters.
    """
    shown = facts.time_text(sheet.axis)
    step = _step(panel.row.timeline for panel in sheet.panels)
    return {
        "left": sheet.left,
        "chart": sheet.chart,
        "width": sheet.width,
        "height": sheet.height,
        "step": step,
        "end": max(1, round(sheet.axis.makespan / step)),
        "time": [shown.factor, shown.unit, shown.decimals + 1],
        "by": sheet.by,
        "ink": INK,
        "joined": JOINED,
        "kinds": {kind.value: [facts.look(kind).word, _hex(facts.look(kind).colour)] for kind in Kind},
        "panels": [_panel(panel, step) for panel in sheet.panels if panel.row.has_lanes],
    }


def _panel(panel: Panel, step: float) -> dict[str, Any]:
    """Where the panel is, and what is in its lanes."""
    timeline = panel.row.timeline
    out: dict[str, Any] = {
        "title": panel.row.title,
        "top": panel.lanes,
        "bar": panel.bar,
        "pitch": panel.pitch,
        "devices": timeline.num_devices,
        "names": [facts.called(timeline, device) for device in range(timeline.num_devices)],
        "end": round(timeline.makespan / step),
        "font": panel.font,
    }
    if panel.row.levels is not None:
        changes: dict[float, int] = {}
        lanes = [_steps(lane, step, changes) for lane in panel.row.levels]
        return {**out, "most": panel.row.most, "held": lanes, "changes": list(changes)}
    tracks: list[Any] = []
    for device, top, height, spans in panel.tracks():
        codes: dict[tuple[Kind, int], int] = {}
        for span in spans:
            codes.setdefault((span.action.kind, span.action.stage), len(codes))
        first = {span.action[:2]: span for span in reversed(spans)}
        named = [[kind.value, stage, panel.palette.of(first[kind, stage]).hex] for kind, stage in codes]
        rows = ((codes[span.action[:2]], span.action.microbatch, span.start, span.end) for span in spans)
        tracks.append([device, top, height, named, _spans(rows, step)])
    return {**out, "tracks": tracks}


def _step(timelines: Iterable[Timeline]) -> float:
    """A time of which all others are multiples, if there is a simple one; else one that is too short to see."""
    found = list({id(timeline): timeline for timeline in timelines}.values())
    end = max((timeline.makespan for timeline in found), default=1.0) or 1.0
    times = {time for timeline in found for span in timeline.spans for time in (span.start, span.end)}
    for parts in (1, 2, 4, 10, 100):
        if end * parts < 2**30 and all(abs(time * parts - round(time * parts)) < 1e-6 for time in times):
            return 1 / parts
    many = sum(len(timeline.spans) for timeline in found) > _MANY
    return end / (2**17 if many else 2**20)


def _spans(rows: Iterable[tuple[int, int, float, float]], step: float) -> str:
    """The actions of a track as letters.

    Each is twice its code, if it comes right after the one before, is as long as the last of its code, and has the next
    microbatch; which nearly all do where a schedule is simulated. Else it is one more, and by how much the microbatch,
    the start and the length differ from that follows.
    """
    out: list[str] = []
    now = 0
    last: dict[int, tuple[int, int]] = {}
    for code, microbatch, begin, end in rows:
        start, stop = round(begin / step), round(end / step)
        before, length = last.get(code, (-1, 0))
        differs = (microbatch - before - 1, start - now, stop - start - length)
        last[code], now = (microbatch, stop - start), stop
        if any(differs):
            out += [_letters(2 * code + 1), *(_letters(_whole(number)) for number in differs)]
        else:
            out.append(_letters(2 * code))
    return "".join(out)


def _steps(lane: Sequence[Level], step: float, changes: dict[float, int]) -> str:
    """The levels of a lane as letters: for each change its number among all changes, and how long after the last."""
    out: list[str] = []
    now, amount = 0, 0.0
    points = [(level.start, level.amount) for level in lane] + ([(lane[-1].end, 0.0)] if lane else [])
    for time, level in points:
        at = round(time / step)
        change = float(f"{level - amount:.12g}")
        out += [_letters(changes.setdefault(change, len(changes))), _letters(_whole(at - now))]
        now, amount = at, level
    return "".join(out)


def _whole(number: int) -> int:
    """A number with a sign as one without."""
    return 2 * number if number >= 0 else -2 * number - 1


def _letters(number: int) -> str:
    """A number, five bits a letter, the lowest first; a letter of the second half says that more follow."""
    out = ""
    while number >= 32:
        out += _DIGITS[32 + number % 32]
        number //= 32
    return out + _DIGITS[number]


def _hex(colour: tuple[int, int, int]) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)
