"""The way of a stage to its replicas: parameters are gathered on it, and gradients summed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.runtime.edge import Connection, LostError
from funcpipe.runtime.worker import Worker


class Sharding(NamedTuple):
    """How the replicas have a tensor: in parts along an axis, as even as those of `torch.chunk`, some may be empty."""

    axis: int

    def part(self, whole: Tensor, replica: int, replicas: int) -> Tensor:
        """The part of a replica, a view."""
        length = whole.shape[self.axis]
        size = -(-length // replicas)
        start = min(size * replica, length)
        return whole.narrow(self.axis, start, min(size, length - start))


class Replicas:
    """Gathers and sums in a thread of its own, while the lanes go on; one after the other, all in the same order."""

    def __init__(self, connection: Connection, me: int, name: str, lost: Callable[[LostError], None]) -> None:
        self.connection, self.me, self.lost = connection, me, lost
        self.ranks = [*connection.seats]
        self.worker = Worker(f"funcpipe replicas {name}", patience=1.0)
        self.worker.start()

    def gather(self, parts: Sequence[tuple[Tensor, Sequence[Tensor]]], done: Callable[[], None]) -> None:
        """Begin to fetch the parts of the others: of each tensor what is here, and rooms for all, by replica."""

        def work() -> None:
            for mine, rooms in parts:
                self._swap(dict.fromkeys(self.ranks, mine), dict(zip(self.ranks, rooms, strict=True)))
            done()

        self._give(work, "parameters cannot be gathered")

    def begin(
        self, gradients: Sequence[Tensor | None], cuts: Mapping[int, Sharding], answers: queue.SimpleQueue[Any]
    ) -> None:
        """Begin to sum; the sums are put into the queue, in a tuple. Of what is cut this replica gets its part.

        What was given has no memory afterwards.
        """

        def total(gradient: Tensor | None, cut: Sharding | None) -> Tensor | None:
            if gradient is None:
                return None
            out = self._sum(gradient, cut)
            gradient.untyped_storage().resize_(0)
            return out

        def work() -> None:
            with torch.no_grad():
                answers.put(([total(gradient, cuts.get(number)) for number, gradient in enumerate(gradients)],))

        self._give(work, "gradients cannot be summed")

    def _give(self, job: Callable[[], None], text: str) -> None:
        def work() -> None:
            try:
                job()
            except LostError as error:
                self.lost(error)
            except Exception as error:
                self.lost(LostError(self.me, f"its {text}: {type(error).__name__}: {error}"))

        self.worker.give(work)

    def _sum(self, gradient: Tensor, cut: Sharding | None) -> Tensor:
        """The sum over all replicas, in their order: the same bits for each."""
        if cut is None:
            theirs = dict.fromkeys(self.ranks, gradient.contiguous())
        else:
            count = len(self.ranks)
            pieces = [cut.part(gradient, replica, count).contiguous() for replica in range(count)]
            theirs = dict(zip(self.ranks, pieces, strict=True))
        parts = {rank: torch.empty_like(theirs[self.me]) for rank in self.ranks}
        parts[self.me] = theirs[self.me]
        self._swap(theirs, parts)
        return reduce(add, parts.values())

    def _swap(self, theirs: Mapping[int, Tensor], rooms: Mapping[int, Tensor]) -> None:
        """Send each other replica a tensor, and receive its own into a room."""
        sent = {
            rank: self.connection.send(tensor, rank)
            for rank, tensor in theirs.items()
            if rank != self.me and tensor.numel()
        }
        for rank, room in rooms.items():
            if rank != self.me and room.numel():
                dense = room if room.is_contiguous() else torch.empty_like(room, memory_format=torch.contiguous_format)
                self.connection.finish([self.connection.receive(dense, rank)], rank)
                if dense is not room:
                    room.copy_(dense)
        for rank, work in sent.items():
            self.connection.finish([work], rank)
