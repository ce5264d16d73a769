"""The shares that slices and microbatches have of times and memory.

`Cost.slice_shares` and `Cost.piece_shares` check and explain; the arithmetic is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

from funcpipe._src.core.errors import ScheduleError

_LONGEST = 1e15  # the upper bound of a length or factor, so that sums of them stay exact enough


def are_lengths(values: Any) -> bool:
    """Return whether the values can be lengths or factors: positive numbers in a sequence."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return False
    numbers = cast("Sequence[Any]", values)
    return all(type(value) in (int, float) and 0 < value < _LONGEST for value in numbers)


def slice_shares(
    slices: Sequence[float], slice_times: Sequence[float], attention: float, num_slices: int
) -> list[tuple[float, float]]:
    """Compute the result of `Cost.slice_shares` from the fields of the cost."""
    lengths = slices or (1.0,) * num_slices
    for name, word, values in (
        ("slices", "lengths", lengths),
        ("slice_times", "times", slice_times),
    ):
        if values and len(values) != num_slices:
            raise ScheduleError(
                f"the cost has the {word} of {len(values)} slices, and a microbatch has "
                f"{num_slices}; give {name}= one number per slice, or () for equal slices"
            )
    if num_slices == 1:
        return [(1.0, 1.0)]
    ends = [0.0, *(end / sum(lengths) for end in accumulate(lengths))]
    sizes = [y - x for x, y in pairwise(ends)]
    if slice_times:
        return [
            (time / sum(slice_times), size) for time, size in zip(slice_times, sizes, strict=True)
        ]
    linear, square = 1 - attention, attention
    times = [linear * (y - x) + square * (y * y - x * x) for x, y in pairwise(ends)]
    return list(zip(times, sizes, strict=True))


def one_each(name: str, nouns: str, values: Sequence[float], count: int) -> Sequence[float]:
    """Return one number for each of ``count`` things, 1 if none are given.

    Raises ScheduleError for another number of them.
    """
    if values and len(values) != count:
        raise ScheduleError(
            f"Cost.{name} has {len(values)} numbers, and the schedule has {count} {nouns}; give "
            f"{name}= {count} numbers, or () for equal {nouns}"
        )
    return values or (1.0,) * count
