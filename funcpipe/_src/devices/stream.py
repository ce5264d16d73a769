"""Places, where lanes compute, and edges, which move values between lanes.

On the CPU an edge passes the value itself. On CUDA an edge copies with streams and events. A lane
computes on one stream of its device, and an edge has its own copy stream. A copy waits for two
events: its value is ready, and its slot is free. After the copy comes an event that the reader
waits for. A tensor that a stream uses but did not allocate is recorded on that stream; otherwise
its memory would be allocated again too early.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.core.border import Border, fills
from funcpipe._src.core.plain_tensors import materialized
from funcpipe._src.core.sparse_gradients import parts
from funcpipe._src.data.program import CALLER
from funcpipe._src.devices.device_graph import DeviceGraph
from funcpipe._src.devices.devices import same_device
from funcpipe._src.devices.nccl import has_nccl, nccl


class StreamBackend:
    """Streams, events, copies and allocator of real devices. Tests replace it by a recorder."""

    def asynchronous(self, device: torch.device) -> bool:
        """Return whether the device has streams."""
        return device.type not in ("cpu", "meta")

    def module(self, device: torch.device) -> Any:
        """Return torch's module with Stream, Event, stream and current_stream for the device."""
        return torch.get_device_module(device.type)

    def use(self, device: torch.device) -> None:
        """Make the device the calling thread's current device.

        A new thread has device 0, and would allocate memory there.
        """
        if self.asynchronous(device):
            self.module(device).set_device(device)

    def lies_on(self, tensor: Tensor, device: torch.device) -> bool:
        """Return whether the tensor is on the device."""
        return tensor.device == device or same_device(tensor.device, device)

    def streamed(self, tensor: Tensor) -> torch.device | None:
        """Return the tensor's device if the device has streams, else None."""
        return tensor.device if self.asynchronous(tensor.device) else None

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Queue a copy to the device on the current streams, and return the copy."""
        return tensor.to(device, non_blocking=True)

    def record(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that a stream uses the tensor.

        The allocator ignores copy-on-write memory, because the memory has another deleter. So
        callers use `materialized` first.
        """
        tensor.record_stream(stream)

    def room(self, like: Tensor, count: int, device: torch.device | None) -> Tensor:
        """Return memory for ``count`` numbers from the current stream's pool.

        With device None, return page-locked host memory. Torch caches page-locked memory, and knows
        which streams still use it.
        """
        if device is None:
            return torch.empty(
                count, dtype=like.dtype, device="cpu", pin_memory=self.asynchronous(like.device)
            )
        return torch.empty(count, dtype=like.dtype, device=device)

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between a device and its host on the current stream of the device."""
        target.copy_(source, non_blocking=True)

    def hollow(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same size, strides and type, but without memory."""
        new = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        new.untyped_storage().resize_(0)
        return new

    def page_locked(self, tensor: Tensor) -> Tensor:
        """Return a tensor of host memory in page-locked memory."""
        return tensor if tensor.is_pinned() else tensor.pin_memory()

    def grow(self, tensor: Tensor, device: torch.device) -> None:
        """Give a tensor without memory its memory, from the current stream's pool."""
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())

    def shrink(self, tensor: Tensor) -> None:
        """Free the memory of a tensor that is still referenced."""
        tensor.untyped_storage().resize_(0)

    def own_streams(self) -> dict[Hashable, Any]:
        """Return the streams for runs of the calling thread, by device and name.

        All runs of a thread use the same streams, because torch caches freed memory and library
        workspaces per stream, and a device has only 32 streams. Each thread has its own, so that
        work of another thread is never part of this thread's recordings.
        """
        local = self.__dict__.setdefault("_local", threading.local())
        if not hasattr(local, "streams"):
            local.streams = {}
        return local.streams

    def way_stream(self, device: torch.device, name: str) -> Any:
        """Return the stream for transfers to other processes.

        All links of a device share it, because a device has only 32 streams.
        """
        streams = self.__dict__.setdefault("_ways", {})
        if (device, name) not in streams:
            streams[device, name] = self.module(device).Stream(device)
        return streams[device, name]

    def pace(self, event: Any) -> None:
        """Make the host wait for the event, so that the host does not run far ahead."""
        event.synchronize()

    def identity(self, device: torch.device) -> str:
        """Return a unique id of the device for NCCL, or "" if NCCL cannot use the device."""
        if device.type != "cuda" or not has_nccl():
            return ""
        return str(self.module(device).get_device_properties(device).uuid)

    def joined(self, store: Any, rank: int, size: int, device: torch.device) -> Any:
        """Return a group of devices of several processes. All of these processes call this.

        The first operation of the group connects the devices.
        """
        return nccl(store, rank, size)

    def graph(self, device: torch.device) -> DeviceGraph | None:
        """Return a graph for the device, or None if its kind of device has no graphs."""
        module = self.module(device) if self.asynchronous(device) else None
        return DeviceGraph(module, device) if hasattr(module, "CUDAGraph") else None


