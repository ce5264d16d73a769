"""`draw`: pictures of schedules, plans and timelines, as text or as SVG.

`text.py` and `svg.py` draw. This file checks arguments, and registers what notebooks show.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.core.notebook import page, picture
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result, Timeline, lanes_elsewhere, with_all_lanes
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.view import summary
from funcpipe._src.view.figure import aligned, panels_of
from funcpipe._src.view.palette import By
from funcpipe._src.view.simulate import simulate
from funcpipe._src.view.svg import svg, too_many
from funcpipe._src.view.text import text, width_of

_FILE_WIDTH = 120
_BY = ("kind", "stage")
_TRACE = "drawing.timeline.to_chrome_trace('trace.json') (on the command line: --trace trace.json)"
_MOST = 5_000
"""The most actions of a schedule or plan that a notebook draws by itself, which takes a second."""

Drawn: TypeAlias = Schedule | Plan | Timeline


def draw(what: Drawn, *others: Drawn, memory: bool = False, by: By = "kind") -> Drawing:
    """Draw timelines: a row for each device, time from left to right.

    >>> print(fp.draw(fp.schedules.one_f_one_b(2, 3)).text(width=60))
    1F1B, simulated in units: makespan 12 units, bubble 25.0%,
    idle 25.0%
                                                 busy  peak
    dev 0 │F0 F1 ······B0─── F2 B1─── ···B2─── │  75%     2
    dev 1 │···F0 B0─── F1 B1─── F2 B2─── ······│  75%     1
          └───────────────┴──────────────┴─────┘
           0              5              10 units
    F forward  B backward  · idle

    Args:
        what: a timeline, simulated or measured. A schedule or a plan is simulated with the default
            `Cost`: F, I and W take one unit each, B two. For another cost, draw ``simulate(what,
            cost)``.
        others: timelines, schedules or plans to draw below, on the same time axis. If some times
            are in seconds, timelines in units are scaled so that the total work of their devices
            is equal. A note in the picture says the scale.
        memory: also draw the memory of the devices over time, below each timeline. Default: False.
        by: the meaning of colours: the "kind" of an action (lighter for a device's later stages),
            or its "stage" (letters and the upper edge then show the kind). Default: "kind".

    Returns:
        A drawing. Print it, save it, or let a notebook show it.

    Raises:
        TypeError: an argument is not a schedule, a plan or a timeline.
        ScheduleError: a schedule is not legal.
        PlanError: with `ranks`, a timeline has the lanes of one process only.
        ValueError: the timelines are in different units, or ``by`` is neither "kind" nor "stage".
    """
    if by not in _BY:
        raise ValueError(f'colours are by "kind" or by "stage"; got by={by!r}')
    first, *rest = map(_timeline, (what, *others))
    aligned([first, *rest])  # raises here, not when the drawing is printed
    return Drawing(first, tuple(rest), memory=memory, by=by)


def _timeline(source: Drawn) -> Timeline:
    if isinstance(source, Timeline):
        return with_all_lanes(source)
    if isinstance(source, (Schedule, Plan)):
        return simulate(source)
    hint = (
        "; draw its timeline (run with record=True)"
        if isinstance(source, Result) or source is None
        else ""
    )
    raise TypeError(
        f"draw takes a Schedule, a Plan or a Timeline; got {type(source).__name__}{hint}"
    )


@dataclass(frozen=True, repr=False)
class Drawing:
    """A picture of timelines, as `draw` returns it.

    ``print`` shows it in a terminal, a notebook shows it as SVG, and `save` writes a file.

    >>> drawing = fp.draw(fp.schedules.one_f_one_b(2, 3))
    >>> drawing.timeline.makespan, drawing.by
    (12.0, 'kind')

    Attributes:
        timeline: the first timeline.
        others: the timelines below it, on the same axis.
        memory: whether the memory of the devices is drawn too.
        by: the meaning of colours, "kind" or "stage".
    """

    timeline: Timeline
    others: tuple[Timeline, ...] = ()
    memory: bool = False
    by: By = "kind"

    def text(self, width: int | None = None, *, color: bool = False) -> str:
        """Return the picture as text. Works for any number of actions.

        Actions have labels (``F0``, or ``2F0`` if a device runs several stages) if most labels fit.
        Otherwise each column shows one letter, in proportion to the time that each kind takes.

        Args:
            width: the largest number of columns. None: the width of the terminal, or 80.
            color: paint the actions with a terminal's 256 colours. The letters stay the same.
                Default: False.

        Raises:
            TypeError: ``width`` is not a whole number.
            ValueError: ``width`` is less than 40.
        """
        return text(
            [self.timeline, *self.others],
            width_of(width, "drawing"),
            color=color,
            memory=self.memory,
        )

    def svg(self) -> str:
        """Return the picture as a standalone SVG without scripts, for browsers, papers and slides.

        The picture scales to any size, and follows the viewer's light or dark mode.

        Raises:
            ScheduleError: the picture has more than 10,000 actions. Save a trace with
                `Timeline.to_chrome_trace` instead.
        """
        return self._svg(inline=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
            path: the path of the file, which ends in ``.svg`` or ``.txt`` (120 columns). An
                existing file is replaced.

        Raises:
            ValueError: the path has another ending.
            ScheduleError: an SVG would have more than 10,000 actions. Save a trace with
                `Timeline.to_chrome_trace` instead, and open it at ui.perfetto.dev.
        """
        file = Path(path)
        match file.suffix.lower():
            case ".svg":
                content = self.svg()
            case ".txt":
                content = self.text(_FILE_WIDTH) + "\n"
            case suffix:
                raise ValueError(
                    f"drawings are saved as .svg or .txt; got {suffix!r} in {str(file)!r}. To "
                    "zoom, write drawing.timeline.to_chrome_trace('trace.json'), and open it at "
                    "ui.perfetto.dev"
                )
        file.write_text(content, encoding="utf-8", newline="\n")

    def _svg(self, *, inline: bool) -> str:
        timelines = [self.timeline, *self.others]
        if reason := too_many(timelines, _TRACE):
            raise ScheduleError(reason)
        panels = panels_of(timelines, memory=self.memory)
        return svg(panels, [panel.timeline for panel in panels], by=self.by, inline=inline)

    def _repr_html_(self) -> str:
        # Not _repr_svg_: Jupyter shows that as an image, which cannot inherit the page's text
        # colour. In a narrow page the picture shrinks to its least width, then the box scrolls.
        try:
            return f'<div style="overflow-x:auto">{self._svg(inline=True)}</div>'
        except ScheduleError as error:
            return page(f"Drawing of {summary.title(self.timeline)}", [("too large", str(error))])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


@picture.register(Schedule)
@picture.register(Plan)
@picture.register(Timeline)
def _in_notebook(thing: Schedule | Plan | Timeline) -> str:
    """Return the HTML for a notebook: the drawing, or text and the reason why there is none."""
    if isinstance(thing, Timeline):
        if lanes_elsewhere(thing):  # the repr says so
            return page(repr(thing), [])
        reason = too_many([thing], "it.to_chrome_trace('trace.json')")
        return page(repr(thing), [("large", reason)]) if reason else draw(thing)._repr_html_()
    schedule = thing.schedule if isinstance(thing, Plan) else thing
    if sum(map(len, schedule.orders)) > _MOST:
        return page(
            repr(schedule), [("large", "print(fp.draw(it)) draws it, and print(it) writes it")]
        )
    try:
        return draw(thing)._repr_html_()
    except ScheduleError as error:
        return page(
            repr(schedule), [("not legal", str(error))], f"<pre>{escape(str(schedule))}</pre>"
        )
