"""The work of one row on one batch, in a thread of its own or in that of the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from funcpipe.batches.device import ToDevice
from funcpipe.batches.flow import Flow, Item, Release
from funcpipe.batches.leaves import firm, streamed
from funcpipe.batches.rail import Rail
from funcpipe.batches.stage import BatchStage
from funcpipe.core.errors import Where, at_batch
from funcpipe.core.tree import Tree
from funcpipe.runtime.context import Context
from funcpipe.runtime.rng import Keyed, Keys
from funcpipe.runtime.stream import Place


class BatchKeys(Keys):
    """Keys of the draws of a batch stage: its seed, its name, the number of the batch."""

    def __init__(self, seed: int, name: str) -> None:
        super().__init__(seed, ())
        self.name = name

    def path(self, stage: int, layer: str, part: Any = None) -> str:
        """All draws are the stage's."""
        return self.name

    def claim(self, stage: int, layer: str, what: Any, part: Any = None) -> None:
        """Names of stages differ, and there is a seed."""


class Around:
    """What was switched on where `overlap` was called, for every row but the fold."""

    def __init__(self) -> None:
        self.context = Context()
        self.grad = torch.is_grad_enabled()
        self.threads = torch.get_num_threads()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside it is on."""
        stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with self.context.entered(), torch.set_grad_enabled(self.grad), stream:
            yield


@dataclass
class Row:
    """A row of the plan at work. It knows the flow and not its handle, so that the handle can be collected.

    Attributes:
        flow: what is shared.
        number: of the row; 0 is the source.
        name: for errors.
        rail: its streams.
        ahead: streams of the row that reads.
        stage: what it does; None: it draws from the source.
        draw: the source's ``next``.
        snapshot: of the source, called before each draw.
        threaded: has it a thread.
    """

    flow: Flow
    number: int
    name: str
    rail: Rail
    ahead: Rail
    stage: BatchStage | None
    draw: Callable[[], Any] | None
    snapshot: Callable[[], Any] | None
    threaded: bool

    def every(self, first: int, around: Around) -> None:
        """In a thread: all batches from the first."""
        torch.get_num_threads()  # else torch takes at the first operation what another thread has set since
        torch.set_num_threads(around.threads)
        with around.entered(), self.rail.entered():
            while self.perform(first):
                first += 1

    def perform(self, batch: int) -> bool:
        """Do the row's work on a batch. False: there is no such batch."""
        if not self.flow.room(self.number, batch):
            return False
        if self.stage is None:
            item = self._draw(batch)
        else:
            given = self.flow.take(self.number - 1, batch)
            item = given if given is None or given.error is not None else self._work(self.stage, given)
            given = None  # what is read is dropped as soon as it is used
        if item is None:
            return False
        self.flow.put(self.number, item)
        item = None  # an error's traceback leads here, and must not come back to the error
        return True

    def where(self, batch: int) -> Where:
        """The coordinates of what fails."""
        if self.stage is None:
            return Where(None, self.name, None, "next(source)", "", batch)
        return Where(self.number - 1, self.name, None, "overlap", "", batch)

    def failed(self, batch: int, error: Exception) -> Item:
        """An error in the place of a batch: nothing after it is wanted any more."""
        self.flow.finish(batch + 1)
        return Item(batch, error=at_batch(no_end(error, self.name), self.where(batch)))

    def reclaim(self) -> None:
        """In a ring: memory that came back is dropped after the stream has waited for those who read it."""
        for release in self.flow.come_back(self.number):
            self.rail.wait(release.marks)

    def _draw(self, batch: int) -> Item | None:
        """Draw. The source's state before the next draw is looked at before this batch goes on."""
        flow, draw = self.flow, self.draw
        assert draw is not None
        start = perf_counter()
        try:
            if not flow.snapshots:
                self._look()
            try:
                value = draw()
            except StopIteration:
                flow.finish(batch)
                return None
            self._look()
        except Exception as error:
            return self.failed(batch, error)
        flow.meters[self.number].add(start, batch)
        flow.drawn += 1
        # What lies on the host is there: its copy to a device waits for nothing that the loop has queued.
        marks = self.rail.marks() if streamed(Place.backend, value) else ()
        return Item(batch, value, marks=marks)

    def _look(self) -> None:
        if self.snapshot is not None:
            self.flow.snapshots.append(deepcopy(self.snapshot()))

    def _work(self, stage: BatchStage, item: Item) -> Item:
        rail, flow = self.rail, self.flow
        start = perf_counter()
        try:
            with rail.entered():
                self.reclaim()
                rail.wait(item.marks)
                if not flow.ring or self.number == 1:  # what the source made is no row's to take back
                    rail.use(item.value, item.marks)
                value = firm(self._call(stage, item)) if rail.devices else self._call(stage, item)
                marks = rail.marks()
            if flow.ring and rail.devices:
                flow.give_back(self.number - 1, Release(marks, item.value))
            return Item(item.batch, value, marks=marks)
        except Exception as error:
            return self.failed(item.batch, error)
        finally:
            flow.meters[self.number].add(start, item.batch)

    def _call(self, stage: BatchStage, item: Item) -> Tree:
        fn = stage.fn
        if isinstance(fn, ToDevice):
            return self._copy(fn, item.value)
        given: list[Any] = [item.value]
        if stage.lag is not None:
            state = self.flow.state(item.batch, stage.lag)
            self.rail.wait(state.marks)
            given.insert(0, state.tree)
        words = {"index": item.batch} if stage.indexed else {}
        with ExitStack() as stack:
            if stage.grad is not None:
                stack.enter_context(torch.set_grad_enabled(stage.grad))
            if stage.autocast is not None:
                stack.enter_context(autocast(stage.autocast, self.rail))
            if stage.seed is not None:
                stack.enter_context(Keyed(BatchKeys(stage.seed, stage.name), 0, {}, item.batch))
            return fn(*given, **words)

    def _copy(self, fn: ToDevice, batch: Tree) -> Tree:
        if fn.memory == "side" or not self.rail.devices:
            return fn(batch, threaded=self.threaded)
        with self.ahead.entered():
            rooms = fn.rooms(batch)
            marks = self.ahead.marks()
        self.rail.wait(marks)
        return fn.fill(batch, rooms, threaded=self.threaded)


def autocast(dtype: torch.dtype, rail: Rail) -> torch.autocast:
    """Autocast on the kind of device that a row works on."""
    kind = rail.devices[0].type if rail.devices else "cpu"
    return torch.autocast(kind, dtype)


def no_end(error: Exception, name: str) -> Exception:
    """The error; one that would pass for the end of the data becomes a RuntimeError, as in generators."""
    if not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"{name!r} raised StopIteration")
    told.__cause__ = error
    return told
