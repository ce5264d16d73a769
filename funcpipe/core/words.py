"""Words for messages and tables: sizes in units, columns, and the nearest known name."""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Sequence


def size_of(count: int) -> str:
    """A number of bytes in the largest unit that it fills: ``"1.5 MiB"``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def columns(rows: Sequence[Sequence[str]], words: Container[int] = (0,)) -> list[str]:
    """Rows as lines of aligned columns; those with words to the left, numbers to the right.

    >>> print(*columns([["", "bytes"], ["weight", "12"]]), sep="\\n")
            bytes
    weight     12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{'<' if column in words else '>'}{width}" for column, width in enumerate(widths)]
    return ["  ".join(map(format, row, forms)).rstrip() for row in rows]


def similar(name: object, names: Iterable[object], words: str = "; did you mean {!r}?") -> str:
    """What to add to a message about an unknown name: the nearest known one; nothing where none is near.

    >>> similar("layer.0", ["layers.0", "head"])
    "; did you mean 'layers.0'?"
    """
    matches = difflib.get_close_matches(str(name), [str(known) for known in names], 1)
    return words.format(matches[0]) if matches else ""
