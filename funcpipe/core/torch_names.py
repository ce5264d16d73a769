"""Private names of torch that can be done without: who misses one goes on in another way, and says once what is lost.

A torch that is newer than what was tested may lack them. Nothing is said where all are there.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

_told: set[str] = set()
_MISSING: Any = object()


def private(name: str, *, instead: Any, lost: str) -> Any:
    """Look up a private name of torch.

    Args:
        name: below ``torch``, as ``_C._data_address``.
        instead: what takes its place where it is missing.
        lost: what that costs, for the warning: a RuntimeWarning, once per name and process.

    Returns:
        What has the name, or ``instead``.
    """
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, _MISSING)
    if found is not _MISSING:
        return found
    if name not in _told:
        _told.add(name)
        told = f"torch {torch.__version__} has no torch.{name}, which funcpipe would use: {lost}"
        warnings.warn(told, RuntimeWarning, stacklevel=2)
    return instead
