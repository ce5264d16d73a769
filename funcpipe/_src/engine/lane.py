"""Run the instructions of one lane.

A lane depends on its program and its mailbox, not on other lanes. Other lanes call `Mailbox.put` to
deliver to a lane. The key of a value is a slot of this lane. The key (lane, slot) says that a slot
of another lane is free again. `lanes` and `executors` decide which thread runs a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from funcpipe._src.core.border import Border
from funcpipe._src.data.program import CALLER, LaneProgram, Receive, Run, Send
from funcpipe._src.data.schedule import Action
from funcpipe._src.devices.device_clock import LaneClock
from funcpipe._src.devices.ranges import named_range
from funcpipe._src.devices.stream import Channel, Place, Ticket
from funcpipe._src.engine.mail import Mailbox, PoolLevel
from funcpipe._src.engine.steps import Step


class Lane:
    """The state of one lane while it runs.

    Args:
        boxes: the mailboxes of this lane, of its receivers and of its senders, by lane.
        edges: the channels to its receivers, and the channel from the caller, by (from, to).
        caller: the caller's values, by value number.
        levels: the fill level of the pool of each slot, by (lane, slot).

    Attributes:
        steps: the function of each call; set them before `advance`.
        slots: the values, by slot; None: the slot is empty.
        coming: by slot, the event after which its value may be read.
        done: the number of actions that are done.
        stop: the number of actions after which the lane ends.
        from_caller: the channel from the caller; None: nothing comes from there.
        clock: reads the time of each action; None unless `measure` was called.
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
        """The events after which free slots for values of the caller may be filled."""
        self.from_caller = edges.get((CALLER, program.lane))
        self._receivers = {
            end: (edges[program.lane, end[0]], _put_function(boxes[end[0]]), levels[end])
            for end in program.outgoing
        }
        """By (lane, slot): the channel, the function that puts into the mailbox there, and the
        pool's level."""
        self._free_notices = [
            self._free_notice(slot, source, levels) for slot, source in enumerate(program.sources)
        ]

    def _free_notice(
        self, slot: int, source: int | None, levels: Mapping[tuple[int, int], PoolLevel]
    ) -> tuple[PoolLevel, Callable[[Any, Any], None], Any] | None:
        """Return the pool's level, the function to call when the slot is free, and its key; None:
        only this lane fills it."""
        if source is None:
            return None
        level = levels[self.program.lane, slot]
        if source == CALLER:
            return level, self._freed.__setitem__, slot
        return level, _put_function(self.boxes[source]), (self.program.lane, slot)

    def measure(self) -> None:
        """Note when each action begins and ends."""
        self.clock = LaneClock(self.place)
        self.steps = [_measured(step, self.program, self.clock, self._marks) for step in self.steps]

    def advance(self) -> None:
        """Run the next action and the instructions around it.

        An action that reads a value waits for its event; those before it do not. This is the hot
        path of every run, so it is one function.
        """
        slots, came, coming, place = self.slots, self._came, self.coming, self.place
        number = self.done
        self.begun = number + 1  # before the action: other threads read which action is running
        for instruction in self.parts[number]:
            if type(instruction) is Run:
                call, _, reads, writes = instruction
                values = [*map(slots.__getitem__, reads)]
                if coming:
                    # Popped: after one wait, all later work on this stream comes after the event.
                    for slot in reads:
                        place.wait(coming.pop(slot, None))
                results = self.steps[call](values, instruction)
                for slot, result in zip(writes, results, strict=True):
                    slots[slot] = result
                result = None
                # Otherwise a freed value would stay alive while this lane waits for a slot.
                del values, results
            elif type(instruction) is Receive:
                value, source, slot = instruction
                if source == CALLER:
                    slots[slot], event = self._take_from_caller(value, slot)
                else:
                    if slot not in came:
                        self.mail.wait(slot)
                    slots[slot], event = came.pop(slot)
                if event is not None:
                    coming[slot] = event
            elif type(instruction) is Send:
                slot, to, into = instruction
                end = (to, into)
                if end not in came:
                    self.mail.wait(end)
                channel, put, level = self._receivers[end]
                level.sent = sent = level.sent + 1
                if sent - level.freed > level.most:
                    level.most = sent - level.freed
                # Consume the notice: the slot there is taken until its lane frees it again. Without
                # that, the next value would overwrite one that is not read yet.
                free = came.pop(end)
                put(
                    into,
                    (slots[slot], None) if channel.at_once else channel.send(slots[slot], free),
                )
            else:
                for slot in instruction.slots:
                    slots[slot] = None
                    notice = self._free_notices[slot]
                    if notice is not None:
                        # On a stream, queued reads of the slot may not have run yet, so the next
                        # copy waits.
                        level, put, key = notice
                        level.freed += 1
                        put(key, place.event() if place.asynchronous else None)
        self.done = number + 1

    def _take_from_caller(self, value: int, slot: int) -> Ticket:
        """Return a value of the caller, and the event after which it may be read."""
        notice, channel = self._free_notices[slot], self.from_caller
        assert notice is not None
        assert channel is not None
        level = notice[0]
        level.sent = sent = level.sent + 1  # `PoolLevel.add`, without a call, here and in `advance`
        if sent - level.freed > level.most:
            level.most = sent - level.freed
        free = self._freed.pop(slot, None)
        return (
            (self.caller[value], None)
            if channel.at_once
            else channel.send(self.caller[value], free)
        )

    def spans(self) -> list[tuple[Action, int, int]]:
        """Return (action, start, end) of each finished action, in nanoseconds. Empty unless
        measured."""
        time_of = self.clock.nanoseconds if self.clock is not None else int
        return [(action, time_of(start), time_of(end)) for action, start, end in self._marks]


def _put_function(box: Mailbox) -> Callable[[Any, Any], None]:
    """Return `Mailbox.put`. For a lane on this thread, return the dictionary's own method, which
    saves a call."""
    return box.came.__setitem__ if type(box) is Mailbox else box.put


def _measured(
    step: Step, program: LaneProgram, clock: LaneClock, marks: list[tuple[Action, Any, Any]]
) -> Step:
    """Wrap a step so that it also marks its start and its end."""

    def measured(reads: list[Any], run: Run) -> Sequence[Any]:
        start = clock.mark()
        results = step(reads, run)
        marks.append((program.action(run), start, clock.mark()))
        return results

    return measured


def ranged(step: Step, program: LaneProgram, device: torch.device) -> Step:
    """Wrap a step in a range with the name of its action, such as ``action 2F3``."""

    def ranged(reads: list[Any], run: Run) -> Sequence[Any]:
        # Without the word, profilers take a name such as 2F0 for a C++ symbol and show F0.
        with named_range(f"action {program.action(run)}", device):
            return step(reads, run)

    return ranged
