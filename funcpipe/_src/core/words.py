"""Words for messages and tables: byte sizes, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def size_of(count: int) -> str:
    """Write a number of bytes in a suitable unit: ``"1.5 MiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def similar(name: object, names: Iterable[object], words: str = "; did you mean {!r}?") -> str:
    """Suggest the nearest known name for an unknown one, for a message; "" if none is near.

    >>> similar("layer.0", ["layers.0", "head"])
    "; did you mean 'layers.0'?"
    """
    matches = difflib.get_close_matches(str(name), [str(known) for known in names], 1)
    return words.format(matches[0]) if matches else ""
