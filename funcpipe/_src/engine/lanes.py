"""Run each lane in its own worker thread, and stop all lanes when one fails.

`execute` runs the actions of a lane; `Ranks` extends `Lanes` to several processes.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import monotonic, sleep
from typing import Self

import torch

from funcpipe._src.core.captured import lent_modules
from funcpipe._src.core.errors import FuncpipeError, PlanError, RunTimeout
from funcpipe._src.core.remembered import Remembered
from funcpipe._src.core.shown import guarded
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.stage import Bindable
from funcpipe._src.engine.execute import Execution, LaneExecutor
from funcpipe._src.engine.failures import raise_located
from funcpipe._src.engine.lane import Lane
from funcpipe._src.engine.mail import Stop
from funcpipe._src.engine.switches import SwitchWatch
from funcpipe._src.engine.watchdog import LaneWatch
from funcpipe._src.engine.worker import Worker, compute_with, end_all
from funcpipe._src.stages.context import (
    RUNNING,
    checked_plan,
    cores,
    intra_op_threads,
    not_carried,
    pin,
)
from funcpipe._src.stages.drawing import beside_others

_ALARM = -1  # the number that an alarm puts into the queue of finished lanes

_PATIENCE = 0.05  # seconds that lanes get to end by themselves before they are interrupted


class Lanes(LaneExecutor):
    """The worker threads of a plan's lanes. `lanes` makes them, or `run` makes them for one run.

    Attributes:
        count: the number of lanes.
        closed: whether `close` was called.
    """

    threaded = True

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self._cores = cores()
        self._workers: list[Worker] = []
        self._running: Sequence[Execution] = ()  # the executions whose lanes may still run
        self._busy = threading.Lock()
        self._process = os.getpid()
        self.closed = False

    @guarded
    def __repr__(self) -> str:
        threads = (
            "closed"
            if self.closed
            else "threads run"
            if self._workers
            else "threads start with the first run"
        )
        return f"<{type(self).__name__}: {self.count} lanes, {threads}>"

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # No reference is left, so no run can follow: let the threads end without waiting for them.
        for worker in self._workers:
            worker.dismiss()

    def close(self) -> None:
        """End all threads. A later run with these lanes raises `FuncpipeError`."""
        self.closed = True
        _stop(self._running)  # Ctrl-C may have interrupted the end of a run
        self._end()

    def _end(self, wait: float | None = None) -> None:
        end_all(self._workers, wait)
        self._workers = []

    def check(self, plan: Plan) -> None:
        """Raise PlanError if the plan has another number of lanes, or a mode is on that threads
        cannot inherit."""
        if self.count != plan.num_devices:
            raise PlanError(
                f"these are {self.count} lanes, but the plan has {plan.num_devices}; make lanes "
                "for this plan: fp.lanes(plan)"
            )
        refuse_uncarried(plan)

    def walk(self, executions: Sequence[Execution]) -> None:
        """Run all lanes of the executions in their threads, and wait; raise the first failure.

        With a timeout, raise RunTimeout if no lane begins an action for that many seconds.
        """
        # A pullback must work after `with fp.lanes(plan)` has ended: give it threads of its own.
        if self.closed and executions[0].part[0]:
            with Lanes(self.count) as fresh:
                fresh.walk(executions)
            return
        if self._process != os.getpid():  # a fork has none of the threads
            self._workers, self._busy, self._process = [], threading.Lock(), os.getpid()
        if self.closed:
            raise FuncpipeError("these lanes are closed; call fp.run within their with block")
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "these lanes are busy with another run; give each concurrent run its own "
                "fp.lanes(plan)"
            )
        try:
            # Restored afterwards, so that threads started later inherit the user's number.
            with intra_op_threads(executions[0].ready.threads):
                self._do_all(executions)
        finally:
            self._busy.release()

    def _do_all(self, executions: Sequence[Execution]) -> None:
        timeout = executions[0].ready.options.timeout
        failures: list[tuple[tuple[int, int], BaseException]] = []
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        finished = False
        leaving = partial(self._leave, executions, threading.get_ident())
        # A lane that is in torch's code when Python ends would abort the process.
        atexit.register(leaving)
        watch = None if timeout is None else LaneWatch(executions, timeout)
        try:
            self._running = executions
            # Within the try: Ctrl-C between two starts must stop the threads already started.
            self._start()
            for seat, worker in enumerate(self._workers):
                worker.give(partial(self._work, executions, seat, failures, done))
            if watch is not None:
                watch.start()
            with self.watched(partial(done.put, _ALARM)):
                # One number per lane. A failure ends the wait early, to stop the other lanes.
                for _ in executions[0].lanes:
                    if _take(done, watch) == _ALARM or failures:
                        break
                else:
                    finished = True
        finally:
            atexit.unregister(leaving)
            if watch is not None:  # in the finally, because Ctrl-C may come during watch.start()
                watch.end()
            if not finished:
                # With timeout= the caller waits no longer than that, even for a stuck lane.
                wait = timeout if watch is None or not watch.report else _PATIENCE
                try:
                    self.ending(failures[0][1] if failures else sys.exception())
                finally:  # also if Ctrl-C interrupts `ending`
                    self._halt(executions, wait=wait)
            self._running = ()
        if watch is not None and watch.report and not finished:
            raise RunTimeout(watch.report)
        if failures:
            raise_located(failures)
        if not finished:
            self.raise_alarm()

    def watched(self, alarm: Callable[[], None]) -> AbstractContextManager[object]:
        """Return a context in which the lanes run. A call of ``alarm`` ends them; `raise_alarm`
        raises the reason."""
        return nullcontext()

    def ending(self, error: BaseException | None) -> None:
        """Hook: the lanes are about to be ended early, by ``error`` if it is known."""

    def raise_alarm(self) -> None:
        """Hook: raise the reason of an alarm."""

    def seat(self, lane: int) -> tuple[int, int]:
        """Return the number of a lane among all lanes on this machine's cores, and their count."""
        return lane, self.count

    def _start(self) -> None:
        if not self._workers:
            self._workers = [Worker(f"funcpipe lane {index}") for index in range(self.count)]
            for worker in self._workers:
                worker.start()

    def _halt(self, executions: Sequence[Execution], wait: float | None) -> None:
        """End all lanes: a waiting lane at once, a computing lane after its present operation.

        Leave threads behind that do not end within ``wait`` seconds, because Python cannot end
        them. None waits without limit.
        """
        _stop(executions)
        # Wait before interrupting: an interruption may arrive in some object's __del__, where
        # Python prints and drops it.
        end_all(self._workers, _PATIENCE)
        for worker in self._workers:
            worker.interrupt()
        self._end(wait)  # the next run starts new ones

    def _leave(self, executions: Sequence[Execution], caller: int) -> None:
        """At exit of Python: end all lanes, then wait until the caller's thread has left the
        run."""
        self._halt(executions, wait=1.0 + self.count)
        deadline = monotonic() + 1.0
        while _is_inside(caller) and monotonic() < deadline:
            sleep(0.005)

    def _work(
        self,
        executions: Sequence[Execution],
        seat: int,
        failures: list[tuple[tuple[int, int], BaseException]],
        done: queue.SimpleQueue[int],
    ) -> None:
        """Run one lane, in one execution after the other. The job of a worker thread."""
        execution = executions[0]
        lane = execution.lanes[seat]
        try:
            compute_with(execution.ready.threads)
            place, (number, count) = lane.place, self.seat(lane.program.lane)
            pin([number], count, self._cores)
            place.backend.use(place.device)
            with (
                execution.context.computing(),
                execution.catching(),
                place.active(),
                beside_others(several=self.count > 1),
                SwitchWatch(alone=self.count == 1) as switches,
            ):
                for execution in executions:
                    lane = execution.lanes[seat]
                    # Set in the copied context of this job, so nothing has to reset it.
                    RUNNING.set(partial(execution.where, lane))
                    if not _do(execution, lane, switches, executions, failures):
                        break
                    lane.thread = 0
        except Stop:
            pass
        except BaseException as error:
            failures.append((execution.position(lane), execution.failure(lane, error)))
        finally:
            lane.thread = 0
            # Last: the caller reads `failures` as soon as it gets this number.
            done.put(lane.program.lane)


