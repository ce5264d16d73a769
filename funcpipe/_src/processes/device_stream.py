"""A stream of a device for what goes to other processes and comes from them: over its host, or
straight away.

What goes out waits on the stream for what the lane has queued so far. What comes waits for the
event after which its slot is free, and is followed by an event that its reader waits for. The other
end begins to send before this one is told to receive, so that no kernel of the device waits for a
process that has not come to it yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.plain_tensors import materialized
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.devices.stream import StreamBackend
from funcpipe._src.processes.wire_format import memory


class DeviceStream:
    """The stream, and what travels on it.

    Attributes:
        stream: the stream itself.
        group: joins this device and those at the other ends; None: values go over the host.
        seat: the number of this device in the group.
    """

    def __init__(
        self,
        name: str,
        backend: StreamBackend,
        device: torch.device,
        group: Any = None,
        seat: int = 0,
    ) -> None:
        self.backend, self.device, self.group, self.seat = backend, device, group, seat
        self.module = backend.module(device)
        self.stream = backend.way_stream(device, name)
        self._under_way: deque[Any] = deque()
        self._moved = 0

    def moved(self) -> int:
        """How many events of the stream are over; one thread asks."""
        with suppress(RuntimeError):  # the device has failed; whoever needs what it does says so
            while self._under_way and self._under_way[0].query():
                self._under_way.popleft()
                self._moved += 1
        return self._moved

    def now(self) -> Any:
        """An event after all that the calling thread has queued on the device's current stream."""
        event = self.module.Event()
        event.record(self.module.current_stream(self.device))
        return event

    @contextmanager
    def after(self, event: Any) -> Generator[None]:
        """Inside, what the thread queues on the device comes after an event (None: at once)."""
        self.backend.use(self.device)
        if event is not None:
            self.stream.wait_event(event)
        with self.module.stream(self.stream):
            yield

    def over(self) -> Any:
        """An event after all that is queued here."""
        event = self.module.Event()
        event.record(self.stream)
        self._under_way.append(event)
        return event

    def used(self, tensors: Sequence[Tensor]) -> None:
        """The stream uses tensors that it did not make."""
        for tensor in tensors:
            self.backend.record(tensor, self.stream)

    def hand(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Let the device's current stream have what was made here, after an event."""
        current = self.module.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors:
            self.backend.record(tensor, current)

    def at_home(self, tensor: Tensor) -> Tensor:
        """A tensor of the lane on its device, in memory that can be recorded on streams."""
        lies = self.backend.lies_on(tensor, self.device)
        return materialized(tensor if lies else self.backend.copy(tensor, self.device))

    # -- over the host

    def copies_on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy to page-locked memory, inside of `after`."""
        return [self._copied(tensor, None) for tensor in tensors]

    def _copied(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        """A copy of a dense tensor on the device or on its host (None), with the same strides."""
        room = self.backend.room(tensor, tensor.numel(), device)
        copy = room.as_strided(tensor.shape, tensor.stride())
        self.backend.fill(copy, tensor)
        return copy

    def host_room(self, layout: TensorLayout) -> Tensor:
        """Page-locked memory for what comes."""
        like = torch.empty(0, dtype=layout.dtype, device=self.device)
        return self.backend.room(like, prod(layout.size), None).as_strided(
            layout.size, layout.strides
        )

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begin to copy what the lane has queued; the copies, and a function that waits until they
        are there."""
        with self.after(self.now()):
            copies = self.copies_on_host(tensors)
        self.used(tensors)
        return copies, self.over().synchronize

    def from_host(self, leaves: Sequence[Any], free: Any, reader: Any) -> tuple[list[Any], Any]:
        """Begin to copy what has come to the device, after an event; for a stream that waits for
        the event returned."""
        with self.after(free):
            copies = [
                self._copied(leaf, self.device) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
        return self._given(copies, reader)

    # -- straight away

    def send(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Begin to send tensors, after an event."""
        with self.after(event):
            for tensor in tensors:
                self.group.send([memory(tensor)], 1 - self.seat, 0).wait()
        self.used(tensors)
        self.over()

    def receive(self, leaves: Sequence[Any], free: Any, reader: Any) -> tuple[list[Any], Any]:
        """Begin to receive what a `TensorLayout` each stands for, as `from_host` does."""
        with self.after(free):
            rooms = [
                leaf.room(self.device) if isinstance(leaf, TensorLayout) else leaf
                for leaf in leaves
            ]
            for room in rooms:
                if isinstance(room, Tensor) and room.numel():
                    self.group.recv([memory(room)], 1 - self.seat, 0).wait()
        return self._given(rooms, reader)

    def swap(self, theirs: Sequence[Tensor], rooms: Sequence[Tensor]) -> None:
        """Send each of the others a dense tensor and receive one from each, inside of `after`."""
        sent, received = [*map(memory, theirs)], [*map(memory, rooms)]
        sent[self.seat] = received[self.seat] = torch.empty(
            0, dtype=torch.uint8, device=self.device
        )
        self.group.alltoall(received, sent).wait()

    def greet(self, way: str) -> None:
        """Connect: the first that goes "out", comes "in", or is swapped with "all". Waits for the
        others."""
        if self.group is None:
            return
        self.group.eager_connect_single_device(
            self.device
        )  # else each first send makes a communicator of its own
        token = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if way == "out":
            self.send([token], self.now())
        elif way == "in":
            self.receive([TensorLayout((1,), (1,), torch.uint8)], None, self.stream)
        else:
            with self.after(self.now()):
                self.swap(
                    [token] * self.group.size(), [token.clone() for _ in range(self.group.size())]
                )
        self.over().synchronize()

    def _given(self, leaves: list[Any], reader: Any) -> tuple[list[Any], Any]:
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.backend.record(leaf, reader)
        return leaves, self.over()
