"""Threads that do jobs: interrupted inside of a job only, ended one by one, and waited for when
Python ends."""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from funcpipe._src.engine.mail import Stop

_waited_for: set[Worker] = set()
"""Workers that Python's end must wait for: a thread that is in torch's code then would abort the
process."""


class Worker:
    """One thread that does jobs until it is told to end.

    Args:
        name: of the thread.
        stop: ends the job that it does when Python ends; None: Python's end does not wait for it.
        patience: for how many seconds Python's end waits for it.
    """

    def __init__(
        self, name: str, stop: Callable[[], None] | None = None, patience: float = 0.0
    ) -> None:
        self.name, self.stop, self.patience = name, stop, patience
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._interruptible = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        """Has the thread begun and not ended."""
        return self._thread.is_alive()

    @property
    def is_here(self) -> bool:
        """Is this thread the one that calls."""
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Start the thread."""
        if self.stop is not None:
            _waited_for.add(self)
        self._thread.start()

    def give(self, job: Callable[[], Any]) -> None:
        """Queue a job; it sees the context variables of the caller."""
        self._jobs.put(partial(contextvars.copy_context().run, job))

    def interrupt(self) -> None:
        """Raise Stop in the thread at its next bytecode, that is after the operation that it is
        in."""
        with self._gate:
            if self._interruptible and self._thread.ident is not None:
                identity = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Stop))

    def dismiss(self) -> None:
        """Let the thread end after the jobs that are queued."""
        self._jobs.put(None)

    def end(self, seconds: float | None = None) -> None:
        """Dismiss it, and wait for its end; for so long at most."""
        self.dismiss()
        if self._thread.ident is not None and not self.is_here:
            self._thread.join(seconds)

    def _loop(self) -> None:
        _tell_system(self.name.removeprefix("funcpipe "))
        try:
            while (job := self._jobs.get()) is not None:
                self._do(job)
                del job  # it holds the run's values
        finally:
            _waited_for.discard(self)
            self.stop = (
                None  # mostly a method of who has this worker: a cycle, with all that is held there
            )

    def _do(self, job: Callable[[], Any]) -> None:
        try:
            self._interruptible = True
            try:
                job()
            finally:
                with self._gate:
                    self._interruptible = False
        except Stop:
            pass  # the interruption came while the job was ending


def _tell_system(name: str) -> None:
    """Tell Linux the name of this thread, as Python does from 3.14 on: profilers and debuggers show
    it, 15 letters."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


def end_all(workers: list[Worker], seconds: float | None) -> None:
    """End workers, waiting for so many seconds together (None: for ever)."""
    deadline = None if seconds is None else monotonic() + seconds
    for worker in workers:
        worker.end(None if deadline is None else max(0.0, deadline - monotonic()))


def compute_with(threads: int) -> None:
    """Set the intra-op threads of this thread: MKL counts per thread, and one that never set it
    takes every core."""
    # else torch takes at the first operation what another run has set since
    torch.get_num_threads()
    torch.set_num_threads(threads)


@atexit.register
def _leave() -> None:
    start, workers = monotonic(), list(_waited_for)
    for worker in workers:
        stop = worker.stop  # its thread may end meanwhile
        if stop is not None:
            stop()
    for worker in workers:
        worker.end(max(0.0, start + worker.patience - monotonic()))
