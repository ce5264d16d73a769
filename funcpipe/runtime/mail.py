"""Mailboxes: what others give a lane, in one process or over processes."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from funcpipe.core.errors import FuncpipeError


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
