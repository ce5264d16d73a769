"""Two actions of a device that overlap: each on a stream, where the device has streams.

The lane's own stream waits for all that both read, the stream beside it waits for that, and the lane's own waits for the
stream beside it when both are queued. So whatever stands before or after the two needs no wait of its own. Memory that
the first frees could be given out again to the second while it is read, if it is of the pool of the other stream. So what it
reads is kept until both are queued, in its slot or here, and what came back from the host is recorded on both streams.

Two of one stage stay on one stream: they share what the stage computes of its parameters alone, and add to the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcpipe.core.kinds import Kind
from funcpipe.core.program import LaneProgram, Run
from funcpipe.runtime.steps import Step
from funcpipe.runtime.stream import Place

MAKES = (Kind.F, Kind.R)
"""What makes residuals."""


def kept_by(value: object) -> list[Tensor]:
    """What a residual keeps, and lets go of while its backward runs; of other values the slots keep all."""
    kept = getattr(value, "kept", None)
    return [] if kept is None else kept()


def either(place: Place, own: Step, away: Step) -> Step:
    """A step that does the one of two that is for the stream on which it runs: the lane's own, or the one beside it."""

    def step(reads: list[Any], run: Run) -> Sequence[Any]:
        return (own if place.stream is place.streams[0] else away)(reads, run)

    return step


class Beside:
    """Which of two runs on the stream beside the lane's own.

    Autograd runs a backward where its forward ran, whatever stream is current. So a backward has the stream of what made
    its residual, and a forward the one that is left.
    """

    def __init__(self, program: LaneProgram, place: Place, coming: dict[int, Any]) -> None:
        self.program, self.place, self.coming = program, place, coming
        self.away = -1
        """The number of the action that runs beside the lane; -1: none."""
        self.made: set[tuple[int, int]] = set()
        """(stage, piece) of the residuals that were made there."""
        self.kept: list[Tensor] = []
        """What the first of two would free while it runs."""

    def begin(self, number: int, reads: Sequence[Any]) -> None:
        """The action of this number runs next; the lane's own stream has what it reads."""
        program, place = self.program, self.place
        run = program.runs[number]
        if number in program.pairs:
            other = program.runs[number + 1]
            for slot in other.reads:
                place.wait(self.coming.pop(slot, None))
            self.away = self._which(number, run, other)
            if self.away >= 0:
                place.split()
                self.kept = [tensor for value in reads for tensor in kept_by(value)]
        call = program.calls[run.call]
        if self.away == number:
            place.turn(beside=True)
        if call.kind in MAKES:
            (self.made.add if self.away == number else self.made.discard)((call.stage, run.microbatch))

    def end(self, number: int) -> None:
        """It is queued; what it hands on is not."""
        if number - 1 in self.program.pairs and self.away >= 0:
            self.leave()
            self.place.meet()
            self.away = -1
            self.kept.clear()

    def leave(self) -> None:
        """All of it is queued; what follows is for the lane's own stream."""
        self.place.turn(beside=False)

    def _which(self, number: int, run: Run, other: Run) -> int:
        calls = self.program.calls
        first, second = calls[run.call], calls[other.call]
        if first.stage == second.stage:
            return -1
        homes = [
            None if call.kind in MAKES else (call.stage, each.microbatch) in self.made
            for call, each in ((first, run), (second, other))
        ]
        return number if homes[0] or (homes[0] is None and homes[1] is False) else number + 1