def _apart(value: Border) -> Border:
    """Return a full copy of the value, which another thread may write to and free.

    The copy is not copy-on-write. If two threads free the last two sharers of such memory at the
    same time, torch may lock a mutex that it has already deleted. Gradients, which have no flags,
    are passed without a copy, because no stage writes to them.
    """
    return value.mapped(torch.clone) if value.flags else value


def are_on_host(values: Iterable[Border]) -> bool:
    """Return whether all tensors of some values are in host memory."""
    return all(leaf.is_cpu for value in values for leaf in value.leaves if isinstance(leaf, Tensor))


def _without_gaps(value: Border) -> Border:
    """Return the value in memory without gaps, so that eager and compiled stages see equal
    strides."""
    if all(not isinstance(leaf, Tensor) or fills(leaf) for leaf in value.leaves):
        return value
    return value.mapped(lambda leaf: leaf if fills(leaf) else leaf.clone())


Ticket: TypeAlias = tuple[Border, Any]
"""A value for a lane, and the event after which the lane may read it; None: at once."""


class Place:
    """The device of a lane, and the lane's stream if the device has streams.

    If several lanes share a device, each lane has its own stream. A lane alone on its device
    computes on the caller's stream.
    """

    backend: ClassVar[StreamBackend] = StreamBackend()

    def __init__(self, device: torch.device, *, alone: bool, lane: int = -1) -> None:
        self.device, self.lane = device, lane
        self.asynchronous = self.backend.asynchronous(device)
        self.module: Any = self.backend.module(device) if self.asynchronous else None
        self.caller: Any = self.module.current_stream(device) if self.asynchronous else None
        self._own = self.backend.own_streams()
        self.stream: Any = self.caller
        if self.asynchronous and not alone:
            self.stream = self.named("lane", device)
        self.copy_streams: list[Any] = []  # streams that copy from or into the lane's memory

    def named(self, name: str, device: torch.device, other: int = -1) -> Any:
        """Return the stream of a name, between this lane and another, on a device."""
        key = device, name, self.lane, other
        stream = self._own.get(key)
        if stream is None:
            stream = self._own[key] = self.backend.module(device).Stream(device)
        return stream

    def active(self) -> AbstractContextManager[Any]:
        """Return a context in which operations are queued on the lane's stream."""
        return self.module.stream(self.stream) if self.asynchronous else nullcontext()

    def fork(self) -> None:
        """Make the lane's work wait for work that the caller has queued."""
        if self.asynchronous:
            # Read the stream again: a pullback may be called on another stream than its vjp.
            self.caller = self.module.current_stream(self.device)
            self.settle()

    def join(self) -> None:
        """Make later work of the caller wait for the lane's work."""
        for stream in self.copy_streams:  # a failed run may not have waited for all copies
            self.stream.wait_stream(stream)
        if self.asynchronous and self.stream != self.caller:
            self.caller.wait_stream(self.stream)

    def settle(self) -> None:
        """Make the lane's stream wait for the caller's stream.

        So the lane does not reuse memory that the caller still reads.
        """
        if self.asynchronous and self.stream != self.caller:
            self.stream.wait_stream(self.caller)

    def hand(self, leaf: Any) -> Any:
        """Return a leaf of the lane that the caller may use and free on its own stream."""
        if not self.asynchronous or self.stream == self.caller or not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf if leaf.is_sparse else materialized(leaf)
        for part in parts(leaf):
            self.backend.record(part, self.caller)
        return leaf

    def event(self) -> Any:
        """Return an event after all work that the lane has queued; None on the CPU."""
        if not self.asynchronous:
            return None
        event = self.module.Event()
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        """Make later work of the lane wait for the event."""
        if event is None:
            return
        if self.asynchronous:
            event.wait(self.stream)
        else:
            event.synchronize()


