"""Mailboxes: what others give a lane, in one process or over processes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable
from typing import Any

from funcpipe._src.core.errors import FuncpipeError


class Stop(SystemExit):
    """Raised in a thread to unwind it when its run is over; users never see it."""


class Mailbox:
    """What others have put for a lane: tickets by slot, events of free slots by (lane, slot). One
    thread runs all."""

    def __init__(self) -> None:
        self.came: dict[Hashable, Any] = {}
        self.waits: Hashable = None
        """The key that the lane waits for; None: it does not wait."""

    def put(self, key: Hashable, item: Any) -> None:
        """Hand something to the lane."""
        self.came[key] = item

    def wait(self, key: Hashable) -> None:
        """Wait until something has come under a key."""
        raise FuncpipeError(f"internal error: lanes in plan order, and {key} has not come yet")

    def stop(self) -> None:
        """The lane waits no longer: it ends."""


class Inbox(Mailbox):
    """The mailbox of a thread, which alone reads ``came``.

    Args:
        lead: called by the thread before it waits. It reads what other processes send, until
            something lies in the box or another thread reads. None: there are no other processes.

    Attributes:
        wake: interrupts the thread while it reads; None: it does not read.
    """

    def __init__(self, lead: Callable[[Inbox], None] | None = None) -> None:
        super().__init__()
        self._lead = lead
        self.wake: Callable[[], None] | None = None
        self._messages: queue.SimpleQueue[tuple[Hashable, Any] | None] = queue.SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Has the thread taken all that was put here."""
        return self._messages.empty()

    def put(self, key: Hashable, item: Any) -> None:
        """Hand something to the thread."""
        self._post((key, item))

    def nudge(self) -> None:
        """Let the thread look again whether it is to read."""
        self._messages.put((None, None))

    def wait(self, key: Hashable) -> None:
        """Wait until something has come under a key. Raises Stop."""
        self.waits = key
        while key not in self.came:
            if self._lead is not None and self._messages.empty():
                self._lead(self)
            message = self._messages.get()
            if message is None:
                self._messages.put(None)  # for the next wait
                raise Stop
            self.came[message[0]] = message[1]
        self.waits = None

    def stop(self) -> None:
        """The thread waits no longer: it ends."""
        self._post(None)

    def _post(self, message: tuple[Hashable, Any] | None) -> None:
        self._messages.put(message)
        wake = self.wake  # second: the thread looks into the box after it has said how it is woken
        if wake is not None:
            wake()


class PoolLevel:
    """How many values lie in a pool. One lane writes ``sent``, another ``freed``."""

    def __init__(self) -> None:
        self.sent = self.freed = self.most = 0

    def add(self) -> None:
        """Count a value that is sent."""
        self.sent = sent = self.sent + 1
        if sent - self.freed > self.most:
            self.most = sent - self.freed
