"""The iterator of an overlap: ticks of the loop's own thread, and the threads beside it."""

from __future__ import annotations

import atexit
import contextvars
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import length_hint
from time import monotonic, perf_counter
from typing import Any, Self

import torch

from funcpipe.batches.flow import Flow, Item, Meter, Release, first_states
from funcpipe.batches.leaves import firm
from funcpipe.batches.rail import Rail
from funcpipe.batches.row import Around, Row, autocast, work
from funcpipe.batches.stage import BatchStage, Fold
from funcpipe.batches.stats import Bar, Progress, StageStats, measured, stats
from funcpipe.batches.ticks import Ticks
from funcpipe.core.errors import FuncpipeError, PlanError, Where, at_batch
from funcpipe.core.result import Timeline
from funcpipe.core.tree import Tree
from funcpipe.runtime.stream import Place


class Overlap(Iterator[Any]):
    """The iterator that `overlap` makes.

    Attributes:
        plan: what is done at each tick, as data; prints itself, and ``fp.draw(run.plan)`` draws it.
    """

    def __init__(
        self,
        source: Iterable[Any],
        stages: Sequence[BatchStage],
        fold: Fold | None,
        plan: Ticks,
        devices: Sequence[torch.device],
        *,
        start: int,
        ring: bool,
        snapshot: Callable[[], Any] | None,
        record: bool,
        report: Bar | Callable[[Progress], None] | None,
    ) -> None:
        self.plan = plan
        self._source: Any = source
        self._stages, self._start = stages, start
        self._fold = fold and replace(fold, init=None, earlier=())  # the first state is not kept
        self._report, self._record = report, record
        self._snapshot = snapshot
        self._around = Around()
        self._here = Rail(devices)
        lag = max((one.lag for one in stages if one.lag is not None), default=None)
        states = first_states(fold.init if fold else None, fold.earlier if fold else (), start, lag, self._here)
        # Without a fold the loop itself is the last to wait.
        meters = [Meter(spans=[] if record else None) for _ in range(len(plan.rows) + (fold is None))]
        self._flow = Flow(plan, start, start, states, meters, ring)
        self._reached: tuple[int, Tree] = (start, fold.init if fold else None)
        self._tick = start - plan.depth
        self._rows: list[Row] = []
        self._threads: list[threading.Thread] = []
        self._lent: Item | None = None
        self._began = 0.0
        self._opened = self._finished = False
        self._busy = threading.Lock()
        self._finalizer: weakref.finalize[..., Overlap] | None = None

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
        with self._flow.changed:
            return tuple(state.tree for state in self._flow.states.kept)

    @property
    def drawn(self) -> int:
        """The number of the next batch that is drawn."""
        return self._flow.drawn

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
        kept = self._flow.snapshots
        return kept[0] if kept else deepcopy(self._snapshot())

    @property
    def timeline(self) -> Timeline:
        """What ran when, measured on the host, as far as it is: draw it, or lay it beside ``plan.simulate()``.

        Raises:
            FuncpipeError: without ``record=True``.
        """
        if not self._record:
            raise FuncpipeError("nothing was measured: overlap(..., record=True)")
        return measured(self.plan, self._flow.meters)

    def stats(self) -> tuple[StageStats, ...]:
        """For the source, each stage and the fold: how many batches, how long they took, how long it waited."""
        return stats(self.plan, self._flow.meters)

    def stop_drawing(self) -> None:
        """Draw no more: what is under way comes out, then it ends."""
        with self._flow.changed:
            self._flow.stopping = True
            self._flow.changed.notify_all()

    def close(self, timeout: float | None = 5.0) -> None:
        """End it now: what is under way is lost. Does nothing where it has ended.

        Args:
            timeout: seconds to wait for threads (one that waits for the source cannot be interrupted); a warning names
                those that are left then, which end when what they wait for comes. None: as long as it takes.
        """
        if late := self._end(timeout):
            warnings.warn(f"still at work after close(timeout={timeout:g}): {late}", stacklevel=2)

    def _end(self, timeout: float | None) -> str:
        """End it; the threads that did not within so many seconds."""
        source = type(self._source).__name__
        self._finished = True
        self._flow.stop()
        deadline = None if timeout is None else monotonic() + timeout
        others = [one for one in self._threads if one is not threading.current_thread() and one.ident is not None]
        for one in others:
            one.join(None if deadline is None else max(0.0, deadline - monotonic()))
        if self._finalizer is not None:
            self._finalizer()
        self._settle()
        self._rows, self._threads, self._source = [], [], None
        for edge in self._flow.edges:
            edge.clear()
        late = [one.name for one in others if one.is_alive()]
        return f"{', '.join(late)} (the source is a {source})" if late else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __length_hint__(self) -> int:
        hint = length_hint(self._source, -1) if self._source is not None else 0
        return NotImplemented if hint < 0 else max(0, hint - (self.index - self._start))

    def __next__(self) -> Any:
        if self._finished:
            raise StopIteration
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "this overlap is asked for its next batch by two at once; each loop has its own overlap"
            )
        try:
            item = self._advance()
        except BaseException:
            self._end(_PATIENCE)
            raise
        finally:
            self._busy.release()
        if item is None:
            self._say(last=True)
            self._end(None)
            raise StopIteration
        if item.error is not None:
            self._say(last=True)
            error, item = item.error, None
            try:
                if late := self._end(_PATIENCE):
                    error.add_note(f"still at work: {late}")
                raise error
            finally:
                del error
        self._say()
        return item.value

    # ---------------------------------------------------------------------------------------------------------------

    def _advance(self) -> Item | None:
        """The tick of the next batch, after those that only fill the pipeline. None: there is none."""
        self._open()
        flow = self._flow
        self._take_back()
        target, last = flow.handed, len(self._rows) - 1
        out: Item | None = None
        while self._tick <= target:
            for folds, numbers in groupby(self.plan.order, key=last.__lt__):
                if not folds:
                    self._perform(numbers)
                elif self._tick == target and (out := self._fold_batch(target)) is None:
                    return None
            self._tick += 1
        if self._fold is None:
            out = self._arrived(target)
        return self._hand_out(out)

    def _perform(self, numbers: Iterable[int]) -> None:
        """The part of a tick of rows of the loop's thread."""
        own = [self._rows[number] for number in numbers if not self.plan.rows[number].thread]
        if own:
            with self._around.entered():
                for row in own:
                    batch = self._tick + self.plan.rows[row.number].lead
                    if batch >= self._start:
                        row.perform(batch)

    def _arrived(self, batch: int) -> Item | None:
        """A batch that has come through all stages, on the loop's own streams."""
        flow, here = self._flow, self._here
        item = flow.take(len(self._rows) - 1, batch)
        if item is None or item.error is not None or not here.devices:
            return item
        here.wait(item.marks)
        item = item._replace(value=firm(item.value))
        if flow.ring:
            self._lent = item
        else:
            here.use(item.value, item.marks)
        return item

    def _fold_batch(self, batch: int) -> Item | None:
        """A batch through the fold; its result comes with the new state."""
        item = self._arrived(batch)
        if item is None or item.error is not None:
            return item
        assert self._fold is not None
        try:
            out = self._step(self._fold, batch, item.value)
        except Exception as error:
            return Item(batch, error=self._failure(batch, error))
        self._take_back()
        return Item(batch, out)

    def _hand_out(self, item: Item | None) -> Item | None:
        """Count a batch as handed out, and its state as the state: both at once, whatever interrupts."""
        if item is None or item.error is not None:
            return item
        state, result = item.value if self._fold is not None else (None, item.value)
        flow = self._flow
        if flow.snapshots:
            flow.snapshots.popleft()
        self._reached = (item.batch + 1, state)
        with flow.changed:
            flow.handed = item.batch + 1
            flow.changed.notify_all()
        return Item(item.batch, result)

    def _step(self, fold: Fold, index: int, batch: Any) -> tuple[Tree, Any]:
        """The fold, on one batch."""
        start = perf_counter()
        words = {"index": index} if fold.indexed else {}
        try:
            if fold.autocast is None:
                out = fold.fn(self._reached[1], batch, **words)
            else:
                with autocast(fold.autocast, self._here):
                    out = fold.fn(self._reached[1], batch, **words)
        finally:
            meter, end = self._flow.meters[-1], perf_counter()
            meter.batches += 1
            meter.busy += end - start
            if meter.spans is not None:
                meter.spans.append((start, end, index))
        if not isinstance(out, tuple) or len(out) != 2:
            raise PlanError(f"a fold returns (state, result); {fold.name!r} returned a {type(out).__name__}")
        self._flow.publish(out[0], self._here)
        return out

    def _failure(self, index: int, error: Exception) -> BaseException:
        assert self._fold is not None
        if isinstance(error, StopIteration):
            told = RuntimeError(f"{self._fold.name!r} raised StopIteration")
            told.__cause__ = error
            error = told
        return at_batch(error, Where(len(self._stages), self._fold.name, None, "overlap", "", index))

    def _open(self) -> None:
        """Before the first batch: the iterator, streams, threads."""
        if self._opened:
            return
        self._opened = True
        self._began = perf_counter()
        draw = iter(self._source).__next__
        callers = {device: Place.backend.module(device).current_stream(device) for device in self._here.devices}
        rails = self._rails(callers)
        stages = [None, *self._stages]
        self._rows = [
            Row(self._flow, at, self.plan.rows[at].name, rails[at], rails[at + 1], stage, None if at else draw,
                None if at else self._snapshot, self.plan.rows[at].thread)
            for at, stage in enumerate(stages)
        ]  # fmt: skip
        for row in self._rows:
            if row.threaded:
                carried = contextvars.copy_context()
                job = partial(work, row, self._start, self._around, carried)
                self._threads.append(threading.Thread(target=job, name=f"funcpipe {row.name}", daemon=True))
        if self._threads:
            leaving = partial(_leave, self._flow, self._threads)
            atexit.register(leaving)
            self._finalizer = weakref.finalize(self, _forget, self._flow, leaving)
            self._finalizer.atexit = False
        for one in self._threads:
            one.start()

    def _rails(self, callers: dict[torch.device, Any]) -> list[Rail]:
        """Streams of the source, of each stage, and of the loop."""
        devices = self._here.devices
        shared: dict[str, dict[torch.device, Any]] = {}
        out = [Rail(devices, callers) if self.plan.rows[0].thread else self._here]
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
            out.append(Rail(devices, streams))
        return [*out, self._here]

    def _take_back(self) -> None:
        """In a ring: the caller is done with the last result."""
        if self._lent is not None:
            lent, self._lent = self._lent, None
            self._flow.give_back(len(self._rows) - 1, Release(self._here.marks(), lent.value))

    def _settle(self) -> None:
        """What the loop queues next comes after all that was under way; and what streams get after its memory's readers."""
        if self._lent is not None:
            lent, self._lent = self._lent, None
            self._here.use(lent.value, lent.marks)
        for row in self._rows:
            row.reclaim()
            self._here.wait(row.rail.marks())

    def _say(self, *, last: bool = False) -> None:
        if self._report is None:
            return
        done = self.index - self._start
        hint = length_hint(self._source, 0) if self._source is not None else 0
        told = Progress(done, hint or None, perf_counter() - self._began, self.stats())
        if not last:
            self._report(told)
        elif isinstance(self._report, Bar):
            self._report.end(told)


_PATIENCE = 1.0
"""Seconds that threads get to end after an error; a source that waits for ever must not hide it."""


def _forget(flow: Flow, leaving: Callable[[], None]) -> None:
    """Nobody holds the overlap any more: its threads end by themselves."""
    flow.stop()
    atexit.unregister(leaving)


def _leave(flow: Flow, threads: list[threading.Thread]) -> None:
    """Python ends: a thread that is in torch's code then would abort the process."""
    flow.stop()
    deadline = monotonic() + _PATIENCE
    for one in threads:
        one.join(max(0.0, deadline - monotonic()))
