"""Statistics of an overlap: the work and the waits of each row, and a progress line."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import NamedTuple, TextIO

from funcpipe._src.core.progress import EVERY, TextLine, bar


class StageStats(NamedTuple):
    """Counts and times of one row of an overlap. `Overlap.stats` returns one per row.

    Times are measured on the host. For work on a stream they are the times to queue the work.

    Attributes:
        name: the name of the stage, or "source". Without a fold the last entry is "loop", with the
            waits of your own loop.
        batches: the number of batches that the row has worked on.
        busy: seconds in the row's function.
        input: seconds of waiting for the row before.
        room: seconds of waiting because the row was as far ahead as allowed.
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
    """The progress of an overlap, the argument of its progress function after each batch.

    Attributes:
        done: the number of batches returned by this overlap.
        total: the number of all batches. None if the source has no length.
        seconds: seconds since the first batch was asked for.
        stats: the `StageStats` of each row.
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
    """Prints the progress on one line of a terminal, at most ten times per second."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._line, self._last = TextLine(file or sys.stderr), 0.0

    def __call__(self, progress: Progress) -> None:
        """Print the progress, unless the last print was too recent."""
        now = perf_counter()
        if now - self._last >= EVERY or progress.done == progress.total:
            self._last = now
            self._line.write(str(progress))

    def end(self, progress: Progress) -> None:
        """Print the final progress, and end the line."""
        self._line.write(str(progress))
        self._line.end(stays=True)
