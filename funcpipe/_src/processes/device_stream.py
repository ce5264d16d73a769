"""A stream for transfers between a device and other processes, through host memory or by NCCL.

An outgoing value waits on the stream for the lane's queued work. An incoming value waits for the
event after which its slot is free, and its reader waits for an event after the transfer. The sender
begins before the receiver is told to receive. So no kernel occupies the device while it waits for a
process that is not ready.
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
    """A stream of a device, with the transfers on it.

    Attributes:
        stream: the stream.
        group: the NCCL group with the devices of the other processes; None: through the host.
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
        """Return the number of finished events. Only one thread may call this."""
        with suppress(RuntimeError):  # the device has failed; the reader of a value will raise
            while self._under_way and self._under_way[0].query():
                self._under_way.popleft()
                self._moved += 1
        return self._moved

    def now(self) -> Any:
        """Return an event after the work that the calling thread has queued on the device."""
        event = self.module.Event()
        event.record(self.module.current_stream(self.device))
        return event

    @contextmanager
    def after(self, event: Any) -> Generator[None]:
        """Return a context whose work on this stream comes after an event (None: at once)."""
        self.backend.use(self.device)
        if event is not None:
            self.stream.wait_event(event)
        with self.module.stream(self.stream):
            yield

    def over(self) -> Any:
        """Return an event after all work on this stream."""
        event = self.module.Event()
        event.record(self.stream)
        self._under_way.append(event)
        return event

    def used(self, tensors: Sequence[Tensor]) -> None:
        """Record this stream on tensors that other streams have allocated."""
        for tensor in tensors:
            self.backend.record(tensor, self.stream)

    def hand(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Make tensors of this stream safe to use on the device's current stream, after an
        event."""
        current = self.module.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors:
            self.backend.record(tensor, current)

    def at_home(self, tensor: Tensor) -> Tensor:
        """Return a lane's tensor on its device, in memory that can record a stream."""
        lies = self.backend.lies_on(tensor, self.device)
        return materialized(tensor if lies else self.backend.copy(tensor, self.device))

    # -- through host memory

    def copies_on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Begin to copy tensors to page-locked memory, within the context of `after`."""
        return [self._copied(tensor, None) for tensor in tensors]

    def _copied(self, tensor: Tensor, device: torch.device | None) -> Tensor:
        """Copy a dense tensor to the device or to its host (None), with the same strides."""
        room = self.backend.room(tensor, tensor.numel(), device)
        copy = room.as_strided(tensor.shape, tensor.stride())
        self.backend.fill(copy, tensor)
        return copy

    def host_room(self, layout: TensorLayout) -> Tensor:
        """Return page-locked memory for an incoming tensor."""
        like = torch.empty(0, dtype=layout.dtype, device=self.device)
        return self.backend.room(like, prod(layout.size), None).as_strided(
            layout.size, layout.strides
        )

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begin to copy tensors of the lane to the host.

        Returns the copies, and a function that waits until they are ready.
        """
        with self.after(self.now()):
            copies = self.copies_on_host(tensors)
        self.used(tensors)
        return copies, self.over().synchronize

    def from_host(self, leaves: Sequence[Any], free: Any, reader: Any) -> tuple[list[Any], Any]:
        """Begin to copy received leaves to the device, after the event ``free``.

        Returns the copies, and the event that the ``reader`` stream must wait for.
        """
        with self.after(free):
            copies = [
                self._copied(leaf, self.device) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
        return self._given(copies, reader)

    # -- from device to device

    def send(self, tensors: Sequence[Tensor], event: Any) -> None:
        """Begin to send tensors, after an event."""
        with self.after(event):
            for tensor in tensors:
                self.group.send([memory(tensor)], 1 - self.seat, 0).wait()
        self.used(tensors)
        self.over()

    def receive(self, leaves: Sequence[Any], free: Any, reader: Any) -> tuple[list[Any], Any]:
        """Begin to receive tensors with these layouts. Returns the same as `from_host`."""
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
        """Send a dense tensor to each other device, and receive one from each, within `after`."""
        sent, received = [*map(memory, theirs)], [*map(memory, rooms)]
        sent[self.seat] = received[self.seat] = torch.empty(
            0, dtype=torch.uint8, device=self.device
        )
        self.group.alltoall(received, sent).wait()

    def greet(self, way: str) -> None:
        """Connect the group with a first transfer: "out", "in", or a swap with "all". Waits."""
        if self.group is None:
            return
        # Otherwise the first send to each peer makes a separate communicator.
        self.group.eager_connect_single_device(self.device)
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
