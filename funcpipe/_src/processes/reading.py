"""Decide which thread reads the connections to other processes: one at a time, usually one that
waits."""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from funcpipe._src.engine.mail import Inbox
from funcpipe._src.processes.peer import LostError, Peer

_LOOK = 0.5  # seconds after which a reading thread checks again whether it must continue


class Reading:
    """The connections of a process, and the turn to read them.

    A thread that waits for a message reads the connections itself: two switches between threads
    take longer than a read. One of several waiting threads leads: it reads for all.

    Args:
        lost: a function that is called with a connection that has ended, and its error.
        goes_on: a function that returns whether waiting threads must wait longer.
    """

    def __init__(
        self, lost: Callable[[Peer, LostError], None], goes_on: Callable[[], bool]
    ) -> None:
        self._lost, self._goes_on = lost, goes_on
        self._turn = threading.Lock()
        self._leader = 0
        self._waiting: deque[Inbox] = deque()
        """The boxes of threads that wait while another one reads."""
        self._unwritten: set[Peer] = set()
        self._poll = select.poll()
        self._peers: dict[int, Peer] = {}  # the connections, by file descriptor
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)

    @property
    def has_unwritten(self) -> bool:
        """Return whether bytes wait for a connection that accepts no more now."""
        return bool(self._unwritten)

    def add(self, peer: Peer) -> None:
        """Read a connection, too."""
        with self._turn:
            self._peers[peer.fileno()] = peer
            self._poll.register(peer, select.POLLIN)

    def lead(self, box: Inbox) -> None:
        """Read until the box has an item. Return at once if another thread reads."""
        if not self._turn.acquire(blocking=False):
            self._waiting.append(box)
            # Try again: the reader may have ended its turn before it saw this box, and then nobody
            # would read for it.
            if not self._turn.acquire(blocking=False):
                return
        box.wake = self.wake
        self._leader = threading.get_ident()
        try:
            while box.is_empty and self._goes_on():
                self._read(_LOOK)
        finally:
            box.wake = None
            self._end_turn()

    def read(self, seconds: float) -> int | None:
        """Read once, and wait at most ``seconds``. Return the count of bytes.

        Returns None if another thread reads.
        """
        if not self._turn.acquire(blocking=False):
            return None
        self._leader = threading.get_ident()
        try:
            return self._read(seconds)
        finally:
            self._end_turn()

    def write_later(self, peer: Peer) -> None:
        """Leave bytes that a connection does not accept now to the reading thread."""
        self._unwritten.add(peer)
        self.wake()

    def wake(self) -> None:
        """Make the reading thread check whether it must continue."""
        if self._leader not in (0, threading.get_ident()):
            with suppress(OSError):  # already awake, or closed
                self._waker.send(b"\0")

    def _end_turn(self) -> None:
        self._leader = 0
        self._turn.release()
        while self._waiting:
            with suppress(IndexError):
                self._waiting.popleft().nudge()

    def _read(self, seconds: float) -> int:
        for peer in [*self._unwritten]:
            with suppress(KeyError, ValueError, OSError):  # the connection has ended
                self._poll.modify(peer, select.POLLIN | select.POLLOUT)
        count = 0
        for number, event in self._poll.poll(seconds * 1000):
            peer = self._peers.get(number)
            if peer is None:
                with suppress(OSError):
                    self._woken.recv(4096)
                continue
            if event & select.POLLOUT and peer.flush():
                self._unwritten.discard(peer)
                self._poll.modify(peer, select.POLLIN)
            if event & ~select.POLLOUT:
                try:
                    count += peer.read()
                except LostError as error:
                    self._remove(number, peer)
                    self._lost(peer, error)
        return count

    def _remove(self, number: int, peer: Peer) -> None:
        self._poll.unregister(number)
        del self._peers[number]
        self._unwritten.discard(peer)
        peer.shut()

    def close(self) -> None:
        """Close the sockets that wake the reader. No thread may read any more."""
        self._woken.close()
        self._waker.close()
