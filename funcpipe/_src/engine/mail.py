"""Mailboxes, through which lanes receive values and notices of free slots.

`remote` has the mailboxes that stand for lanes of other processes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable
from typing import Any

from funcpipe._src.core.errors import FuncpipeError


class Stop(SystemExit):
    """Raised in a thread to end it when its run is over. Never raised to users."""


class Mailbox:
    """A mailbox for lanes that share one thread.

    Attributes:
        came: tickets by slot, and events of free slots by (lane, slot).
        waits: the key that the lane waits for. None: it does not wait.
    """

    def __init__(self) -> None:
        self.came: dict[Hashable, Any] = {}
        self.waits: Hashable = None

    def put(self, key: Hashable, item: Any) -> None:
        """Deliver an item to the lane."""
        self.came[key] = item

    def wait(self, key: Hashable) -> None:
        """Raise: on one thread in plan order, each item is delivered before it is needed."""
        raise FuncpipeError(f"internal error: lanes in plan order, and {key} has not come yet")

    def stop(self) -> None:
        """End the lane's wait. A no-op, because the lane never waits."""


class Inbox(Mailbox):
    """The mailbox of a lane with its own thread. Only this thread reads ``came``.

    Args:
        lead: a function that the thread calls before it waits. The function reads messages of other
            processes, until the box has an item or another thread reads. None: there are no other
            processes.

    Attributes:
        wake: interrupts the thread while it reads messages. None: the thread does not read.
    """

    def __init__(self, lead: Callable[[Inbox], None] | None = None) -> None:
        super().__init__()
        self._lead = lead
        self.wake: Callable[[], None] | None = None
        self._messages: queue.SimpleQueue[tuple[Hashable, Any] | None] = queue.SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Whether the thread has taken all items."""
        return self._messages.empty()

    def put(self, key: Hashable, item: Any) -> None:
        """Deliver an item to the thread."""
        self._post((key, item))

    def nudge(self) -> None:
        """Wake the thread, so that it checks again whether it must read messages."""
        self._messages.put((None, None))

    def wait(self, key: Hashable) -> None:
        """Wait until an item with this key has come. Raises Stop if the run ends."""
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
        """End the thread's wait: it raises Stop."""
        self._post(None)

    def _post(self, message: tuple[Hashable, Any] | None) -> None:
        self._messages.put(message)
        # Read `wake` after the put. The thread sets `wake` before it looks into the box, so either
        # it sees this message or we see its `wake`.
        wake = self.wake
        if wake is not None:
            wake()


class PoolLevel:
    """The fill level of a pool of slots.

    One lane writes ``sent`` and ``most``, another lane writes ``freed``. So no lock is needed.
    """

    def __init__(self) -> None:
        self.sent = self.freed = self.most = 0

    def add(self) -> None:
        """Count a sent value."""
        self.sent = sent = self.sent + 1
        if sent - self.freed > self.most:
            self.most = sent - self.freed
