"""The streams of a row on every device, and the leaves of a batch that streams work on."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.plain_tensors import materialized
from funcpipe._src.core.tree import Tree, flatten, locations, map_tensors
from funcpipe._src.devices.stream import Place


class Mark(NamedTuple):
    """A point in a stream: the device, its stream, and the event that happens there."""

    device: torch.device
    stream: Any
    event: Any


class StreamSet:
    """A stream on each device, where work is queued; it does nothing where no device has streams.

    Without ``streams``, one for each device, they are those that are current whenever work is
    queued.
    """

    def __init__(
        self, devices: Sequence[torch.device], streams: Mapping[torch.device, Any] | None = None
    ) -> None:
        self.devices = devices
        self._streams = None if streams is None else {device: streams[device] for device in devices}

    def now(self) -> Mapping[torch.device, Any]:
        """The stream of each device."""
        if self._streams is not None:
            return self._streams
        return {
            device: Place.backend.module(device).current_stream(device) for device in self.devices
        }

    @contextmanager
    def entered(self) -> Generator[None]:
        """Inside, operations are queued here."""
        with ExitStack() as stack:
            for device in reversed(
                self.devices if self._streams else ()
            ):  # the first is the current device
                stack.enter_context(Place.backend.module(device).stream(self.now()[device]))
            yield

    def wait(self, marks: Iterable[Mark]) -> None:
        """Let what is queued here from now on wait for these marks."""
        streams = self.now()
        for device, stream, event in marks:
            if streams.get(device, stream) != stream:
                event.wait(streams[device])

    def use(self, batch: Tree, marks: Iterable[Mark]) -> None:
        """Tell the allocator that a batch made on other streams is read here, so that it may be
        freed at any time."""
        streams = self.now()
        readers = {
            mark.device: streams[mark.device]
            for mark in marks
            if streams[mark.device] != mark.stream
        }
        if not readers:
            return
        leaves, unrecorded = flatten(batch)[0], list[int]()
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                device = Place.backend.streamed(leaf)
                if device in readers:
                    Place.backend.record(leaf, readers[device])
            elif callable(getattr(leaf, "record_stream", None)):
                for stream in readers.values():
                    leaf.record_stream(stream)
            elif moves(leaf):
                unrecorded.append(number)
        if unrecorded:
            places = locations(batch, "batch")
            named = [f"{places[number]} ({type(leaves[number]).__name__})" for number in unrecorded]
            warnings.warn(
                f"no stream can be recorded on {', '.join(named)}, so its memory may be given out "
                "while a stream reads it; give it record_stream(stream)",
                stacklevel=2,
            )

    def marks(self) -> tuple[Mark, ...]:
        """A mark of all that is queued here so far, on every device."""
        marks = tuple(
            Mark(*entry, Place.backend.module(entry[0]).Event()) for entry in self.now().items()
        )
        for mark in marks:
            mark.event.record(mark.stream)
        return marks


def moves(leaf: Any) -> bool:
    """Whether the leaf can go to a device: a tensor, or an object with ``to(device)`` (torchrec's
    Pipelineable)."""
    return isinstance(leaf, Tensor) or (
        not isinstance(leaf, type) and callable(getattr(leaf, "to", None))
    )


def may_be_on_stream(tree: Tree) -> bool:
    """Whether a stream may still work on some leaf of a tree."""
    return any(map(_may_be_on_stream, flatten(tree)[0]))


def _may_be_on_stream(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return Place.backend.streamed(leaf) is not None
    if not callable(getattr(leaf, "record_stream", None)):
        return False
    device = getattr(leaf, "device", None)  # a method in torchrec
    device = device() if callable(device) else device
    return not isinstance(device, torch.device) or Place.backend.asynchronous(device)


def without_lazy_copies(tree: Tree) -> Tree:
    """The tree without memory that is shared copy-on-write, on which no stream could be
    recorded."""
    if any(
        isinstance(leaf, Tensor) and materialized(leaf) is not leaf for leaf in flatten(tree)[0]
    ):
        return map_tensors(materialized, tree)
    return tree
