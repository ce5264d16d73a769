"""Caches of values computed from objects, for the lifetime of the objects. Not pickled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


def declared_fields(self: Any) -> dict[str, Any]:
    """Return the state of a dataclass for pickle and copy, without cached properties."""
    return {name: self.__dict__[name] for name in self.__dataclass_fields__}


class Remembered(Generic[T, V]):
    """Caches a function of one object. Objects are compared by identity.

    The value must not refer to the object, or neither would ever be freed. Two threads that call at
    the same time may both compute the value.

    >>> class Thing: pass
    >>> size = Remembered(lambda thing: [])
    >>> thing = Thing()
    >>> size(thing) is size(thing), size(thing) is size(Thing())
    (True, False)
    """

    def __init__(self, work_out: Callable[[T], V]) -> None:
        self._work_out = work_out
        self._found: dict[int, V] = {}

    def __call__(self, subject: T) -> V:
        """Return the value for an object, computed at the first call."""
        key = id(subject)
        if key not in self._found:
            # The value goes when its object ends, before a new object can get the id.
            self._found[key] = self._work_out(subject)
            weakref.finalize(subject, self._found.pop, key, None).atexit = False
        return self._found[key]
