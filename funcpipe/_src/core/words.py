"""Words for messages and tables: sizes in units, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def size_of(count: int) -> str:
    """A number of bytes in the largest unit that it fills: ``"1.5 MiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def similar(name: object, names: Iterable[object], words: str = "; did you mean {!r}?") -> str:
    """What to add to a message about an unknown name: the nearest known one; nothing where none is
    near.

    >>> similar("layer.0", ["layers.0", "head"])
    "; did you mean 'layers.0'?"
    """
    matches = difflib.get_close_matches(str(name), [str(known) for known in names], 1)
    return words.format(matches[0]) if matches else ""
