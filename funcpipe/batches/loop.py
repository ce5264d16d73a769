"""The iterator of an overlap: ticks of the loop's own thread, and the threads beside it."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from operator import length_hint
from time import perf_counter
from typing import Any, Self

import torch

from funcpipe.batches.crew import PATIENCE, Crew
from funcpipe.batches.flow import Closed, Flow, Item, Meter, first_states
from funcpipe.batches.leaves import firm, sharing
from funcpipe.batches.rail import Rail
from funcpipe.batches.row import Around, Row, autocast, no_end
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
        self._crew = Crew(self._flow, self._here)
        self._total = length_hint(source, -1)
        self._began = 0.0
        self._opened = self._finished = False
        self._busy = threading.Lock()
        weakref.finalize(self, self._crew.forget).atexit = False

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
            states, index = self._flow.states, self.index
            return tuple(state.tree for state in states.kept)[: len(states.kept) - (states.version - index)]

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
        """Draw no more: what is under way comes out, then it ends. A draw that has begun comes out, too."""
        with self._flow.changed:
            self._flow.stopping = True
            self._flow.changed.notify_all()

    def close(self, timeout: float | None = 5.0) -> None:
        """End it now: what is under way is lost. Does nothing where it has ended.

        Called from elsewhere while the loop waits for a batch (another thread, a signal, a stage), it comes back at once,
        and the loop ends there.

        Args:
            timeout: seconds to wait for threads (one that waits for the source cannot be interrupted); a warning names
                those that are left then, which end when what they wait for comes. None: as long as it takes.
        """
        source = type(self._source).__name__
        if late := self._close(timeout):
            warnings.warn(f"still at work after close(timeout={timeout:g}): {late} (the source is a {source})", stacklevel=2)  # fmt: skip

    def _close(self, timeout: float | None) -> str:
        if not self._busy.acquire(blocking=False):
            self._flow.stop()
            return ""
        try:
            return self._end(timeout)
        finally:
            self._busy.release()

    def _end(self, timeout: float | None) -> str:
        """End it; the threads that did not within so many seconds."""
        self._finished = True
        late = self._crew.end(timeout)
        self._source = None
        return late

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
        if self._crew.process != os.getpid():
            raise FuncpipeError("this overlap belongs to the process that made it, and a fork has none of its threads; make a new one")  # fmt: skip
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "this overlap is asked for its next batch by two at once; each loop has its own overlap"
            )
        try:
            return self._next()
        finally:
            self._busy.release()

    def _next(self) -> Any:
        try:
            item = self._advance()
            if item is not None and item.error is None:
                self._say()
        except Closed:  # by close(), from elsewhere
            item = None
        except BaseException:
            self._end(PATIENCE)
            raise
        if item is None or item.error is not None:
            with suppress(Exception):  # an error of a batch comes before one of the bar
                self._say(last=True)
            late = self._end(PATIENCE)
            if item is None or item.error is None:
                raise StopIteration
            error, item = item.error, None
            try:
                if late:
                    error.add_note(f"still at work: {late}")
                raise error
            finally:
                del error
        return item.value

    # ---------------------------------------------------------------------------------------------------------------

    def _advance(self) -> Item | None:
        """The tick of the next batch, after those that only fill the pipeline. None: there is none."""
        self._open()
        flow, crew = self._flow, self._crew
        crew.take_back()
        target, last = flow.handed, len(crew.rows) - 1
        done: list[Item | None] = []  # emptied: an error's traceback leads here, and must not come back to the error
        while self._tick <= target:
            for folds, numbers in groupby(self.plan.order, key=last.__lt__):
                if not folds:
                    self._perform(numbers)
                elif self._tick == target:
                    done.append(self._fold_batch(target))
                    if _failed(done[0]):
                        return done.pop()  # what stands behind the fold waits for nothing any more
            self._tick += 1
        if not done:
            done.append(self._arrived(target))
        return done.pop() if _failed(done[0]) else self._hand_out(done.pop())

    def _perform(self, numbers: Iterable[int]) -> None:
        """The part of a tick of rows of the loop's thread."""
        own = [self._crew.rows[number] for number in numbers if not self.plan.rows[number].thread]
        if own:
            with self._around.entered():
                for row in own:
                    batch = self._tick + self.plan.rows[row.number].lead
                    if batch >= self._start:
                        row.perform(batch)

    def _arrived(self, batch: int) -> Item | None:
        """A batch that has come through all stages, on the loop's own streams."""
        flow, here = self._flow, self._here
        item = flow.take(len(self._crew.rows) - 1, batch)
        if item is None or item.error is not None or not here.devices:
            return item
        here.wait(item.marks)
        item = item._replace(value=firm(item.value))
        if flow.ring:
            self._crew.lent = item
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
        if self._flow.ring:
            # The state lives on, whatever comes back.
            self._here.use(sharing(out[0], item.value), item.marks)
        return Item(batch, out)

    def _hand_out(self, item: Item | None) -> Item:
        """Count a batch as handed out, and its state as the state: both at once, whatever interrupts."""
        assert item is not None
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
            self._flow.meters[-1].add(start, index)
        if not isinstance(out, tuple) or len(out) != 2:
            raise PlanError(f"a fold returns (state, result); {fold.name!r} returned a {type(out).__name__}")
        self._flow.publish(out[0], self._here)
        return out

    def _failure(self, index: int, error: Exception) -> BaseException:
        assert self._fold is not None
        where = Where(len(self._stages), self._fold.name, None, "overlap", "", index)
        return at_batch(no_end(error, self._fold.name), where)

    def _open(self) -> None:
        """Before the first batch: the iterator, streams, threads."""
        if self._opened:
            return
        self._opened = True
        self._began = perf_counter()
        draw = iter(self._source).__next__
        callers = {device: Place.backend.module(device).current_stream(device) for device in self._here.devices}
        rails = self._rails(callers)
        # Who reads on whatever stream is current is taken to read on the one that is current now.
        reading = [rail if rail.streams is not None else Rail(rail.devices, callers) for rail in rails[1:]]
        rows = [
            Row(self._flow, at, self.plan.rows[at].name, rails[at], reading[at], stage, None if at else draw,
                None if at else self._snapshot, self.plan.rows[at].thread)
            for at, stage in enumerate([None, *self._stages])
        ]  # fmt: skip
        self._crew.start(rows, self._start, self._around)

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

    def _say(self, *, last: bool = False) -> None:
        if self._report is None:
            return
        done = self.index - self._start
        told = Progress(done, self._total if self._total >= 0 else None, perf_counter() - self._began, self.stats())
        if not last:
            self._report(told)
        elif isinstance(self._report, Bar):
            self._report.end(told)


def _failed(item: Item | None) -> bool:
    return item is None or item.error is not None
