"""The workers of one overlap: what they share, and how all of them begin and end."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from funcpipe.batches.stage import Fold
from funcpipe.batches.streams import Mark, StreamSet
from funcpipe.core.errors import FuncpipeError
from funcpipe.core.torch_names import version as written
from funcpipe.core.tree import Tree, flatten, locations
from funcpipe.runtime.mail import Inbox, Stop
from funcpipe.runtime.worker import Worker, end_all

if TYPE_CHECKING:
    from funcpipe.batches.stage_worker import StageWorker

PATIENCE = 1.0
"""Seconds that threads get to end after an error, or that a source gets which cannot be interrupted."""

_LONGEST = 30.0
"""Seconds that Python's end waits for a stage."""


class Item(NamedTuple):
    """A batch between two workers, ready after some marks; or an error, to be raised in its place."""

    value: Any = None
    error: BaseException | None = None
    marks: tuple[Mark, ...] = ()


class Queue(Inbox):
    """The inbox of a worker, by the number of the batch, and for how many seconds it has waited at it."""

    waited = 0.0

    def take(self, batch: Hashable) -> Any:
        """Wait for what belongs to a batch, and take it. Raises Stop."""
        start = perf_counter()
        self.wait(batch)
        self.waited += perf_counter() - start
        return self.came.pop(batch)


_NO_RANGE = nullcontext()


def _no_range(batch: int) -> AbstractContextManager[object]:
    return _NO_RANGE


@dataclass
class Meter:
    """The inboxes of a worker (batches of the one before it, and leave to be so far ahead), and what it has done.

    ``ranges`` makes what the work on a batch, by its number, is done inside of.
    """

    input: Queue = field(default_factory=Queue)
    room: Queue = field(default_factory=Queue)
    batches: int = 0
    busy: float = 0.0
    spans: list[tuple[float, float, int]] | None = None
    ranges: Callable[[int], AbstractContextManager[object]] = _no_range

    def add(self, start: float, batch: int) -> None:
        """The worker has worked on a batch, since ``start``."""
        end = perf_counter()
        self.batches += 1
        self.busy += end - start
        if self.spans is not None:
            self.spans.append((start, end, batch))


class FoldState(NamedTuple):
    """A state of the fold, ready after some marks, and the versions (counts of in-place writes) of its tensors then."""

    tree: Tree
    marks: tuple[Mark, ...]
    versions: tuple[tuple[str, Tensor, int], ...]


class States:
    """The states that stages with a lag up to ``lag`` read, by number of batches before each. The loop adds them."""

    def __init__(self, fold: Fold | None, start: int, lag: int, here: StreamSet) -> None:
        self._lag, self._here, self._newest = lag, here, start
        trees = (*fold.earlier, fold.init)[-lag - 1 :] if fold else (None,)
        self._first = start - len(trees) + 1
        self._kept = {self._first + number: self._made(tree) for number, tree in enumerate(trees)}

    def read(self, batch: int, lag: int) -> FoldState:
        """The state that a stage with this lag reads for a batch; its lead is no larger, so it is there."""
        return self._kept[max(batch - lag, self._first)]

    def until(self, index: int) -> tuple[Tree, ...]:
        """The states after at most ``index`` batches, the newest last."""
        return tuple(state.tree for number, state in sorted(self._kept.copy().items()) if number <= index)

    def add(self, tree: Tree) -> None:
        """Add a new state.

        Raises:
            FuncpipeError: an older one was written into, and somebody reads it.
        """
        for place, tensor, version in (entry for state in self._kept.values() for entry in state.versions):
            if written(tensor) != version:
                raise FuncpipeError(
                    f"the fold writes into its state in place ({place}), and a stage with lag= reads older states; "
                    "return new tensors (clone, or an optimizer that is a function)"
                )
        new, self._newest = self._made(tree), self._newest + 1
        self._kept[self._newest] = new
        self._kept.pop(self._newest - self._lag - 1, None)

    def _made(self, tree: Tree) -> FoldState:
        """A state as the fold left it; with versions only where stages read older ones, which nobody may write into."""
        pairs = zip(flatten(tree)[0], locations(tree, "state"), strict=True) if self._lag else ()
        tensors = [(place, leaf) for leaf, place in pairs if isinstance(leaf, Tensor) and not leaf.is_inference()]
        return FoldState(tree, self._here.marks(), tuple((place, leaf, written(leaf)) for place, leaf in tensors))


class Workers:
    """What the threads of an overlap share. It does not know the overlap, so that this can be collected.

    ``all`` are those of the source and of the stages, in the order in which a batch goes through them; each has a
    meter, and the last meter is the fold's, or that of the loop, which waits then. ``here`` are the streams of the
    loop, ``end`` is the first batch that will not come, and ``snapshots`` are the source's states before each batch
    under way was drawn.
    """

    def __init__(self, here: StreamSet, states: States, meters: Sequence[Meter]) -> None:
        self.here, self.states, self.meters = here, states, meters
        self.all: Sequence[StageWorker] = ()
        self.process = os.getpid()
        self.end = sys.maxsize
        self.stopping = self.closed = False
        self.snapshots: deque[Any] = deque()
        self._started: list[Worker] = []
        self._abort: BaseException | None = None
        self._ending = threading.Lock()

    def start(self, workers: Sequence[StageWorker], first: int) -> None:
        """Begin with a batch; threads see the context variables of the caller."""
        self.all = workers
        for worker in workers:
            for batch in range(first, first + worker.row.lead):
                worker.meter.room.put(batch, None)
            if worker.row.thread:
                patience = PATIENCE if worker is workers[0] else _LONGEST
                self._started.append(Worker(f"funcpipe {worker.row.name}", self.stop, patience))
                self._started[-1].give(partial(worker.run, first))
                self._started[-1].dismiss()
        self.allow(first)
        for thread in self._started:
            thread.start()

    def allow(self, handed: int) -> None:
        """Let all workers be as far ahead of the loop, which has so many batches, as their leads say."""
        for worker in self.all:
            if worker.row.thread:
                worker.meter.room.put(handed + worker.row.lead, None)

    def finish(self, end: int) -> None:
        """No batch from this one on will come."""
        with self._ending:
            self.end = min(end, self.end)

    def stop(self) -> None:
        """End all workers as soon as they look."""
        self.closed = True
        for meter in self.meters:
            meter.input.stop()
            meter.room.stop()

    def abandon(self, error: BaseException) -> None:
        """End everything at once because of an error that is no Exception."""
        if not (isinstance(error, Stop) and self.closed):
            self._abort = self._abort or error
            self.stop()

    def taken_abort(self) -> BaseException | None:
        """The error that ended everything at once, for the loop to raise."""
        abort, self._abort = self._abort, None
        return abort

    def close(self, timeout: float | None) -> str:
        """Stop all, and wait for so many seconds; the names of the threads that are left."""
        self.stop()
        end_all(self._started, timeout)
        late = ", ".join(thread.name for thread in self._started if thread.alive and not thread.is_here)
        self._settle()
        self._started = []
        return late

    def forget(self) -> None:
        """End the threads of an overlap that nobody holds any more.

        The one that draws is waited for a moment: the source may be given to another overlap at once.
        """
        self.stop()
        inside = self.process != os.getpid() or any(thread.is_here for thread in self._started)
        if self._started and self.all[0].row.thread and not inside:
            self._started[0].end(PATIENCE)
        self._settle()

    def _settle(self) -> None:
        """Queue what the loop does next after all that was under way."""
        for worker in self.all:
            self.here.wait(worker.streams.marks())
        self.all = ()  # they know these workers: a circle would keep batches until the collector comes
