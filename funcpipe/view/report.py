"""The report of a run: a page for browsers and notebooks, a text for terminals."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from pathlib import Path
from textwrap import wrap

from funcpipe.core.notebook import table as html_table
from funcpipe.core.plan import Plan
from funcpipe.core.result import Result, Timeline
from funcpipe.core.tree import Tree
from funcpipe.core.words import columns
from funcpipe.view import summary
from funcpipe.view.align import aligned
from funcpipe.view.figure import Panel, memory_scale, panels_of
from funcpipe.view.findings import Findings, Table, findings
from funcpipe.view.memory_levels import highest
from funcpipe.view.svg import svg, too_many
from funcpipe.view.text import text, width_of

_SPARE = ("bytes", "total", "actions", "parameters", "device", "simulated", "name", "lane")
"""Words of headings: columns of a text to leave out where there is no room, in this order."""
_STYLE = """\
.funcpipe-report{font:14px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;\
font-variant-numeric:tabular-nums;max-width:1400px}
.funcpipe-report h1{font-size:22px;margin:0 0 12px}
.funcpipe-report h2{font-size:16px;margin:28px 0 8px}
.funcpipe-report p,.funcpipe-report ul{max-width:80ch;margin:8px 0}
.funcpipe-report ul{padding-left:20px}
.funcpipe-report .soft{opacity:.75}
.funcpipe-report dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:10px 24px;margin:0}
.funcpipe-report dt{opacity:.75;font-size:12px}
.funcpipe-report dd{margin:0;font-weight:600;overflow-wrap:anywhere}
.funcpipe-report .wide{overflow-x:auto}
.funcpipe-report .wide svg{display:block}
.funcpipe-report .charts{margin-left:-10px}
.funcpipe-report table{border-collapse:collapse;background:none;color:inherit;font-size:13px;margin:0}
.funcpipe-report tr{background:none}
.funcpipe-report th,.funcpipe-report td{padding:4px 12px 4px 0;text-align:right;white-space:nowrap;\
border-bottom:1px solid rgba(128,128,128,.35)}
.funcpipe-report th{font-weight:400;opacity:.75;vertical-align:bottom}
.funcpipe-report .word{text-align:left}
"""
"""Inherits colour and background, so that it fits the page or the notebook around it."""

_PAGE = """\
:root{color-scheme:light dark}
body{margin:24px;background:#fff;color:#1f2328}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
@media(max-width:600px){body{margin:12px}}
"""


def report(plan: Plan, result: Result, *, params: Sequence[Tree] | None = None, title: str = "") -> Report:
    """What a run did, on one page: measured and simulated timelines, memory, stages, lanes, and what is worth a look.

    The simulated timeline is the plan's schedule with the mean measured times, and nothing lost in between: what the
    measured one takes longer is hand-over and waiting.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, batch = (torch.tensor(2.0), torch.tensor(3.0)), (torch.ones(4), torch.zeros(4))
    >>> report = fp.report(plan, fp.run(plan, weights, batch, record=True), title="two factors")
    >>> report.measured.num_devices, len(report.measured.spans), report.simulated.unit
    (2, 8, 's')

    Args:
        plan: the plan that ran.
        result: of ``run(plan, ..., record=True)``.
        params: the parameters of the run, one tree per stage; with them the table of stages has their sizes.
        title: what to call the run; the name of the schedule if empty.

    Returns:
        A report: a notebook shows it, `print` writes it, `Report.save` makes a file of it. It keeps no tensor.

    Raises:
        PlanError: the run was not recorded, or result or params are another plan's.
        TypeError: these are no plan and no result.
    """
    if not isinstance(plan, Plan) or not isinstance(result, Result):
        raise TypeError(
            "report takes a Plan and the Result of fp.run(plan, ..., record=True); got a "
            f"{type(plan).__name__} and a {type(result).__name__}"
        )
    return Report(findings(plan, result, params, title))


@dataclass(frozen=True, repr=False)
class Report:
    """The report of a run: `str` for a terminal, HTML in a notebook, a file with `save`. Compares and pickles.

    Attributes:
        findings: what it says, as data.
    """

    findings: Findings

    @property
    def measured(self) -> Timeline:
        """The run's timeline."""
        return self.findings.measured

    @property
    def simulated(self) -> Timeline:
        """The same schedule with the mean measured times, in seconds."""
        return self.findings.simulated

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report as an HTML file that needs nothing else; light or dark as the viewer likes.

        Args:
            path: of the file; written anew, at once: nobody ever reads half of it.
        """
        file = Path(path)
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
        """The report as text.

        Args:
            width: no line is longer; tables leave columns out where they do not fit. None: that of the terminal.

        Raises:
            TypeError: the width is no whole number.
            ValueError: the width is less than 40.
        """
        width, findings = width_of(width, "report"), self.findings
        longest = max(len(name) for name, _ in findings.headline)
        parts = [
            _wrap(findings.title, width),
            [line for name, value in findings.headline for line in _wrap(value, width, f"  {name:<{longest}}  ")],
            ["", text(_timelines(findings), width)],
        ]
        parts += [["", *_wrap(table.title, width), *_columns(table, width)] for table in findings.tables if table.rows]
        if findings.remarks:
            remarks = [line for remark in findings.remarks for line in _wrap(remark, width, "  * ")]
            parts.append(["", "Remarks", *remarks])
        parts.append(["", *_wrap(_sentence(findings.note), width)])
        return "\n".join(line for part in parts for line in part)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def _page(findings: Findings) -> str:
    """The report as an HTML page of its own."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(findings.title)}</title>\n<style>{_PAGE}</style></head>\n"
        f"<body>\n{_body(findings)}\n</body></html>\n"
    )


