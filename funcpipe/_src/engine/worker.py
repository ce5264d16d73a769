"""Worker threads, which can be interrupted within a job, and which Python's exit waits for."""

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
"""Workers that Python's exit must wait for: a thread in torch's code would abort the process."""


class Worker:
    """One thread that runs jobs until it is dismissed.

    Args:
        name: the name of the thread.
        stop: a function that ends the present job, called at Python's exit. None: Python's exit
            does not wait for this worker.
        patience: the seconds that Python's exit waits.
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
        """Whether the thread has started and not ended."""
        return self._thread.is_alive()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this thread."""
        return self._thread is threading.current_thread()

    def start(self) -> None:
        """Start the thread."""
        if self.stop is not None:
            _waited_for.add(self)
        self._thread.start()

    def give(self, job: Callable[[], Any]) -> None:
        """Queue a job. It runs in a copy of the caller's context variables."""
        self._jobs.put(partial(contextvars.copy_context().run, job))

    def interrupt(self) -> None:
        """Raise Stop in the thread at its next bytecode, which is after its present operation."""
        # Under the gate, because a job that ends meanwhile would leave Stop to the next job.
        with self._gate:
            if self._interruptible and self._thread.ident is not None:
                identity = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Stop))

    def dismiss(self) -> None:
        """Let the thread end after the queued jobs."""
        self._jobs.put(None)

    def end(self, seconds: float | None = None) -> None:
        """Dismiss the thread, and wait for its end, at most ``seconds``."""
        self.dismiss()
        if self._thread.ident is not None and not self.is_here:
            self._thread.join(seconds)

    def _loop(self) -> None:
        _tell_system(self.name.removeprefix("funcpipe "))
        try:
            while (job := self._jobs.get()) is not None:
                self._do(job)
                del job  # else the job would keep the run's values alive until the next job
        finally:
            _waited_for.discard(self)
            self.stop = None  # usually a method of the worker's owner: this breaks the cycle

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
    """Give the thread's name to Linux, as Python 3.14 does. Profilers show its first 15 letters."""
    with suppress(OSError):
        Path("/proc/thread-self/comm").write_text(name)


def end_all(workers: list[Worker], seconds: float | None) -> None:
    """End workers, and wait at most ``seconds`` in total. None waits without limit."""
    deadline = None if seconds is None else monotonic() + seconds
    for worker in workers:
        worker.end(None if deadline is None else max(0.0, deadline - monotonic()))


def compute_with(threads: int) -> None:
    """Set the number of intra-op threads for this thread.

    MKL has one number per thread, and a thread that never set it uses every core.
    """
    # The read initializes torch's number for this thread. Without it, the first operation would
    # take the number that another run has set meanwhile.
    torch.get_num_threads()
    torch.set_num_threads(threads)


@atexit.register
def _leave() -> None:
    start, workers = monotonic(), list(_waited_for)
    for worker in workers:
        stop = worker.stop  # a local: the thread may end and clear the attribute
        if stop is not None:
            stop()
    for worker in workers:
        worker.end(max(0.0, start + worker.patience - monotonic()))
