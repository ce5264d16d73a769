"""The rows of an overlap at work: threads started, ended and joined, and streams brought together again."""

from __future__ import annotations

import atexit
import contextvars
import os
import threading
from functools import partial
from time import monotonic

from funcpipe.batches.flow import Closed, Flow, Item, Release
from funcpipe.batches.rail import Rail
from funcpipe.batches.row import Around, Row

PATIENCE = 1.0
"""Seconds that threads get to end after an error, or that a source gets which cannot be interrupted."""

_LONGEST = 30.0
"""Seconds that Python's end waits for a stage: a thread that is in torch's code then would abort the process."""

_working: dict[threading.Thread, tuple[Flow, bool]] = {}
"""Threads of all overlaps that have not ended, and whether they draw; Python's end must wait for them."""

_changing = threading.Lock()


class Crew:
    """The rows of one overlap. It knows the flow and not the handle, so that the handle can be collected.

    Attributes:
        flow: what the rows share.
        here: the streams of the loop.
        rows: in the order in which a batch goes through them.
        threads: of those that have one.
        lent: in a ring, the result that the loop has: its memory comes back when the next one is asked for.
        process: in which it works; a fork has none of the threads.
    """

    def __init__(self, flow: Flow, here: Rail) -> None:
        self.flow, self.here = flow, here
        self.rows: list[Row] = []
        self.threads: list[threading.Thread] = []
        self.lent: Item | None = None
        self.process = os.getpid()

    def start(self, rows: list[Row], first: int, around: Around) -> None:
        """Begin with a batch; every thread sees the context variables of the caller."""
        self.rows = rows
        for row in rows:
            if row.threaded:
                job = partial(_work, row, first, around, contextvars.copy_context())
                self.threads.append(threading.Thread(target=job, name=f"funcpipe {row.name}", daemon=True))
                with _changing:
                    _working[self.threads[-1]] = (self.flow, row.stage is None)
        for one in self.threads:
            one.start()

    def end(self, timeout: float | None) -> str:
        """Stop all, and wait for so many seconds; the names of the threads that are left."""
        self.flow.stop()
        deadline = None if timeout is None else monotonic() + timeout
        others = [one for one in self.threads if one is not threading.current_thread() and one.ident is not None]
        for one in others:
            one.join(None if deadline is None else max(0.0, deadline - monotonic()))
        self.settle()
        self.rows, self.threads = [], []
        for edge in self.flow.edges:
            edge.clear()
        return ", ".join(one.name for one in others if one.is_alive())

    def forget(self) -> None:
        """Nobody holds the overlap any more: its threads end by themselves.

        The one that draws is waited for a moment: the source may be given to another overlap at once.
        """
        self.flow.stop()
        if self.process == os.getpid() and threading.current_thread() not in self.threads:
            for row, one in zip([row for row in self.rows if row.threaded], self.threads, strict=True):
                if row.stage is None and one.ident is not None:
                    one.join(PATIENCE)
        self.settle()

    def take_back(self) -> None:
        """In a ring: the caller is done with the last result."""
        if self.lent is not None:
            lent, self.lent = self.lent, None
            self.flow.give_back(len(self.rows) - 1, Release(self.here.marks(), lent.value))

    def settle(self) -> None:
        """What the loop queues next comes after all that was under way; and what streams get after its memory's readers."""
        if self.lent is not None:
            lent, self.lent = self.lent, None
            self.here.use(lent.value, lent.marks)
        for row in self.rows:
            row.reclaim()
            self.here.wait(row.rail.marks())


def _work(row: Row, first: int, around: Around, carried: contextvars.Context) -> None:
    """A thread: all batches, one after the other."""
    try:
        carried.run(row.every, first, around)
    except BaseException as error:  # no Exception: those are values
        flow = row.flow
        with flow.changed:
            if not (isinstance(error, Closed) and flow.closed):
                flow.abort = flow.abort or error
                flow.closed = True
                flow.changed.notify_all()
    finally:
        with _changing:
            _working.pop(threading.current_thread(), None)


def _leave() -> None:
    """Python ends."""
    with _changing:
        working = list(_working.items())
    for _, (flow, _) in working:
        flow.stop()
    start = monotonic()
    for one, (_, draws) in working:
        if one.ident is not None:
            one.join(max(0.0, start + (PATIENCE if draws else _LONGEST) - monotonic()))


atexit.register(_leave)
