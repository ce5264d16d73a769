"""The work of the source or of one stage on one batch, in a thread of its own or in that of the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

import torch

from funcpipe.batches.device import ToDevice
from funcpipe.batches.leaves import materialized_tree, streamed
from funcpipe.batches.stage import BatchStage, Fold
from funcpipe.batches.streams import StreamSet
from funcpipe.batches.ticks import TickRow
from funcpipe.batches.workers import Item, Meter, Queue, Workers
from funcpipe.core.errors import Where, at_batch
from funcpipe.core.tree import Tree
from funcpipe.runtime.context import CallerContext
from funcpipe.runtime.mail import Stop
from funcpipe.runtime.rng import KeyedDraws, Keys
from funcpipe.runtime.stream import Place
from funcpipe.runtime.worker import compute_with


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


class CallerModes:
    """The modes that were on where `overlap` was called, for all stages but the fold."""

    def __init__(self) -> None:
        self.context = CallerContext()
        self.grad = torch.is_grad_enabled()
        self.threads = torch.get_num_threads()
        self.stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside, these modes are on."""
        stream = nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
        with self.context.entered(), torch.set_grad_enabled(self.grad), stream:
            yield


@dataclass(eq=False)
class StageWorker:
    """Takes batches from the worker before it and hands each on, or None where there is no such batch.

    Number 0 draws from the source and has no stage.
    """

    shared: Workers
    number: int
    row: TickRow
    around: CallerModes
    streams: StreamSet
    stage: BatchStage | None
    draw: Callable[[], Any]
    snapshot: Callable[[], Any] | None

    @property
    def meter(self) -> Meter:
        """What it waits for and has done."""
        return self.shared.meters[self.number]

    @property
    def output(self) -> Queue:
        """The inbox of the next worker, or of the loop."""
        return self.shared.meters[self.number + 1].input

    def run(self, first: int) -> None:
        """In a thread: all batches from the first."""
        try:
            compute_with(self.around.threads)
            with self.around.entered(), self.streams.entered():
                for batch in count(first):
                    self.meter.room.take(batch)
                    if not self.perform(batch):
                        break
        except BaseException as error:  # no Exception: those are values
            self.shared.abandon(error)

    def perform(self, batch: int) -> bool:
        """Work on a batch and hand it on. False: none is wanted after it."""
        if self.shared.closed:
            raise Stop
        item = None
        if batch < self.shared.end:
            item = self._draw(batch) if self.stage is None else self._work(self.stage, batch)
        self.output.put(batch, item)
        goes_on = item is not None and item.error is None
        item = None  # an error's traceback leads here, and must not come back to the error
        return goes_on

    def _failed(self, batch: int, error: Exception) -> Item:
        """An error in the place of a batch: nothing after it is wanted any more."""
        self.shared.finish(batch + 1)
        return failed(None if self.stage is None else self.number - 1, self.row.name, batch, error)

    def _draw(self, batch: int) -> Item | None:
        """Draw. The source's state before the next draw is looked at before this batch goes on."""
        shared = self.shared
        start = perf_counter()
        try:
            if not shared.snapshots:
                self._look()
            try:
                if shared.stopping:
                    raise StopIteration
                with self.meter.ranges(batch):
                    value = self.draw()
            except StopIteration:
                shared.finish(batch)
                return None
            self._look()
        except Exception as error:
            return self._failed(batch, error)
        self.meter.add(start, batch)
        # What lies on the host is there: its copy to a device waits for nothing that the loop has queued.
        return Item(value, marks=self.streams.marks() if streamed(Place.backend, value) else ())

    def _look(self) -> None:
        if self.snapshot is not None:
            self.shared.snapshots.append(deepcopy(self.snapshot()))

    def _work(self, stage: BatchStage, batch: int) -> Item | None:
        streams = self.streams
        item: Item | None = self.meter.input.take(batch)
        if item is None or item.error is not None:
            return item
        start = perf_counter()
        try:
            with streams.entered():
                streams.wait(item.marks)
                streams.use(item.value, item.marks)
                with self.meter.ranges(batch):
                    value = self._call(stage, batch, item.value)
                value = materialized_tree(value) if streams.devices else value
                marks = streams.marks()
            return Item(value, marks=marks)
        except Exception as error:
            return self._failed(batch, error)
        finally:
            self.meter.add(start, batch)

    def _call(self, stage: BatchStage, batch: int, value: Tree) -> Tree:
        if isinstance(stage.fn, ToDevice):
            return stage.fn(value, threaded=self.row.thread)
        arguments = [value]
        if stage.lag is not None:
            state = self.shared.states.read(batch, stage.lag)
            self.streams.wait(state.marks)
            arguments.insert(0, state.tree)
        with ExitStack() as stack:
            if stage.grad is not None:
                stack.enter_context(torch.set_grad_enabled(stage.grad))
            if stage.seed is not None:
                stack.enter_context(KeyedDraws(BatchKeys(stage.seed, stage.name), 0, {}, batch))
            return call(stage, self.streams, batch, *arguments)


def call(stage: BatchStage | Fold, streams: StreamSet, batch: int, *arguments: Tree) -> Any:
    """Call the function of a stage, with the number of the batch and under autocast where it asks for them."""
    keywords = {"index": batch} if stage.indexed else {}
    if stage.autocast is None:
        return stage.fn(*arguments, **keywords)
    with torch.autocast(streams.devices[0].type if streams.devices else "cpu", stage.autocast):
        return stage.fn(*arguments, **keywords)


def failed(stage: int | None, name: str, batch: int, error: Exception) -> Item:
    """An error in the place of a batch. StopIteration, which would pass for the end, becomes a RuntimeError."""
    if isinstance(error, StopIteration):
        error, cause = RuntimeError(f"{name!r} raised StopIteration"), error
        error.__cause__ = cause
    origin = "next(source)" if stage is None else "overlap"
    return Item(error=at_batch(error, Where(stage, name, None, origin, "", batch)))
