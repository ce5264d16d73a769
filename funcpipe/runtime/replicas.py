"""The way of a stage to its replicas: parameters are gathered on it, and gradients summed."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcpipe.runtime.connection import LostError, Way, lost_by_device
from funcpipe.runtime.mail import Mailbox
from funcpipe.runtime.worker import Worker

GiveSums: TypeAlias = Callable[[], list[Tensor | None]]
"""Gives the sums of a stage's gradients over its replicas to the stream that the calling thread queues on."""


Told: TypeAlias = Callable[[GiveSums], None]
"""Who is told that they are there, from any thread."""


@dataclass(frozen=True)
class Summed:
    """The key under which a lane is given the `GiveSums` of a stage. No tuple: those are the keys of free slots."""

    stage: int


class Reduction:
    """A sum of a stage's gradients over its replicas, in progress. G writes it, S reads it, and the caller takes it.

    Args:
        stage: its number.
        box: the mailbox of the stage's lane; None: only the caller waits.

    Attributes:
        wait_at_end: waits on the caller's thread, and returns the function that gives the sums.
    """

    def __init__(self, stage: int, box: Mailbox | None) -> None:
        self._key, self._box = Summed(stage), box
        self._give: GiveSums | None = None
        self.wait_at_end: Callable[[], GiveSums] | None = None

    def deliver(self, give: GiveSums) -> None:
        """Deliver the finished sums to the lane and to the caller. Any thread may call this."""
        self._give = give
        if self._box is not None:
            self._box.put(self._key, give)

    def wait(self, stream: Any = None) -> None:
        """Wait on the stage's lane, by its mailbox. The signature is that of ``torch.cuda.Event.wait``."""
        assert self._box is not None
        if self._key not in self._box.came:
            self._box.wait(self._key)

    synchronize = wait

    def sums_on_lane(self) -> list[Tensor | None]:
        """Wait on the stage's lane, and return the sums."""
        self.wait()
        assert self._box is not None
        return self._box.came.pop(self._key)()

    def sums_at_end(self) -> list[Tensor | None]:
        """Wait on the caller's thread, and return the sums. Raises PeerError."""
        give = self._give
        if give is None:
            assert self.wait_at_end is not None
            give = self.wait_at_end()
        return give()

    def spend(self) -> None:
        """Release the sums after a step has used them."""
        self._give = self.wait_at_end = None


