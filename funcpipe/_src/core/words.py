"""Words for messages and tables: byte sizes, and suggestions for misspelled names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def size_of(count: int) -> str:
    """Write a number of bytes in a suitable unit: ``"1.5 MiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def similar(name: object, names: Iterable[object], words: str = "; did you mean {!r}?") -> str:
    """Suggest the nearest known name with the same numbers, for a message; "" if none is near.

    >>> similar("layer.0", ["layers.0", "head"]), similar("layers.1", ["layers.0", "head"])
    ("; did you mean 'layers.0'?", '')
    """
    numbers = re.findall(r"\d+", str(name))
    alike = [known for known in map(str, names) if re.findall(r"\d+", known) == numbers]
    matches = difflib.get_close_matches(str(name), alike, 1)
    return words.format(matches[0]) if matches else ""