def _body(findings: Findings) -> str:
    """The report as HTML for a place inside a page."""
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in findings.headline)
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in findings.remarks)
    return "\n".join(
        [
            f'<div class="funcpipe-report"><style>{_STYLE}</style>',
            f"<h1>{escape(findings.title)}</h1>",
            f"<dl>{pairs}</dl>",
            f"<h2>Remarks</h2><ul>{remarks}</ul>" if remarks else "",
            "<h2>Timelines</h2>",
            f'<p class="soft">{escape(_sentence(findings.note))}</p>',
            _charts(findings),
            *map(_table, findings.tables),
            "</div>",
        ]
    )


def _charts(findings: Findings) -> str:
    """The pictures of the timelines and of the residuals, or why there are none."""
    timelines = _timelines(findings)
    if reason := too_many(timelines, "report.measured.to_chrome_trace('trace.json')"):
        return f"<p>{escape(_sentence(reason))}</p>"
    panels = panels_of(aligned(timelines), memory=False)
    if findings.held:
        peak = highest(findings.held) or 1.0
        words = (summary.count_text(findings.measured.num_devices, "device"), memory_scale(peak))
        panels.append(Panel(findings.measured, "residuals held, measured", words, findings.held, peak))
    charts = (svg([panel], timelines, inline=True, explained=number == 0) for number, panel in enumerate(panels))
    return f'<div class="wide charts">{"".join(charts)}</div>'


def _timelines(findings: Findings) -> list[Timeline]:
    """The timelines that are drawn, by their names."""
    return [replace(findings.measured, name="measured"), replace(findings.simulated, name="simulated")]


def _table(table: Table) -> str:
    cells = html_table(table.heads, table.rows, range(table.words))
    return f'<h2>{escape(table.title)}</h2>\n<div class="wide">{cells}</div>'


def _wrap(words: str, width: int, first: str = "") -> list[str]:
    """The words behind a first few letters, the further lines below them."""
    return wrap(words, width, initial_indent=first, subsequent_indent=" " * len(first)) or [first.rstrip()]


def _columns(table: Table, width: int) -> list[str]:
    """The table's rows, without the columns that can be spared until it fits."""
    lines = [table.heads, *table.rows]
    kept = list(range(len(table.heads)))
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for word in _SPARE:
        if sum(widths[column] + 2 for column in kept) > width:
            kept = [column for column in kept if not (column and word in table.heads[column].replace(",", "").split())]
    words = [place for place, column in enumerate(kept) if column < table.words]
    return [f"  {line}"[:width] for line in columns([[line[column] for column in kept] for line in lines], words)]


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."