class Sharding(NamedTuple):
    """How the replicas have a tensor: in parts along an axis, as even as those of `torch.chunk`, some may be empty."""

    axis: int

    def part(self, whole: Tensor, replica: int, replicas: int) -> Tensor:
        """The part of a replica, a view."""
        length = whole.shape[self.axis]
        size = -(-length // replicas)
        start = min(size * replica, length)
        return whole.narrow(self.axis, start, min(size, length - start))


def dtensor_of(local: Tensor, like: Any) -> Any:
    """What is here of a tensor as all of it: a DTensor that is spread like another."""
    stride = torch.empty(like.shape, device="meta").stride()
    layout = {"run_check": False, "shape": like.shape, "stride": stride}
    return type(like).from_local(local, like.device_mesh, like.placements, **layout)


class Replicas:
    """Gathers and sums in a thread of its own, while the lanes go on; one after the other, all in the same order.

    Where the stage is on a device with streams, all of it goes on one of its own, after what the lane has queued.
    """

    def __init__(self, way: Way, me: int) -> None:
        self.connection, self.lost, self.stream, self.me = way.connection, way.lost, way.stream, me
        self.ranks = [*way.connection.seats]
        self.worker = Worker(f"funcpipe replicas {way.name}", patience=1.0)
        self.worker.start()

    def greet(self) -> None:
        """Connect the devices, where they are joined."""
        if self.stream is not None:
            self.stream.greet("all")

    def gather(self, parts: Sequence[tuple[Tensor, Sequence[Tensor]]], done: Callable[[Any], None]) -> None:
        """Begin to fetch the parts of the others: of each tensor what is here, and rooms for all, by replica.

        ``done`` gets the event after which they are there; None: they are.
        """
        queued = self._queued()

        def work() -> None:
            with queued:
                for mine, rooms in parts:
                    self._swap(dict.fromkeys(self.ranks, mine), dict(zip(self.ranks, rooms, strict=True)))
            done(self._over([tensor for mine, rooms in parts for tensor in (mine, *rooms)]))

        self._give(work, "parameters cannot be gathered")

    def begin(
        self, gradients: Sequence[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> queue.SimpleQueue[Any]:
        """Begin to sum. The `GiveSums` are told, and put into the queue that is returned, in a tuple.

        Of what is cut this replica gets its part. What was given has no memory afterwards.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        queued = self._queued()

        def total(gradient: Tensor | None, cut: Sharding | None) -> Tensor | None:
            if gradient is None:
                return None
            out = self._sum(gradient, cut)
            self._over([here(gradient)])
            here(gradient).untyped_storage().resize_(0)
            return out

        def work() -> None:
            with torch.no_grad(), queued:
                sums = [total(gradient, cuts.get(number)) for number, gradient in enumerate(gradients)]
            ready = partial(self._taken, sums, self._over([]))
            told(ready)
            answers.put((ready,))

        self._give(work, "gradients cannot be summed")
        return answers

    def _taken(self, sums: list[Tensor | None], event: Any) -> list[Tensor | None]:
        """The sums, for the stream that the calling thread queues on."""
        if self.stream is not None:
            self.stream.hand([here(each) for each in sums if each is not None], event)
        return sums

    def _queued(self) -> AbstractContextManager[object]:
        """Inside, what is queued comes after what the calling thread has queued by now."""
        return nullcontext() if self.stream is None else self.stream.after(self.stream.now())

    def _over(self, tensors: Sequence[Tensor]) -> Any:
        """The event after what is queued, which uses these tensors."""
        if self.stream is None:
            return None
        self.stream.used(tensors)
        return self.stream.over()

    def _give(self, job: Callable[[], None], text: str) -> None:
        def work() -> None:
            try:
                job()
            except LostError as error:
                self.lost(error)
            except torch.distributed.DistBackendError as error:
                others = [rank for rank in self.ranks if rank != self.me]
                self.lost(lost_by_device(others[0] if len(others) == 1 else -1, error))
            except Exception as error:
                self.lost(LostError(self.me, f"its {text}: {type(error).__name__}: {error}"))

        self.worker.give(work)

    def _sum(self, gradient: Tensor, cut: Sharding | None) -> Tensor:
        """The sum over all replicas, in their order: the same bits for each. Of a DTensor each has the same part."""
        own = here(gradient)
        if own is not gradient:
            return dtensor_of(self._sum(own, cut), gradient)
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
        dense = {
            rank: room if room.is_contiguous() else torch.empty_like(room, memory_format=torch.contiguous_format)
            for rank, room in rooms.items()
        }
        if self.stream is None:
            self._exchange(theirs, dense)
        elif self.stream.group is not None:
            self.stream.swap([*theirs.values()], [dense[rank] for rank in theirs])
        else:
            different = {id(tensor): tensor for tensor in theirs.values()}
            copies = dict(zip(different, self.stream.copies_on_host([*different.values()]), strict=True))
            self.stream.over().synchronize()
            landed = {rank: torch.empty(room.shape, dtype=room.dtype) for rank, room in dense.items()}
            self._exchange({rank: copies[id(tensor)] for rank, tensor in theirs.items()}, landed)
            for rank, room in landed.items():
                if rank != self.me:
                    self.stream.backend.fill(dense[rank], room)
        for rank, room in rooms.items():
            if rank != self.me and dense[rank] is not room:
                room.copy_(dense[rank])

    def _exchange(self, theirs: Mapping[int, Tensor], rooms: Mapping[int, Tensor]) -> None:
        """The same in the memory of hosts, with dense rooms."""
        sent = {
            rank: self.connection.send(tensor, rank)
            for rank, tensor in theirs.items()
            if rank != self.me and tensor.numel()
        }
        for rank, room in rooms.items():
            if rank != self.me and room.numel():
                self.connection.finish([self.connection.receive(room, rank)], rank)
        for rank, work in sent.items():
            self.connection.finish([work], rank)


def here(tensor: Any) -> Tensor:
    """What is here of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
