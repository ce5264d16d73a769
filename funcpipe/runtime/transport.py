"""Carries values from lane to lane: a lane's runner knows its own program and a transport, and no other lane.

`Transport` is the protocol that a runner needs. `Local` is the one within a process: values go into the mailbox of the
lane that reads them, over a `Channel` (a hand-over, or copies between streams), and slots that are free again into that
of the lane that fills them.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from funcpipe.core.errors import FuncpipeError
from funcpipe.core.program import CALLER, LaneProgram, Receive, Send
from funcpipe.runtime.border import Border
from funcpipe.runtime.stream import Channel, Ticket


class Transport(Protocol):
    """Values and free slots between one lane and the others."""

    def receive(self, instruction: Receive) -> Ticket:
        """The value that comes into a slot, once it has come (its event may be yet to come)."""
        ...

    def send(self, instruction: Send, value: Any) -> None:
        """Start to move a value, once the slot at the other end is free."""
        ...

    def free(self, slot: int, source: int, event: Any) -> None:
        """A slot that ``source`` fills is free after the event (None: now)."""
        ...


class Stop(SystemExit):
    """Raised in a thread to unwind it when its run is over; users never see it."""


class Mailbox:
    """What others have put for a lane: tickets by slot, events of free slots by (lane, slot). One thread runs all."""

    def __init__(self) -> None:
        self.came: dict[Hashable, Any] = {}
        self.waits: Hashable = None
        """The key that the lane waits for; None: it does not wait."""
        self.stopped = False
        """Does the lane wait no longer."""
        self.wake: Callable[[], None] | None = None
        """While the lane waits for what it reads itself, what ends that."""

    def put(self, key: Hashable, item: Any) -> None:
        """Hand something to the lane."""
        self.came[key] = item

    def wait(self, key: Hashable) -> None:
        """Wait until something has come under a key."""
        raise FuncpipeError(f"internal error: lanes in plan order, and {key} has not come yet")

    def bring(self, slot: int, box: Mailbox) -> None:
        """Before the lane of another box waits for what comes from this lane into a slot: what it has to do itself."""

    def stop(self) -> None:
        """The lane waits no longer: it ends."""


class Inbox(Mailbox):
    """The mailbox of a lane with a thread of its own, which alone reads ``came``."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: queue.SimpleQueue[tuple[Hashable, Any] | None] = queue.SimpleQueue()
        self.quiet: deque[tuple[Hashable, Any]] = deque()

    def put(self, key: Hashable, item: Any) -> None:
        """Hand something to the lane."""
        self.messages.put((key, item))

    def put_quietly(self, key: Hashable, item: Any) -> None:
        """Hand something to the lane, which is woken only if it waits for just that."""
        self.quiet.append((key, item))
        if self.waits == key:  # it looked at what is quiet after it said so
            self.messages.put((None, None))

    def wait(self, key: Hashable) -> None:
        """Wait until something has come under a key. Raises Stop."""
        self.waits = key
        while True:
            while self.quiet:
                quiet = self.quiet.popleft()
                self.came[quiet[0]] = quiet[1]
            if key in self.came:
                break
            message = self.messages.get()
            if message is None:
                raise Stop
            self.came[message[0]] = message[1]
        self.waits = None

    def stop(self) -> None:
        """The lane waits no longer: it ends."""
        self.stopped = True  # first: a lane looks at it after it has said how it is woken
        wake = self.wake
        if wake is not None:
            wake()
        self.messages.put(None)


class PoolLevel:
    """How many values lie in a pool. One lane writes ``sent``, another ``freed``."""

    def __init__(self) -> None:
        self.sent = self.freed = self.most = 0

    def add(self) -> None:
        """Count a value that is sent."""
        self.sent = sent = self.sent + 1
        if sent - self.freed > self.most:
            self.most = sent - self.freed


class Local:
    """The transport of one lane within a process.

    ``boxes`` are of every lane that it sends to or gets from, ``edges`` by (from, to); ``caller`` has what he gives by
    value number, ``levels`` those of the pools by (lane, slot).
    """

    def __init__(
        self,
        program: LaneProgram,
        boxes: Mapping[int, Mailbox],
        edges: Mapping[tuple[int, int], Channel],
        caller: Mapping[int, Border],
        levels: Mapping[tuple[int, int], PoolLevel],
    ) -> None:
        self.lane, self.box, self.boxes, self.caller = program.lane, boxes[program.lane], boxes, caller
        self.given = edges.get((CALLER, program.lane))
        self.ways = {end: (edges[program.lane, end[0]], boxes[end[0]], levels[end]) for end in program.outgoing}
        """By (lane, slot): the edge, the mailbox and the pool level there."""
        self.levels = {slot: level for (lane, slot), level in levels.items() if lane == program.lane}
        self.freed: dict[int, Any] = {}
        self.came = self.box.came
        self.came.update(dict.fromkeys(program.outgoing))

    def receive(self, instruction: Receive) -> Ticket:
        """The value that comes into a slot; from the caller it is fetched."""
        value, source, slot = instruction
        if source != CALLER:
            if slot not in self.came:
                self.boxes[source].bring(slot, self.box)
            if slot not in self.came:
                self.box.wait(slot)
            return self.came.pop(slot)
        assert self.given is not None
        self.levels[slot].add()
        return self.given.send(self.caller[value], self.freed.pop(slot, None))

    def send(self, instruction: Send, value: Any) -> None:
        """Start to move a value."""
        end = instruction[1:]
        if end not in self.came:
            self.box.wait(end)
        edge, box, level = self.ways[end]
        level.add()
        box.put(end[1], edge.send(value, self.came.pop(end)))

    def free(self, slot: int, source: int, event: Any) -> None:
        """Tell the lane that fills the slot that it is free."""
        self.levels[slot].freed += 1
        if source == CALLER:
            self.freed[slot] = event
        else:
            self.boxes[source].put((self.lane, slot), event)
