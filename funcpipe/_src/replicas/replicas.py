"""Sum the gradients of a stage over its replicas, and gather its sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.core.plain_tensors import here
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.engine.worker import Worker
from funcpipe._src.processes.device_stream import DeviceStream

if TYPE_CHECKING:
    from funcpipe._src.processes.team import Team

_WINDOW = 1 << 26
"""Gradients are summed in groups of at most this many bytes; a larger gradient is one group."""

GiveSums: TypeAlias = Callable[[], list[Tensor | None]]
"""Returns sums of gradients over the replicas, ready for the calling thread's stream."""


Told: TypeAlias = Callable[[GiveSums], None]
"""A callback for finished sums. It may be called on any thread."""


@dataclass(frozen=True)
class Summed:
    """The mailbox key for the `GiveSums` of a stage. Not a tuple: tuples are keys of free slots."""

    stage: int


class Reduction:
    """A sum of a stage's gradients over its replicas, in progress.

    G writes it, S reads it, and the end of the run takes it.

    Args:
        stage: the number of the stage.
        box: the mailbox of the stage's lane; None: only the caller waits.

    Attributes:
        wait_at_end: a function that waits on the caller's thread, and returns the `GiveSums`.
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
        """Wait on the stage's lane, by its mailbox. Same signature as ``torch.cuda.Event.wait``."""
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
    """The sharding of a tensor over replicas: parts along an axis, as `torch.chunk` cuts them.

    Some parts may be empty.
    """

    axis: int

    def part(self, whole: Tensor, replica: int, replicas: int) -> Tensor:
        """Return the part of a replica, a view."""
        length = whole.shape[self.axis]
        size = -(-length // replicas)
        start = min(size * replica, length)
        return whole.narrow(self.axis, start, min(size, length - start))


def dtensor_of(local: Tensor, like: Any) -> Any:
    """Return a DTensor with this local part, spread like another DTensor."""
    stride = torch.empty(like.shape, device="meta").stride()
    layout = {"run_check": False, "shape": like.shape, "stride": stride}
    return type(like).from_local(local, like.device_mesh, like.placements, **layout)


class Replicas:
    """Gathers and sums in a thread beside the lane, in the same order in all replicas.

    Each replica adds up one piece of a gradient, in the order of the replicas, and sends the sum to
    the others. So sums are bit-identical in all replicas, and a replica sends at most twice the
    size of a gradient. On a device with streams, the work has its own stream, and comes after the
    work that the lane has queued.

    Args:
        team: the other processes.
        stage: the number of the stage.
        ranks: the processes with this stage, by replica.
        worker: the thread, one for all stages of a lane.
        stream: the stream, or None on the CPU.
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
        """Begin to gather parts of tensors from the other replicas, as `PlanPart.gather_params`."""
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
        """Begin to sum gradients, and free their memory.

        The `GiveSums` go to ``told``, and to the caller's mailbox with the returned key. For leaves
        in ``cuts``, this replica gets only its part of the sum.
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
        """Return the sums of gradients over all replicas. DTensors are summed by local parts."""
        sums: list[Tensor | None] = [None] * len(gradients)
        # Each phase begins for all gradients of a window before the next phase waits for the first,
        # so that their transfers overlap. All replicas use the same windows: no deadlock.
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
                # Free the memory only after the stream has used it.
                self._over([here(gradients[number])])
                here(gradients[number]).untyped_storage().resize_(0)
        return sums

    def _add(self, gradient: Tensor, cut: Sharding | None) -> Callable[[], Callable[[], Tensor]]:
        """Begin to send the pieces of a gradient.

        Returns:
            A function that adds up this replica's piece and begins to send its sum. It returns a
            function that waits for the whole sum.
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
            # Added in the order of the replicas, by one replica for all: bit-identical everywhere.
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
        """Return the sums, ready for the current stream of the calling thread."""
        if self.stream is not None:
            self.stream.hand([here(each) for each in sums if each is not None], event)
        return sums

    def _queued(self) -> AbstractContextManager[object]:
        """Return a context whose work comes after the present work of the calling thread."""
        return nullcontext() if self.stream is None else self.stream.after(self.stream.now())

    def _over(self, tensors: Sequence[Tensor]) -> Any:
        """Return an event after the queued work, which uses these tensors."""
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
        """Begin to send a dense tensor to each other replica.

        Returns a function that receives their tensors into ``rooms``.
        """
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
            stream.over().synchronize()  # sockets send host memory, so the copies must be complete
            theirs = {rank: copies[id(theirs[rank])] for rank in others}
        for rank in others:
            if theirs[rank].numel():
                self._channel.post(rank, theirs[rank])

        def take() -> None:
            for rank in others:
                room = rooms[rank]
                if room.numel():
                    layout = TensorLayout.contiguous(room.shape, room.dtype)
                    came = layout.view_of(self._channel.take(rank))
                    room.copy_(came) if stream is None else stream.backend.fill(room, came)

        return take


def _windows(gradients: Sequence[Tensor | None]) -> list[list[int]]:
    """Group gradients that are summed together, so that messages overlap and memory is bounded."""
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
