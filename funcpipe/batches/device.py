"""The stage that copies a batch to its devices."""

from __future__ import annotations

import inspect
import warnings
from collections import UserDict
from copy import copy as shallow
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor

from funcpipe.batches.leaves import moves
from funcpipe.core.errors import BatchError, PlanError
from funcpipe.core.tree import Tree, flatten, locations, map_leaves, spread, unflatten
from funcpipe.runtime.stream import Place

Pin: TypeAlias = Literal["auto"] | bool


@dataclass(frozen=True, eq=False)
class ToDevice:
    """Copies batches to devices; made by `to_device`, which says what the fields are."""

    devices: Tree
    pin: Pin = "auto"
    _warned: list[str] = field(default_factory=list[str], repr=False)

    @property
    def __name__(self) -> str:
        """The name of the stage where it has no other."""
        return "to_device"

    @property
    def all(self) -> list[torch.device]:
        """Every device that anything is copied to."""
        return [device for device in flatten(self.devices)[0] if device is not None]

    def __call__(self, batch: Tree, *, threaded: bool = True) -> Tree:
        """The batch on its devices; leaves that lie there already are the same objects.

        Args:
            batch: a tree of tensors, of objects with ``to``, and of anything else, which stays as it is.
            threaded: may the host wait in here.

        Raises:
            BatchError: the batch has no such branch as the tree of devices.
        """
        leaves, spec = flatten(batch, _moves_whole)
        devices = self._spread(batch)
        if not any(map(moves, leaves)) and (unmovable := [leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]):
            raise BatchError(
                f"to_device finds nothing in the batch that can move: a {type(unmovable[0]).__name__} is no tree and "
                "has no to(device); register it with optree.register_pytree_node(..., namespace='funcpipe'), or give "
                "it to()"
            )
        entries = zip(leaves, devices, strict=True)
        return unflatten(spec, [self._move(*entry, threaded, (batch, at)) for at, entry in enumerate(entries)])

    def _spread(self, batch: Tree) -> list[torch.device | None]:
        """The device of each leaf, in their order."""
        try:
            return spread(self.devices, batch, _moves_whole)
        except ValueError as error:
            raise BatchError(
                "to_device has devices for other branches than this batch has (one device stands for all below it, "
                f"None leaves a branch where it is): {error}"
            ) from error

    def _move(self, leaf: Any, device: torch.device | None, threaded: bool, place: tuple[Tree, int]) -> Any:
        backend = Place.backend
        if device is None or not moves(leaf):
            return leaf
        if not isinstance(leaf, Tensor):
            return self._object(leaf, device, threaded)
        if backend.lies_on(leaf, device):
            return leaf
        copy = backend.copy(self._pinned(leaf, threaded, place), device)
        source = backend.streamed(leaf)
        if source is not None and not backend.asynchronous(device):
            Place(source, alone=True).event().synchronize()  # nothing on the host could wait for it later
        return copy

    def _object(self, leaf: Any, device: torch.device, threaded: bool) -> Any:
        """An object's own copy. Those that cannot copy without the host waiting say so by their signature."""
        if self.pin is True or (self.pin == "auto" and threaded and Place.backend.asynchronous(device)):
            pin = getattr(leaf, "pin_memory", None)
            leaf = pin() if callable(pin) else leaf
        if isinstance(leaf, (dict, UserDict)):  # transformers' BatchEncoding moves itself
            leaf = shallow(cast("Any", leaf))
        keywords = {"non_blocking": True} if Place.backend.asynchronous(device) and _takes_words(leaf.to) else {}
        return leaf.to(device, **keywords)

    def _pinned(self, leaf: Tensor, threaded: bool, place: tuple[Tree, int]) -> Tensor:
        """The tensor in memory that a device copies from by itself."""
        if self.pin is False or leaf.device.type != "cpu" or not torch.cuda.is_available() or leaf.is_pinned():
            return leaf
        if self.pin is True or threaded:
            return leaf.pin_memory()
        if not self._warned:
            where = locations(place[0], "batch")[place[1]]
            self._warned.append(where)
            warnings.warn(
                f"{where} lies in memory that is not page-locked, so its copy makes the thread wait that queues all "
                "work; give DataLoader(pin_memory=True), or to_device(pin=True), or a thread: "
                "BatchStage(to_device(...), thread=True)",
                stacklevel=2,
            )
        return leaf


def to_device(devices: Any, *, pin: Pin = "auto") -> ToDevice:
    """A stage that copies batches to a device, beside the computation.

    >>> batch = fp.batches.to_device({"x": "cpu", "y": None})({"x": torch.ones(2), "y": "a label"})
    >>> batch["y"]
    'a label'

    Args:
        devices: a ``torch.device`` or its name, for every leaf that can move: tensors and objects with ``to(device)``.
            Or a tree of them that is a prefix of the batch's, where None leaves what is below it alone.
        pin: page-lock host memory before the copy: True, False, or "auto": where the stage has a thread of its own;
            else one warning names the first leaf that is not page-locked (its copy makes the host wait).

    Raises:
        PlanError: no device, or an option is not what it should be.
    """
    if pin not in (True, False, "auto"):
        raise PlanError(f'pin is True, False or "auto"; got {pin!r}')
    if all(leaf is None for leaf in flatten(devices)[0]):
        raise PlanError(f"to_device takes a device, or a tree with some; got {devices!r}")
    return ToDevice(map_leaves(_device, devices), pin)


def _device(leaf: Any) -> torch.device | None:
    if leaf is None:
        return None
    try:
        return numbered(torch.device(leaf))
    except (RuntimeError, TypeError, AssertionError) as error:  # no such word; torch was built without it
        raise PlanError(f"to_device takes a device, or a tree of them; got {leaf!r}: {error}") from error


def numbered(device: torch.device) -> torch.device:
    """The device with its number: that of the current one where it names none."""
    if ":" in str(device) or not Place.backend.asynchronous(device):
        return device
    return torch.device(device.type, Place.backend.module(device).current_device())


_PLAIN = (str, bytes, bool, int, float, complex, type(None), Tensor)


def _moves_whole(node: Any) -> bool:
    """Is a node of a tree a container that moves by itself: a PackedSequence, a BatchEncoding."""
    return not isinstance(node, Tensor) and moves(node)


def _takes_words(to: Any) -> bool:
    """Does a method ``to`` have ``non_blocking``, or take anything."""
    try:
        parameters = inspect.signature(to).parameters.values()
    except (TypeError, ValueError):  # made in C
        return False
    return any(parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
