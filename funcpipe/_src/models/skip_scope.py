"""Find the store of skips while modules are called.

In a plan the store belongs to the call of a stage. Otherwise the store belongs to the outermost
call of a module. `skippable` has the layers that use the store.
"""

from __future__ import annotations

import itertools
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.frames import MODULE_CALL, frames, own_dict
from funcpipe._src.core.tree import Tree

_number = itertools.count()


@dataclass(init=False, repr=False, order=True, unsafe_hash=True, slots=True)
class Namespace:
    """A key that separates skips with equal names: ``Layer().isolate(Namespace())``.

    Skips without a namespace have the namespace None. Namespaces are values: a copy or a pickle
    equals its original, and two namespaces with the same name are equal. A namespace without a name
    equals no other namespace and gets a number as its name. If several processes build the same
    model, give names, so that the plans can be compared.

    >>> fp.models.Namespace("deep") == fp.models.Namespace("deep"), fp.models.Namespace() == fp.models.Namespace()
    (True, False)

    Args:
        name: a string without "/". Plans and errors show a skip as ``deep/skip``. "", the default:
            a new, unique namespace.

    Attributes:
        name: the given name, or the number as ``ns0``.

    Raises:
        PlanError: the name is not a string, or contains "/".
    """

    name: str
    _unique: str

    def __init__(self, name: str = "") -> None:
        if not isinstance(name, str) or "/" in name:
            raise PlanError(f"the name of a namespace is a str without '/'; got {name!r}")
        self.name = name or f"ns{next(_number)}"
        self._unique = "" if name else uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"


Key: TypeAlias = tuple[Namespace | None, str]
Store: TypeAlias = dict[Key, Tree]


def label(key: Key) -> str:
    """The name of a skip outside of its module: its namespace if it has one, and its own name."""
    namespace, name = key
    return name if namespace is None else f"{namespace.name}/{name}"


_OPEN: ContextVar[Store | None] = ContextVar("funcpipe_skips", default=None)


class carrying:
    """A context in which layers on this thread stash into and pop from one store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> Self:
        self.token = _OPEN.set(self.store)
        return self

    def __exit__(self, *error: object) -> None:
        _OPEN.reset(self.token)


def current() -> Store:
    """Return the store for the layer that is running now.

    Outside of a stage no hook marks where a call of the model begins and ends, and an aborted call
    must leave nothing to the next call. So the store is a local of the outermost module call on the
    Python stack, and disappears when that call ends.
    """
    store = _OPEN.get()
    if store is not None:
        return store
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace code that reads the stack
        uncompiled: Any = torch.compiler.disable(_of_the_call)
        return uncompiled()
    return _of_the_call()


def _of_the_call() -> Store:
    outermost = None
    for frame in frames():
        if frame.f_code is MODULE_CALL:
            outermost = frame
    if outermost is None:
        return Store()  # layer.forward(x) was called directly: no other layer can pop
    return own_dict(outermost).setdefault(_STORE, Store())


_STORE = object()
"""The key of the store in a frame's locals. An object, so it cannot equal the name of an
argument."""
