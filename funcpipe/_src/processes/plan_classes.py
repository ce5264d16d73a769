"""Find the classes that a plan's values may have: those that code of its stages or loss can
name."""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from funcpipe._src.core.remembered import Remembered
from funcpipe._src.data.plan import Plan
from funcpipe._src.processes.wire_classes import permit

_DEPTH = 8  # the depth to which nested closures, partials and objects are searched


def _permit(plan: Plan) -> None:
    """Permit other processes to send values of the classes that a plan can name.

    A process may receive a class that it never sent.
    """
    functions = [fn for stage in plan.stages for fn in (stage.fn, stage.commit)]
    seen: dict[int, Any] = {}
    for fn in (*functions, plan.loss, plan.weight):
        for names in _namespaces(fn, seen, _DEPTH):
            for kind in names:
                permit(kind)


permit_classes_of: Remembered[Plan, None] = Remembered(_permit)
"""Permit the classes of a plan, once per plan."""


def _namespaces(value: Any, seen: dict[int, Any], depth: int) -> Iterator[Iterable[type]]:
    """Yield the classes that the code of a function, a module or an object can name, by
    namespace."""
    if depth == 0 or id(value) in seen or isinstance(value, (type, ModuleType)):
        return
    seen[id(value)] = value  # kept alive: otherwise another object could get its id
    inner: list[Any] = []
    if isinstance(value, FunctionType):
        yield _classes_in(value.__globals__, seen)
        yield _named_in_modules(value.__code__, value.__globals__)
        inner = [_content(cell) for cell in value.__closure__ or ()]
        inner += [
            getattr(value, "__wrapped__", None),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    elif isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    elif isinstance(value, MethodType):
        inner = [value.__func__, value.__self__]
    elif isinstance(value, nn.Module):
        inner = [
            vars(kind).get("forward") for module in value.modules() for kind in type(module).__mro__
        ]
    elif isinstance(value, (list, tuple)):
        inner = [*value]  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(value, dict):
        inner = [*value.values()]  # pyright: ignore[reportUnknownVariableType]
    elif callable(value):
        kinds: Any = type(value).__mro__  # pyright: ignore[reportFunctionMemberAccess]
        inner = [vars(kind).get("__call__") for kind in kinds]
        inner += [*getattr(value, "__dict__", {}).values()]
    for each in inner:
        yield from _namespaces(each, seen, depth - 1)


def _content(cell: Any) -> Any:
    """Return the content of a closure's cell, None if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _classes_in(namespace: dict[str, Any], seen: dict[int, Any]) -> list[type]:
    """Return the classes in a module's namespace that values can be containers of."""
    if id(namespace) in seen:
        return []
    seen[id(namespace)] = namespace
    return [
        value for value in [*namespace.values()] if isinstance(value, type) and _is_container(value)
    ]


def _named_in_modules(code: CodeType, namespace: dict[str, Any]) -> list[type]:
    """Return the classes that code names as ``module.Class``, without imports."""
    modules = [
        namespace[name] for name in code.co_names if isinstance(namespace.get(name), ModuleType)
    ]
    found = [
        vars(module).get(name)
        for module in modules
        if module.__name__ in sys.modules
        for name in code.co_names
    ]
    return [value for value in found if isinstance(value, type) and _is_container(value)]


def _is_container(kind: type) -> bool:
    """Return whether values of a class are containers: named tuples, dataclasses, mappings."""
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named_tuple or dataclasses.is_dataclass(kind) or issubclass(kind, (dict, UserDict))