class Channel(Protocol):
    """A directed edge between two lanes.

    Attributes:
        at_once: whether the value can be passed without calling `send`.
    """

    at_once: bool

    def send(self, value: Border, free: Any = None) -> Ticket:
        """Start to move a value.

        ``free`` is the event after which the target slot is free; None: the slot is free now.
        """
        ...


class HandOut:
    """The channel to a lane of another process. It returns the value, which the mailbox sends."""

    at_once = False

    def send(self, value: Border, free: Any = None) -> Ticket:
        """Return the value itself."""
        return value, None


class CopyEdge:
    """The channel within a process, from one lane to another, or from the caller (None) to a lane.

    Args:
        source, target: the two ends.
        threaded: whether lanes have their own threads.
        on_host: whether all values of the caller are in host memory.
    """

    def __init__(
        self, source: Place | None, target: Place, *, threaded: bool = False, on_host: bool = False
    ) -> None:
        self.source, self.target, self.threaded = source, target, threaded
        self._on_host = source is not None and not source.asynchronous and not target.asynchronous
        # Lanes on threads may share values of the caller, because no stage writes to them.
        alike = on_host and target.device.type == "cpu" and not target.asynchronous
        self.at_once = alike if source is None else self._on_host and not threaded
        self._streams: dict[torch.device, Any] = {}

    def send(self, value: Border, free: Any = None) -> Ticket:
        """Start to move a value that is on the source's device, or on any device for the caller."""
        if self._on_host:
            return _apart(value) if self.threaded else value, None
        source, target = self.source, self.target
        for leaf in value.leaves:
            if isinstance(leaf, Tensor) and not target.backend.lies_on(leaf, target.device):
                return self._copy(value, free)
        if source is None:
            # No events: the caller keeps the value until the run ends, and `fork` and `join` have
            # ordered the lanes' work after the caller's, and the caller's after the lanes'.
            return _without_gaps(value) if target.asynchronous else value, None
        return self._hand_over(source, value, free)

    def _hand_over(self, source: Place, value: Border, free: Any) -> Ticket:
        """Pass a value between two lanes of one device: the same memory, ordered by an event."""
        value = (_apart(value) if self.threaded else value).mapped(materialized)
        event = source.event()
        for leaf in value.leaves:
            if isinstance(leaf, Tensor):
                self._record(leaf)
        if free is not None:
            source.wait(free)  # there is no copy that could wait for the slot, so the sender waits
        return value, event

    def _copy(self, value: Border, free: Any) -> Ticket:
        """Copy a value to another device, on the copy streams of both devices.

        Torch orders a copy after the work on the current streams of both ends.
        """
        source, target = self.source, self.target
        backend = target.backend
        ends = [target] if target.asynchronous else []
        if source is None:
            tensors = (leaf for leaf in value.leaves if isinstance(leaf, Tensor))
            devices = dict.fromkeys(
                d for leaf in tensors if (d := backend.streamed(leaf)) is not None
            )
            ends += [Place(device, alone=True) for device in devices if device != target.device]
            for place in ends:  # the caller's streams may still compute the value
                if place.device in devices:
                    self._stream(place).wait_stream(place.caller)
        elif source.asynchronous:
            value = value.mapped(materialized)
            ends.append(source)
            self._stream(source).wait_event(source.event())
        if free is not None:
            self._stream(target).wait_event(free)
        with ExitStack() as stack:
            for place in ends:
                stack.enter_context(place.module.stream(self._stream(place)))
            copy = value.mapped(lambda leaf: backend.copy(leaf, target.device))
        for old, new in zip(value.leaves, copy.leaves, strict=True):
            if isinstance(old, Tensor):
                if source is not None and source.asynchronous:
                    backend.record(old, self._stream(source))
                if target.asynchronous:
                    self._record(new)
        event = None
        if ends:
            event = ends[0].module.Event()
            event.record(self._stream(ends[0]))
        return copy, event

    def _record(self, tensor: Tensor) -> None:
        self.target.backend.record(tensor, self.target.stream)

    def _stream(self, place: Place) -> Any:
        """Return the copy stream of this edge on one of its devices."""
        if place.device not in self._streams:
            source = CALLER if self.source is None else self.source.lane
            self._streams[place.device] = self.target.named("edge", place.device, source)
        return self._streams[place.device]
