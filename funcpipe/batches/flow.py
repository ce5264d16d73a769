"""What the threads of an overlap share: batches between rows, states of the fold, and how far the loop is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Condition
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from funcpipe.batches.rail import Mark, Rail
from funcpipe.batches.ticks import Ticks
from funcpipe.core.errors import FuncpipeError
from funcpipe.core.torch_names import version as written
from funcpipe.core.tree import Tree, flatten, locations


class Closed(BaseException):
    """Ends a row's work; never leaves the package."""


class Item(NamedTuple):
    """A batch between two rows.

    Attributes:
        batch: its number.
        value: itself; None where it failed.
        error: what a row raised for it, to be raised where its result would come.
        marks: after which it is there.
    """

    batch: int
    value: Any = None
    error: BaseException | None = None
    marks: tuple[Mark, ...] = ()


class State(NamedTuple):
    """A state of the fold.

    Attributes:
        tree: itself.
        marks: after which it is there.
        versions: its tensors with their counts of in-place writes, as they were when it was made.
    """

    tree: Tree
    marks: tuple[Mark, ...]
    versions: tuple[tuple[str, Tensor, int], ...]


class Release(NamedTuple):
    """What a reader has done with: memory that the row that made it may use again, once its stream has waited."""

    marks: tuple[Mark, ...]
    value: Any


@dataclass
class Meter:
    """What a row has done so far; one thread writes it. Times in seconds of the host."""

    batches: int = 0
    busy: float = 0.0
    input: float = 0.0
    room: float = 0.0
    spans: list[tuple[float, float, int]] | None = None

    def add(self, start: float, batch: int) -> None:
        """The row has worked on a batch, since ``start``."""
        end = perf_counter()
        self.batches += 1
        self.busy += end - start
        if self.spans is not None:
            self.spans.append((start, end, batch))


@dataclass
class States:
    """The last states of the fold, the newest last.

    Attributes:
        version: how many batches the newest has seen.
        watched: is any older one read, so that it must not be written into.
    """

    kept: deque[State]
    version: int
    watched: bool


@dataclass
class Flow:
    """The state of an overlap.

    What several threads write, or wait for, changes under ``changed``; ``drawn`` and ``snapshots`` grow by the row that
    draws alone, and each row writes its own meter.

    Attributes:
        plan: what is done.
        handed: how many batches the loop has, counted from the first of all: the tick.
        drawn: how many were drawn.
        end: the first batch that will not come; None: not known yet.
        stopping: draw no more.
        closed: stop.
        abort: what a thread raised that ends everything at once.
        edges: for each row, what it has made and the next has not taken.
        released: for each row, memory that comes back to it ("ring").
        snapshots: of the source, before each batch that is under way was drawn.
    """

    plan: Ticks
    handed: int
    drawn: int
    states: States
    meters: list[Meter]
    ring: bool
    changed: Condition = field(default_factory=Condition)
    end: int | None = None
    stopping: bool = False
    closed: bool = False
    abort: BaseException | None = None
    edges: list[deque[Item]] = field(init=False)
    released: list[list[Release]] = field(init=False)
    snapshots: deque[Any] = field(default_factory=deque[Any])

    def __post_init__(self) -> None:
        self.edges = [deque() for _ in self.plan.rows]
        self.released = [[] for _ in self.plan.rows]

    def stop(self) -> None:
        """End all rows as soon as they look."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def finish(self, end: int) -> None:
        """No batch from this one on will come."""
        with self.changed:
            self.end = end if self.end is None else min(end, self.end)
            self.changed.notify_all()

    def look(self) -> None:
        """Raise what ends everything."""
        if self.abort is not None:
            error, self.abort = self.abort, None
            try:
                raise error
            finally:
                del error
        if self.closed:
            raise Closed

    def room(self, row: int, batch: int) -> bool:
        """Wait until the row may be so far ahead. False: there is no such batch."""
        lead, meter = self.plan.rows[row].lead, self.meters[row]
        with self.changed:
            while True:
                self.look()
                if self.end is not None and batch >= self.end:
                    return False
                if self.stopping and row == 0:
                    self.end = batch
                    self.changed.notify_all()
                    return False
                if batch <= self.handed + lead:
                    return True
                start = perf_counter()
                self.changed.wait()
                meter.room += perf_counter() - start

    def take(self, row: int, batch: int) -> Item | None:
        """Wait for what the row has made of a batch, and take it. None: there is no such batch."""
        edge = self.edges[row]
        meter = self.meters[row + 1]
        with self.changed:
            while not edge:
                self.look()
                if self.end is not None and batch >= self.end:
                    return None
                start = perf_counter()
                self.changed.wait()
                meter.input += perf_counter() - start
            return edge.popleft() if self.end is None or batch < self.end else None

    def put(self, row: int, item: Item) -> None:
        """Hand a batch to the next row."""
        with self.changed:
            self.edges[row].append(item)
            self.changed.notify_all()

    def state(self, batch: int, lag: int) -> State:
        """The state that a stage with this lag reads for a batch; its lead is no larger, so it is there."""
        with self.changed:
            states = self.states
            back = states.version - max(batch - lag, states.version - len(states.kept) + 1)
            return states.kept[-1 - back]

    def publish(self, tree: Tree, rail: Rail) -> None:
        """A new state of the fold.

        Raises:
            FuncpipeError: an older one was written into, and somebody reads it.
        """
        states = self.states
        if states.watched:
            for place, tensor, version in (one for state in states.kept for one in state.versions):
                if written(tensor) != version:
                    raise FuncpipeError(f"the fold writes into its state in place ({place}), and a stage with lag= reads older states; return new tensors (clone, or an optimizer that is a function)")  # fmt: skip
        new = made(tree, rail, watched=states.watched)
        with self.changed:
            states.kept.append(new)
            states.version += 1

    def give_back(self, row: int, release: Release) -> None:
        """Memory comes back to every stage up to this row: what was only handed on may be an earlier one's."""
        with self.changed:
            for number in range(1, row + 1):
                self.released[number].append(release)

    def come_back(self, row: int) -> list[Release]:
        """Take what came back to a row."""
        with self.changed:
            found, self.released[row] = self.released[row], []
            return found


def made(tree: Tree, rail: Rail, *, watched: bool) -> State:
    """A state as the fold left it."""
    if not watched:
        return State(tree, rail.marks(), ())
    pairs = zip(flatten(tree)[0], locations(tree, "state"), strict=True)
    tensors = [(place, leaf) for leaf, place in pairs if isinstance(leaf, Tensor) and not leaf.is_inference()]
    return State(tree, rail.marks(), tuple((place, leaf, written(leaf)) for place, leaf in tensors))


def first_states(init: Tree, earlier: Sequence[Tree], start: int, lag: int | None, rail: Rail) -> States:
    """The states before the first batch."""
    most = lag or 0
    watched = most > 0
    kept = [made(tree, rail, watched=watched) for tree in (*earlier, init)]
    return States(deque(kept, maxlen=most + 1), start, watched)
