"""Read from bytecode which attributes a module's forward writes, and which it reads before a
write."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

from funcpipe._src.core.remembered import Remembered

_FILLS = frozenset({"append", "appendleft", "add", "clear", "extend", "update"})
"""Methods that write into a container and return nothing from it."""

_CHANGES = frozenset(
    {"insert", "move_to_end", "pop", "popitem", "popleft", "remove", "setdefault", *_FILLS}
)
"""Methods that write into a container."""

_NEAR = 12
"""The largest number of bytecode steps between a container and a write into it; the steps
compute the key."""

_LOOKUPS = frozenset({"getattr", "hasattr"})


class AttributeUses(NamedTuple):
    """The names of the attributes that the forward of a class of modules uses, and how."""

    written: frozenset[str]  # assigned, or written into
    kept: frozenset[str]  # read before they are written, so an earlier call's value may be read
    used_counts: frozenset[str]  # computed from their old value, ``self.step += 1``, and also read
    mentioned: frozenset[str]  # all names and strings in the code


def _uses(kind: type) -> AttributeUses:
    written: set[str] = set()
    read: set[str] = set()
    mentioned: set[str] = set()
    counted: list[str] = []
    loaded: list[str] = []
    for code in _reachable(kind):
        names = set(code.co_names)
        consts = {const for const in code.co_consts if isinstance(const, str)}
        mentioned |= names | consts
        if names & _LOOKUPS:
            read |= consts
        if "setattr" in names:
            written |= consts
        before = set[str]()  # attributes that this function has assigned so far
        steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
        for number, step in enumerate(steps):
            if step.opname == "STORE_ATTR":
                before.add(step.argval)
                if _computes_from_old(steps[max(0, number - _NEAR) : number], step.argval):
                    counted.append(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                loaded.append(step.argval)
                following = steps[number + 1 : number + 1 + _NEAR]
                if _is_written_into(following):
                    written.add(step.argval)
                # A read after a write in the same function sees the new value, so nothing is kept
                # from the last call.
                if step.argval not in before and not _is_filled(following):
                    read.add(step.argval)
        written |= before
    used = {name for name in counted if loaded.count(name) > counted.count(name)}
    return AttributeUses(frozenset(written), frozenset(read), frozenset(used), frozenset(mentioned))


def _computes_from_old(earlier: list[dis.Instruction], name: str) -> bool:
    """Return whether the code before a write computes the new value from the old one."""
    loads = [
        n for n, step in enumerate(earlier) if (step.opname, step.argval) == ("LOAD_ATTR", name)
    ]
    return bool(loads) and any(step.opname == "BINARY_OP" for step in earlier[loads[-1] :])


def _is_written_into(following: list[dis.Instruction]) -> bool:
    """Return whether the code may write into a container that it just loaded: ``c[k] = y``."""
    return _calls(following, _CHANGES) or any(step.opname == "STORE_SUBSCR" for step in following)


def _is_filled(following: list[dis.Instruction]) -> bool:
    """Return whether the code writes into a container that it just loaded, without a read."""
    # The key must be one loaded value: an expression may read the container itself.
    stores = (
        len(following) > 1
        and following[0].opname.startswith("LOAD")
        and following[1].opname == "STORE_SUBSCR"
    )
    return stores or _calls(following, _FILLS)


def _calls(following: list[dis.Instruction], methods: frozenset[str]) -> bool:
    return (
        bool(following)
        and following[0].opname in ("LOAD_ATTR", "LOAD_METHOD")
        and following[0].argval in methods
    )


def _reachable(kind: type) -> Iterator[CodeType]:
    """Yield the code of a forward, of the methods that it names, and of inner functions."""
    todo: list[Any] = [getattr(kind, "forward", None)]
    seen: set[CodeType] = set()
    while todo:
        value = todo.pop()
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
        code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
        if not isinstance(code, CodeType) or code in seen:
            continue
        seen.add(code)
        yield code
        todo += [const for const in code.co_consts if isinstance(const, CodeType)]
        # Methods of nn.Module itself are not part of a forward.
        names = [name for name in code.co_names if not hasattr(nn.Module, name)]
        todo += [inspect.getattr_static(kind, name, None) for name in names]


uses_of: Remembered[type, AttributeUses] = Remembered(_uses)
"""How the forward of a class uses attributes."""
