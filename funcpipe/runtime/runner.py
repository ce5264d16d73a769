"""Runs the instructions of one lane, one after the other. It knows no schedule, no autograd, no other lane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcpipe.core.program import Free, LaneProgram, Receive, Run
from funcpipe.core.schedule import Action
from funcpipe.runtime.device_clock import LaneClock
from funcpipe.runtime.steps import Step
from funcpipe.runtime.stream import Place
from funcpipe.runtime.transport import Transport


class Runner:
    """The state of one lane while it runs; ``timed`` measures every action.

    Attributes:
        slots: what lies in each; None: nothing.
        coming: by slot, the event after which what lies there may be read.
        done: how many actions are done.
        stop: how many are done when it ends.
        clock: tells when actions begin and end; only where they are ``timed``.
        thread: the identity of the thread that runs it; 0: none.
    """

    def __init__(
        self,
        program: LaneProgram,
        steps: Sequence[Step],
        place: Place,
        transport: Transport,
        coming: dict[int, Any],
        *,
        timed: bool,
    ) -> None:
        self.program, self.place, self.transport, self.coming = program, place, transport, coming
        self.parts, self.sources = program.parts, program.sources
        self.slots: list[Any] = [None] * len(program.slots)
        self.done = self.begun = self.first = self.stop = 0
        self.clock = LaneClock(place) if timed else None
        self._marks: list[tuple[Action, Any, Any]] = []
        if self.clock is not None:
            steps = [_measured(step, program, self.clock, self._marks) for step in steps]
        self.steps = steps
        self.thread = 0

    def advance(self) -> None:
        """Run the next action and the instructions around it.

        An action that reads a value waits for its event; those before it do not.
        """
        slots, transport = self.slots, self.transport
        number = self.done
        self.begun = number + 1
        for instruction in self.parts[number]:
            if type(instruction) is Run:
                call, _, reads, writes = instruction
                values = [slots[slot] for slot in reads]
                if self.coming:
                    for slot in reads:
                        self.place.wait(self.coming.pop(slot, None))
                results = self.steps[call](values, instruction)
                for index, slot in enumerate(writes):
                    slots[slot] = results[index]
                del values, results  # else a value would outlive its free while this lane waits for a slot
            elif type(instruction) is Receive:
                slots[instruction.slot], event = transport.receive(instruction)
                if event is not None:
                    self.coming[instruction.slot] = event
            elif type(instruction) is Free:
                for slot in instruction.slots:
                    slots[slot] = None
                    source = self.sources[slot]
                    if source is not None:
                        transport.free(slot, source, self.place.event() if self.place.asynchronous else None)
            else:
                transport.send(instruction, slots[instruction.slot])
        self.done = number + 1

    def spans(self) -> list[tuple[Action, int, int]]:
        """(action, start, end) of all that is done, in nanoseconds; where nothing is measured none."""
        told = self.clock.nanoseconds if self.clock is not None else int
        return [(action, told(start), told(end)) for action, start, end in self._marks]


def _measured(step: Step, program: LaneProgram, clock: LaneClock, marks: list[tuple[Action, Any, Any]]) -> Step:
    """A step that also marks when it ran."""

    def measured(reads: list[Any], run: Run) -> Sequence[Any]:
        start = clock.mark()
        results = step(reads, run)
        marks.append((program.action(run), start, clock.mark()))
        return results

    return measured
