"""Where skips are while modules are called: in the store of a stage's call, or of the outermost
call around them."""

from __future__ import annotations

import functools
import itertools
import uuid
from contextvars import ContextVar
from typing import Any, Self, TypeAlias

import torch

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.frames import MODULE_CALL, frames, own_dict
from funcpipe._src.core.tree import Tree

_number = itertools.count()


@functools.total_ordering
class Namespace:
    """Keeps skips of equal names apart: ``Layer().isolate(Namespace())``. None is the default one.

    Namespaces are values: copies and pickles equal their origin, and so do two of the same name.
    One without a name equals nothing else, and is called by the number of its making; where several
    processes build the same model, names keep the plans comparable.

    >>> fp.models.Namespace("deep") == fp.models.Namespace("deep"), fp.models.Namespace() == fp.models.Namespace()
    (True, False)

    Args:
        name: what plans and errors put before the names of its skips, as in ``deep/skip``.
    """

    __slots__ = ("_identity", "name")

    def __init__(self, name: str = "") -> None:
        if not isinstance(name, str) or "/" in name:
            raise PlanError(f"the name of a namespace is a str without '/'; got {name!r}")
        self.name = name or f"ns{next(_number)}"
        self._identity = (self.name, "" if name else uuid.uuid4().hex)

    def __eq__(self, other: object) -> bool:
        return self._identity == other._identity if isinstance(other, Namespace) else NotImplemented

    def __lt__(self, other: Namespace) -> bool:
        return self._identity < other._identity if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"


Key: TypeAlias = tuple[Namespace | None, str]
Store: TypeAlias = dict[Key, Tree]


def label(key: Key) -> str:
    """What a skip is called outside of the module: its name, after its namespace if it has one."""
    namespace, name = key
    return name if namespace is None else f"{namespace.name}/{name}"


_OPEN: ContextVar[Store | None] = ContextVar("funcpipe_skips", default=None)


class carrying:
    """While inside, on this thread, layers stash into this store and pop from it: one call of a
    stage."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> Self:
        self.token = _OPEN.set(self.store)
        return self

    def __exit__(self, *error: object) -> None:
        _OPEN.reset(self.token)


def current() -> Store:
    """Where the layer that is running now stashes and pops.

    Outside of a stage nobody tells when a model's call begins and ends, and an aborted one must
    leave nothing to the next. So the store lies with the outermost call of a module that is on the
    Python stack, and goes when that ends.
    """
    store = _OPEN.get()
    if store is not None:
        return store
    if torch.compiler.is_dynamo_compiling():  # the compiler does not read the stack
        uncompiled: Any = torch.compiler.disable(_of_the_call)
        return uncompiled()
    return _of_the_call()


def _of_the_call() -> Store:
    outermost = None
    for frame in frames():
        if frame.f_code is MODULE_CALL:
            outermost = frame
    if outermost is None:
        return Store()  # layer.forward(x) by hand: the skips are for nobody
    return own_dict(outermost).setdefault(_STORE, Store())


_STORE = object()
"""The key of the store: no name of an argument."""
