"""The streams of one batch stage, on every device: what it waits for, and what its readers wait for."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.batches.leaves import recordable, unknown
from funcpipe.core.tree import Tree
from funcpipe.runtime.stream import Place


class Mark(NamedTuple):
    """A point in a stream: the device, its stream, and the event that happens there."""

    device: torch.device
    stream: Any
    event: Any


class StreamSet:
    """A place on each device: where work is queued. Does nothing where no device has streams.

    Without ``streams``, one for each device, they are those that are current whenever work is queued.
    """

    def __init__(self, devices: Sequence[torch.device], streams: Mapping[torch.device, Any] | None = None) -> None:
        self.devices = devices
        self._fixed: list[Place] | None = None
        if streams is not None:
            self._fixed = [Place(device, alone=True) for device in devices]
            for place in self._fixed:
                place.stream = streams[place.device]

    @property
    def places(self) -> list[Place]:
        """One for each device."""
        return [Place(device, alone=True) for device in self.devices] if self._fixed is None else self._fixed

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside, operations are queued here."""
        with ExitStack() as stack:
            for place in reversed(self._fixed or ()):  # the first is the current device
                stack.enter_context(place.active())
            yield

    def wait(self, marks: Iterable[Mark]) -> None:
        """Let what is queued here from now on wait for these marks."""
        places = {place.device: place for place in self.places}
        for device, stream, event in marks:
            if device in places and places[device].stream != stream:
                places[device].wait(event)

    def use(self, batch: Tree, marks: Sequence[Mark]) -> None:
        """Tell the allocator that a batch made on other streams is read here, so that it may be freed at any time."""
        writers = {device: stream for device, stream, _ in marks}
        readers = {
            place.device: place.stream
            for place in self.places
            if writers.get(place.device, place.stream) != place.stream
        }
        if not readers:
            return
        if unrecorded := unknown(batch):
            warnings.warn(
                f"no stream can be recorded on {', '.join(unrecorded)}, so its memory may be given out while a stream "
                "reads it; give it record_stream(stream)",
                stacklevel=2,
            )
        for leaf in recordable(batch):
            if not isinstance(leaf, Tensor):
                for stream in readers.values():
                    leaf.record_stream(stream)
            elif (device := Place.backend.streamed(leaf)) in readers:
                Place.backend.record(leaf, readers[device])

    def marks(self) -> tuple[Mark, ...]:
        """A mark of all that is queued here so far, on every device."""
        return tuple(Mark(place.device, place.stream, place.event()) for place in self.places)
