"""The streams of one row, on every device: what it waits for, and what its readers wait for."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from funcpipe.batches.leaves import record, unknown
from funcpipe.core.tree import Tree
from funcpipe.runtime.stream import Place


class Mark(NamedTuple):
    """A point in a stream.

    Attributes:
        device: of the stream.
        stream: it is in.
        event: that happens there.
    """

    device: torch.device
    stream: Any
    event: Any


class Rail:
    """Where a row's work is queued. Does nothing where no device has streams.

    Args:
        devices: with streams.
        streams: one for each device; None: those that are current whenever the row works.
    """

    def __init__(self, devices: Sequence[torch.device], streams: Mapping[torch.device, Any] | None = None) -> None:
        self.devices, self.streams = devices, streams

    def stream(self, device: torch.device) -> Any:
        """The stream of a device; None if it is none of ours."""
        if device not in self.devices:
            return None
        if self.streams is not None:
            return self.streams[device]
        return Place.backend.module(device).current_stream(device)

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside, operations are queued here."""
        with ExitStack() as stack:
            if self.streams is not None:
                for device, stream in reversed(list(self.streams.items())):  # the first is the current device
                    stack.enter_context(Place.backend.module(device).stream(stream))
            yield

    def wait(self, marks: Iterable[Mark]) -> None:
        """What is queued from now on comes after these points."""
        for device, stream, event in marks:
            own = self.stream(device)
            if own is not None and own != stream:
                own.wait_event(event)

    def use(self, batch: Tree, marks: Sequence[Mark]) -> None:
        """A batch that was made on other streams is read here, and may be freed by anyone at any time."""
        made = {mark.device: mark.stream for mark in marks}
        others = [device for device in self.devices if device in made and made[device] != self.stream(device)]
        if not others:
            return
        if places := unknown(batch):
            warnings.warn(f"no stream can be recorded on {', '.join(places)}, so its memory may be given out while a stream reads it; give it record_stream(stream), or overlap(..., memory='ring')", stacklevel=2)  # fmt: skip

        def stream_of(device: torch.device | None) -> Any:
            if device is None:
                return [self.stream(one) for one in others]
            return self.stream(device) if device in others else None

        record(Place.backend, batch, stream_of)

    def marks(self) -> tuple[Mark, ...]:
        """Here and now, on every device."""
        out: list[Mark] = []
        for device in self.devices:
            stream = self.stream(device)
            event = Place.backend.module(device).Event()
            event.record(stream)
            out.append(Mark(device, stream, event))
        return tuple(out)
