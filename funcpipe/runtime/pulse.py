"""Does anyone get on: a number in the store, to which every process adds while it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Pulse:
    """Looks again and again, in a thread of its own, how far this process is, and tells the others when it got on.

    So a process that waits knows whether the others still work for it, or hang with it.

    Attributes:
        beats: changes whenever any process has got on.
    """

    def __init__(self, store: Any, marks: Callable[[], Any]) -> None:
        self.beats = 0
        self._store, self._marks = store, marks
        self._pause, self._over, self._turn = 1.0, False, threading.Event()
        self._thread = threading.Thread(target=self._beat, name="funcpipe pulse", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def serve(self, timeout: float) -> None:
        """Look so often that waits with this timeout, in seconds, can go by it."""
        pause = min(1.0, timeout / 40)
        if pause != self._pause:  # each run says it, and the thread shares the lane's core
            self._pause = pause
            self._turn.set()

    def _beat(self) -> None:
        seen = self._marks()
        while not self._over:
            marks = self._marks()
            try:
                self.beats = self._store.add("beats", int(marks != seen))
            except RuntimeError:  # the store is gone; who needs it says so
                return
            seen = marks
            self._turn.wait(self._pause)
            self._turn.clear()

    def end(self, seconds: float) -> None:
        """Look no more; waits for so long at most, since the store may not answer."""
        self._over = True
        self._turn.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
