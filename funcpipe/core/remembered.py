"""What was worked out of an object, kept for as long as that lives. The only caches of frozen data."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
V = TypeVar("V")


class Remembered(Generic[T, V]):
    """A function of one object that is worked out once for each; objects are told by identity, not compared.

    What it gives must not hold the object, or that would live for ever. Two threads that ask at once may both work it
    out.

    >>> class Thing: pass
    >>> size = Remembered(lambda thing: [])
    >>> thing = Thing()
    >>> size(thing) is size(thing), size(thing) is size(Thing())
    (True, False)

    Args:
        work_out: the function.
    """

    def __init__(self, work_out: Callable[[T], V]) -> None:
        self._work_out = work_out
        self._found: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __call__(self, thing: T) -> V:
        """The value for an object."""
        found = self._found.get(id(thing))
        if found is None or found[0]() is not thing:
            found = self._found[id(thing)] = weakref.ref(thing, self._forget(id(thing))), self._work_out(thing)
        return found[1]

    def _forget(self, key: int) -> Callable[[weakref.ref[Any]], None]:
        """What drops the value when its object ends, unless another with this identity has come meanwhile."""

        def forget(ended: weakref.ref[Any]) -> None:
            if key in self._found and self._found[key][0] is ended:
                del self._found[key]

        return forget
