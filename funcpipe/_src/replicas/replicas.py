"""The replicas of a stage: gradients are summed over them, and parameters gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.engine.worker import Worker
from funcpipe._src.processes.device_stream import DeviceStream

if TYPE_CHECKING:
    from funcpipe._src.processes.team import Team

_WINDOW = 1 << 26
"""Gradients of so many bytes are summed at once, or one that has more."""

GiveSums: TypeAlias = Callable[[], list[Tensor | None]]
"""Gives the sums of a stage's gradients over its replicas to the stream that the calling thread
queues on."""


Told: TypeAlias = Callable[[GiveSums], None]
"""Who is told that they are there, from any thread."""


@dataclass(frozen=True)
class Summed:
    """The key under which a lane is given the `GiveSums` of a stage. No tuple: those are the keys
    of free slots."""

    stage: int


class Reduction:
    """A sum of a stage's gradients over its replicas, in progress. G writes it, S reads it, and the
    caller takes it.

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
        """Wait on the stage's lane, by its mailbox. The signature is that of
        ``torch.cuda.Event.wait``."""
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
    """How the replicas have a tensor: in parts along an axis, as even as those of `torch.chunk`,
    some may be empty."""

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
    """Gathers and sums in a thread beside the lane; one after the other, in all replicas in the
    same order.

    Each replica adds up one piece of a gradient, in the order of the replicas, and sends the others
    the sum: so all have the same bits, and a replica sends at most twice a gradient's size. Where
    the stage is on a device with streams, all goes on one of its own, after what the lane has
    queued.

    Args:
        team: the other processes.
        stage: the number of the stage.
        ranks: the processes that have it, by replica.
        worker: the thread, one for all stages of a lane.
        stream: where the stage is on a device with streams, one of these.
    """

    def __init__(
        self,
        team: Team,
        stage: int,
        ranks: Sequence[int],
        worker: Worker,
        stream: DeviceStream | None,
    ) -> None:
        self.team, self.ranks, self.me, self.stream = team, [*ranks], team.rank, stream
        self._worker, self._channel = worker, team.channel(stage + 1)

    def gather(
        self, parts: Sequence[tuple[Tensor, Sequence[Tensor]]], done: Callable[[Any], None]
    ) -> None:
        """Begin to fetch the parts of the others: of each tensor what is here, and rooms for all,
        by replica.

        ``done`` gets the event after which they are there; None: they are.
        """
        queued = self._queued()

        def work() -> None:
            with queued:
                takes = [
                    self._swap(
                        dict.fromkeys(self.ranks, mine), dict(zip(self.ranks, rooms, strict=True))
                    )
                    for mine, rooms in parts
                ]
                for take in takes:
                    take()
                self._channel.drain()
            done(self._over([tensor for mine, rooms in parts for tensor in (mine, *rooms)]))

        self._give(work)

    def begin(
        self, gradients: Sequence[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> Any:
        """Begin to sum. The `GiveSums` are told, and come to the caller's box under the key that is
        returned.

        Of what is cut this replica gets its part. What was given has no memory afterwards.
        """
        queued, key = self._queued(), object()

        def work() -> None:
            with torch.no_grad(), queued:
                sums = self._sums(gradients, cuts)
            ready = partial(self._taken, sums, self._over([]))
            told(ready)
            self.team.caller.box.put(key, ready)

        self._give(work)
        return key

    def _sums(
        self, gradients: Sequence[Tensor | None], cuts: Mapping[int, Sharding]
    ) -> list[Tensor | None]:
        """The sums of gradients over all replicas; of a DTensor each replica has the same part."""
        sums: list[Tensor | None] = [None] * len(gradients)
        for numbers in _windows(gradients):
            added = {
                number: self._add(here(gradients[number]), cuts.get(number)) for number in numbers
            }
            shared = {number: begin_to_share() for number, begin_to_share in added.items()}
            for number, finish in shared.items():
                total, gradient = finish(), gradients[number]
                sums[number] = total if here(gradient) is gradient else dtensor_of(total, gradient)
            self._channel.drain()
            for number in numbers:
                self._over([here(gradients[number])])
                here(gradients[number]).untyped_storage().resize_(0)
        return sums

    def _add(self, gradient: Tensor, cut: Sharding | None) -> Callable[[], Callable[[], Tensor]]:
        """Begin to send the pieces of a gradient.

        Returns:
            What adds up the piece of this replica and begins to send the sum, and returns what
            waits for the whole.
        """
        count, seat = len(self.ranks), self.ranks.index(self.me)
        flat = gradient.contiguous().reshape(-1)
        pieces = (
            [cut.part(gradient, replica, count).contiguous() for replica in range(count)]
            if cut
            else [*flat.tensor_split(count)]
        )
        rooms = [torch.empty_like(pieces[seat]) for _ in self.ranks]
        rooms[seat] = pieces[seat]
        take = self._swap(
            dict(zip(self.ranks, pieces, strict=True)), dict(zip(self.ranks, rooms, strict=True))
        )

        def share() -> Callable[[], Tensor]:
            take()
            total = reduce(add, rooms)
            if cut is not None:
                return lambda: total
            whole = torch.empty_like(flat)
            parts = dict(zip(self.ranks, whole.tensor_split(count), strict=True))
            parts[self.me].copy_(total)
            wait = self._swap(dict.fromkeys(self.ranks, total), parts)

            def finish() -> Tensor:
                wait()
                return whole.view(gradient.shape)

            return finish

        return share

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

    def _give(self, job: Callable[[], None]) -> None:
        others = [rank for rank in self.ranks if rank != self.me]
        self._worker.give(partial(self.team.safely, job, others[0] if len(others) == 1 else -1))

    def _swap(
        self, theirs: Mapping[int, Tensor], rooms: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Begin to send each other replica a dense tensor; returns what receives theirs into the
        rooms."""
        others = [rank for rank in self.ranks if rank != self.me]
        stream = self.stream
        if stream is not None and stream.group is not None:
            dense = {
                rank: room
                if room.is_contiguous()
                else torch.empty_like(room, memory_format=torch.contiguous_format)
                for rank, room in rooms.items()
            }
            stream.swap([theirs[rank] for rank in self.ranks], [dense[rank] for rank in self.ranks])
            for rank in others:
                if dense[rank] is not rooms[rank]:
                    rooms[rank].copy_(dense[rank])
            return lambda: None
        if stream is not None:
            different = {id(tensor): tensor for rank, tensor in theirs.items() if rank != self.me}
            copies = dict(zip(different, stream.copies_on_host([*different.values()]), strict=True))
            stream.over().synchronize()
            theirs = {rank: copies[id(theirs[rank])] for rank in others}
        for rank in others:
            if theirs[rank].numel():
                self._channel.post(rank, theirs[rank])

        def take() -> None:
            for rank in others:
                room = rooms[rank]
                if room.numel():
                    came = TensorLayout.of(room).view_of(self._channel.take(rank))
                    room.copy_(came) if stream is None else stream.backend.fill(room, came)

        return take


def _windows(gradients: Sequence[Tensor | None]) -> list[list[int]]:
    """The numbers of gradients that are summed at once: their messages overlap, and their memory is
    bounded."""
    windows, size = list[list[int]](), _WINDOW
    for number, gradient in enumerate(gradients):
        if gradient is not None:
            nbytes = here(gradient).nbytes
            if size + nbytes > _WINDOW:
                windows.append([])
                size = 0
            windows[-1].append(number)
            size += nbytes
    return windows


def here(tensor: Any) -> Tensor:
    """What is here of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
