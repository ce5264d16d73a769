"""Statistics of an overlap: how long each row works and waits, and a progress line while it
runs."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import NamedTuple, TextIO

from funcpipe._src.core.progress import EVERY, TextLine, bar


class StageStats(NamedTuple):
    """Counts and times of one row of an overlap so far. Times are the host's, in seconds: work on
    streams is only queued.

    Attributes:
        name: of the stage, or "source"; "loop" where there is no fold: the waits of the loop.
        batches: how many it has worked on.
        busy: time in its function.
        input: time that it waited for the row before it.
        room: time that it waited until it could be so far ahead.
    """

    name: str
    batches: int
    busy: float
    input: float
    room: float

    def __str__(self) -> str:
        each = self.busy / self.batches * 1e3 if self.batches else 0.0
        waits = f"waited {self.input:.3g} s for input, {self.room:.3g} s for room"
        return f"{self.name}: {self.batches} batches, {each:.3g} ms each; {waits}"


class Progress(NamedTuple):
    """How far an overlap has come, told to a progress function after each batch.

    Attributes:
        done: batches handed out by this overlap.
        total: of how many; None: the source does not say.
        seconds: since the first was asked for.
        stats: of every row.
    """

    done: int
    total: int | None
    seconds: float
    stats: tuple[StageStats, ...]

    def __str__(self) -> str:
        seconds = self.seconds or float("inf")
        rate, last = self.done / seconds, self.stats[-1]
        waits = f"{rate:.3g}/s, {last.name} waits {last.input / seconds:.0%}"
        if not self.total:
            return f"{self.done} batches, {waits}"
        left = (self.total - self.done) / rate if rate else 0.0
        return f"{bar(self.done / self.total)} {self.done}/{self.total}, {waits}, {left:.0f} s left"


class Bar:
    """Prints the progress on one line of a terminal, ten times a second at most."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._line, self._last = TextLine(file or sys.stderr), 0.0

    def __call__(self, progress: Progress) -> None:
        """Print it, if the last time is long enough ago."""
        now = perf_counter()
        if now - self._last >= EVERY or progress.done == progress.total:
            self._last = now
            self._line.write(str(progress))

    def end(self, progress: Progress) -> None:
        """Print the last state, and end the line."""
        self._line.write(str(progress))
        self._line.end(stays=True)
