"""The iterator of an overlap: ticks of the loop's own thread, and the threads beside it."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from operator import length_hint
from time import perf_counter
from typing import Any, Self

import torch

from funcpipe.batches.leaves import materialized_tree
from funcpipe.batches.stage import BatchStage, Fold
from funcpipe.batches.stage_worker import CallerModes, StageWorker, call, failed
from funcpipe.batches.stats import Bar, Progress, StageStats, measured, stats
from funcpipe.batches.streams import StreamSet
from funcpipe.batches.ticks import TickPlan
from funcpipe.batches.workers import PATIENCE, Item, Meter, States, Workers
from funcpipe.core.errors import FuncpipeError, PlanError
from funcpipe.core.result import Timeline
from funcpipe.core.shown import guarded
from funcpipe.core.tree import Tree
from funcpipe.runtime.mail import Stop
from funcpipe.runtime.ranges import named_range
from funcpipe.runtime.stream import Place


def _range(row: str, device: torch.device, batch: int) -> AbstractContextManager[object]:
    return named_range(f"{row} {batch}", device)


class Overlap(Iterator[Any]):
    """The iterator that `overlap` makes.

    Attributes:
        plan: what is done at each tick, as data; prints itself.
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
        self._stages, self._start = stages, start
        self._fold = fold and replace(fold, init=None, earlier=())  # the first state is not kept
        self._report, self._record = report, record
        self._snapshot = snapshot
        self._around = CallerModes()
        self._here = StreamSet(devices)
        meters = [Meter(spans=[] if record else None) for _ in range(len(stages) + 2)]
        for row, meter in zip(plan.rows if ranges else (), meters, strict=False):
            meter.ranges = partial(_range, row.name, devices[0] if devices else torch.device("cpu"))
        states = States(fold, start, max((stage.lag or 0 for stage in stages), default=0), self._here)
        self._workers = Workers(self._here, states, meters)
        self._reached: tuple[int, Tree] = (start, fold.init if fold else None)
        self._tick = start - plan.depth
        self._inline: list[StageWorker] = []
        self._ready: Item | None = None
        self._total = length_hint(source, -1)
        self._began = 0.0
        self._opened = self._finished = False
        self._busy = threading.Lock()
        weakref.finalize(self, self._workers.forget).atexit = False

    @guarded
    def __repr__(self) -> str:
        rows = " | ".join(row.name for row in self.plan.rows)
        total = "" if self._total < 0 else f" of {self._total}"
        ended = ", ended" if self._finished else ""
        return f"<Overlap {rows}: {self.index - self._start}{total} batches handed out{ended}>"

    @property
    def state(self) -> Tree:
        """The fold's state after the last result that was handed out; None without a fold."""
        return self._reached[1]

    @property
    def index(self) -> int:
        """The number of the next batch that is handed out."""
        return self._reached[0]

    @property
    def states(self) -> tuple[Tree, ...]:
        """The states that stages with ``lag`` may read next, the newest last: ``Fold(init=s[-1], earlier=s[:-1])``."""
        return self._workers.states.until(self.index)

    @property
    def drawn(self) -> int:
        """The number of the next batch that is drawn."""
        return self._start + self._workers.meters[0].batches

    @property
    def in_flight(self) -> int:
        """How many batches were drawn and not yet handed out."""
        return self.drawn - self.index

    @property
    def source_state(self) -> Any:
        """What ``snapshot`` gave before the first batch was drawn that is not handed out yet: the place to go on from.

        Raises:
            FuncpipeError: there is no ``snapshot``.
        """
        if self._snapshot is None:
            raise FuncpipeError("nothing looks at the source's state: overlap(source, ..., snapshot=loader.state_dict)")
        snapshots = self._workers.snapshots
        return snapshots[0] if snapshots else deepcopy(self._snapshot())

    @property
    def timeline(self) -> Timeline:
        """What ran when, measured on the host, as far as it is.

        Raises:
            FuncpipeError: without ``record=True``.
        """
        if not self._record:
            raise FuncpipeError("nothing was measured: overlap(..., record=True)")
        return measured(self.plan, self._workers.meters)

    def stats(self) -> tuple[StageStats, ...]:
        """For the source, each stage and the fold: how many batches, how long they took, how long it waited."""
        return stats(self.plan, self._workers.meters)

    def stop_drawing(self) -> None:
        """Draw no more: what is under way comes out, then it ends. A draw that has begun comes out, too."""
        self._workers.stopping = True

    def close(self, timeout: float | None = 5.0) -> None:
        """End it now: what is under way is lost. Does nothing where it has ended.

        Called from elsewhere while the loop waits for a batch (another thread, a signal, a stage), it comes back at
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
        if not self._busy.acquire(blocking=False):
            self._workers.stop()
            return ""
        try:
            return self._end(timeout)
        finally:
            self._busy.release()

    def _end(self, timeout: float | None) -> str:
        """End it; the names of threads that did not end within so many seconds."""
        self._finished = True
        self._source = self._ready = None
        return self._workers.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif late := self._close(PATIENCE):
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
        if self._workers.process != os.getpid():
            raise FuncpipeError(
                "this overlap belongs to the process that made it, and a fork has none of its threads; make a new one"
            )
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "this overlap is asked for its next batch by two at once; each loop has its own overlap"
            )
        try:
            return self._next()
        finally:
            self._busy.release()

    def _next(self) -> Any:
        item: Item | None = None
        try:
            self._advance()
            item, self._ready = self._ready, None
            if item is not None and item.error is None:
                self._say()
                return item.value
        except BaseException as error:
            if not (isinstance(error, Stop) and self._workers.closed):
                self._end(PATIENCE)
                raise
        with suppress(Exception):  # an error of a batch comes before one of the bar
            self._say(last=True)
        late = self._end(PATIENCE)
        failure, item = self._workers.taken_abort() if item is None else item.error, None
        if failure is None:  # the end, or close() from elsewhere
            raise StopIteration
        try:
            if late:
                failure.add_note(f"still at work: {late}")
            raise failure
        finally:
            del failure

    # ---------------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """The tick of the next batch, after those that only fill the pipeline. What it makes lies in ``_ready``.

        Not in a variable: an error's traceback leads here, and must not come back to the error.
        """
        self._open()
        batch = self.index
        while self._tick <= batch:
            self._perform()
            self._tick += 1
        self._ready = self._take(batch)
        if self._ready is not None and self._ready.error is None:
            self._hand_out(batch)

    def _perform(self) -> None:
        """Run the workers without threads for the batch that each has in this tick."""
        if self._inline:
            with self._around.entered():
                for worker in self._inline:
                    if self._tick + worker.row.lead >= self._start:
                        worker.perform(self._tick + worker.row.lead)

    def _take(self, batch: int) -> Item | None:
        """A batch that has come through all stages and, where there is one, through the fold. None: there is none."""
        workers, here = self._workers, self._here
        item: Item | None = workers.meters[-1].input.take(batch)
        if item is None or item.error is not None:
            return item
        if here.devices:
            here.wait(item.marks)
            item = item._replace(value=materialized_tree(item.value))
            here.use(item.value, item.marks)
        fold, start = self._fold, perf_counter()
        if fold is None:
            return item
        try:
            with self._workers.meters[-1].ranges(batch):
                returned = call(fold, here, batch, self._reached[1], item.value)
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise PlanError(f"a fold returns (state, result); {fold.name!r} returned a {type(returned).__name__}")
            workers.states.add(returned[0])
        except Exception as error:
            return failed(len(self._stages), fold.name, batch, error)
        finally:
            workers.meters[-1].add(start, batch)
        return Item(returned)

    def _hand_out(self, batch: int) -> None:
        """Count a batch as handed out, and its state as the state: both at once, whatever interrupts."""
        assert self._ready is not None
        state, result = (None, self._ready.value) if self._fold is None else self._ready.value
        self._ready = Item(result)
        if self._workers.snapshots:
            self._workers.snapshots.popleft()
        self._reached = (batch + 1, state)
        self._workers.allow(batch + 1)

    def _open(self) -> None:
        """Before the first batch: make the source's iterator, the streams and the workers."""
        if self._opened:
            return
        self._opened = True
        self._began = perf_counter()
        draw = iter(self._source).__next__
        callers = {device: Place.backend.module(device).current_stream(device) for device in self._here.devices}
        streams = self._streams(callers)
        rows = zip(self.plan.rows, [None, *self._stages], streams, strict=False)
        workers = [
            StageWorker(self._workers, number, row, self._around, home, stage, draw, self._snapshot)
            for number, (row, stage, home) in enumerate(rows)
        ]
        own = [number for number in self.plan.order if number < len(workers)]  # the fold comes after all of them
        self._inline = [workers[number] for number in own if not workers[number].row.thread]
        self._workers.start(workers, self._start)

    def _streams(self, callers: dict[torch.device, Any]) -> list[StreamSet]:
        """Streams of the source and of each stage."""
        devices = self._here.devices
        shared: dict[str, dict[torch.device, Any]] = {}
        out = [StreamSet(devices, callers) if self.plan.rows[0].thread else self._here]
        for at, stage in enumerate(self._stages, 1):
            match stage.stream:
                case "caller":
                    streams = callers if self.plan.rows[at].thread else None
                case None | str():
                    name = stage.stream or f"\0{at}"
                    if name not in shared:
                        shared[name] = {device: Place.backend.module(device).Stream(device) for device in devices}
                    streams = shared[name]
                case stream:
                    streams = {**callers, stream.device: stream}
            out.append(StreamSet(devices, streams))
        return out

    def _say(self, *, last: bool = False) -> None:
        if self._report is None:
            return
        done = self.index - self._start
        progress = Progress(done, self._total if self._total >= 0 else None, perf_counter() - self._began, self.stats())
        if not last:
            self._report(progress)
        elif isinstance(self._report, Bar):
            self._report.end(progress)
