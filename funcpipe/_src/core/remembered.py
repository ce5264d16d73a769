"""Caches of values computed from objects, for the lifetime of the objects. Not pickled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


def declared_fields(self: Any) -> dict[str, Any]:
    """Return the state of a dataclass for pickle and copy: its fields, without cached
    properties."""
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
        self._found: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __call__(self, subject: T) -> V:
        """Return the value for an object, computed at the first call."""
        entry = self._found.get(id(subject))
        if entry is None or entry[0]() is not subject:
            entry = self._found[id(subject)] = (
                weakref.ref(subject, self._forget(id(subject))),
                self._work_out(subject),
            )
        return entry[1]

    def _forget(self, key: int) -> Callable[[weakref.ref[Any]], None]:
        """Return a callback that drops the value when its object is freed."""

        def forget(ended: weakref.ref[Any]) -> None:
            # A new object may have the id of the freed one by now; its value must stay.
            if key in self._found and self._found[key][0] is ended:
                del self._found[key]

        return forget
