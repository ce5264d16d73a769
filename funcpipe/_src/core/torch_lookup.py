"""Look-ups of private names of torch: where one is missing, a substitute takes its place, or its
use raises."""

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
    """The metaclass of what stands for a missing name: every use of it raises `MissingName`."""

    told: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingName(cls.told)

    def __instancecheck__(cls, instance: Any) -> bool:
        raise MissingName(cls.told)

    def __getattr__(cls, name: str) -> Any:
        raise MissingName(cls.told)


class Nothing:
    """A class without instances: takes the place of a missing class, of which nothing can be an
    instance."""


def private(name: str, *, instead: Any = _REQUIRED, lost: str) -> Any:
    """Look up a private name of torch.

    Args:
        name: as ``torch._C._data_address``; modules on its way are imported.
        instead: what takes its place where it is missing. Left out: what raises `MissingName` as
            soon as it is used.
        lost: what is lost without it: in a RuntimeWarning, once per name and process, or in the
            error.

    Returns:
        The object of that name, or ``instead``.
    """
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return _without(name, instead, lost)


def attribute(of: Any, name: str, *, instead: Any = _REQUIRED, lost: str) -> Any:
    """Look up a private attribute of the instances of a class.

    Args:
        of: the class, or an instance.
        name: of the attribute.
        instead: see `private`; takes the instance.
        lost: see `private`.

    Returns:
        A function of an instance that reads the attribute.
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
