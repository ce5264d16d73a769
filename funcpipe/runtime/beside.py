"""Two actions of a device that overlap: each on a stream, where the device has streams.

The lane's own stream waits for all that both read, the stream beside it waits for that, and the lane's own waits for the
stream beside it when both are queued. So whatever stands before or after the two needs no wait of its own, and memory
that dies on one of the streams is given out again on it only after the other is done with it: what the first has read
dies with what the second has read.
"""

from __future__ import annotations

from typing import Any

from funcpipe.core.kinds import ADDS, Kind
from funcpipe.core.program import LaneProgram, Run
from funcpipe.runtime.stream import Place

_MAKES = (Kind.F, Kind.R)
"""What makes residuals."""


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

    def begin(self, number: int) -> None:
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
        call = program.calls[run.call]
        if self.away == number:
            place.turn(beside=True)
        if call.kind in _MAKES:
            (self.made.add if self.away == number else self.made.discard)((call.stage, run.microbatch))

    def end(self, number: int) -> None:
        """It is queued; what it hands on is not."""
        if number - 1 in self.program.pairs and self.away >= 0:
            self.leave()
            self.place.meet()
            self.away = -1

    def leave(self) -> None:
        """All of it is queued; what follows is for the lane's own stream."""
        self.place.turn(beside=False)

    def _which(self, number: int, run: Run, other: Run) -> int:
        calls = self.program.calls
        first, second = calls[run.call], calls[other.call]
        if first.kind in ADDS and second.kind in ADDS and first.stage == second.stage:
            return -1  # they add to the same sums, in this order
        homes = [
            None if call.kind in _MAKES else (call.stage, each.microbatch) in self.made
            for call, each in ((first, run), (second, other))
        ]
        return number if homes[0] or (homes[0] is None and homes[1] is False) else number + 1
