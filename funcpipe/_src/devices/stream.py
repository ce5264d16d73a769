"""Places of lanes and the edges between them: on the CPU a hand-over, on CUDA streams, events and
copies.

A lane computes on one stream of its device. An edge has a copy stream; a copy waits for the event
after which its value is there, and for the event after which its slot is free, and is itself
followed by an event that the reader waits for. A tensor that a stream uses but did not allocate is
recorded on it, so its memory is not given out again too early.
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
    """Streams, events, copies and allocator of real devices; tests put a recording one in its
    place."""

    def asynchronous(self, device: torch.device) -> bool:
        """Does the device have streams."""
        return device.type not in ("cpu", "meta")

    def module(self, device: torch.device) -> Any:
        """The module with Stream, Event, stream and current_stream of the device."""
        return torch.get_device_module(device.type)

    def use(self, device: torch.device) -> None:
        """Make it the calling thread's device. A new thread has the first one, and would take
        memory of that."""
        if self.asynchronous(device):
            self.module(device).set_device(device)

    def lies_on(self, tensor: Tensor, device: torch.device) -> bool:
        """Is the tensor's memory the device's."""
        return tensor.device == device or same_device(tensor.device, device)

    def streamed(self, tensor: Tensor) -> torch.device | None:
        """The tensor's device if that has streams, else None."""
        return tensor.device if self.asynchronous(tensor.device) else None

    def copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A copy on the device, queued on the current streams."""
        return tensor.to(device, non_blocking=True)

    def record(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that a stream uses the tensor.

        The allocator passes over memory that is shared copy-on-write: it does not know its deleter.
        See `materialized`.
        """
        tensor.record_stream(stream)

    def room(self, like: Tensor, count: int, device: torch.device | None) -> Tensor:
        """Memory for ``count`` numbers, of the current stream's pool; with device None page-locked
        memory of the host.

        Torch keeps page-locked memory for the next one who asks, and knows which streams still work
        on it.
        """
        if device is None:
            return torch.empty(
                count, dtype=like.dtype, device="cpu", pin_memory=self.asynchronous(like.device)
            )
        return torch.empty(count, dtype=like.dtype, device=device)

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Copy between a device and its host, queued on the current stream of the device."""
        target.copy_(source, non_blocking=True)

    def hollow(self, tensor: Tensor) -> Tensor:
        """A tensor of the same size, strides and type that has no memory."""
        new = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        new.untyped_storage().resize_(0)
        return new

    def own_streams(self) -> dict[Hashable, Any]:
        """The streams of runs that the calling thread begins, by device and name.

        They are the same ones in every run: torch keeps freed memory, and workspaces of libraries,
        for each stream, and a device has 32. Runs of another thread have others, so that they are
        in none of our recordings.
        """
        local = self.__dict__.setdefault("_local", threading.local())
        if not hasattr(local, "streams"):
            local.streams = {}
        return local.streams

    def way_stream(self, device: torch.device, name: str) -> Any:
        """The stream of a way to other processes: the same one for all links, since a device has
        32."""
        streams = self.__dict__.setdefault("_ways", {})
        if (device, name) not in streams:
            streams[device, name] = self.module(device).Stream(device)
        return streams[device, name]

    def pace(self, event: Any) -> None:
        """Let the host wait for the event, so that it does not run far ahead."""
        event.synchronize()

    def identity(self, device: torch.device) -> str:
        """What tells the device from all others that can be joined with it; "": none can."""
        if device.type != "cuda" or not has_nccl():
            return ""
        return str(self.module(device).get_device_properties(device).uuid)

    def joined(self, store: Any, rank: int, size: int, device: torch.device) -> Any:
        """A group that joins devices of several processes, which all of them make; its first
        operation connects them."""
        return nccl(store, rank, size)

    def graph(self, device: torch.device) -> DeviceGraph | None:
        """A graph that records work of the device; None where its kind of device has none."""
        module = self.module(device) if self.asynchronous(device) else None
        return DeviceGraph(module, device) if hasattr(module, "CUDAGraph") else None


def _apart(value: Border) -> Border:
    """A whole copy of the value, which another thread may write to and free.

    Not copy-on-write: two threads that free the last two sharers of such memory at once may lock a
    mutex that is gone (torch deletes the sharers' context while the other is about to lock it).
    Nobody writes to gradients, so they go as they are; they are told by having no flags.
    """
    return value.mapped(torch.clone) if value.flags else value


def are_on_host(values: Iterable[Border]) -> bool:
    """Whether all tensors of some values lie in the host's memory."""
    return all(leaf.is_cpu for value in values for leaf in value.leaves if isinstance(leaf, Tensor))


def _without_gaps(value: Border) -> Border:
    """The value in memory without gaps, which eager stages (these copy it at once) and programs
    then see alike."""
    if all(not isinstance(leaf, Tensor) or fills(leaf) for leaf in value.leaves):
        return value
    return value.mapped(lambda leaf: leaf if fills(leaf) else leaf.clone())


Ticket: TypeAlias = tuple[Border, Any]
"""A value on its way to a lane, and the event after which it is there; None: now."""


class Place:
    """Where a lane computes: a device and, if it has streams, one of them.

    A device of several lanes gets a stream for each lane; a device of one lane computes on the
    caller's stream.
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
        self.copy_streams: list[Any] = []
        """Streams that copy from or into the lane's memory."""

    def named(self, name: str, device: torch.device, other: int = -1) -> Any:
        """The stream of this name, between the lane and another, on a device."""
        key = device, name, self.lane, other
        stream = self._own.get(key)
        if stream is None:
            stream = self._own[key] = self.backend.module(device).Stream(device)
        return stream

    def active(self) -> AbstractContextManager[Any]:
        """Inside, operations go to the lane's stream."""
        return self.module.stream(self.stream) if self.asynchronous else nullcontext()

    def fork(self) -> None:
        """Let the lane's work wait for what the caller has queued."""
        if self.asynchronous:
            self.caller = self.module.current_stream(
                self.device
            )  # the second half of a vjp may come from another
            self.settle()

    def join(self) -> None:
        """Let what the caller queues next wait for the lane's work."""
        for stream in self.copy_streams:  # a run that failed has not waited for all of them
            self.stream.wait_stream(stream)
        if self.asynchronous and self.stream != self.caller:
            self.caller.wait_stream(self.stream)

    def settle(self) -> None:
        """Let the lane's stream wait for all reads of their memory, the caller's too, before that
        is given out again."""
        if self.asynchronous and self.stream != self.caller:
            self.stream.wait_stream(self.caller)

    def hand(self, leaf: Any) -> Any:
        """A leaf of the lane's made safe for the caller to use and free."""
        if not self.asynchronous or self.stream == self.caller or not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf if leaf.is_sparse else materialized(leaf)
        for part in parts(leaf):
            self.backend.record(part, self.caller)
        return leaf

    def event(self) -> Any:
        """An event after everything that the lane has queued so far; None where work is done at
        once."""
        if not self.asynchronous:
            return None
        event = self.module.Event()
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        """Let what the lane does from now on wait for the event."""
        if event is None:
            return
        if self.asynchronous:
            event.wait(self.stream)
        else:
            event.synchronize()


class Channel(Protocol):
    """One directed edge between lanes: events and copy streams within a process, a communicator
    between processes.

    Attributes:
        at_once: does `send` hand the value over as it is.
    """

    at_once: bool

    def send(self, value: Border, free: Any = None) -> Ticket:
        """Start to move a value, after ``free``, the event after which its slot is free (None: it
        is)."""
        ...


class HandOut:
    """The channel to a lane of another process: the value as it is, which its mailbox sends."""

    at_once = False

    def send(self, value: Border, free: Any = None) -> Ticket:
        """The value itself."""
        return value, None


class CopyEdge:
    """The channel within a process: copies from one lane (or the caller, None) to another.

    Args:
        source, target: the two ends.
        threaded: whether they are on threads of their own.
        on_host: whether all that the caller sends lies in the host's memory.
    """

    def __init__(
        self, source: Place | None, target: Place, *, threaded: bool = False, on_host: bool = False
    ) -> None:
        self.source, self.target, self.threaded = source, target, threaded
        self._on_host = source is not None and not source.asynchronous and not target.asynchronous
        # Lanes on threads may share values of the caller, because no stage writes into them.
        alike = on_host and target.device.type == "cpu" and not target.asynchronous
        self.at_once = alike if source is None else self._on_host and not threaded
        self._streams: dict[torch.device, Any] = {}

    def send(self, value: Border, free: Any = None) -> Ticket:
        """Start to copy a value that lies on the source's device, or anywhere if the caller gave
        it."""
        if self._on_host:
            return _apart(value) if self.threaded else value, None
        source, target = self.source, self.target
        for leaf in value.leaves:
            if isinstance(leaf, Tensor) and not target.backend.lies_on(leaf, target.device):
                return self._copy(value, free)
        if source is None:
            # The caller keeps what he gave, and waits for the lanes; the lanes have waited for him.
            return _without_gaps(value) if target.asynchronous else value, None
        return self._hand_over(source, value, free)

    def _hand_over(self, source: Place, value: Border, free: Any) -> Ticket:
        """Two lanes of one device: the same memory, in order."""
        value = (_apart(value) if self.threaded else value).mapped(materialized)
        event = source.event()
        for leaf in value.leaves:
            if isinstance(leaf, Tensor):
                self._record(leaf)
        if free is not None:
            source.wait(free)  # no copy could wait for the slot, so the sender does
        return value, event

    def _copy(self, value: Border, free: Any) -> Ticket:
        """To another device, on the copy streams of both. Torch orders a copy on the current
        streams of both ends."""
        source, target = self.source, self.target
        backend = target.backend
        ends = [target] if target.asynchronous else []
        if source is None:
            tensors = (leaf for leaf in value.leaves if isinstance(leaf, Tensor))
            devices = dict.fromkeys(
                d for leaf in tensors if (d := backend.streamed(leaf)) is not None
            )
            ends += [Place(device, alone=True) for device in devices if device != target.device]
            for place in ends:  # what the caller gave may still be under way on his streams
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
        """The copy stream of this edge on one of its devices."""
        if place.device not in self._streams:
            source = CALLER if self.source is None else self.source.lane
            self._streams[place.device] = self.target.named("edge", place.device, source)
        return self._streams[place.device]
