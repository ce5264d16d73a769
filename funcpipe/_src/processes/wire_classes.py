"""Look up classes of values from other processes by name, without importing or running anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import is_registered

_permitted: set[str] = set()  # the names of classes that may come from other processes


def name_of(kind: type) -> str:
    """Return the name by which other processes find a class, and permit values of the class.

    Raises PlanError if its name does not lead to it.
    """
    name = f"{kind.__module__}:{kind.__qualname__}"
    if looked_up(name) is not kind:
        raise PlanError(
            f"a {kind.__qualname__} cannot go to another process: {kind.__module__} has no class "
            "of this name, so the other process could not find the class; define it at the top of "
            "a module, or pass a dict or a tuple"
        )
    _permitted.add(name)
    return name


def permit(kind: type) -> type:
    """Permit values of a class from other processes, if its name leads to it."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if looked_up(name) is kind:
        _permitted.add(name)
    return kind


def class_named(name: str) -> Any:
    """Return the class that another process names. Raises ValueError for unknown and unpermitted
    classes."""
    found = looked_up(name)
    if not isinstance(found, type):
        raise ValueError(f"there is no class {name} in this process")
    if name not in _permitted and not is_registered(found):
        raise ValueError(
            f"another process sent a {name}, which this process has neither sent nor registered, "
            "so it refuses to make one; import the class by its name in the module of the stage "
            "that receives it, or pass a dict or a tuple"
        )
    return found


def looked_up(name: str) -> Any:
    """Return the object of a name in a loaded module, or None. Runs no getattr, because some
    modules import then."""
    module, _, path = name.partition(":")
    space: Mapping[str, Any] = vars(sys.modules[module]) if module in sys.modules else {}
    found: Any = None
    for part in path.split("."):
        found = space.get(part)
        if not isinstance(found, type):
            return None
        space = vars(found)
    return found
