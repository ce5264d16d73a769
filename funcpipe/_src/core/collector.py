"""Keep Python's garbage collector off for a while, where a collection would change a measurement."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Generator[None]:
    """Return a context without automatic collections, as timeit does.

    Objects that are made inside stay in the youngest generation, so ``gc.collect(0)`` finds them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
