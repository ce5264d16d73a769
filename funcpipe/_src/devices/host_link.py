"""Copy residuals between a lane and host memory (offload): one stream per direction.

These streams are separate from the lane's own stream, so copies overlap with computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from funcpipe._src.core.plain_tensors import materialized
from funcpipe._src.devices.stream import Place

_LEAST = 16
"""Memory for loaded data is a multiple of this many bytes, so that any dtype can view it."""


class HostStream:
    """The stream that copies from a lane to its host (``out``), or back. On the CPU, a plain
    copy."""

    def __init__(self, place: Place, *, out: bool) -> None:
        self.place, self.out = place, out
        self._stream: Any = None
        self._last: Any = None

    def copy(self, tensors: Sequence[Tensor], after: Any = None) -> tuple[list[Tensor], Any]:
        """Begin to copy tensors, while the lane's stream continues.

        Tensors that go out are recorded on the copy stream, so the caller may free them at once.
        Copies that come back are in the memory pool of the lane's stream. So the lane's stream must
        wait for the event before it reads or frees the copies.

        Args:
            tensors: dense tensors with one dimension.
            after: a further event to wait for, besides the lane's queued work; None: none.

        Returns:
            The copies, and the event after which they are ready (None: they are ready).
        """
        place, backend = self.place, self.place.backend
        if place.asynchronous and self.out:
            if self._last is not None:
                # The host may run far ahead of the device. Without this wait, memory that waits for
                # its copy would accumulate.
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
        """Return the count of numbers to allocate for a copy."""
        multiple = _LEAST // tensor.itemsize
        return tensor.numel() if self.out else -(-tensor.numel() // multiple) * multiple

    def _open(self) -> Any:
        if self._stream is None:
            self._stream = self.place.named("out" if self.out else "back", self.place.device)
            if not self.out:
                self.place.copy_streams.append(self._stream)
        return self._stream

    def takes(self, tensor: Tensor) -> bool:
        """Return whether the tensor is on the lane's device."""
        return self.place.backend.lies_on(tensor, self.place.device)


class HostLink:
    """The two host streams of a lane.

    ``coming`` are the lane's events by slot: a reader of the slot waits for its event. ``fixed``
    are addresses of memory that is not offloaded, because others keep it anyway, such as the batch.
    """

    def __init__(self, place: Place, coming: dict[int, Any], fixed: frozenset[int]) -> None:
        self.out, self.back = HostStream(place, out=True), HostStream(place, out=False)
        self.coming, self.fixed = coming, fixed
