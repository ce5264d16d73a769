"""Where skips are while modules are called: in the store of a stage's call, or of the outermost call around them."""

from __future__ import annotations

import functools
import itertools
import sys
import uuid
import weakref
from contextvars import ContextVar
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import nn

from funcpipe.core.errors import PlanError
from funcpipe.core.tree import Tree

_number = itertools.count()


@functools.total_ordering
class Namespace:
    """Keeps skips of equal names apart: ``Layer().isolate(Namespace())``. None is the default one.

    Namespaces are values: copies and pickles equal their origin, and so do two of the same name. One without a name
    equals nothing else, and is called by the number of its making; where several processes build the same model, names
    keep the plans comparable.

    >>> Namespace("deep") == Namespace("deep"), Namespace() == Namespace()
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
    """While inside, on this thread, layers stash into this store and pop from it: one call of a stage."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> Self:
        self.token = _OPEN.set(self.store)
        return self

    def __exit__(self, *error: object) -> None:
        _OPEN.reset(self.token)


def current() -> Store:
    """Where the layer that is running now stashes and pops.

    Outside of a stage nobody tells when a model's call begins and ends, and an aborted one must leave nothing to the
    next. So the call is found on the Python stack: the outermost frame in which torch calls a module. Its ``kwargs`` are
    a dict of this call alone; its bound method ``forward_call`` goes when it ends, with or without an exception.
    """
    store = _OPEN.get()
    if store is not None:
        return store
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.skip_frame("a skip finds its call on the Python stack")  # which the compiler would warn about
    frame, outermost = sys._getframe(1), None
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and frame.f_code.co_filename == _TORCH:
            outermost = frame
        frame = frame.f_back
    if outermost is None:
        return Store()  # layer.forward(x) by hand: the skips are for nobody
    names = outermost.f_locals
    call = _PLAIN.get()
    if call is None or not call.mark or call.mark[0] is not names["kwargs"]:
        call = _begun(names["kwargs"], names["forward_call"])
        _PLAIN.set(call)
    return call.store


class _Plain(NamedTuple):
    """The skips of one call of a module outside of any stage.

    Attributes:
        mark: one object, which this call alone has; empty as soon as it has ended.
        store: empty as soon as it has ended.
        end: sees to that.
    """

    mark: list[Any]
    store: Store
    end: weakref.ref[Any]


def _begun(mark: Any, ends_with: Any) -> _Plain:
    marks, store = [mark], Store()

    def close(_: object) -> None:
        marks.clear()
        store.clear()

    return _Plain(marks, store, weakref.ref(ends_with, close))


_PLAIN: ContextVar[_Plain | None] = ContextVar("funcpipe_plain_skips", default=None)
_TORCH = nn.Module.__call__.__code__.co_filename
