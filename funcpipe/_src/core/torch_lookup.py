"""Look up private names of torch, with a substitute or an error for missing names.

`torch_names.py` lists the names.
"""

from __future__ import annotations

import pkgutil
import warnings
from operator import attrgetter
from typing import Any

import torch

from funcpipe._src.core.errors import FuncpipeError

_told: set[str] = set()
_REQUIRED: Any = object()


class MissingName(FuncpipeError, AttributeError):
    """This torch lacks a private name that has no substitute."""


class _Missing(type):
    """The metaclass of placeholders for missing names: each use raises `MissingName`."""

    told: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingName(cls.told)

    def __instancecheck__(cls, instance: Any) -> bool:
        raise MissingName(cls.told)

    def __getattr__(cls, name: str) -> Any:
        raise MissingName(cls.told)


class Nothing:
    """A class without instances, the substitute for a missing class in ``isinstance`` checks."""


def private(name: str, *, instead: Any = _REQUIRED, lost: str) -> Any:
    """Look up a private name of torch.

    Args:
        name: the full name, such as ``torch._C._data_address``. Its modules are imported.
        instead: the substitute for a missing name. Without one, each use raises `MissingName`.
        lost: the loss without the name, for the warning (once per name and process) or the error.

    Returns:
        The object with that name, or the substitute.
    """
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return _without(name, instead, lost)


def attribute(of: Any, name: str, *, instead: Any = _REQUIRED, lost: str) -> Any:
    """Look up a private attribute of the instances of a class.

    Args:
        of: the class, or an instance.
        name: the name of the attribute.
        instead: the substitute: a function of the instance (see `private`).
        lost: see `private`.

    Returns:
        A function that reads the attribute of an instance.
    """
    if hasattr(of, name):
        return attrgetter(name)
    kind = of if isinstance(of, type) else type(of)
    return _without(f"{kind.__module__}.{kind.__qualname__}.{name}", instead, lost)


def _without(name: str, instead: Any, lost: str) -> Any:
    message = f"torch {torch.__version__} has no {name}, which funcpipe would use: {lost}"
    if instead is _REQUIRED:
        return _Missing("Missing", (), {"told": message})
    if name not in _told:
        _told.add(name)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    return instead
