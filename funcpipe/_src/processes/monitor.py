"""The thread of a team, which reads if no other thread waits, reports progress, and ends long
waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from funcpipe._src.engine.mail import Stop
from funcpipe._src.engine.worker import Worker
from funcpipe._src.processes.alarms import Alarm, Failure
from funcpipe._src.processes.peer import FrameKind

if TYPE_CHECKING:
    from funcpipe._src.processes.team import Team

_TICK = 0.005  # seconds between two reads while messages arrive

_IDLE = 0.1
"""Seconds between two reads without messages. Each read takes the GIL from the lanes, so it must be
rare."""

_LONG = 0.5  # the longest wait in seconds of a thread that reads everything

_LARGE = 1 << 18  # after a read of this many bytes, the thread reads again without a pause


class Monitor:
    """Looks after a team while its other threads compute.

    Args:
        team: the team.
        timeout: seconds without progress of any process, after which a wait ends.
        marks: returns a value that changes with each progress of this process.

    Attributes:
        beats: the count of reports of progress, from all processes.
        worker: the thread.
    """

    def __init__(self, team: Team, timeout: float, marks: Callable[[], Any]) -> None:
        self.timeout, self.beats = timeout, 0
        self._team, self._marks = team, marks
        self._gate = threading.Lock()
        self._turn, self._is_over = threading.Event(), False
        self._next_beat, self._seen, self._beats_seen = 0.0, object(), -1
        self._since: float | None = None
        """The time since which the caller waits without progress of any process."""
        self.worker = Worker("funcpipe team", team.cut, patience=1.0)

    def start(self, settle: Callable[[], None]) -> None:
        """Start the thread, with ``settle`` first."""
        self.worker.start()
        self.worker.give(settle)
        self.worker.give(self._serve)

    def limit(self, timeout: float) -> None:
        """Set the timeout in seconds. This process reports its progress 40 times in it, or each
        second."""
        if timeout != self.timeout:
            self.timeout, self._next_beat = timeout, 0.0
            self._turn.set()

    def wake(self) -> None:
        """Wake the thread."""
        self._turn.set()

    def end(self) -> None:
        """Let the thread end."""
        self._is_over = True
        self._turn.set()

    @contextmanager
    def patient(self) -> Generator[None]:
        """Guard a wait of the caller: after the timeout without progress the team fails. Raises
        Alarm in place of Stop."""
        with self._gate:
            self._since = monotonic()
        try:
            yield
        except Stop:
            raise Alarm from None
        finally:
            with self._gate:
                self._since = None

    def _serve(self) -> None:
        reading, has_devices, pause = self._team.reading, self._team.has_devices, _TICK
        while not self._is_over:
            self._beat(monotonic())
            seconds = min(_LONG, self.timeout / 40) if has_devices else 0.0
            came = reading.read(_TICK if reading.has_unwritten else seconds)
            # More bytes probably follow at once, so do not pause.
            if came is not None and (has_devices or came >= _LARGE or reading.has_unwritten):
                continue
            pause = _TICK if came else min(2 * pause, _IDLE)
            self._turn.wait(min(pause, self.timeout / 40))
            self._turn.clear()

    def _beat(self, now: float) -> None:
        """Report progress of this process; end the caller's wait if no process makes progress."""
        team = self._team
        if now >= self._next_beat:
            marks, seen = self._marks(), self._seen
            self._next_beat, self._seen = now + min(1.0, self.timeout / 40), marks
            if marks != seen:
                self.beats += 1
                team.tell_all(FrameKind.BEAT, None)
        with self._gate:
            if self._since is None:
                return
            if self.beats != self._beats_seen:
                self._beats_seen, self._since = self.beats, now
            is_over = now - self._since >= self.timeout
        if is_over:
            text = f"waited {self.timeout:g} s for the other ranks, and none made progress"
            team.fail(Failure(team.rank, "RunTimeout", text, None, team.run, timed=True))
