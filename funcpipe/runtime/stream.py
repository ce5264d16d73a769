"""Lanes and the edges between them: on the CPU a hand-over, on CUDA streams, events and copies.

A lane computes on one stream of its device. An edge has a copy stream; a copy waits for the event after which its value
is there, and for the event after which its slot is free, and is itself followed by an event that the reader waits for.
A tensor that a stream uses but did not allocate is recorded on it, so its memory is not given out again too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcpipe.core.tree import own
from funcpipe.runtime.border import Border
from funcpipe.runtime.place import same_device


class Ticket(NamedTuple):
    """A value on its way to a lane.

    Attributes:
        value: what arrives.
        event: after which it is there; None: now.
    """

    value: Border
    event: Any = None


class Place:
    """Where a lane computes: a device and, if it has streams, one of them.

    A device that stands for several lanes gets a stream for each; one that stands alone computes on the caller's.
    """

    def __init__(self, device: torch.device, *, alone: bool) -> None:
        self.device = device
        self.asynchronous = device.type not in ("cpu", "meta")
        self.module: Any = torch.get_device_module(device.type) if self.asynchronous else None
        self.caller: Any = self.module.current_stream(device) if self.asynchronous else None
        self.stream: Any = self.caller
        if self.asynchronous and not alone:
            self.stream = self.module.Stream(device)

    def active(self) -> AbstractContextManager[Any]:
        """Inside, operations go to the lane's stream."""
        return self.module.stream(self.stream) if self.asynchronous else nullcontext()

    def fork(self) -> None:
        """What the caller has queued comes before the lane's work."""
        if self.asynchronous:
            self.caller = self.module.current_stream(self.device)  # the second half of a vjp may come from another
            if self.stream != self.caller:
                self.stream.wait_stream(self.caller)

    def join(self) -> None:
        """The lane's work comes before what the caller queues next."""
        if self.asynchronous and self.stream != self.caller:
            self.caller.wait_stream(self.stream)

    def event(self) -> Any:
        """An event after everything that the lane has queued so far; None where work is done at once."""
        if not self.asynchronous:
            return None
        event = self.module.Event()
        event.record(self.stream)
        return event

    def wait(self, event: Any) -> None:
        """What the lane does from now on comes after the event."""
        if event is None:
            return
        if self.asynchronous:
            self.stream.wait_event(event)
        else:
            event.synchronize()


class Channel(Protocol):
    """One directed edge between lanes: events and copy streams within a process, a communicator between processes."""

    def send(self, value: Border, free: Any = None) -> Ticket:
        """Start to move a value, after ``free``, the event after which its slot is free (None: it is)."""
        ...


class Edge:
    """The channel within a process: copies from one lane (or the caller, None) to another."""

    def __init__(self, source: Place | None, target: Place, *, threaded: bool = False) -> None:
        self.source, self.target, self.threaded = source, target, threaded
        self._streams: dict[torch.device, Any] = {}

    def send(self, value: Border, free: Any = None) -> Ticket:
        """Start to copy a value.

        Args:
            value: on the source's device, or anywhere if the caller gave it.
            free: the event after which its slot is free; None: it is.
        """
        if self.source is not None and not self.source.asynchronous and not self.target.asynchronous:
            if not self.threaded:
                return Ticket(value)
            # Another thread will read it. Marked copy-on-write here, by one thread, before two can do so at once.
            leaves = [own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in value.leaves]
            return Ticket(Border(leaves, value.spec, value.flags))
        tensors = [leaf for leaf in value.leaves if isinstance(leaf, Tensor)]
        if all(same_device(leaf.device, self.target.device) for leaf in tensors):
            return self._hand_over(value, tensors)
        return self._copy(value, tensors, free)

    def _hand_over(self, value: Border, tensors: Sequence[Tensor]) -> Ticket:
        """Two lanes of one device: the same memory, in order."""
        if self.source is None or not self.target.asynchronous:
            return Ticket(value)
        event = self.source.event()
        for leaf in tensors:
            leaf.record_stream(self.target.stream)
        return Ticket(value, event)

    def _copy(self, value: Border, tensors: Sequence[Tensor], free: Any) -> Ticket:
        ready = self.source.event() if self.source is not None else None
        places = [place for place in (self.source, self.target) if place is not None and place.asynchronous]
        given = next((leaf.device for leaf in tensors if leaf.device.type not in ("cpu", "meta")), None)
        if self.source is None and given is not None and not places:
            places = [Place(given, alone=True)]
        streams = [self._stream(place) for place in places]
        for place, stream in zip(places, streams, strict=True):
            stream.wait_event(ready) if ready is not None else stream.wait_stream(place.caller)
            if free is not None:
                stream.wait_event(free)
        if self.source is None and given is not None and given != self.target.device:
            caller = torch.get_device_module(given.type).current_stream(given)
            for stream in streams:
                stream.wait_stream(caller)
        contexts = [place.module.stream(stream) for place, stream in zip(places, streams, strict=True)]
        for context in contexts:
            context.__enter__()
        try:
            leaves = [
                leaf.to(self.target.device, non_blocking=True) if isinstance(leaf, Tensor) else leaf
                for leaf in value.leaves
            ]
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
        arrived = None
        if places:
            arrived = places[-1].module.Event()
            arrived.record(streams[-1])
        for old, new in zip(value.leaves, leaves, strict=True):
            if isinstance(old, Tensor):
                for place, stream in zip(places, streams, strict=True):
                    if old.device == place.device:
                        old.record_stream(stream)
                if self.target.asynchronous:
                    new.record_stream(self.target.stream)
        return Ticket(Border(leaves, value.spec, value.flags), arrived)

    def _stream(self, place: Place) -> Any:
        """The copy stream of this edge on one of its devices."""
        if place.device not in self._streams:
            self._streams[place.device] = place.module.Stream(place.device)
        return self._streams[place.device]
