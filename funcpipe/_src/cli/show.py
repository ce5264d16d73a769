"""Print the results of the command line: facts, pictures and help."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable

import funcpipe as fp
from funcpipe._src.core.progress import gap_words
from funcpipe._src.core.table import Table
from funcpipe._src.data.result import imbalance_of, percent
from funcpipe._src.view import summary

COLUMNS: dict[str, Callable[[fp.Timeline], str]] = {
    "makespan": lambda timeline: f"{timeline.makespan:.6g}",
    "bubble": lambda timeline: percent(timeline.bubble),
    "span bubble": lambda timeline: percent(timeline.span_bubble),
    "idle": lambda timeline: percent(timeline.idle),
    "imbalance": lambda timeline: percent(timeline.imbalance),
    "peak memory": lambda timeline: f"{max(timeline.peak):.6g}",
}
"""The columns of `compare`."""

_WIDEST_HELP = 120
_EXAMPLE = "  funcpipe "
"""The begin of a command in a help. Such a line is not wrapped, so that it can be copied."""


def picture(timeline: fp.Timeline, width: int | None) -> None:
    """Print the picture of a timeline. On a narrower terminal, lines are cut, with a note."""
    terminal = sys.stdout.isatty()
    text = fp.draw(timeline).text(width, color=terminal and not os.environ.get("NO_COLOR"))
    lines, room = text.split("\n"), shutil.get_terminal_size().columns
    widest = max(map(_columns_of, lines))
    if not terminal or widest <= room:
        print(text)
        return
    note = (
        f"cut: the picture has {widest} columns, the terminal {room}; `| less -S` scrolls, "
        "--output writes a file"
    )
    print("\n".join([*(cut(line, room) for line in lines), *textwrap.wrap(note, room)]))


_COLOR = re.compile(r"(\x1b\[[0-9;]*m)")


def _columns_of(line: str) -> int:
    return summary.size(_COLOR.sub("", line))


def cut(line: str, room: int) -> str:
    """Cut a line to a number of columns, and keep its colour codes.

    >>> cut("device 0 │F0 F1", 12)
    'device 0 │F…'
    """
    if _columns_of(line) <= room:
        return line
    kept, left = "", room - 1
    for part in _COLOR.split(line):
        # The colour codes after the cut remain too, because the last one ends the colour.
        if part.startswith("\x1b"):
            kept += part
        elif left >= 0:
            start = summary.start_of(part, left)
            kept += start if start == part else f"{start}…"
            left = left - summary.size(part)
    return kept


def wrapped(text: str, width: int | None = None) -> str:
    """Wrap the text of a help. The second column of a line continues below itself.

    >>> print(wrapped("Words that are\\nprose.\\n  name  what it\\n        means", 20))
    Words that are
    prose.
      name  what it
            means
    >>> print(wrapped("Words that are\\nprose.\\n  name  what it\\n        means", 14))
    Words that are
    prose.
      name  what
            it
            means
    """
    width = (
        max(20, min(shutil.get_terminal_size().columns - 2, _WIDEST_HELP))
        if width is None
        else width
    )
    paragraphs: list[tuple[str, int]] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if line and paragraphs and paragraphs[-1][0] and indent == paragraphs[-1][1]:
            paragraphs[-1] = f"{paragraphs[-1][0]} {line.strip()}", indent
            continue
        gap = re.search(r"\S {2,}(?=\S)", line)
        paragraphs.append((line, gap.end() if gap else indent + 2 if indent else 0))
    return "\n".join(
        line
        if line.startswith(_EXAMPLE)
        else textwrap.fill(
            line,
            width,
            subsequent_indent=" " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line, hang in paragraphs
    )


def found(result: fp.typing.Found) -> None:
    """Print what a search found, one fact per line."""
    schedule, timeline = result.schedule, result.timeline
    print(
        f"{schedule.num_stages} stages on {schedule.num_devices} devices, "
        f"{schedule.num_microbatches} microbatches\n"
    )
    hint = "; another run may find another" * (result.ended == "seconds")
    shows_span = result.objective == "span" or f"{result.span:.6g}" != f"{result.makespan:.6g}"
    span = f"{result.span:.6g}, bubble {percent(timeline.span_bubble)}"
    is_looped = schedule.num_stages > schedule.num_devices
    facts = {
        "placement": ",".join(map(str, schedule.device_of)) * is_looped,
        "source": result.source,
        "makespan": f"{result.makespan:.6g}, bubble {percent(timeline.bubble)}",
        "span": span * shows_span,
        "idle": ", ".join(filter(None, (percent(timeline.idle), imbalance_of(timeline)))),
        "peak memory": f"{max(result.peak):.6g}",
        "lower bound": (
            f"{result.lower_bound:.6g} of the {result.objective}: {gap_words(result.gap)}"
        ),
        "ended by": f"{result.ended}, {result.evaluations} schedules timed{hint}",
    }
    rows = tuple((name, words) for name, words in facts.items() if words)
    print(Table("Found", (), rows, words=(0, 1)).text() + "\n")
