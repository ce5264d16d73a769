"""Counts that users give: positive whole numbers, checked together."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any, cast


def counted(arguments: Mapping[str, Any], faults: list[str], *, optional: str = "") -> dict[str, int]:
    """The counts as ints, by name; what is no positive whole number is added to the faults.

    Args:
        arguments: as users gave them.
        faults: a list to add to.
        optional: the name of the one that may be None, and is left out then.
    """
    counts: dict[str, int] = {}
    for name, value in arguments.items():
        if value is None and name == optional:
            continue
        try:
            if isinstance(value, bool):
                raise TypeError
            counts[name] = index(cast("Any", value))
        except TypeError:
            faults.append(f"{name} is a whole number; got {value!r}")
            continue
        if counts[name] <= 0:
            faults.append(f"{name} is positive; got {value}")
    return counts
