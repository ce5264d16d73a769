"""`overlap`: a stream of batches through stages that work at the same time, each on another
batch."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import length_hint
from time import perf_counter
from typing import Any, Self, TypeAlias

import torch

from funcpipe._src.core.errors import FuncpipeError, PlanError
from funcpipe._src.core.shown import guarded
from funcpipe._src.core.tree import Tree, flatten
from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.data.schedule import Action, Kind
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.worker import Worker, end_all
from funcpipe._src.prefetch.device import ToDevice, numbered
from funcpipe._src.prefetch.rows import BatchRow, CallerModes, Item, OverlapState
from funcpipe._src.prefetch.stage import (
    BatchStage,
    Fold,
    StageLike,
    TickPlan,
    checked_stages,
    plan_of,
)
from funcpipe._src.prefetch.stats import Bar, Progress, StageStats
from funcpipe._src.prefetch.streams import StreamSet
from funcpipe._src.stages.context import not_carried, refuse_transforms

ProgressReport: TypeAlias = bool | Callable[[Progress], None]

_PATIENCE = 1.0
"""Seconds that threads get to end after an error, and that a source gets which cannot be
interrupted."""

_LONGEST = 30.0
"""Seconds that Python's end waits for a stage."""


def overlap(
    source: Iterable[Any],
    stages: Sequence[StageLike],
    *,
    depth: int = 2,
    start_index: int = 0,
    thread: bool | None = None,
    devices: Sequence[Any] = (),
    snapshot: Callable[[], Any] | None = None,
    record: bool = False,
    ranges: bool = False,
    progress: ProgressReport = False,
) -> Overlap:
    """Prefetch batches through stages: while batch i is trained on, i+1 exchanges its inputs and
    i+2 is copied.

    The results equal ``[last(...first(batch)) for batch in source]`` bit for bit and in order,
    whatever the depth and the threads, for functions that do not depend on each other and a source
    that does not write into a batch again. Each batch that is drawn comes out, or the error that it
    met is raised in its place, after the results of all batches before it: the exception itself,
    with ``.funcpipe`` (stage, name, batch) and a note.

    >>> list(fp.batches.overlap(range(4), [lambda x: x + 1, lambda x: 10 * x]))
    [10, 20, 30, 40]
    >>> total = fp.batches.overlap(range(4), [lambda x: x + 1, fp.batches.Fold(lambda state, x: (state + x, x), 0)])
    >>> list(total), total.state
    ([1, 2, 3, 4], 10)

    Args:
        source: any iterable of batches; None is a batch like others. Drawn once, from the first
            ``next`` on, never after its end and never by two threads.
        stages: functions of one batch, `BatchStage`, `to_device`, `awaited`; the last may be a
            `Fold`, which runs where the loop runs. Without a fold all of them run ahead of the
            loop's own work.
        depth: how many batches are under way besides the one that is handed out next; all stages
            work at once if it is at least the number of stages before the step. 0: the plain loop,
            nothing runs ahead; good to find a fault.
        start_index: the number of the first batch, where training resumes in the middle of an
            epoch.
        thread: whether the source and the stages have threads, where they do not say; None: where
            no device with streams is named (`to_device`, ``devices``). There one thread queues
            everything, in the plan's order.
        devices: with streams, that stages work on besides those of `to_device`.
        snapshot: called before each draw, such as ``loader.state_dict``, and copied; see
            `Overlap.source_state`.
        record: keep when everything ran, for `Overlap.timeline`.
        ranges: the work on a batch is a range of torch.profiler, such as ``decode 3``, and of NVTX
            on CUDA devices.
        progress: True: a line on stderr; or a function that is given a `Progress` after each batch.

    Returns:
        The iterator. Threads end with the last batch, with an error, with `Overlap.close` (or its
        ``with`` block), or when no reference to it is left. If a stage is a method of an object
        that refers to the overlap, use ``with``.

    Raises:
        PlanError: stages or leads do not fit; every fault is named.
        FuncpipeError: called under torch.func, or threads are wanted and a mode is on that they
            cannot take over.
    """
    refuse_transforms("overlap")
    if not isinstance(source, Iterable):
        kind = type(source).__name__
        raise PlanError(f"the source of an overlap is an iterable of batches; got a {kind}")
    for name, number in (("depth", depth), ("start_index", start_index)):
        _require(type(number) is int and number >= 0, name, number, "a whole number from 0")
    _require(isinstance(thread, bool | None), "thread", thread, "True, False or None")
    _require(snapshot is None or callable(snapshot), "snapshot", snapshot, "a function")
    told = isinstance(progress, bool) or callable(progress)
    _require(told, "progress", progress, "a function, True or False")
    named, fold = checked_stages(stages)
    streamed = _devices(named, devices)
    thread = depth > 0 and (not streamed if thread is None else thread)
    listed: list[BatchStage] = []
    for stage in named:
        threaded = depth > 0 and (thread if stage.thread is None else stage.thread)
        fn: Any = stage.fn
        if isinstance(fn, ToDevice) and not threaded:
            fn = fn.without_waiting()
        listed.append(replace(stage, fn=fn, thread=threaded))
    plan = plan_of(listed, fold, depth, thread=thread, streamed=bool(streamed))
    if any(row.thread for row in plan.rows) and (modes := not_carried()):
        raise FuncpipeError(
            f"threads cannot take over what is on here: {', '.join(modes)}; overlap(..., "
            "thread=False) runs all stages in this thread"
        )
    lag = max((stage.lag or 0 for stage in listed), default=0)
    shared = OverlapState(fold, start_index, lag, StreamSet(streamed if depth else ()))
    rows: list[BatchRow] = []
    fold = fold and replace(fold, init=None, earlier=())  # the first states are not kept
    for row_plan, stage in zip(plan.rows, (None, *listed, fold), strict=False):
        row = BatchRow(shared, row_plan, stage, rows[-1] if rows else None)
        row.snapshot, row.spans = snapshot, [] if record else None
        row.ranges = (streamed or (torch.device("cpu"),))[0] if ranges else None
        rows.append(row)
    return Overlap(source, plan, rows, shared, progress)


