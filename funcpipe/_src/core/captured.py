"""Find the values that a function captures, names that were rebound since, and modules it calls."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn


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
    return values | {
        name: fn.__globals__[name] for name in _globals(fn.__code__) if name in fn.__globals__
    }


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
