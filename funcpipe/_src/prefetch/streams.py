"""The streams of a row of an overlap, one per device, and the batch leaves that streams use.

Lanes of plans use `devices.stream` instead.
"""

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
    """A point in a stream: the device, the stream, and an event that was recorded there."""

    device: torch.device
    stream: Any
    event: Any


class StreamSet:
    """One stream per device, for the work of one row. A no-op without devices.

    Without ``streams``, the work goes to the streams that are current when it is queued.
    """

    def __init__(
        self, devices: Sequence[torch.device], streams: Mapping[torch.device, Any] | None = None
    ) -> None:
        self.devices = devices
        self._streams = None if streams is None else {device: streams[device] for device in devices}

    def now(self) -> Mapping[torch.device, Any]:
        if self._streams is not None:
            return self._streams
        return {
            device: Place.backend.module(device).current_stream(device) for device in self.devices
        }

    @contextmanager
    def entered(self) -> Generator[None]:
        """Return a context in which operations are queued on these streams."""
        with ExitStack() as stack:
            # Reversed, so that the first device is the current one.
            for device, stream in reversed([*(self._streams or {}).items()]):
                stack.enter_context(Place.backend.module(device).stream(stream))
            yield

    def wait(self, marks: Iterable[Mark]) -> None:
        """Make later work on these streams wait for the marks."""
        streams = self.now()
        for device, stream, event in marks:
            if streams.get(device, stream) != stream:
                event.wait(streams[device])

    def use(self, batch: Tree, marks: Iterable[Mark]) -> None:
        """Tell the allocator that these streams read a batch that other streams made.

        Without that, freed memory could be allocated again before these streams have read it.
        """
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
                f"{', '.join(named)} cannot record a stream, so the memory may be allocated again "
                "while a stream still reads it; give the class a method record_stream(stream)",
                stacklevel=2,
            )

    def marks(self) -> tuple[Mark, ...]:
        """Return a mark on each device, after all work queued so far."""
        marks = tuple(
            Mark(*entry, Place.backend.module(entry[0]).Event()) for entry in self.now().items()
        )
        for mark in marks:
            mark.event.record(mark.stream)
        return marks


def moves(leaf: Any) -> bool:
    """Return whether a leaf can move: a tensor, or an object with ``to(device)``, as torchrec's
    Pipelineable."""
    return isinstance(leaf, Tensor) or (
        not isinstance(leaf, type) and callable(getattr(leaf, "to", None))
    )


def may_be_on_stream(tree: Tree) -> bool:
    """Return whether a stream may still write to some leaf of a tree."""
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
    """Return the tree with copies of copy-on-write tensors, which cannot record a stream."""
    if any(
        isinstance(leaf, Tensor) and materialized(leaf) is not leaf for leaf in flatten(tree)[0]
    ):
        return map_tensors(materialized, tree)
    return tree
