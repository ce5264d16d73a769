"""Find tensors that an object hides from a tree: in attributes, closures, sets and elsewhere.

A run could not cut, move or differentiate such tensors. `tree.py` decides where they raise.
"""

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

_PYTHON = {bool, int, float, complex, str, bytes, type(None), range, slice, type, Attribute}
_TORCH = {torch.Size, torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format}
_PLAIN: frozenset[type] = frozenset(_PYTHON | _TORCH)
ATOMS: frozenset[type] = _PLAIN | {Tensor, nn.Parameter, FakeTensor}
"""Types of leaves that hide no tensors."""

_CONTAINERS: frozenset[type] = frozenset({list, tuple, dict, set, frozenset})

_ELSEWHERE = (type, ModuleType, Enum, CodeType, FrameType, TracebackType, logging.Filterer)
"""Types that objects refer to but do not contain. A logger refers to all other loggers, and to the
records that their handlers keep."""

_ENOUGH = 10_000
"""The most objects to look into, so that a huge leaf (an index, a trie) does not slow a run."""


def fault_of(leaf: Any) -> str:
    """Say why a leaf cannot be part of a tree; "" if it can."""
    kind = type(leaf)
    if kind in ATOMS:
        return ""
    if issubclass(kind, (Iterator, Awaitable)):
        return (
            f"is a {kind.__name__}, which can be read only once, so each microbatch would continue "
            "where another stopped: make it a tuple"
        )
    if not hides_tensors((leaf,)):
        return ""
    if built := built_in_the_stage(leaf):
        return built
    return (
        f"is a {kind.__name__}, which hides tensors: they would not be cut, moved or "
        "differentiated. Use a dict, a tuple or a dataclass, or register the class: "
        f"optree.register_pytree_node({kind.__name__}, flatten, unflatten, namespace='funcpipe')"
    )


def built_in_the_stage(value: Any) -> str:
    """Say why an object with functions that close over tensors cannot be in a tree; "" for others.

    An example is the mask function of an attention.
    """
    held = _held(value)
    held += [inner for each in held if type(each) in _CONTAINERS for inner in _held(each)]
    if not any(isinstance(each, FunctionType) and hides_tensors((each,)) for each in held):
        return ""
    name = type(value).__name__
    return (
        f"is a {name} with a function that closes over tensors: they would not be cut, moved or "
        f"differentiated. Give these tensors in the batch, and make the {name} from them in the "
        "stage that uses it; or register the class, with these tensors among its children: "
        f"optree.register_pytree_node({name}, flatten, unflatten, namespace='funcpipe')"
    )


def hides_tensors(values: Iterable[Any]) -> bool:
    """Return whether values that are not tensors contain tensors, at any depth.

    Looks into attributes, entries, closures and bound arguments.
    """
    # issubclass of the type, because isinstance asks proxies for the class of their target.
    todo = [value for value in values if not issubclass(type(value), (Tensor, *_ELSEWHERE))]
    visited = set(map(id, todo))
    for holder in todo:  # the loop appends to the list
        referents = _held(holder)
        kinds = set(map(type, referents)) - _PLAIN  # fast even for a large vocabulary
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
    """Return whether these are plain Python containers of numbers, strings and the like. Fast."""
    for value in containers:
        if type(value) not in _CONTAINERS:
            return False
    for value in gc.get_referents(*containers):  # noqa: SIM110 - all(...) takes twice as long, at every border
        if type(value) not in _PLAIN:
            return False
    return True


def _held(value: Any) -> list[Any]:
    """Return the objects that a value contains, without objects that it shares with the program."""
    kind = type(value)
    if kind is FunctionType:  # not its globals, which belong to the module
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if kind is dict and "__builtins__" in value:  # the globals of a module
        return []
    referents = gc.get_referents(value)
    if issubclass(kind, nn.Module):  # a scripted module stores its parameters outside of Python
        referents += [*value.parameters(), *value.buffers()]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        array: Any = value
        referents += array.ravel().tolist() if array.dtype.hasobject else []
    return referents