def _stop(executions: Sequence[Execution]) -> None:
    """Let all lanes end: a waiting lane at once, another one before its next action."""
    for execution in executions:
        execution.stopped = True
        for box in execution.boxes.values():
            box.stop()


def _is_inside(thread: int) -> bool:
    """Return whether a thread is in this package's code, or in code called from there."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("funcpipe."):
            return True
        frame = frame.f_back
    return False


def _take(done: queue.SimpleQueue[int], watch: LaneWatch | None) -> int:
    """Return the next number in the queue, or an alarm when the watch has a report."""
    # The wait has a timeout: Ctrl-C that arrives just before the wait in C does not end the wait.
    while True:
        try:
            return done.get(timeout=0.5 if watch is None else min(0.5, watch.pause))
        except queue.Empty:
            if watch is not None and watch.look():
                return _ALARM


def _do(
    execution: Execution,
    lane: Lane,
    switches: SwitchWatch,
    executions: Sequence[Execution],
    failures: list[tuple[tuple[int, int], BaseException]],
) -> bool:
    """Run the actions of a lane; return whether all are done.

    Failures are caught here, because the context managers of the caller write to exceptions that
    pass through them.
    """
    try:
        execution.begin(lane)
        while lane.done < lane.stop:
            if execution.stopped:
                raise Stop
            lane.advance()
            if switches.touched or torch.is_grad_enabled() is not switches.grad:
                switches.check()
        execution.end(lane)
    except BaseException as error:
        if execution.stopped and _from_stop(error):
            return False
        for each in executions:
            each.stopped = True  # before the caller wakes, so that no lane begins another action
        failures.append((execution.position(lane), execution.failure(lane, error)))
        return False
    return True


def _from_stop(error: BaseException | None) -> bool:
    """Return whether the error is Stop, or an error that user code raised while handling Stop."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        if isinstance(error, Stop):
            return True
        visited.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def lanes(plan: Plan) -> Lanes:
    """Keep the threads of a plan's lanes between runs.

    Without `lanes`, each run starts new threads. That costs about 0.2 ms per lane, and new memory
    arenas. Use `lanes` for long trainings with short steps. The threads end with the ``with``
    block.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, batch = (torch.tensor(2.0), torch.tensor(3.0)), (torch.ones(4), torch.zeros(4))
    >>> with fp.lanes(plan) as lanes:
    ...     [float(fp.run(plan, weights, batch, executor=lanes).loss) for _ in range(3)]
    [36.0, 36.0, 36.0]

    Args:
        plan: the plan to run. Other plans with the same number of lanes run, too.

    Returns:
        An executor for `run`. It starts one thread per lane, and is a context manager.

    Raises:
        PlanError: ``plan`` is not a plan.
    """
    return Lanes(checked_plan("lanes", plan).num_devices)


