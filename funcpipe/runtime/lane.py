"""Run the instructions of one lane, which depends on its program and its mailbox alone.

Everything that comes to a lane comes by `Mailbox.put`, whoever sends: values by slot, and by (lane, slot) the slots at other
lanes that are free again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funcpipe.core.program import CALLER, LaneProgram, Receive, Run, Send
from funcpipe.core.schedule import Action
from funcpipe.runtime.border import Border
from funcpipe.runtime.device_clock import LaneClock
from funcpipe.runtime.mail import Mailbox, PoolLevel
from funcpipe.runtime.steps import Step
from funcpipe.runtime.stream import Channel, Place, Ticket


class Lane:
    """The state of one lane while it runs; ``timed`` measures every action.

    Args:
        boxes: the mailboxes of the lane itself, of all that it sends to, and of all that it gets values from.
        edges: the channels that it sends on, and that of the caller's values, by (from, to).
        caller: what the caller gives, by value number.
        levels: how full each pool is, by (lane, slot).
        coming: by slot, the event after which what lies there may be read.

    Attributes:
        slots: what lies in each; None: nothing.
        done: how many actions are done.
        stop: how many are done when it ends.
        clock: tells when actions begin and end; only where they are ``timed``.
        thread: the identity of the thread that runs it; 0: none.
    """

    def __init__(
        self,
        program: LaneProgram,
        place: Place,
        boxes: Mapping[int, Mailbox],
        edges: Mapping[tuple[int, int], Channel],
        caller: Mapping[int, Border],
        levels: Mapping[tuple[int, int], PoolLevel],
    ) -> None:
        self.program, self.place, self.boxes, self.caller = program, place, boxes, caller
        self.parts = program.parts
        self.slots: list[Any] = [None] * len(program.slots)
        self.coming: dict[int, Any] = {}
        self.done = self.begun = self.first = self.stop = self.thread = 0
        self.steps: Sequence[Step] = ()
        self.clock: LaneClock | None = None
        self._marks: list[tuple[Action, Any, Any]] = []
        self.mail = boxes[program.lane]
        self._came = self.mail.came
        self._came.update(dict.fromkeys(program.outgoing))  # at the start all slots are free
        self._freed: dict[Any, Any] = {}
        """The slots for what the caller gives that are free again, with the event after which they are."""
        self._from_caller = edges.get((CALLER, program.lane))
        self._ways = {
            end: (edges[program.lane, end[0]], _putter(boxes[end[0]]), levels[end]) for end in program.outgoing
        }
        """By (lane, slot): the channel, what puts into the mailbox there, and the pool's level."""
        self._fillers = [self._filler(slot, source, levels) for slot, source in enumerate(program.sources)]

    def _filler(
        self, slot: int, source: int | None, levels: Mapping[tuple[int, int], PoolLevel]
    ) -> tuple[PoolLevel, Callable[[Any, Any], None], Any] | None:
        """Who is told that a slot is free again: the pool's level, what tells, and the key. None: no other lane fills it."""
        if source is None:
            return None
        level = levels[self.program.lane, slot]
        if source == CALLER:
            return level, self._freed.__setitem__, slot
        return level, _putter(self.boxes[source]), (self.program.lane, slot)

    def measure(self) -> None:
        """Note when each action begins and ends."""
        self.clock = LaneClock(self.place)
        self.steps = [_measured(step, self.program, self.clock, self._marks) for step in self.steps]

    def advance(self) -> None:
        """Run the next action and the instructions around it.

        An action that reads a value waits for its event; those before it do not. This is the hot path of every run, so
        it is one function.
        """
        slots, came, coming, place = self.slots, self._came, self.coming, self.place
        number = self.done
        self.begun = number + 1
        for instruction in self.parts[number]:
            if type(instruction) is Run:
                call, _, reads, writes = instruction
                values = [*map(slots.__getitem__, reads)]
                if coming:
                    for slot in reads:
                        place.wait(coming.pop(slot, None))
                results = self.steps[call](values, instruction)
                for slot, result in zip(writes, results):
                    slots[slot] = result
                result = None
                del values, results  # else a value would outlive its free while this lane waits for a slot
            elif type(instruction) is Receive:
                value, source, slot = instruction
                if slot not in came and source != CALLER:
                    self._wait_for_value(slot, source)
                slots[slot], event = self._fetched(value, slot) if source == CALLER else came.pop(slot)
                if event is not None:
                    coming[slot] = event
            elif type(instruction) is Send:
                slot, to, into = instruction
                end = (to, into)
                if end not in came:
                    self.mail.wait(end)
                channel, put, level = self._ways[end]
                level.sent = sent = level.sent + 1
                if sent - level.freed > level.most:
                    level.most = sent - level.freed
                free = came.pop(end)
                put(into, (slots[slot], None) if channel.at_once else channel.send(slots[slot], free))
            else:
                for slot in instruction.slots:
                    slots[slot] = None
                    filler = self._fillers[slot]
                    if filler is not None:
                        level, put, key = filler
                        level.freed += 1
                        put(key, place.event() if place.asynchronous else None)
        self.done = number + 1

    def _wait_for_value(self, slot: int, source: int) -> None:
        self.boxes[source].bring(slot, self.mail)
        if slot not in self._came:
            self.mail.wait(slot)

    def _fetched(self, value: int, slot: int) -> Ticket:
        """A value that the caller gives."""
        filler = self._fillers[slot]
        assert filler is not None
        assert self._from_caller is not None
        filler[0].add()
        return self._from_caller.send(self.caller[value], self._freed.pop(slot, None))

    def spans(self) -> list[tuple[Action, int, int]]:
        """(action, start, end) of all that is done, in nanoseconds; where nothing is measured none."""
        told = self.clock.nanoseconds if self.clock is not None else int
        return [(action, told(start), told(end)) for action, start, end in self._marks]


def _putter(box: Mailbox) -> Callable[[Any, Any], None]:
    """`Mailbox.put`; of a lane on this thread without a call."""
    return box.came.__setitem__ if type(box) is Mailbox else box.put


def _measured(step: Step, program: LaneProgram, clock: LaneClock, marks: list[tuple[Action, Any, Any]]) -> Step:
    """A step that also marks when it ran."""

    def measured(reads: list[Any], run: Run) -> Sequence[Any]:
        start = clock.mark()
        results = step(reads, run)
        marks.append((program.action(run), start, clock.mark()))
        return results

    return measured
