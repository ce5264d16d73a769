"""Statistics of an overlap: how long each row works and waits, and a progress line while it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple, TextIO

from funcpipe.batches.ticks import TickPlan
from funcpipe.batches.workers import Meter
from funcpipe.core.progress import EVERY, TextLine, bar
from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Action, Kind


class StageStats(NamedTuple):
    """What a row of an overlap did so far. Times are the host's, in seconds: of work on streams only what queues it.

    Attributes:
        name: of the stage, or "source"; "loop" where there is no fold: what the loop waited.
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
        return (
            f"{self.name}: {self.batches} batches, {each:.3g} ms each; waited {self.input:.3g} s for input, "
            f"{self.room:.3g} s for room"
        )


def stats(plan: TickPlan, meters: Sequence[Meter]) -> tuple[StageStats, ...]:
    """The statistics of all rows."""
    names = [*(row.name for row in plan.rows), "loop"]
    return tuple(
        StageStats(name, meter.batches, meter.busy, meter.input.waited, meter.room.waited)
        for name, meter in zip(names, meters, strict=False)
    )


def measured(plan: TickPlan, meters: Sequence[Meter]) -> Timeline:
    """The timeline of what every row did, from the first draw."""
    kept = [(row, number, span) for number, row in enumerate(plan.rows) for span in list(meters[number].spans or ())]
    zero = min((start for _, _, (start, _, _) in kept), default=0.0)
    spans = [
        Span(row.lane, start - zero, end - zero, Action(Kind.F, number, batch))
        for row, number, (start, end, batch) in kept
    ]
    spans.sort(key=lambda span: (span.start, span.device))
    return Timeline(tuple(spans), len(plan.lanes), unit="s", name="overlap", lanes=plan.lanes)


class Progress(NamedTuple):
    """What a progress function is told after each batch.

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
        rate = self.done / self.seconds if self.seconds else 0.0
        last = self.stats[-1]
        waits = f"{last.name} waits {last.input / self.seconds:.0%}" if self.seconds else ""
        if not self.total:
            return f"{self.done} batches, {rate:.3g}/s, {waits}"
        left = (self.total - self.done) / rate if rate else 0.0
        return f"{bar(self.done / self.total)} {self.done}/{self.total}, {rate:.3g}/s, {left:.0f} s left, {waits}"


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