def uncarried(plan: Plan) -> list[str]:
    """Return the modes of the caller that other threads cannot inherit, for this plan."""
    return [*not_carried(), *_lent_twice(plan)]


def refuse_uncarried(plan: Plan) -> None:
    """Raise PlanError if other threads cannot run a plan now."""
    obstacles = uncarried(plan)
    if obstacles:
        copies = (
            "; or give each stage a module of its own, copy.deepcopy(module)"
            if _lent_twice(plan)
            else ""
        )
        raise PlanError(
            f"{', '.join(obstacles)} cannot be taken over by other threads; use "
            f"executor='serial'{copies}"
        )


def _find_lent_twice(plan: Plan) -> list[str]:
    """Describe the modules that functions of several lanes call with their own parameters.

    Two threads that put parameters into one module at the same time would mix them up.
    """
    lanes_of: dict[int, set[int]] = {}
    names: dict[int, str] = {}
    for stage, composed in enumerate(plan.stages):
        for simple in composed.simple():
            lent = {} if isinstance(simple.fn, Bindable) else lent_modules(simple.fn)
            for key, (name, _) in lent.items():
                lanes_of.setdefault(key, set()).add(plan.schedule.device_of[stage])
                names[key] = name
    return [
        (
            f"the module {names[key]!r}, which stages of lanes {sorted(users)} call with "
            "parameters of their own"
        )
        for key, users in lanes_of.items()
        if len(users) > 1
    ]


_lent_twice = Remembered(_find_lent_twice)
