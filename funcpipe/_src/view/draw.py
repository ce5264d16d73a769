"""Draw schedules, plans and timelines: text for terminals, SVG for papers and notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.core.notebook import page, picture
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result, Timeline
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.view import summary
from funcpipe._src.view.align import aligned
from funcpipe._src.view.figure import panels_of
from funcpipe._src.view.palette import By
from funcpipe._src.view.simulate import simulate
from funcpipe._src.view.svg import svg, too_many
from funcpipe._src.view.text import text, width_of

_FILE_WIDTH = 120
_BY = ("kind", "stage")
_TRACE = "drawing.timeline.to_chrome_trace('trace.json') (on the command line: --trace trace.json)"
_MOST = 5_000
"""Actions of a schedule or plan that a notebook simulates and draws without being asked; that takes
a second."""

Drawn: TypeAlias = Schedule | Plan | Timeline


def draw(what: Drawn, *others: Drawn, memory: bool = False, by: By = "kind") -> Drawing:
    """A picture of who does what when: a row for each device, time from left to right.

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
            `Cost`: F, I and W take one unit each, B two. For other costs draw ``simulate(what,
            cost)``.
        others: drawn below it on the same time axis. Beside a timeline in seconds, timelines in
            units are scaled until their devices work as long in sum. A note in the picture says the
            scale.
        memory: True: below each timeline, what its devices hold over time.
        by: what colours tell: the "kind" of an action (lighter for a device's later stages), or its
            "stage" (then letters and the upper edge tell the kind).

    Returns:
        A drawing: print it, let a notebook show it, or save it.

    Raises:
        TypeError: an argument is not a schedule, a plan or a timeline.
        ScheduleError: a schedule is not legal.
        ValueError: the timelines are in different units, or ``by`` is neither "kind" nor "stage".
    """
    if by not in _BY:
        raise ValueError(f'colours are by "kind" or by "stage"; got by={by!r}')
    first, *rest = map(_timeline, (what, *others))
    aligned([first, *rest])  # refuses what has no common axis
    return Drawing(first, tuple(rest), memory=memory, by=by)


def _timeline(source: Drawn) -> Timeline:
    if isinstance(source, Timeline):
        return source
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
    """A picture of timelines: `str` for a terminal, inline SVG in a notebook, a file with `save`.

    Attributes:
        timeline: what is drawn.
        others: what is drawn below it, on the same axis.
        memory: what the devices hold is drawn, too.
        by: what colours tell, "kind" or "stage".
    """

    timeline: Timeline
    others: tuple[Timeline, ...] = ()
    memory: bool = False
    by: By = "kind"

    def text(self, width: int | None = None, *, color: bool = False) -> str:
        """The picture as text, of any number of actions.

        Actions have labels (``F0``, and ``2F0`` where a device runs several stages) if most labels
        fit. Otherwise each column shows one letter, in proportion to the time that each kind takes.

        Args:
            width: no line has more columns. None: the width of the terminal, 80 without one.
            color: paint the actions with a terminal's 256 colours; the letters are the same.

        Raises:
            TypeError: the width is no whole number.
            ValueError: the width is less than 40.
        """
        return text(
            [self.timeline, *self.others],
            width_of(width, "drawing"),
            color=color,
            memory=self.memory,
        )

    def svg(self) -> str:
        """The picture as a standalone SVG without scripts, for browsers, papers and slides.

        It scales to any size, and follows the viewer's light or dark mode.

        Raises:
            ScheduleError: it has more than 10,000 actions. Save a trace with
                `Timeline.to_chrome_trace` instead.
        """
        return self._svg(inline=False)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture to a file.

        Args:
            path: ends in ``.svg`` or ``.txt`` (120 columns); replaced if it exists.

        Raises:
            ValueError: the path ends otherwise.
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
    """What a notebook shows of these: the drawing; of what cannot be drawn its text and why."""
    if isinstance(thing, Timeline):
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
