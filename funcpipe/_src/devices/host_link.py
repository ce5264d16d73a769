"""Copies between a lane and the memory of its host: a stream for each way, beside the one that
computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcpipe._src.core.plain_tensors import materialized
from funcpipe._src.devices.stream import Place

_LEAST = 16
"""What comes back is a multiple of so many bytes, so that it can be viewed as numbers of any
type."""


class HostStream:
    """The stream that copies out to a lane's host, or back from it. On the CPU a copy is made at
    once."""

    def __init__(self, place: Place, *, out: bool) -> None:
        self.place, self.out = place, out
        self._stream: Any = None
        self._last: Any = None

    def copy(self, tensors: Sequence[Tensor], after: Any = None) -> tuple[list[Tensor], Any]:
        """Begin to copy; the lane's stream goes on.

        What goes out is recorded on the copy stream, so it may be dropped at once. What comes back
        lies in the pool of the lane's stream, which must wait for the event before it reads it or
        gives it out again; it is recorded on the stream beside that, where the lane has one.

        Args:
            tensors: of one dimension, dense.
            after: the event after which they may be read, besides what the lane has queued; None:
                none.

        Returns:
            The copies, and the event after which they are there (None: they are).
        """
        place, backend = self.place, self.place.backend
        if place.asynchronous and self.out:
            if self._last is not None:
                # The host is far ahead of the device; without this, memory that waits for its copy
                # would heap up.
                backend.pace(self._last)
            tensors = [materialized(tensor) for tensor in tensors]
        copies = [
            backend.room(tensor, self._count(tensor), None if self.out else place.device)
            for tensor in tensors
        ]
        pairs = [
            (copy[: tensor.numel()], tensor) for copy, tensor in zip(copies, tensors, strict=True)
        ]
        if not place.asynchronous:
            for copy, tensor in pairs:
                copy.copy_(tensor)
            return copies, None
        stream = self._open()
        stream.wait_event(place.event())
        if after is not None:
            stream.wait_event(after)
        with place.module.stream(stream):
            for copy, tensor in pairs:
                backend.fill(copy, tensor)
        for tensor in tensors if self.out else ():
            backend.record(tensor, stream)
        self._last = place.module.Event()
        self._last.record(stream)
        return copies, self._last

    def _count(self, tensor: Tensor) -> int:
        """The count of numbers that memory is taken for."""
        multiple = _LEAST // tensor.itemsize
        return tensor.numel() if self.out else -(-tensor.numel() // multiple) * multiple

    def _open(self) -> Any:
        if self._stream is None:
            self._stream = self.place.named("out" if self.out else "back", self.place.device)
            if not self.out:
                self.place.copy_streams.append(self._stream)
        return self._stream

    def takes(self, tensor: Tensor) -> bool:
        """Does the tensor's memory lie on the lane's device."""
        return self.place.backend.lies_on(tensor, self.place.device)


class HostLink:
    """The streams to the host and back of a lane.

    ``coming`` are the lane's events by slot: who reads what lies there waits for it. ``fixed`` are
    addresses of memory that stays, for others keep it anyway, such as the batch.
    """

    def __init__(self, place: Place, coming: dict[int, Any], fixed: frozenset[int]) -> None:
        self.out, self.back = HostStream(place, out=True), HostStream(place, out=False)
        self.coming, self.fixed = coming, fixed