def _require(fits: bool, name: str, value: object, kind: str) -> None:
    if not fits:
        raise PlanError(f"{name} is {kind}; got {value!r}")


def _devices(stages: Sequence[BatchStage], devices: Sequence[Any]) -> tuple[torch.device, ...]:
    """The devices with streams that stages work on."""
    try:
        asked = [devices] if isinstance(devices, str | torch.device) else devices
        used = [numbered(torch.device(device)) for device in asked]
    except (RuntimeError, TypeError, AssertionError) as error:
        raise PlanError(
            f"devices is a sequence of torch devices; got {devices!r}: {error}"
        ) from error
    for stage in stages:
        if isinstance(stage.fn, ToDevice):
            used += [device for device in flatten(stage.fn.devices)[0] if device is not None]
        if stage.stream is not None and not isinstance(stage.stream, str):
            used.append(numbered(stage.stream.device))
    return tuple(device for device in dict.fromkeys(used) if Place.backend.asynchronous(device))


class Overlap(Iterator[Any]):
    """The iterator that `overlap` makes.

    Attributes:
        plan: the work of each tick, as data; prints itself.
    """

    def __init__(
        self,
        source: Any,
        plan: TickPlan,
        rows: Sequence[BatchRow],
        shared: OverlapState,
        progress: ProgressReport,
    ) -> None:
        self.plan, self._rows, self._shared = plan, rows, shared
        self._source: Any = source
        self._total = length_hint(source, -1)
        self._start, self._tick = self.index, self.index - plan.depth
        self._report = progress if callable(progress) else Bar() if progress else None
        self._modes, self._began = CallerModes(), 0.0
        self._finished, self._busy = False, threading.Lock()
        # The fold runs in the modes of the loop, after the rows that run ahead.
        self._folds = isinstance(rows[-1].stage, Fold)
        ahead = [rows[number] for number in plan.order if not isinstance(rows[number].stage, Fold)]
        self._inline = [row for row in ahead if not row.plan.thread]
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _ended, shared, rows, self._workers, _PATIENCE)
        self._finalizer.atexit = False

    @guarded
    def __repr__(self) -> str:
        rows = " | ".join(row.name for row in self.plan.rows)
        total = "" if self._total < 0 else f" of {self._total}"
        ended = ", ended" if self._finished else ""
        return f"<Overlap {rows}: {self.index - self._start}{total} batches handed out{ended}>"

    @property
    def state(self) -> Tree:
        """The fold's state after the last result that was handed out; None without a fold."""
        return self._shared.reached[1]

    @property
    def index(self) -> int:
        """The number of the next batch that is handed out."""
        return self._shared.reached[0]

    @property
    def states(self) -> tuple[Tree, ...]:
        """The states that stages with ``lag`` may read next, the newest last: ``Fold(init=s[-1],
        earlier=s[:-1])``."""
        states = sorted(self._shared.states.items())
        return tuple(state.tree for number, state in states if number <= self.index)

    @property
    def drawn(self) -> int:
        """The number of the next batch that is drawn."""
        return self._start + self._rows[0].batches

    @property
    def in_flight(self) -> int:
        """How many batches were drawn and not yet handed out."""
        return self.drawn - self.index

    @property
    def source_state(self) -> Any:
        """The ``snapshot`` before the first batch was drawn that is not handed out yet: the place
        to go on from.

        Raises:
            FuncpipeError: there is no ``snapshot``.
        """
        snapshot, snapshots = self._rows[0].snapshot, self._shared.snapshots
        if snapshot is None:
            raise FuncpipeError(
                "nothing looks at the source's state: overlap(source, ..., "
                "snapshot=loader.state_dict)"
            )
        return snapshots[0] if snapshots else deepcopy(snapshot())

    @property
    def timeline(self) -> Timeline:
        """The calls so far, measured on the host, in seconds from the first draw.

        Raises:
            FuncpipeError: without ``record=True``.
        """
        if self._rows[0].spans is None:
            raise FuncpipeError("nothing was measured: overlap(..., record=True)")
        lanes = self.plan.lanes
        spans = [
            Span(lanes.index(row.plan.lane), begin, end, Action(Kind.F, row.number, batch))
            for row in self._rows
            for begin, end, batch in list(row.spans or ())
        ]
        spans.sort(key=lambda span: (span.start, span.device))
        zero = spans[0].start if spans else 0.0
        spans = [span._replace(start=span.start - zero, end=span.end - zero) for span in spans]
        return Timeline(tuple(spans), len(lanes), unit="s", name="overlap", lanes=lanes)

    def stats(self) -> tuple[StageStats, ...]:
        """For the source, each stage and the fold: how many batches, how long they took, how long
        it waited."""
        rows = [row.stats() for row in self._rows]
        if not self._folds:
            rows.append(StageStats("loop", 0, 0.0, self._rows[-1].output.waited, 0.0))
        return tuple(rows)

    def stop_drawing(self) -> None:
        """Draw no more: batches that are under way come out, then it ends. So does a batch whose
        draw has begun."""
        self._shared.stopping = True

    def close(self, timeout: float | None = 5.0) -> None:
        """End it now: batches under way are lost. A no-op where it has ended.

        Called from elsewhere while the loop waits for a batch (another thread, a signal, a stage),
        it returns at once, and the loop ends there.

        Args:
            timeout: seconds to wait for threads (one that waits for the source cannot be
                interrupted); a warning names those that are left then, which end when what they
                wait for comes. None: as long as it takes.
        """
        kind = type(self._source).__name__
        if late := self._close(timeout):
            left = f"{late} (the source is a {kind})"
            warnings.warn(f"still at work after close(timeout={timeout:g}): {left}", stacklevel=2)

    def _close(self, timeout: float | None) -> str:
        """End it from outside of its loop; the names of the threads that are left."""
        if not self._busy.acquire(blocking=False):
            self._shared.stop()
            return ""
        try:
            return self._end(timeout)
        finally:
            self._busy.release()

    def _end(self, timeout: float | None) -> str:
        self._finished, self._source = True, None
        if not self._finalizer.detach():  # it has ended before
            return ""
        return _ended(self._shared, self._rows, self._workers, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif late := self._close(_PATIENCE):
            error.add_note(f"still at work: {late}")

    def __iter__(self) -> Self:
        return self

    def __length_hint__(self) -> int:
        if self._finished:
            return 0
        left = self._total - (self.index - self._start)
        return NotImplemented if self._total < 0 else max(0, left)

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if self._shared.process != os.getpid():
            raise FuncpipeError(
                "this overlap belongs to the process that made it, and a fork has none of its "
                "threads; make a new one"
            )
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "this overlap is asked for its next batch by two at once; each loop has its own "
                "overlap"
            )
        try:
            return self._next()
        except BaseException as error:  # the end, the error of a batch, or an interrupt
            if late := self._end(_PATIENCE):
                error.add_note(f"still at work: {late}")
            if isinstance(self._report, Bar):
                with suppress(Exception):  # an error of a batch comes before one of the bar
                    self._report.end(self._progress())
            raise
        finally:
            self._busy.release()

    def _next(self) -> Any:
        """The result of the next tick, after ticks that only fill the pipeline."""
        if not self._began:
            self._open()
        shared, index = self._shared, self.index
        if self._inline:
            with self._modes.entered():
                for tick in range(self._tick, index + 1):
                    for row in self._inline:
                        if tick + row.plan.lead >= self._start:
                            row.make()
        self._tick = index + 1
        if self._folds:
            self._rows[-1].make()
        item: Item | None = self._rows[-1].output.take()
        if item is None or item.error is not None or shared.closed:
            failure = shared.abort if item is None or shared.closed else item.error
            shared.abort = item = None
            try:
                raise StopIteration if failure is None else failure
            finally:
                del failure  # the traceback leads to this frame: a cycle
        shared.here.wait(item.marks)
        shared.here.use(item.value, item.marks)
        state, result = item.value if self._folds else (None, item.value)
        if shared.snapshots:
            shared.snapshots.popleft()
        shared.reached = (index + 1, state)  # together, whatever interrupts
        for row in self._rows:
            if row.plan.thread:
                row.room.put(True)
        if self._report:
            self._report(self._progress())
        return result

    def _open(self) -> None:
        """Before the first batch: make the source's iterator, the streams and the threads."""
        self._began = perf_counter()
        self._rows[0].draw = iter(self._source).__next__
        here = self._shared.here
        callers = here.now()
        made: dict[str | int, Mapping[torch.device, Any]] = {"caller": callers}
        for row in self._rows:
            stream = row.stage.stream if isinstance(row.stage, BatchStage) else "caller"
            key = row.number if stream is None else stream
            if not isinstance(key, str | int):
                row.streams = StreamSet(here.devices, {**callers, key.device: key})
            elif key != "caller" or row.plan.thread:
                if key not in made:
                    backend = Place.backend
                    made[key] = {
                        device: backend.module(device).Stream(device) for device in here.devices
                    }
                row.streams = StreamSet(here.devices, made[key])
            if row.plan.thread:
                for _ in range(row.plan.lead + 1):
                    row.room.put(True)
                patience = _LONGEST if row.number else _PATIENCE
                worker = Worker(f"funcpipe {row.plan.name}", self._shared.stop, patience)
                worker.give(partial(row.run, self._modes))
                worker.dismiss()
                self._workers.append(worker)
        for worker in self._workers:
            worker.start()

    def _progress(self) -> Progress:
        total = self._total if self._total >= 0 else None
        return Progress(self.index - self._start, total, perf_counter() - self._began, self.stats())


def _ended(
    shared: OverlapState, rows: Sequence[BatchRow], workers: list[Worker], timeout: float | None
) -> str:
    """End all rows, and wait for their threads; the names of those that are left. A fork has none
    of them."""
    if shared.process != os.getpid():
        return ""
    shared.stop()
    end_all(workers, timeout)
    # Let go of the source: processes of a loader end with its iterator.
    rows[0].draw = iter(()).__next__
    # The loop's work comes after all that was under way: the memory of that may be given out again.
    for row in rows:
        shared.here.wait(row.streams.marks())
    return ", ".join(worker.name for worker in workers if worker.alive and not worker.is_here)
