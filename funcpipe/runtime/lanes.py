"""Threads, one per lane: started, stopped and joined; one failure ends all."""

from __future__ import annotations

import contextvars
import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any, Self

import torch

from funcpipe.core.errors import FuncpipeError, located
from funcpipe.core.plan import Plan
from funcpipe.runtime.context import Context, cores, no_autocast_cache, pin
from funcpipe.runtime.execute import STOP, Execution, Lane, Stop, raise_located

_Job = Callable[[], None]


class Lanes:
    """The worker threads of the lanes of a plan. Made by `lanes`, or for one run."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._cores = cores()
        self._threads: list[threading.Thread] = []
        self._jobs: list[queue.SimpleQueue[_Job | None]] = []
        self._busy = threading.Lock()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all threads."""
        for jobs in self._jobs:
            jobs.put(None)
        self._join()

    def run(self, execution: Execution, context: Context, threads: int) -> None:
        """Run every lane of an execution in its thread; come back when all are done, or raise what failed."""
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "these lanes are busy with another run; give each concurrent run its own fp.lanes(plan)"
            )
        before = torch.get_num_threads()
        try:
            self._run(execution, context, threads)
        finally:
            torch.set_num_threads(before)  # threads started later by the user begin with his number again
            self._busy.release()

    def _run(self, execution: Execution, context: Context, threads: int) -> None:
        failures: list[tuple[int, BaseException]] = []
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        finished = False
        try:
            # Inside of try: Ctrl-C between two starts must stop the first.
            self._start()
            for lane in execution.lanes:
                job = _job(self, execution, lane, context, threads, failures, done)
                carried = contextvars.copy_context()
                self._jobs[lane.index].put(lambda carried=carried, job=job: carried.run(job))
            for _ in execution.lanes:
                done.get()  # waits in C and can be interrupted
                if failures:
                    break
            finished = not failures
        finally:
            if not finished:
                self._halt(execution)
        if failures:
            raise_located(failures)

    def _start(self) -> None:
        if self._threads:
            return
        self._jobs = [queue.SimpleQueue() for _ in range(self.count)]
        for index in range(self.count):
            thread = threading.Thread(
                target=_work, args=(self._jobs[index],), name=f"funcpipe lane {index}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _halt(self, execution: Execution) -> None:
        """End every lane: those that wait at once, those that compute after the operation that they are in."""
        execution.stopped = True
        for lane in execution.lanes:
            lane.inbox.put(STOP)
        for jobs in self._jobs:
            jobs.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread.ident is not None:
                identity = ctypes.c_ulong(thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Stop))
        self._join()

    def _join(self) -> None:
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._threads, self._jobs = [], []

    def pin(self, lane: int) -> None:
        """Give the calling thread its share of the cores."""
        pin(lane, self.count, self._cores)


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _job(
    crew: Lanes,
    execution: Execution,
    lane: Lane,
    context: Context,
    threads: int,
    failures: list[tuple[int, BaseException]],
    done: queue.SimpleQueue[int],
) -> _Job:
    """The work of one lane in one run."""

    def work() -> None:
        try:
            # In the thread itself: MKL counts per thread, and a thread that never said its number takes every core.
            torch.set_num_threads(threads)
            crew.pin(lane.index)
            with (
                context.entered(),
                no_autocast_cache(),
                torch.autograd.set_multithreading_enabled(False),
                lane.place.active(),
            ):
                for position, code in lane.order:
                    if execution.stopped:
                        raise Stop
                    execution.perform(lane, position, code)
        except Stop:
            pass
        except BaseException as error:
            failures.append((lane.now, located(error, execution.where(lane))))
        finally:
            done.put(lane.index)

    return work


def lanes(plan: Plan) -> Lanes:
    """Threads that are kept between runs: ``with fp.lanes(plan) as lanes: fp.run(..., executor=lanes)``.

    Starting threads anew for each run costs about 0.2 ms per lane and fresh memory arenas; long trainings of short steps
    save it. The threads end with the ``with`` block.
    """
    return Lanes(plan.num_devices)


def parallel(plan_devices: Any) -> bool:
    """Do threads pay: at least two lanes compute on the CPU."""
    return sum(device.type == "cpu" for device in plan_devices) >= 2
