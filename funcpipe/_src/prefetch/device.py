"""Ready-made stages: the copy of a batch to its devices, and the wait for values that are under
way."""

from __future__ import annotations

import inspect
import warnings
from collections import UserDict
from copy import copy as shallow_copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from funcpipe._src.core.errors import BatchError, PlanError
from funcpipe._src.core.tree import Tree, flatten, locations, map_leaves, spread, unflatten
from funcpipe._src.devices.stream import Place
from funcpipe._src.prefetch.streams import moves

Pin: TypeAlias = Literal["auto"] | bool


@dataclass(frozen=True, eq=False)
class ToDevice:
    """Copies batches to devices. `to_device` makes it and describes the fields; pin is "warn" on
    the loop's thread."""

    devices: Tree
    pin: Pin | Literal["warn"] = "auto"
    warned: list[str] = field(default_factory=list[str], repr=False)
    __name__ = "to_device"

    def without_waiting(self) -> ToDevice:
        """The same for a thread that queues all work, which must not wait for memory to be
        page-locked."""
        return replace(self, pin="warn") if self.pin == "auto" else self

    def __call__(self, batch: Tree) -> Tree:
        """The batch on its devices; leaves that are there already are the same objects.

        Raises:
            BatchError: the batch has no such branch as the tree of devices, or nothing in it can
                move.
        """
        leaves, spec = flatten(batch, _moves_whole)
        try:
            devices = spread(self.devices, batch, _moves_whole)
        except ValueError as error:
            raise BatchError(
                "to_device has devices for other branches than this batch has (one device stands "
                f"for all below it, None leaves a branch where it is): {error}"
            ) from error
        plain = (str, bytes, bool, int, float, complex, type(None), Tensor)
        if not any(map(moves, leaves)) and (
            unmovable := [leaf for leaf in leaves if not isinstance(leaf, plain)]
        ):
            raise BatchError(
                "to_device finds nothing in the batch that can move: a "
                f"{type(unmovable[0]).__name__} is no tree and has no to(device); register it "
                "with optree.register_pytree_node(..., namespace='funcpipe'), or give it to()"
            )
        for at, device in enumerate(devices):
            if device is not None and isinstance(leaves[at], Tensor):
                leaves[at] = self._moved(leaves[at], device, batch, at)
            elif device is not None and moves(leaves[at]):
                leaves[at] = self._moved_object(leaves[at], device)
        return unflatten(spec, leaves)

    def _moved(self, leaf: Tensor, device: torch.device, batch: Tree, at: int) -> Tensor:
        backend = Place.backend
        if backend.lies_on(leaf, device):
            return leaf
        if (
            self.pin
            and leaf.device.type == "cpu"
            and torch.cuda.is_available()
            and not leaf.is_pinned()
        ):
            if self.pin != "warn":
                leaf = leaf.pin_memory()
            elif not self.warned:
                self.warned.append(locations(batch, "batch")[at])
                warnings.warn(
                    f"{self.warned[0]} lies in memory that is not page-locked, so its copy makes "
                    "the thread wait that queues all work; give DataLoader(pin_memory=True), or "
                    "to_device(pin=True), or a thread: BatchStage(to_device(...), thread=True)",
                    stacklevel=2,
                )
        copy, source = backend.copy(leaf, device), backend.streamed(leaf)
        if source is not None and not backend.asynchronous(device):
            Place(
                source, alone=True
            ).event().synchronize()  # work on the host could not wait for the copy later
        return copy

    def _moved_object(self, leaf: Any, device: torch.device) -> Any:
        """The object's own copy; without the host waiting if the signature of its ``to`` has
        ``non_blocking``."""
        queued = Place.backend.asynchronous(device)
        if self.pin is True or (self.pin == "auto" and queued):
            leaf = leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf
        if isinstance(leaf, (dict, UserDict)):  # transformers' BatchEncoding moves itself
            leaf = shallow_copy(cast("Any", leaf))
        return leaf.to(
            device, **({"non_blocking": True} if queued and _takes_non_blocking(leaf.to) else {})
        )


def to_device(devices: Any, *, pin: Pin = "auto") -> ToDevice:
    """A stage that copies batches to a device, beside the computation.

    >>> batch = fp.batches.to_device({"x": "cpu", "y": None})({"x": torch.ones(2), "y": "a label"})
    >>> batch["y"]
    'a label'

    Args:
        devices: a ``torch.device`` or its name, for every leaf that can move: tensors and objects
            with ``to(device)``. Or a tree of them that is a prefix of the batch's, where None
            leaves what is below it alone.
        pin: page-lock host memory before the copy: True, False, or "auto": where the stage has a
            thread of its own; else one warning names the first leaf that is not page-locked (its
            copy makes the host wait).

    Raises:
        PlanError: no device, or an option is not what it should be.
    """
    if pin not in (True, False, "auto"):
        raise PlanError(f'pin is True, False or "auto"; got {pin!r}')
    if all(leaf is None for leaf in flatten(devices)[0]):
        raise PlanError(f"to_device takes a device, or a tree with some; got {devices!r}")
    return ToDevice(map_leaves(_device, devices), pin)


def _device(leaf: Any) -> torch.device | None:
    try:
        return None if leaf is None else numbered(torch.device(leaf))
    except (
        RuntimeError,
        TypeError,
        AssertionError,
    ) as error:  # no such word; torch was built without it
        raise PlanError(
            f"to_device takes a device, or a tree of them; got {leaf!r}: {error}"
        ) from error


def numbered(device: torch.device) -> torch.device:
    """The device with its number: that of the current one where it names none."""
    if ":" in str(device) or not Place.backend.asynchronous(device):
        return device
    return torch.device(device.type, Place.backend.module(device).current_device())


def _moves_whole(node: Any) -> bool:
    """Whether a node of a tree is a container that moves by itself: a PackedSequence, a
    BatchEncoding."""
    return not isinstance(node, Tensor) and moves(node)


def _takes_non_blocking(to: Any) -> bool:
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):  # made in C
        return False
    return any(
        parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )


def awaited(batch: Tree) -> Tree:
    """Every awaitable of a batch, waited for: a stage of its own, so that the wait is queued where
    it belongs.

    A stage may return values that are not there yet: an asynchronous collective, torchrec's
    ``Awaitable``. They go on as they are; this stage calls ``wait()`` on each such leaf, in its own
    thread and on its own stream, and puts the result in its place. A handle whose ``wait`` returns
    None or a bool (``torch.distributed.Work``) becomes None.

    >>> class Later:
    ...     def wait(self):
    ...         return 7
    >>> fp.batches.awaited({"now": 1, "then": Later()})
    {'now': 1, 'then': 7}

    Args:
        batch: any tree.
    """

    def wait(leaf: Any) -> Any:
        if isinstance(leaf, type) or not callable(getattr(leaf, "wait", None)):
            return leaf
        value = leaf.wait()
        return None if isinstance(value, bool) else value

    return map_leaves(wait, batch)
