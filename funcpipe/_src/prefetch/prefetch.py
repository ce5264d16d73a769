"""`overlap`: pass a stream of batches through stages that work at the same time on other batches.

`stage` plans the work, and `rows` does it. This module has the iterator: start, next batch, end.
"""

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
"""Seconds to wait for threads after an error, and at Python's exit for a source, which may not
react."""

_LONGEST = 30.0  # seconds that Python's exit waits for a stage


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
    """Prefetch batches through stages, while you train on an earlier batch.

    For example, batch i+2 is copied and batch i+1 is decoded while you train on batch i. The
    results are bit-identical to ``[last(...first(batch)) for batch in source]``, in the same order,
    for every depth and with or without threads. This needs functions that do not depend on each
    other, and a source that does not write into earlier batches.

    If a stage raises an error, `overlap` first returns the results of all batches before, and then
    raises the original exception. Its ``.funcpipe`` and a note name the stage and the batch.

    >>> list(fp.batches.overlap(range(4), [lambda x: x + 1, lambda x: 10 * x]))
    [10, 20, 30, 40]
    >>> total = fp.batches.overlap(range(4), [lambda x: x + 1, fp.batches.Fold(lambda state, x: (state + x, x), 0)])
    >>> list(total), total.state
    ([1, 2, 3, 4], 10)

    Args:
        source: any iterable of batches. A batch may be any object, also None. The first ``next``
            starts to draw. The source is iterated once, by one thread at a time.
        stages: functions of one batch, `BatchStage`, `to_device` or `awaited`. The last may be a
            `Fold`, which runs in the thread of your loop. Without a fold, all stages run ahead of
            the loop.
        depth: the number of batches in progress besides the next batch for the loop, 2 by default.
            All stages work at the same time if ``depth`` is at least the number of stages before
            the fold. 0: a plain loop without prefetching, to debug.
        start_index: the number of the first batch, 0 by default. Give it if training resumes in the
            middle of an epoch.
        thread: whether the source and the stages have their own threads; a `BatchStage` may
            override this. None, the default: True if no device with streams is named in `to_device`
            or ``devices``. Otherwise one thread queues all work, in the order of the plan.
        devices: further devices with streams that stages use, besides those of `to_device`.
        snapshot: a function such as ``loader.state_dict``, called before each draw. Its result is
            copied for `Overlap.source_state`.
        record: whether to keep the times of all work, for `Overlap.timeline`.
        ranges: whether the work on each batch is a range of torch.profiler, such as ``decode 3``,
            and of NVTX on CUDA devices.
        progress: True: print a progress line on stderr. A function: call it with a `Progress` after
            each batch. False, the default: neither.

    Returns:
        An `Overlap`, the iterator of the results. Its threads end after the last batch, after an
        error, with `Overlap.close` or its ``with`` block, or when the iterator is deleted. If a
        stage is a method of an object that refers to the overlap, use ``with``.

    Raises:
        PlanError: stages or leads do not fit together. The message names all faults.
        FuncpipeError: called under torch.func, or threads cannot inherit a mode of the caller.
    """
    refuse_transforms("overlap")
    if not isinstance(source, Iterable):
        kind = type(source).__name__
        raise PlanError(f"the source of overlap is an iterable of batches; got a {kind}")
    for name, number in (("depth", depth), ("start_index", start_index)):
        _require(type(number) is int and number >= 0, name, number, "a whole number from 0")
    _require(isinstance(thread, bool | None), "thread", thread, "True, False or None")
    _require(snapshot is None or callable(snapshot), "snapshot", snapshot, "a function")
    fits = isinstance(progress, bool) or callable(progress)
    _require(fits, "progress", progress, "a function, True or False")
    named, fold = checked_stages(stages)
    streamed = _devices(named, devices)
    thread = depth > 0 and (not streamed if thread is None else thread)
    listed: list[BatchStage] = []
    for stage in named:
        threaded = depth > 0 and (thread if stage.thread is None else stage.thread)
        fn: Any = stage.fn
        if isinstance(fn, ToDevice) and fn.pin == "auto" and not threaded:
            fn = replace(fn, pin="warn")
        listed.append(replace(stage, fn=fn, thread=threaded))
    plan = plan_of(listed, fold, depth, thread=thread, streamed=bool(streamed))
    if any(row.thread for row in plan.rows) and (modes := not_carried()):
        raise FuncpipeError(
            f"threads cannot take over {', '.join(modes)}; overlap(..., thread=False) runs all "
            "stages in this thread"
        )
    lag = max((stage.lag or 0 for stage in listed), default=0)
    shared = OverlapState(fold, start_index, lag, StreamSet(streamed if depth else ()))
    rows: list[BatchRow] = []
    # `shared` has the states now. Drop them here, so that the first state can be freed.
    fold = fold and replace(fold, init=None, earlier=())
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
    """Return the devices with streams that stages work on."""
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
    """The iterator over results that `overlap` returns. It is also a context manager.

    Attributes:
        plan: the `TickPlan`, the work of each tick as data. Print it to see leads and lanes.
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
        """The fold's state after the last returned result. None without a fold."""
        return self._shared.reached[1]

    @property
    def index(self) -> int:
        """The number of the next batch that the iterator returns."""
        return self._shared.reached[0]

    @property
    def states(self) -> tuple[Tree, ...]:
        """The states that stages with ``lag`` may still read, the newest last.

        To resume from ``s = overlap.states``, give ``Fold(init=s[-1], earlier=s[:-1])``.
        """
        states = sorted(self._shared.states.items())
        return tuple(state.tree for number, state in states if number <= self.index)

    @property
    def drawn(self) -> int:
        """The number of the next batch that is drawn from the source."""
        return self._start + self._rows[0].batches

    @property
    def in_flight(self) -> int:
        """The number of batches that were drawn and not yet returned."""
        return self.drawn - self.index

    @property
    def source_state(self) -> Any:
        """The state of the source before it drew the next batch for the loop. Resume from here.

        The source itself is already up to ``depth`` batches ahead.

        Raises:
            FuncpipeError: `overlap` was called without ``snapshot``.
        """
        snapshot, snapshots = self._rows[0].snapshot, self._shared.snapshots
        if snapshot is None:
            raise FuncpipeError(
                "this overlap keeps no states of its source; give overlap(source, ..., "
                "snapshot=loader.state_dict)"
            )
        return snapshots[0] if snapshots else deepcopy(snapshot())

    @property
    def timeline(self) -> Timeline:
        """A `Timeline` of all work so far, measured on the host, in seconds from the first draw.

        Raises:
            FuncpipeError: `overlap` was called without ``record=True``.
        """
        if self._rows[0].spans is None:
            raise FuncpipeError(
                "this overlap has measured no times; give overlap(..., record=True)"
            )
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
        """Return a `StageStats` for the source, for each stage, and for the fold or the loop."""
        rows = [row.stats() for row in self._rows]
        if not self._folds:
            rows.append(StageStats("loop", 0, 0.0, self._rows[-1].output.waited, 0.0))
        return tuple(rows)

    def stop_drawing(self) -> None:
        """Stop reading the source. The iterator still returns the batches that were drawn."""
        self._shared.stopping = True

    def close(self, timeout: float | None = 5.0) -> None:
        """End all threads now, and drop the batches in progress. A no-op after the end.

        You can call `close` from another thread, a signal handler or a stage, while the loop waits
        for a batch. Then `close` returns at once, and the loop ends.

        Args:
            timeout: seconds to wait for threads, 5 by default. A thread that waits for the source
                cannot be interrupted. A warning names the threads that are left. They end when the
                source returns. None: no limit.
        """
        kind = type(self._source).__name__
        if late := self._close(timeout):
            left = f"{late} (the source is a {kind})"
            warnings.warn(
                f"these threads still work after close(timeout={timeout:g}): {left}", stacklevel=2
            )

    def _close(self, timeout: float | None) -> str:
        """End the overlap from outside its loop, and return the names of threads that are left."""
        # The loop is in `__next__`: it finds the end, and waits for the threads itself.
        if not self._busy.acquire(blocking=False):
            self._shared.stop()
            return ""
        try:
            return self._end(timeout)
        finally:
            self._busy.release()

    def _end(self, timeout: float | None) -> str:
        self._finished, self._source = True, None
        if not self._finalizer.detach():  # already ended
            return ""
        return _ended(self._shared, self._rows, self._workers, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif late := self._close(_PATIENCE):
            error.add_note(f"these threads still work: {late}")

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
                "this overlap belongs to the process that made it, and a forked process has none "
                "of its threads; call fp.batches.overlap in the forked process"
            )
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "two threads ask this overlap for the next batch at the same time; give each loop "
                "its own overlap"
            )
        try:
            return self._next()
        except BaseException as error:  # the end, the error of a batch, or an interrupt
            if late := self._end(_PATIENCE):
                error.add_note(f"these threads still work: {late}")
            if isinstance(self._report, Bar):
                with suppress(Exception):  # an error of the bar must not hide the batch's error
                    self._report.end(self._progress())
            raise
        finally:
            self._busy.release()

    def _next(self) -> Any:
        """Return the result of the next tick, after ticks that only fill the pipeline."""
        if not self._began:
            self._open()
        shared, index = self._shared, self.index
        if self._inline:
            with self._modes.entered():
                # The first call also runs the ticks that fill the pipeline; later calls run one.
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
                del failure  # its traceback refers to this frame: a cycle that keeps batches alive
        shared.here.wait(item.marks)
        shared.here.use(item.value, item.marks)
        state, result = item.value if self._folds else (None, item.value)
        if shared.snapshots:
            shared.snapshots.popleft()
        # One assignment, so that an interrupt cannot separate the index from its state.
        shared.reached = (index + 1, state)
        for row in self._rows:
            if row.plan.thread:
                row.room.put(True)  # one batch was returned, so each thread may make one more
        if self._report:
            self._report(self._progress())
        return result

    def _open(self) -> None:
        """Make the source's iterator, the streams and the threads, before the first batch."""
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
                # A row may be `lead` batches ahead of the next batch for the loop.
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
    """End all rows, wait for their threads, and return the names of threads that are left.

    A forked process has none of the threads, so it does nothing. Not a method: the finalizer of the
    iterator calls this function.
    """
    if shared.process != os.getpid():
        return ""
    shared.stop()
    end_all(workers, timeout)
    # Drop the source's iterator: the worker processes of a loader end with it.
    rows[0].draw = iter(()).__next__
    # The loop's streams wait for unfinished work, because its memory may now be allocated again.
    for row in rows:
        shared.here.wait(row.streams.marks())
    return ", ".join(worker.name for worker in workers if worker.alive and not worker.is_here)
