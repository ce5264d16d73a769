"""Several costs, from which each stage has one: how much it keeps for its backward, and how much longer that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from funcpipe.core.cost import Cost
from funcpipe.schedules.levels import LINKS, number_of, of_rows

Score = TypeVar("Score", float, tuple[float, float])


def least(levels: Sequence[Cost], num_stages: int) -> Cost:
    """A cost with which no schedule takes longer, or more memory, than with any choice of levels."""

    def number(name: str, stage: int) -> float:
        values = [number_of(level, name, stage) for level in levels]
        if name in LINKS:  # the more of an action waits for a link the more may be hidden: all of it at most
            return min(max(values), *(level.of(kind, stage) for level in levels for kind in LINKS[name]))
        return min(values)

    return of_rows(levels, number, num_stages)


def neighbours(chosen: Sequence[int], num_levels: int) -> Iterator[tuple[int, ...]]:
    """Each choice in which one stage has another level."""
    for stage, level in enumerate(chosen):
        for other in range(num_levels):
            if other != level:
                yield (*chosen[:stage], other, *chosen[stage + 1 :])


def descend(
    start: tuple[int, ...],
    num_levels: int,
    score: Callable[[tuple[int, ...]], Score],
    over: Callable[[], bool],
) -> tuple[tuple[int, ...], Score]:
    """A choice whose neighbours are not better, and its score; or what was found when the time was over."""
    best, value, better = start, score(start), True
    while better:
        better = False
        for choice in neighbours(best, num_levels):
            if over():
                return best, value
            found = score(choice)
            if found < value:
                best, value, better = choice, found, True
                break
    return best, value
