"""Tensors that an object hides from a tree: in attributes, closures, sets, wherever Python keeps
references."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Awaitable, Iterable, Iterator
from enum import Enum
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.containers import Attribute
from funcpipe._src.core.torch_names import FakeTensor

_PLAIN: frozenset[type] = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), range, slice, type, Attribute),
        *(
            torch.Size,
            torch.Generator,
            torch.dtype,
            torch.device,
            torch.layout,
            torch.memory_format,
        ),
    }
)
ATOMS: frozenset[type] = _PLAIN | {Tensor, nn.Parameter, FakeTensor}
"""Types of leaves that need no second look."""

_CONTAINERS: frozenset[type] = frozenset({list, tuple, dict, set, frozenset})

_ELSEWHERE = (type, ModuleType, Enum, CodeType, FrameType, TracebackType, logging.Filterer)
"""Types of what objects refer to and do not hold: a logger knows all others, and what their
handlers have kept."""

_ENOUGH = 10_000
"""How many objects are looked into, the nearest first: a leaf with more (an index, a trie) makes no
run slower."""


def fault_of(leaf: Any) -> str:
    """Why something that is no container cannot stand in a tree, in words; "": it can."""
    kind = type(leaf)
    if kind in ATOMS:
        return ""
    if issubclass(kind, (Iterator, Awaitable)):
        return (
            f"is a {kind.__name__}, which can be read only once, and each microbatch would read "
            "on where another stopped: make it a tuple"
        )
    if not hides_tensors((leaf,)):
        return ""
    if built := built_in_the_stage(leaf):
        return built
    return (
        f"is a {kind.__name__}, which hides tensors: they would not be cut, moved or "
        "differentiated. Use a dict, a tuple or a dataclass, or say how it is taken apart: "
        f"optree.register_pytree_node({kind.__name__}, flatten, unflatten, namespace='funcpipe')"
    )


def built_in_the_stage(value: Any) -> str:
    """Say why an object whose functions close over tensors (a mask's rule) cannot be in a tree.

    Returns "" for objects without such functions.
    """
    functions = [inner for inner in _held(value) if isinstance(inner, FunctionType)]
    functions += [
        inner
        for held in _held(value)
        if type(held) in _CONTAINERS
        for inner in _held(held)
        if isinstance(inner, FunctionType)
    ]
    if not any(hides_tensors((function,)) for function in functions):
        return ""
    name = type(value).__name__
    return (
        f"is a {name} with a function that closes over tensors: they would not be cut, moved or "
        f"differentiated. Give these tensors in the batch, and make the {name} of them in the "
        "stage that uses it; or say how it is taken apart, these tensors among its children: "
        f"optree.register_pytree_node({name}, flatten, unflatten, namespace='funcpipe')"
    )


def hides_tensors(values: Iterable[Any]) -> bool:
    """Do values that are no tensors hold any, at any depth: in attributes, entries, closures, bound
    arguments."""
    # By type alone: isinstance asks proxies what they stand for.
    todo = [value for value in values if not issubclass(type(value), (Tensor, *_ELSEWHERE))]
    visited = set(map(id, todo))
    for holder in todo:  # which grows
        referents = _held(holder)
        kinds = set(map(type, referents)) - _PLAIN  # quick also for a vocabulary
        if any(issubclass(kind, Tensor) for kind in kinds):
            return True
        kinds = {kind for kind in kinds if not issubclass(kind, _ELSEWHERE)}
        for referent in referents if kinds else ():
            if len(visited) >= _ENOUGH:
                break
            if type(referent) in kinds and id(referent) not in visited:
                visited.add(id(referent))
                todo.append(referent)
    return False


def only_plain(containers: list[Any]) -> bool:
    """Are these containers of Python with nothing but numbers, words and the like in them; a quick
    look."""
    for value in containers:
        if type(value) not in _CONTAINERS:
            return False
    for value in gc.get_referents(*containers):  # noqa: SIM110 - all(...) takes twice as long, at every border
        if type(value) not in _PLAIN:
            return False
    return True


def _held(value: Any) -> list[Any]:
    """The objects that a value holds, without what it shares with the rest of the program."""
    kind = type(value)
    if kind is FunctionType:  # not its globals
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if (
        kind is dict and "__builtins__" in value
    ):  # a module's globals, reached by code without its function
        return []
    referents = gc.get_referents(value)
    if issubclass(kind, nn.Module):  # a scripted one has its parameters elsewhere
        referents += [*value.parameters(), *value.buffers()]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        array: Any = value
        referents += array.ravel().tolist() if array.dtype.hasobject else []
    return referents
