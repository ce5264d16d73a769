"""The values that a function captures, those that were rebound since, and the modules that it
calls."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def captured_values(fn: Any) -> dict[str, Any]:
    """The values of the names that a function takes from around it: of enclosing functions, and
    global ones."""
    if not isinstance(fn, FunctionType):
        return {}
    values: dict[str, Any] = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # it is assigned later
            continue
    return values | {
        name: fn.__globals__[name] for name in _globals(fn.__code__) if name in fn.__globals__
    }


def rebound_names(before: Mapping[str, Any], fn: Any) -> list[str]:
    """The names that hold something else now than they did, with both values."""
    current = captured_values(fn)
    return [
        f"{name!r} was {_short(value)} when the stage was made, and is {_short(current[name])} now"
        for name, value in before.items()
        if name in current and not _same(value, current[name])
    ]


def lent_modules(fn: Any) -> dict[int, tuple[str, nn.Module]]:
    """Modules that a function calls with parameters of its own, by id, with their names.

    ``torch.func.functional_call(module, params, x)`` puts the parameters into the module for as
    long as the call takes. One whose own parameters are frozen is called as it is.
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


def _lends(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(
        leaf.requires_grad or leaf.is_meta for leaf in value.parameters()
    )


def _globals(code: CodeType) -> Iterator[str]:
    yield from (
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    )
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def _same(a: Any, b: Any) -> bool:
    """Does a function compute the same with either value."""
    if a is b:
        return True
    if isinstance(a, nn.Module) and not list(a.parameters()):  # its options are in its repr
        return type(a) is type(b) and repr(a) == repr(b)
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:  # tensors, and others whose == is no bool
        return False


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or " ".join(repr(value).split())
    return text if len(text) <= 40 else f"a {type(value).__name__}"
