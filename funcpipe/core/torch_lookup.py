"""A private name of torch that may not be there: something else takes its place, or using it says what is lost."""

from __future__ import annotations

import pkgutil
import warnings
from operator import attrgetter
from typing import Any

import torch

from funcpipe.core.errors import FuncpipeError

_told: set[str] = set()
_REQUIRED: Any = object()


class MissingName(FuncpipeError, AttributeError):
    """This torch lacks a private name that cannot be done without."""


class _Missing(type):
    """The class of what stands for a missing name: whatever is done with it says so."""

    told: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingName(cls.told)

    def __instancecheck__(cls, instance: Any) -> bool:
        raise MissingName(cls.told)

    def __getattr__(cls, name: str) -> Any:
        raise MissingName(cls.told)


class Nothing:
    """The class of no thing: takes the place of a class where nothing can be one of its instances."""


def private(name: str, *, instead: Any = _REQUIRED, lost: str) -> Any:
    """Look up a private name of torch.

    Args:
        name: as ``torch._C._data_address``; modules on its way are imported.
        instead: what takes its place where it is missing. Left out: what raises `MissingName` as soon as it is used.
        lost: what is lost without it: in a RuntimeWarning, once per name and process, or in the error.

    Returns:
        What has the name, or ``instead``.
    """
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return _without(name, instead, lost)


def attribute(of: Any, name: str, *, instead: Any = _REQUIRED, lost: str) -> Any:
    """Look up a private attribute of the things of a kind.

    Args:
        of: the kind, or one such thing.
        name: of the attribute.
        instead: see `private`; takes the thing.
        lost: see `private`.

    Returns:
        A function of a thing that reads the attribute.
    """
    if hasattr(of, name):
        return attrgetter(name)
    kind = of if isinstance(of, type) else type(of)
    return _without(f"{kind.__module__}.{kind.__qualname__}.{name}", instead, lost)


def _without(name: str, instead: Any, lost: str) -> Any:
    told = f"torch {torch.__version__} has no {name}, which funcpipe would use: {lost}"
    if instead is _REQUIRED:
        return _Missing("Missing", (), {"told": told})
    if name not in _told:
        _told.add(name)
        warnings.warn(told, RuntimeWarning, stacklevel=3)
    return instead
