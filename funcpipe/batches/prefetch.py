"""`overlap`: a stream of batches through stages that work at the same time, each on another batch."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import length_hint
from time import perf_counter
from typing import Any, Self, TypeAlias

import torch

from funcpipe.batches.device import ToDevice, numbered
from funcpipe.batches.rows import BatchRow, CallerModes, Item, OverlapState, drawing, folded, staged
from funcpipe.batches.stage import BatchStage, Fold, StageLike, TickPlan, checked_stages, plan_of
from funcpipe.batches.stats import Bar, Progress, StageStats
from funcpipe.batches.streams import StreamSet
from funcpipe.core.errors import FuncpipeError, PlanError
from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Action, Kind
from funcpipe.core.shown import guarded
from funcpipe.core.tree import Tree, flatten
from funcpipe.runtime.context import not_carried, refuse_transforms
from funcpipe.runtime.stream import Place
from funcpipe.runtime.worker import Worker, end_all

ProgressReport: TypeAlias = bool | Callable[[Progress], None]

_PATIENCE = 1.0
"""Seconds that threads get to end after an error, and that a source gets which cannot be interrupted."""

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
    """Prefetch batches through stages: while batch i is trained on, i+1 exchanges its inputs and i+2 is copied.

    The results equal ``[last(...first(batch)) for batch in source]`` bit for bit and in order, whatever the depth
    and the threads, for functions that do not depend on each other and a source that does not write into a batch again.
    Each batch that is drawn comes out, or the error that it met is raised in its place, after the results of all
    batches before it: the exception itself, with ``.funcpipe`` (stage, name, batch) and a note.

    >>> list(fp.batches.overlap(range(4), [lambda x: x + 1, lambda x: 10 * x]))
    [10, 20, 30, 40]
    >>> total = fp.batches.overlap(range(4), [lambda x: x + 1, fp.batches.Fold(lambda state, x: (state + x, x), 0)])
    >>> list(total), total.state
    ([1, 2, 3, 4], 10)

    Args:
        source: any iterable of batches; None is a batch like others. Drawn once, from the first ``next`` on, never
            after its end and never by two threads.
        stages: functions of one batch, `BatchStage`, `to_device`, `awaited`; the last may be a `Fold`, which runs where
            the loop runs. Without a fold all of them run ahead of the loop's own work.
        depth: how many batches are under way besides the one that is handed out next; all stages work at once if it is
            at least the number of stages before the step. 0: the plain loop, nothing runs ahead; good to find a fault.
        start_index: the number of the first batch, where training resumes in the middle of an epoch.
        thread: whether the source and the stages have threads, where they do not say; None: where no device with
            streams is named (`to_device`, ``devices``). There one thread queues everything, in the plan's order.
        devices: with streams, that stages work on besides those of `to_device`.
        snapshot: called before each draw, such as ``loader.state_dict``, and copied; see `Overlap.source_state`.
        record: keep when everything ran, for `Overlap.timeline`.
        ranges: the work on a batch is a range of torch.profiler, such as ``decode 3``, and of NVTX on CUDA devices.
        progress: True: a line on stderr; or a function that is given a `Progress` after each batch.

    Returns:
        The iterator. Threads end with the last batch, with an error, with `Overlap.close` (or its ``with`` block), or
        when no reference to it is left. If a stage is a method of an object that refers to the overlap, use ``with``.

    Raises:
        PlanError: stages or leads do not fit; every fault is named.
        FuncpipeError: called under torch.func, or threads are wanted and a mode is on that they cannot take over.
    """
    refuse_transforms("overlap")
    if not isinstance(source, Iterable):
        raise PlanError(f"the source of an overlap is an iterable of batches; got a {type(source).__name__}")
    for word, value, kind, fits in (
        ("depth", depth, "a whole number from 0", type(depth) is int and depth >= 0),
        ("start_index", start_index, "a whole number from 0", type(start_index) is int and start_index >= 0),
        ("thread", thread, "True, False or None", isinstance(thread, bool | None)),
        ("snapshot", snapshot, "a function", snapshot is None or callable(snapshot)),
        ("progress", progress, "a function, True or False", isinstance(progress, bool) or callable(progress)),
    ):
        if not fits:
            raise PlanError(f"{word} is {kind}; got {value!r}")
    listed, fold = checked_stages(stages)
    streamed = _devices(listed, devices)
    default = not streamed if thread is None else thread
    threads = [default, *(default if stage.thread is None else stage.thread for stage in listed)]
    threads = [depth > 0 and threaded for threaded in threads]
    plan = plan_of(listed, fold, depth, threads, streamed=bool(streamed))
    if any(threads) and (modes := not_carried()):
        raise FuncpipeError(
            f"threads cannot take over what is on here: {', '.join(modes)}; overlap(..., thread=False) runs all "
            "stages in this thread"
        )
    return Overlap(
        source,
        listed,
        fold,
        plan,
        streamed if depth else (),
        start=start_index,
        snapshot=snapshot,
        record=record,
        ranges=ranges,
        report=progress if callable(progress) else Bar() if progress else None,
    )


def _devices(stages: Sequence[BatchStage], devices: Sequence[Any]) -> tuple[torch.device, ...]:
    """The devices with streams that stages work on."""
    try:
        asked = [devices] if isinstance(devices, str | torch.device) else devices
        used = [numbered(torch.device(device)) for device in asked]
    except (RuntimeError, TypeError, AssertionError) as error:
        raise PlanError(f"devices is a sequence of torch devices; got {devices!r}: {error}") from error
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
        source: Iterable[Any],
        stages: Sequence[BatchStage],
        fold: Fold | None,
        plan: TickPlan,
        devices: Sequence[torch.device],
        *,
        start: int,
        snapshot: Callable[[], Any] | None,
        record: bool,
        ranges: bool,
        report: Bar | Callable[[Progress], None] | None,
    ) -> None:
        self.plan = plan
        self._source: Any = source
        self._stages, self._start, self._tick = stages, start, start - plan.depth
        self._snapshot, self._record, self._report = snapshot, record, report
        self._modes, self._process = CallerModes(), os.getpid()
        self._total, self._began = length_hint(source, -1), 0.0
        self._finished, self._busy = False, threading.Lock()
        lag = max((stage.lag or 0 for stage in stages), default=0)
        self._shared = OverlapState(fold, start, lag, StreamSet(devices))
        self._fold = fold and replace(fold, init=None, earlier=())  # the first states are not kept
        self._rows: list[BatchRow] = []
        for number, row_plan in enumerate(plan.rows):
            row = BatchRow(self._shared, row_plan, number, self._rows[-1].output if number else None)
            row.spans = [] if record else None
            row.ranges = (devices[0] if devices else torch.device("cpu")) if ranges else None
            self._rows.append(row)
        ahead = plan.order[:-1] if fold else plan.order
        self._inline = [self._rows[number] for number in ahead if not plan.rows[number].thread]
        self._workers: list[Worker] = []
        self._finalizer = weakref.finalize(self, _forget, self._shared, self._rows, self._workers, self._process)
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
        """The states that stages with ``lag`` may read next, the newest last: ``Fold(init=s[-1], earlier=s[:-1])``."""
        return tuple(state.tree for number, state in sorted(self._shared.states.items()) if number <= self.index)

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
        """The ``snapshot`` before the first batch was drawn that is not handed out yet: the place to go on from.

        Raises:
            FuncpipeError: there is no ``snapshot``.
        """
        if self._snapshot is None:
            raise FuncpipeError("nothing looks at the source's state: overlap(source, ..., snapshot=loader.state_dict)")
        snapshots = self._shared.snapshots
        return snapshots[0] if snapshots else deepcopy(self._snapshot())

    @property
    def timeline(self) -> Timeline:
        """The calls so far, measured on the host, in seconds from the first draw.

        Raises:
            FuncpipeError: without ``record=True``.
        """
        if not self._record:
            raise FuncpipeError("nothing was measured: overlap(..., record=True)")
        kept = [(row, *span) for row in self._rows for span in list(row.spans or ())]
        zero = min((begin for _, begin, _, _ in kept), default=0.0)
        lanes = self.plan.lanes
        spans = [
            Span(lanes.index(row.plan.lane), begin - zero, end - zero, Action(Kind.F, row.number, batch))
            for row, begin, end, batch in kept
        ]
        spans.sort(key=lambda span: (span.start, span.device))
        return Timeline(tuple(spans), len(lanes), unit="s", name="overlap", lanes=lanes)

    def stats(self) -> tuple[StageStats, ...]:
        """For the source, each stage and the fold: how many batches, how long they took, how long it waited."""
        rows = [row.stats() for row in self._rows]
        if self._fold is None:
            rows.append(StageStats("loop", 0, 0.0, self._rows[-1].output.waited, 0.0))
        return tuple(rows)

    def stop_drawing(self) -> None:
        """Draw no more: batches that are under way come out, then it ends. So does a batch whose draw has begun."""
        self._shared.stopping = True

    def close(self, timeout: float | None = 5.0) -> None:
        """End it now: batches under way are lost. A no-op where it has ended.

        Called from elsewhere while the loop waits for a batch (another thread, a signal, a stage), it returns at
        once, and the loop ends there.

        Args:
            timeout: seconds to wait for threads (one that waits for the source cannot be interrupted); a warning names
                those that are left then, which end when what they wait for comes. None: as long as it takes.
        """
        source = type(self._source).__name__
        if late := self._close(timeout):
            warnings.warn(
                f"still at work after close(timeout={timeout:g}): {late} (the source is a {source})", stacklevel=2
            )

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
        return _ended(self._shared, self._rows, self._workers, timeout) if self._finalizer.detach() else ""

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
        return NotImplemented if self._total < 0 else max(0, self._total - (self.index - self._start))

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if self._process != os.getpid():
            raise FuncpipeError(
                "this overlap belongs to the process that made it, and a fork has none of its threads; make a new one"
            )
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "this overlap is asked for its next batch by two at once; each loop has its own overlap"
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
        for tick in range(self._tick, index + 1):
            with self._modes.entered():
                for row in self._inline:
                    if tick + row.plan.lead >= self._start:
                        row.make()
        self._tick = index + 1
        if self._fold:
            self._rows[-1].make()
        item: Item | None = self._rows[-1].output.take()
        failure = shared.abort or (StopIteration() if item is None or shared.closed else item.error)
        if item is None or failure:
            shared.abort = item = None
            try:
                raise failure or StopIteration
            finally:
                del failure  # the traceback leads to this frame: a cycle
        shared.here.wait(item.marks)
        shared.here.use(item.value, item.marks)
        state, result = item.value if self._fold else (None, item.value)
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
        source, *rows = self._rows
        source.work = drawing(iter(self._source).__next__, self._snapshot)
        if self._fold:
            rows[-1].work = folded(self._fold)
        devices, callers = self._shared.here.devices, self._shared.here.now()
        if source.plan.thread:
            source.streams = StreamSet(devices, callers)
        shared_streams: dict[str, dict[torch.device, Any]] = {}
        for row, stage in zip(rows, self._stages, strict=False):
            if stage.stream == "caller":
                streams = callers if row.plan.thread else None
            elif stage.stream is None or isinstance(stage.stream, str):
                name = stage.stream or f"\0{row.number}"
                if name not in shared_streams:
                    shared_streams[name] = {device: Place.backend.module(device).Stream(device) for device in devices}
                streams = shared_streams[name]
            else:
                streams = {**callers, stage.stream.device: stage.stream}
            if isinstance(stage.fn, ToDevice) and not row.plan.thread:
                stage = replace(stage, fn=stage.fn.without_waiting())
            row.work, row.streams = staged(stage), StreamSet(devices, streams)
        for row in self._rows:
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


def _ended(shared: OverlapState, rows: Sequence[BatchRow], threads: list[Worker], timeout: float | None) -> str:
    """End all rows, and wait for some threads; the names of those that are left."""
    shared.stop()
    end_all(threads, timeout)
    for row in rows:  # the loop's work comes after all that was under way
        shared.here.wait(row.streams.marks())
    return ", ".join(thread.name for thread in threads if thread.alive and not thread.is_here)


def _forget(shared: OverlapState, rows: Sequence[BatchRow], threads: list[Worker], process: int) -> None:
    """End an overlap to which nobody refers. The thread that draws is waited for: the source may be used again at once."""
    if process == os.getpid():
        _ended(shared, rows, threads[: rows[0].plan.thread], _PATIENCE)
