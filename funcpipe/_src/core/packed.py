"""An immutable sequence of many small ints in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload


class Packed(Sequence[int]):
    """An immutable sequence of ints below 2**31, in 4 bytes each. Compares, hashes and pickles.

    >>> numbers = Packed([3, 1, 2])
    >>> numbers, numbers[0], numbers[1:], numbers == Packed((3, 1, 2))
    (Packed([3, 1, 2]), 3, (1, 2), True)
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = array("i", numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._numbers)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: Any) -> Any:
        found = self._numbers[at]
        return tuple(found) if isinstance(at, slice) else found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Packed) and self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(self._numbers.tobytes())

    def __repr__(self) -> str:
        return f"Packed({self._numbers.tolist()})"
