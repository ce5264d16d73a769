"""The rows of an overlap at work: each makes its batches in order, in a thread or when the loop
asks for the next one."""

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
from funcpipe._src.engine.ranges import named_range
from funcpipe._src.engine.worker import compute_with
from funcpipe._src.prefetch.stage import BatchStage, Fold, TickRow
from funcpipe._src.prefetch.stats import StageStats
from funcpipe._src.prefetch.streams import Mark, StreamSet, may_be_on_stream, without_lazy_copies
from funcpipe._src.stages.context import CallerContext
from funcpipe._src.stages.rng import KeyedDraws, Keys


class Item(NamedTuple):
    """A batch between two rows, ready after some marks; or the error that is raised in its
    place."""

    value: Any = None
    marks: tuple[Mark, ...] = ()
    error: Exception | None = None


class TimedQueue(SimpleQueue[Any]):
    """A queue that counts for how many seconds its reader has waited.

    It has no lock of Python's, so a signal handler and a finalizer may put something in at any
    moment.
    """

    waited = 0.0

    def take(self) -> Any:
        """Wait for the next item."""
        start = perf_counter()
        item = self.get()
        self.waited += perf_counter() - start
        return item


class CallerModes:
    """The modes that were on where `overlap` was called, for all rows but the fold."""

    def __init__(self) -> None:
        self.context, self.grad = CallerContext(), torch.is_grad_enabled()
        self.threads = torch.get_num_threads()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside, these modes are on."""
        stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with self.context.entered(), torch.set_grad_enabled(self.grad), stream:
            yield


class OldState(NamedTuple):
    """A state of the fold, ready after some marks, and its tensors with their counts of in-place
    writes."""

    tree: Tree
    marks: tuple[Mark, ...]
    versions: list[tuple[str, Tensor, int]]


class OverlapState:
    """State that the rows of one overlap and its loop share. It refers to no row, so no cycle keeps
    batches alive.

    Attributes:
        reached: the number of the next batch that is handed out, and the fold's state before it.
        states: the states that stages with a lag read, by the number of batches before each.
        snapshots: the source's states before the draw of each batch under way.
        queues: all queues of all rows.
        abort: an error that is no Exception; it does not wait for the batches before it.
        process: the one that has the threads.
        stopping: whether no more batches are drawn.
        closed: whether all rows end.
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
        """Keep the state after ``number`` batches, and as many older ones as stages read.

        Raises:
            FuncpipeError: the fold wrote into an older one, which a stage may be reading.
        """
        for place, tensor, before in (
            entry for state in self.states.values() for entry in state.versions
        ):
            if version(tensor) != before:
                raise FuncpipeError(
                    f"the fold writes into its state in place ({place}), and a stage with lag= "
                    "reads older states; return new tensors (clone, or an optimizer that is a "
                    "function)"
                )
        named = zip(locations(tree, "state"), flatten(tree)[0], strict=True) if self._lag else ()
        tensors = [
            (place, leaf)
            for place, leaf in named
            if isinstance(leaf, Tensor) and not leaf.is_inference()
        ]
        versions = [(place, leaf, version(leaf)) for place, leaf in tensors]
        self.states[number] = OldState(tree, self.here.marks(), versions)
        self.states.pop(number - self._lag - 1, None)

    def old_state(self, batch: int, lag: int) -> OldState:
        """The state after ``batch - lag`` batches, or the oldest. It exists: a lead is at most the
        lag."""
        return self.states[max(batch - lag, self._first)]

    def stop(self) -> None:
        """End all rows: each finds an end in its queue, and makes none of the batches before
        that."""
        self.closed = True
        for queue in self.queues:
            queue.put(None)


class BatchRow:
    """One row of the plan: it takes batches from the row before, and puts each that it has made
    into its queue.

    Attributes:
        stage: whose function it calls; None: it draws from the source.
        output: the batches that it has made, in order; None: there are no more.
        room: one entry for each batch that its thread may make.
        draw, snapshot: of the source, for its row.
        ranges: the device for which its work is a range in profiles; None: it is none.
        spans: (begin, end, batch) of its work, where that is recorded.
        ended: whether it has made its last batch.
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
        """Its work and its waits so far."""
        waited = 0.0 if self.input is None else self.input.waited
        return StageStats(self.plan.name, self.batches, self.busy, waited, self.room.waited)

    def run(self, modes: CallerModes) -> None:
        """In a thread: make all batches, each as soon as there is room."""
        try:
            compute_with(modes.threads)
            with modes.entered():
                while not self.ended and self.room.take():
                    self.make()
        except BaseException as error:  # no Exception: those are items
            if self.shared.abort is None:
                self.shared.abort = error
            self.shared.stop()

    def make(self) -> None:
        """Make the next batch, the error in its place, or the end. A no-op after the end, or once
        all rows end."""
        if not (self.ended or self.shared.closed):
            item = self._next_item()
            self.ended = item is None or item.error is not None
            self.batch += 1
            self.output.put(item)
            del item  # the traceback of its error leads to this frame: a cycle

    def _next_item(self) -> Item | None:
        item: Item | None = Item() if self.input is None else self.input.take()
        if item is None or item.error is not None:
            return item
        start = perf_counter()
        try:
            named = (
                named_range(f"{self.plan.name} {self.batch}", self.ranges)
                if self.ranges
                else nullcontext()
            )
            with self.streams.entered(), named:
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
        """An item with an error. StopIteration, which would pass for the end, becomes a
        RuntimeError."""
        if isinstance(error, StopIteration):
            error, cause = RuntimeError(f"{self.plan.name!r} raised StopIteration"), error
            error.__cause__ = cause
        stage, origin = (self.number - 1, "overlap") if self.number else (None, "next(source)")
        at_batch(error, Where(stage, self.plan.name, None, origin, "", self.batch))
        return Item(error=error)

    def _drawn(self) -> Item | None:
        """Draw a batch. The state before the next draw is kept before this batch goes on."""
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
        # A batch on the host is there: its copy to a device waits for nothing that the loop has
        # queued.
        return Item(value, self.streams.marks() if may_be_on_stream(value) else ())

    def _called(self, stage: BatchStage | Fold, value: Tree) -> Item:
        """Call the function of a stage, in its modes. An item of the fold is a pair of a state and
        a result."""
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
    """Keys of the draws of a batch stage: its seed, its name, the number of the batch."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__(seed, ())
        self.name = name

    def path(self, stage: int, layer: str, part: Any = None) -> str:
        """The name of the batch stage, for all its draws."""
        return self.name

    def claim(self, stage: int, layer: str, what: Any, part: Any = None) -> None:
        """Refuse nothing: names of stages differ, and there is a seed."""
