"""Tensors that a thing holds without showing them: in attributes, closures, sets, wherever Python keeps references."""

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

from funcpipe.core.containers import Attribute
from funcpipe.core.torch_names import FakeTensor

_PLAIN: frozenset[type] = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), range, slice, type, Attribute),
        *(torch.Size, torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
ATOMS: frozenset[type] = _PLAIN | {Tensor, nn.Parameter, FakeTensor}
"""Types of leaves that need no second look."""

_CONTAINERS: frozenset[type] = frozenset({list, tuple, dict, set, frozenset})

_ELSEWHERE = (type, ModuleType, Enum, CodeType, FrameType, TracebackType, logging.Filterer)
"""What a thing refers to without holding it: a logger knows all others, and what their handlers have kept."""

_ENOUGH = 10_000
"""How many things are opened, the nearest first; who has more in a leaf (an index, a trie) gets no slower run for it."""


def fault_of(leaf: Any) -> str:
    """Why something that is no container cannot stand in a tree, in words; "": it can."""
    kind = type(leaf)
    if kind in ATOMS:
        return ""
    if issubclass(kind, (Iterator, Awaitable)):
        return (
            f"is a {kind.__name__}, which can be read only once, and each microbatch would read on where another "
            "stopped: make it a tuple"
        )
    if not hides_tensors((leaf,)):
        return ""
    return (
        f"is a {kind.__name__}, which hides tensors: they would not be cut, moved or differentiated. Use a dict, a "
        f"tuple or a dataclass, or say how it is taken apart: optree.register_pytree_node({kind.__name__}, flatten, "
        "unflatten, namespace='funcpipe')"
    )


def hides_tensors(things: Iterable[Any]) -> bool:
    """Do some things that are no tensors hold any, at any depth: in attributes, entries, closures, bound arguments."""
    # By type alone: isinstance asks proxies what they stand for.
    todo = [one for one in things if not issubclass(type(one), (Tensor, *_ELSEWHERE))]
    seen = set(map(id, todo))
    for thing in todo:  # which grows
        held = _held(thing)
        kinds = set(map(type, held)) - _PLAIN  # quick also for a vocabulary
        if any(issubclass(kind, Tensor) for kind in kinds):
            return True
        kinds = {kind for kind in kinds if not issubclass(kind, _ELSEWHERE)}
        for one in held if kinds else ():
            if len(seen) >= _ENOUGH:
                break
            if type(one) in kinds and id(one) not in seen:
                seen.add(id(one))
                todo.append(one)
    return False


def only_plain(containers: list[Any]) -> bool:
    """Are these containers of Python with nothing but numbers, words and the like in them; a quick look."""
    for one in containers:
        if type(one) not in _CONTAINERS:
            return False
    for one in gc.get_referents(*containers):  # noqa: SIM110 - all(...) takes twice as long, at every border
        if type(one) not in _PLAIN:
            return False
    return True


def _held(thing: Any) -> list[Any]:
    """What a thing keeps alive, as far as it is its own."""
    kind = type(thing)
    if kind is FunctionType:  # not its globals
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    held = gc.get_referents(thing)
    if issubclass(kind, nn.Module):  # a scripted one has its parameters elsewhere
        held += [*thing.parameters(), *thing.buffers()]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        array: Any = thing
        held += array.ravel().tolist() if array.dtype.hasobject else []
    return held
