"""Run the rows of an overlap: each makes its batches in order, in a thread or in the loop.

`stage` describes rows as data; `prefetch` owns threads and the iterator.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from queue import SimpleQueue
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.errors import FuncpipeError, PlanError, Where, at_batch
from funcpipe._src.core.torch_names import version
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.devices.ranges import named_range
from funcpipe._src.engine.worker import compute_with
from funcpipe._src.prefetch.stage import BatchStage, Fold, TickRow
from funcpipe._src.prefetch.stats import StageStats
from funcpipe._src.prefetch.streams import Mark, StreamSet, may_be_on_stream, without_lazy_copies
from funcpipe._src.stages.context import CallerContext
from funcpipe._src.stages.rng import KeyedDraws, Keys


class Item(NamedTuple):
    """A batch between two rows, ready after the marks, or an error in its place."""

    value: Any = None
    marks: tuple[Mark, ...] = ()
    error: Exception | None = None


class TimedQueue(SimpleQueue[Any]):
    """A queue that counts the seconds that its reader has waited.

    A SimpleQueue has no Python lock, so a signal handler or a finalizer may put items at any time.
    """

    waited = 0.0

    def take(self) -> Any:
        start = perf_counter()
        item = self.get()
        self.waited += perf_counter() - start
        return item


class CallerModes:
    """The modes that were active at the call of `overlap`, for all rows except the fold."""

    def __init__(self) -> None:
        self.context, self.grad = CallerContext(), torch.is_grad_enabled()
        self.threads = torch.get_num_threads()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered(self) -> Generator[None]:
        stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with self.context.entered(), torch.set_grad_enabled(self.grad), stream:
            yield


class OldState(NamedTuple):
    """A state of the fold, ready after the marks, and the version counters of its tensors."""

    tree: Tree
    marks: tuple[Mark, ...]
    versions: list[tuple[str, Tensor, int]]


class OverlapState:
    """State that the rows of one overlap and its loop share.

    It does not refer to rows, so no cycle keeps batches alive.

    Attributes:
        reached: the number of the next batch for the loop, and the fold's state before this batch.
        states: the states that stages with a lag read, by the number of batches before each.
        snapshots: the source's states before the draw of each batch in progress.
        queues: all queues of all rows.
        abort: an error that is not an Exception, which is raised before the batches in progress.
        process: the id of the process with the threads.
        stopping: whether no more batches are drawn.
        closed: whether all rows must end.
    """

    def __init__(self, fold: Fold | None, start: int, lag: int, here: StreamSet) -> None:
        self.reached: tuple[int, Tree] = (start, fold.init if fold else None)
        self.here, self._lag, self.process = here, lag, os.getpid()
        self.snapshots: deque[Any] = deque()
        self.queues: list[TimedQueue] = []
        self.abort: BaseException | None = None
        self.stopping = self.closed = False
        self.states: dict[int, OldState] = {}
        trees = (*fold.earlier, fold.init)[-lag - 1 :] if fold else (None,)
        self._first = start - len(trees) + 1
        for number, tree in enumerate(trees, self._first):
            self.add_state(number, tree)

    def add_state(self, number: int, tree: Tree) -> None:
        """Keep the state after ``number`` batches, and as many older states as stages read.

        Raises:
            FuncpipeError: the fold wrote into an older state, which a stage may be reading.
        """
        for state in self.states.values():
            for place, tensor, before in state.versions:
                if version(tensor) != before:
                    raise FuncpipeError(
                        f"the fold writes into its state in place ({place}), but a stage with lag= "
                        "reads older states; return new tensors (clone them, or use a functional "
                        "optimizer)"
                    )
        named = zip(locations(tree, "state"), flatten(tree)[0], strict=True) if self._lag else ()
        versions = [
            (place, leaf, version(leaf))
            for place, leaf in named
            if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]
        self.states[number] = OldState(tree, self.here.marks(), versions)
        self.states.pop(number - self._lag - 1, None)  # no stage reads further back than the lag

    def old_state(self, batch: int, lag: int) -> OldState:
        """Return the state after ``batch - lag`` batches, or the oldest state."""
        # The state exists already, because a stage's lead is at most its lag.
        return self.states[max(batch - lag, self._first)]

    def stop(self) -> None:
        """End all rows. A row that waits finds the end in its queue; ``closed`` stops the others."""
        self.closed = True
        for queue in self.queues:
            queue.put(None)


class BatchRow:
    """One row at work: it takes batches from the row before, and puts its batches into a queue.

    Attributes:
        stage: the stage whose function the row calls. None: the row draws from the source.
        output: the queue of finished batches, in order. The item None is the end.
        room: a queue with one entry for each batch that the row's thread may still make.
        draw, snapshot: functions of the source, for its row.
        ranges: the device of profiler ranges. None: no ranges.
        spans: (begin, end, batch) of all work, or None without recording.
        ended: whether the row has made its last batch.
    """

    draw: Callable[[], Any]
    snapshot: Callable[[], Any] | None = None
    ranges: torch.device | None = None
    spans: list[tuple[float, float, int]] | None = None

    def __init__(
        self,
        shared: OverlapState,
        plan: TickRow,
        stage: BatchStage | Fold | None,
        before: BatchRow | None,
    ) -> None:
        self.shared, self.plan, self.stage = shared, plan, stage
        self.number = 0 if before is None else before.number + 1
        self.input = None if before is None else before.output
        self.output, self.room = TimedQueue(), TimedQueue()
        shared.queues += self.output, self.room
        self.streams, self.batch = shared.here, shared.reached[0]
        self.batches, self.busy, self.ended = 0, 0.0, False

    def stats(self) -> StageStats:
        waited = 0.0 if self.input is None else self.input.waited
        return StageStats(self.plan.name, self.batches, self.busy, waited, self.room.waited)

    def run(self, modes: CallerModes) -> None:
        """Make all batches in this thread, each as soon as there is room."""
        try:
            compute_with(modes.threads)
            with modes.entered():
                while not self.ended and self.room.take():
                    self.make()
        except BaseException as error:  # such as KeyboardInterrupt; an Exception becomes an item
            if self.shared.abort is None:
                self.shared.abort = error
            self.shared.stop()

    def make(self) -> None:
        """Make the next batch, or the error in its place, or the end. A no-op after the end."""
        if not (self.ended or self.shared.closed):
            item = self._next_item()
            self.ended = item is None or item.error is not None
            self.batch += 1
            self.output.put(item)
            del item  # the traceback of its error refers to this frame: a cycle

    def _next_item(self) -> Item | None:
        item: Item | None = Item() if self.input is None else self.input.take()
        if item is None or item.error is not None:
            return item
        start = perf_counter()
        try:
            words = f"{self.plan.name} {self.batch}"
            ranged = named_range(words, self.ranges) if self.ranges else nullcontext()
            with self.streams.entered(), ranged:
                self.streams.wait(item.marks)
                self.streams.use(item.value, item.marks)
                made = self._drawn() if self.stage is None else self._called(self.stage, item.value)
        except Exception as error:
            return self._failed(error)
        if made is not None:
            end = perf_counter()
            self.batches += 1
            self.busy += end - start
            if self.spans is not None:
                self.spans.append((start, end, self.batch))
        return made

    def _failed(self, error: Exception) -> Item:
        """Return an item with the error, which gets the coordinates of the row and the batch."""
        # A StopIteration out of ``__next__`` would look like the end of the overlap.
        if isinstance(error, StopIteration):
            error, cause = RuntimeError(f"{self.plan.name!r} raised StopIteration"), error
            error.__cause__ = cause
        stage, origin = (self.number - 1, "overlap") if self.number else (None, "next(source)")
        at_batch(error, Where(stage, self.plan.name, None, origin, "", self.batch))
        return Item(error=error)

    def _drawn(self) -> Item | None:
        """Draw a batch, and keep a snapshot of the source before and after."""
        shared, snapshot = self.shared, self.snapshot
        if snapshot and not shared.snapshots:
            shared.snapshots.append(deepcopy(snapshot()))
        try:
            if shared.stopping:
                return None
            value = self.draw()
        except StopIteration:
            return None
        if snapshot:
            shared.snapshots.append(deepcopy(snapshot()))
        # A batch on the host is ready, so its copy to a device need not wait for queued work.
        return Item(value, self.streams.marks() if may_be_on_stream(value) else ())

    def _called(self, stage: BatchStage | Fold, value: Tree) -> Item:
        """Call the function of a stage in its modes. A fold's item has the pair (state, result)."""
        streams, arguments = self.streams, [value]
        kind = streams.devices[0].type if streams.devices else "cpu"
        with ExitStack() as stack:
            if stage.autocast is not None:
                stack.enter_context(torch.autocast(kind, stage.autocast))
            if isinstance(stage, Fold):
                arguments.insert(0, self.shared.reached[1])
            else:
                if stage.lag is not None:
                    state = self.shared.old_state(self.batch, stage.lag)
                    streams.wait(state.marks)
                    arguments.insert(0, state.tree)
                if stage.grad is not None:
                    stack.enter_context(torch.set_grad_enabled(stage.grad))
                if stage.seed is not None:
                    stack.enter_context(
                        KeyedDraws(BatchKeys(stage.seed, stage.name), 0, {}, self.batch)
                    )
            made = stage.fn(*arguments, **({"index": self.batch} if stage.indexed else {}))
        if not isinstance(stage, Fold):
            return Item(without_lazy_copies(made) if streams.devices else made, streams.marks())
        if not isinstance(made, tuple) or len(made) != 2:
            raise PlanError(
                f"a fold returns (state, result); {stage.name!r} returned a {type(made).__name__}"
            )
        self.shared.add_state(self.batch + 1, made[0])
        return Item(made)


class BatchKeys(Keys):
    """Keys for the draws of a batch stage: its seed, its name and the number of the batch."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__(seed, ())
        self.name = name

    def path(self, stage: int, layer: str, part: Any = None) -> str:
        """Return the name of the batch stage, the path of all its draws."""
        return self.name

    def claim(self, stage: int, layer: str, what: Any, part: Any = None) -> None:
        """Accept every draw: names of batch stages are unique, and there is a seed."""
