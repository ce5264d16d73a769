"""Find the values that a function captures, rebound names, and the modules and attributes it reads."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from funcpipe._src.core.torch_names import children_of

_OTHERS = {*sys.stdlib_module_names, "torch", "numpy", "optree", "funcpipe"}
"""Packages whose functions and objects are not searched."""

_FEW = 100  # the most entries of a container that `attribute_reads` searches


def captured_values(fn: Any) -> dict[str, Any]:
    """Return the values of a function's free names: closure variables and globals."""
    if not isinstance(fn, FunctionType):
        return {}
    values: dict[str, Any] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # the enclosing function assigns it later
            continue
    names = _names(fn.__code__, "LOAD_GLOBAL")
    return values | {name: fn.__globals__[name] for name in names if name in fn.__globals__}


def rebound_names(before: Mapping[str, Any], fn: Any) -> list[str]:
    """Say which names have another value now than in ``before``, with both values."""
    current = captured_values(fn)
    return [
        f"{name!r} was {_short(value)} when the stage was made, and is {_short(current[name])} now"
        for name, value in before.items()
        if name in current and not _same(value, current[name])
    ]


def lent_modules(fn: Any) -> dict[int, tuple[str, nn.Module]]:
    """Return the modules that a function may call with other parameters, by id, with their names.

    ``torch.func.functional_call(module, params, x)`` puts the parameters into the module during the
    call, so two threads must not do this with one module at once. A module whose own parameters are
    all frozen is called with its own parameters.
    """
    values, inner = captured_values(fn), dict[int, tuple[str, nn.Module]]()
    if isinstance(fn, FunctionType):
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        values |= dict(zip(reversed(names), reversed(fn.__defaults__ or ()), strict=False)) | (
            fn.__kwdefaults__ or {}
        )
    elif isinstance(fn, partial):
        values |= dict(enumerate(fn.args)) | fn.keywords
        inner = lent_modules(fn.func)
    elif not isinstance(fn, nn.Module) and callable(fn):
        values |= getattr(getattr(fn, "__self__", fn), "__dict__", {})
    return {id(net): (str(name), net) for name, net in values.items() if _lends(net)} | inner


def attribute_reads(fn: Any) -> tuple[set[str], dict[int, nn.Module]]:
    """Return the names of the attributes that a function may read, and the modules that it reaches.

    Follows functions and methods that it calls, except those of torch and other packages that are
    not the user's. Modules are by id, with all modules inside.
    """
    names, modules, seen = {"__call__", "forward"}, dict[int, nn.Module](), dict[int, Any]()
    objects: list[Any] = []
    todo = [fn]
    while todo:
        value = todo.pop()
        if id(value) not in seen and not isinstance(value, type):
            seen[id(value)] = value  # kept alive: otherwise another object could get its id
            if isinstance(value, FunctionType):
                if not is_foreign(value):
                    names |= _attributes(value.__code__)
                    todo += captured_values(value).values()
                    todo += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            elif isinstance(value, partial):
                todo += [value.func, *value.args, *value.keywords.values()]  # pyright: ignore[reportUnknownMemberType]
            elif isinstance(value, MethodType):
                todo += [value.__func__, value.__self__]
            elif isinstance(value, (list, tuple)):
                todo += value[:_FEW]  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(value, dict):
                todo += [*value.values()][:_FEW]  # pyright: ignore[reportUnknownArgumentType]
            elif isinstance(value, nn.Module) and value is not fn:
                modules |= {id(module): module for module in value.modules()}
            elif not is_foreign(type(value)):
                objects.append(value)
                todo += getattr(value, "__dict__", {}).values()
                todo += children_of(value).values() if isinstance(value, nn.Module) else ()
        if not todo:  # methods of the objects, if the code found so far has their names
            todo += [
                method
                for each in objects
                for name, method in vars(type(each)).items()
                if name in names and id(method) not in seen
            ]
    return names, modules


def is_foreign(value: Any) -> bool:
    """Return whether a function or a class is of a package that is not searched."""
    return (getattr(value, "__module__", None) or "").partition(".")[0] in _OTHERS


def _attributes(code: CodeType) -> set[str]:
    """Return the names of the attributes that code reads."""
    found = {*_names(code, "LOAD_ATTR", "LOAD_METHOD")}
    for each in _codes(code):
        if "getattr" in each.co_names:
            found |= {constant for constant in each.co_consts if isinstance(constant, str)}
    return found


def _lends(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(
        leaf.requires_grad or leaf.is_meta for leaf in value.parameters()
    )


def _names(code: CodeType, *operations: str) -> list[str]:
    """Return the arguments of some bytecode operations, in order."""
    steps = chain.from_iterable(map(dis.get_instructions, _codes(code)))
    return [step.argval for step in steps if step.opname in operations]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of its inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _same(a: Any, b: Any) -> bool:
    """Return whether a function computes the same with either value."""
    if a is b:
        return True
    if isinstance(a, nn.Module) and not list(a.parameters()):  # its repr shows its options
        return type(a) is type(b) and repr(a) == repr(b)
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # tensors, and other objects whose == does not return a bool
        return False


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or " ".join(repr(value).split())
    return text if len(text) <= 40 else f"a {type(value).__name__}"
