"""Ready-made batch stages: `to_device` copies batches, `awaited` waits for asynchronous values."""

from __future__ import annotations

import inspect
import warnings
from collections import UserDict
from copy import copy as shallow_copy
from dataclasses import dataclass, field
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
    """The batch stage that `to_device` makes, which describes the fields.

    ``pin`` is "warn" in a thread that queues all work, which must not wait while memory is locked.
    """

    devices: Tree
    pin: Pin | Literal["warn"] = "auto"
    warned: list[str] = field(default_factory=list[str], repr=False)
    __name__ = "to_device"

    def __call__(self, batch: Tree) -> Tree:
        """Copy a batch to its devices. Leaves that are already there stay the same objects.

        Raises:
            BatchError: the tree of devices has a branch that the batch does not have, or no leaf of
                the batch can move.
        """
        leaves, spec = flatten(batch, _moves_whole)
        try:
            devices = spread(self.devices, batch, _moves_whole)
        except ValueError as error:
            raise BatchError(
                "the devices of to_device have another structure than this batch (a device applies "
                f"to all leaves below it, None leaves a branch where it is): {error}"
            ) from error
        plain = (str, bytes, bool, int, float, complex, type(None), Tensor)
        if not any(map(moves, leaves)) and (
            unmovable := [leaf for leaf in leaves if not isinstance(leaf, plain)]
        ):
            raise BatchError(
                "to_device finds nothing in the batch that can move: a "
                f"{type(unmovable[0]).__name__} is not a tree and has no method to(device); "
                "register the class with optree.register_pytree_node(..., namespace='funcpipe'), "
                "or add a method to(device)"
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
        pinnable = self.pin and leaf.device.type == "cpu" and torch.cuda.is_available()
        if pinnable and not leaf.is_pinned():
            if self.pin != "warn":
                leaf = leaf.pin_memory()
            elif not self.warned:
                self.warned.append(locations(batch, "batch")[at])
                warnings.warn(
                    f"{self.warned[0]} is in memory that is not page-locked, so the thread that "
                    "queues all work waits for its copy; use DataLoader(pin_memory=True), "
                    "to_device(pin=True), or a thread: BatchStage(to_device(...), thread=True)",
                    stacklevel=2,
                )
        copy, source = backend.copy(leaf, device), backend.streamed(leaf)
        if source is not None and not backend.asynchronous(device):
            # Later work on the host could not wait for this copy from a stream, so wait here.
            Place(source, alone=True).event().synchronize()
        return copy

    def _moved_object(self, leaf: Any, device: torch.device) -> Any:
        """Move an object by its own ``to``, with ``non_blocking=True`` if ``to`` accepts it."""
        queued = Place.backend.asynchronous(device)
        if self.pin is True or (self.pin == "auto" and queued):
            leaf = leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf
        # ``to`` of transformers' BatchEncoding changes the object itself: move a copy.
        if isinstance(leaf, (dict, UserDict)):
            leaf = shallow_copy(cast("Any", leaf))
        if queued and _takes_non_blocking(leaf.to):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device)


def to_device(devices: Any, *, pin: Pin = "auto") -> ToDevice:
    """Make a batch stage that copies each batch to a device while training goes on.

    >>> batch = fp.batches.to_device({"x": "cpu", "y": None})({"x": torch.ones(2), "y": "a label"})
    >>> batch["y"]
    'a label'

    Args:
        devices: a ``torch.device`` or its name, for all leaves that can move: tensors and objects
            with a method ``to(device)``. Or a tree of devices that is a prefix of the batch's tree.
            None in this tree leaves all leaves below unchanged.
        pin: whether to page-lock host memory before the copy. "auto", the default: True if the
            stage has its own thread; else the stage does not pin, and warns once of a leaf that is
            not page-locked, because the host waits for its copy.

    Returns:
        A function of a batch, for `overlap`.

    Raises:
        PlanError: ``devices`` contains no device, or an argument has a wrong value.
    """
    if pin not in (True, False, "auto"):
        raise PlanError(f'pin is True, False or "auto"; got {pin!r}')
    if all(leaf is None for leaf in flatten(devices)[0]):
        raise PlanError(f"to_device takes a device, or a tree with some; got {devices!r}")
    return ToDevice(map_leaves(_device, devices), pin)


def _device(leaf: Any) -> torch.device | None:
    try:
        return None if leaf is None else numbered(torch.device(leaf))
    except (RuntimeError, TypeError, AssertionError) as error:
        # An unknown name, or a kind of device that this torch was built without.
        raise PlanError(
            f"to_device takes a device, or a tree of them; got {leaf!r}: {error}"
        ) from error


def numbered(device: torch.device) -> torch.device:
    """Return the device with an index: the current device's index if it has none."""
    if ":" in str(device) or not Place.backend.asynchronous(device):
        return device
    return torch.device(device.type, Place.backend.module(device).current_device())


def _moves_whole(node: Any) -> bool:
    """Return whether a node is a container with its own ``to``, such as a PackedSequence."""
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
    """Wait for all asynchronous values of a batch. Use it as a batch stage of its own.

    A batch stage may return values that are not ready, such as the handle of an asynchronous
    collective or torchrec's ``Awaitable``. `awaited` calls ``wait()`` on each leaf that has this
    method, in its own thread and on its own stream. The result replaces the leaf. A handle whose
    ``wait`` returns None or a bool, such as ``torch.distributed.Work``, becomes None.

    >>> class Later:
    ...     def wait(self):
    ...         return 7
    >>> fp.batches.awaited({"now": 1, "then": Later()})
    {'now': 1, 'then': 7}

    Args:
        batch: any tree.

    Returns:
        The tree with the results of ``wait()``.
    """

    def wait(leaf: Any) -> Any:
        if isinstance(leaf, type) or not callable(getattr(leaf, "wait", None)):
            return leaf
        value = leaf.wait()
        return None if isinstance(value, bool) else value

    return map_leaves(wait, batch)
