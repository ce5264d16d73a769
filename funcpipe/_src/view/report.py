"""`report`: the report of a recorded run, as an HTML page or as text.

`findings.py` computes the content, `svg.py` and `text.py` draw the timelines.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from pathlib import Path
from textwrap import indent, wrap

from funcpipe._src.core.notebook import page
from funcpipe._src.core.shown import count_text
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result, Timeline
from funcpipe._src.view.figure import Panel, memory_scale, panels_of
from funcpipe._src.view.findings import Findings, findings
from funcpipe._src.view.memory_levels import highest
from funcpipe._src.view.svg import svg, too_many
from funcpipe._src.view.text import text, width_of

_PAGE = """\
:root{color-scheme:light dark}
body{margin:24px;background:#fff;color:#1f2328;font-family:system-ui,sans-serif}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
@media(max-width:600px){body{margin:12px}}
"""


def report(
    plan: Plan, result: Result, *, params: Sequence[Tree] | None = None, title: str = ""
) -> Report:
    """Report a recorded run: measured and simulated timelines, memory, stages, lanes and remarks.

    The simulated timeline is the plan's schedule with the mean measured times, without time between
    actions. The measured timeline takes longer by transfers, waiting, and variation of the times.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, batch = (torch.tensor(2.0), torch.tensor(3.0)), (torch.ones(4), torch.zeros(4))
    >>> report = fp.report(plan, fp.run(plan, weights, batch, record=True), title="two factors")
    >>> report.measured.num_devices, len(report.measured.spans), report.simulated.unit
    (2, 8, 's')

    Args:
        plan: the plan of the run.
        result: the result of ``run(plan, ..., record=True)``.
        params: the parameters of the run, one tree per stage, to show their sizes in the table of
            stages. None: the table has no sizes.
        title: the title of the report. "": the name of the schedule.

    Returns:
        A report. Print it, save it as HTML, or let a notebook show it. It keeps no tensors.

    Raises:
        PlanError: the run was not recorded, or ``result`` or ``params`` belong to another plan.
        TypeError: the arguments are not a plan and a result.
    """
    if not isinstance(plan, Plan) or not isinstance(result, Result):
        raise TypeError(
            "report takes a Plan and the Result of fp.run(plan, ..., record=True); got a "
            f"{type(plan).__name__} and a {type(result).__name__}"
        )
    return Report(findings(plan, result, params, title))


@dataclass(frozen=True, repr=False)
class Report:
    """The report of a recorded run, as `report` returns it.

    ``print`` shows it in a terminal, a notebook shows it as HTML, and `save` writes a file. Reports
    compare and pickle.

    Attributes:
        findings: the content as data: headline, timelines, tables and remarks.
    """

    findings: Findings

    @property
    def measured(self) -> Timeline:
        """The measured timeline of the run."""
        return self.findings.measured

    @property
    def simulated(self) -> Timeline:
        """The simulated timeline of the schedule with the mean measured times, in seconds."""
        return self.findings.simulated

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report as a single HTML file, which follows the viewer's light or dark mode.

        Args:
            path: the path of the file. An existing file is replaced.
        """
        file = Path(path)
        # Written to a temporary file and renamed, so that no one can read half of a report.
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_text(_page(self.findings), encoding="utf-8", newline="\n")
            os.replace(temporary, file)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()

    def _repr_html_(self) -> str:
        return _body(self.findings)

    def text(self, width: int | None = None) -> str:
        """Return the report as text.

        Args:
            width: the largest number of columns. Columns of tables that do not fit continue below.
                None: the width of the terminal, or 80.

        Raises:
            TypeError: ``width`` is not a whole number.
            ValueError: ``width`` is less than 40.
        """
        width, findings = width_of(width, "report"), self.findings
        longest = max(len(name) for name, _ in findings.headline)
        lines = _wrap(findings.title, width)
        for name, value in findings.headline:
            lines += _wrap(value, width, f"  {name:<{longest}}  ")
        lines += ["", text(_timelines(findings), width)]
        for table in findings.tables:
            if table.rows:
                lines += ["", table.title, indent(table.text(width - 2), "  ")]
        if findings.remarks:
            lines += ["", "Remarks"]
        for remark in findings.remarks:
            lines += _wrap(remark, width, "  * ")
        return "\n".join([*lines, "", *_wrap(_sentence(findings.note), width)])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def _page(findings: Findings) -> str:
    """Return the report as a complete HTML page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(findings.title)}</title>\n<style>{_PAGE}</style></head>\n"
        f"<body>\n{_body(findings)}\n</body></html>\n"
    )


def _body(findings: Findings) -> str:
    """Return the report as HTML for a place inside a page, in the style of `notebook.page`."""
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in findings.remarks)
    parts = [
        f"<h2>Remarks</h2><ul>{remarks}</ul>" if remarks else "",
        "<h2>Timelines</h2>",
        f"<p>{escape(_sentence(findings.note))}</p>",
        *_charts(findings),
    ]
    parts += [f"<h2>{escape(table.title)}</h2>{table.html()}" for table in findings.tables]
    title = f"<h1>{escape(findings.title)}</h1>"
    return f"<div>{title}\n{page('A recorded run', [*findings.headline], *parts)}</div>"


def _charts(findings: Findings) -> list[str]:
    """Return the pictures of the timelines and residuals, or the reason why there are none."""
    timelines = _timelines(findings)
    if reason := too_many(timelines, "report.measured.to_chrome_trace('trace.json')"):
        return [f"<p>{escape(_sentence(reason))}</p>"]
    panels = panels_of(timelines, memory=False)
    if findings.held:
        peak = highest(findings.held) or 1.0
        words = (count_text(findings.measured.num_devices, "device"), memory_scale(peak))
        panels.append(
            Panel(findings.measured, "residuals held", ", measured", words, findings.held, peak)
        )
    # One scale for all, and one legend.
    return [
        svg([panel], timelines, inline=True, explained=at == 0) for at, panel in enumerate(panels)
    ]


def _timelines(findings: Findings) -> list[Timeline]:
    """Return the timelines to draw."""
    # The captions call a timeline with memory simulated, so the measured one must have none.
    return [replace(findings.measured, memory=()), findings.simulated]


def _wrap(words: str, width: int, first: str = "") -> list[str]:
    """Wrap words after a prefix, with the further lines indented below them."""
    return wrap(words, width, initial_indent=first, subsequent_indent=" " * len(first)) or [
        first.rstrip()
    ]


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
