"""Look up classes of values from other processes by name, without importing or running anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import is_registered

_permitted: set[str] = set()
"""The names of classes that may come from other processes."""


def name_of(kind: type) -> str:
    """Return the name by which other processes find a class, and permit values of it. Raises
    PlanError without one."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if looked_up(name) is not kind:
        raise PlanError(
            f"a {kind.__qualname__} cannot go to another process: {kind.__module__} has no class "
            "of this name, by which it would be found there; define it at the top of a module, "
            "or hand a dict or a tuple on"
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
            f"this process has neither sent nor registered a {name}, so none is made here of what "
            "another one says; import the class by its name where the stage that gets it is "
            "defined, or hand a dict or a tuple on"
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
