"""Caches of frozen data: of values computed of objects, kept as long as these live; none of it is
pickled."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


def declared_fields(self: Any) -> dict[str, Any]:
    """The state that a dataclass pickles and copies: its fields, not what cached properties have
    worked out of them."""
    return {name: self.__dict__[name] for name in self.__dataclass_fields__}


class Remembered(Generic[T, V]):
    """A function of one object that is called once for each; objects are told by identity, not
    compared.

    The value must not hold the object, or both would live for ever. Two threads that ask at once
    may both call the function.

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
        """The value for an object."""
        entry = self._found.get(id(subject))
        if entry is None or entry[0]() is not subject:
            entry = self._found[id(subject)] = (
                weakref.ref(subject, self._forget(id(subject))),
                self._work_out(subject),
            )
        return entry[1]

    def _forget(self, key: int) -> Callable[[weakref.ref[Any]], None]:
        """A callback that drops the value when its object ends, unless a newer object has this
        identity by then."""

        def forget(ended: weakref.ref[Any]) -> None:
            if key in self._found and self._found[key][0] is ended:
                del self._found[key]

        return forget
