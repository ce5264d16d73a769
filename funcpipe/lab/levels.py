"""Several costs, from which each stage has one: how much it keeps for its backward, and how much longer that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from funcpipe.core.cost import Cost, per_stage
from funcpipe.core.errors import ScheduleError, raise_all
from funcpipe.core.kinds import Kind

Score = TypeVar("Score", float, tuple[float, float])

_TIMES = {"forward": Kind.F, "backward_input": Kind.I, "backward_weight": Kind.W, "backward": Kind.B, "remat": Kind.R}
_LINKS = {"forward_link": (Kind.F, Kind.R), "backward_link": (Kind.B, Kind.I)}
_OWN = (*_TIMES, *_LINKS, "offload", "residual", "weight_residual")
"""What may differ from level to level; the rest is of all."""


def levels_of(cost: Any) -> tuple[Cost, ...]:
    """The costs that a stage can have. Raises ScheduleError where they differ in more than a stage's own numbers."""
    if isinstance(cost, Cost):
        return (cost,)
    levels = tuple(cost) if isinstance(cost, Sequence) and not isinstance(cost, (str, bytes)) else ()
    if not levels or not all(isinstance(level, Cost) for level in levels):
        raise ScheduleError(
            "search takes a Cost (fp.models.profile measures one), or several, one for each level that stages offer; "
            f"got {[type(level).__name__ for level in levels] if isinstance(cost, (list, tuple)) else type(cost).__name__}"
        )
    counts = {level.num_stages for level in levels} - {None}
    faults = [f"they have numbers of {sorted(map(str, counts))} stages"] if len(counts) > 1 else []
    for field in fields(Cost):
        values = [getattr(level, field.name) for level in levels]
        if field.name not in _OWN and any(value != values[0] for value in values):
            faults.append(
                f"{field.name} is {' and '.join(map(repr, dict.fromkeys(values)))}; it is of all stages alike"
            )
    raise_all("these costs are not levels of the same stages:", faults, ScheduleError)
    return levels


def mixed(levels: Sequence[Cost], chosen: Sequence[int]) -> Cost:
    """The cost of stages that have these levels."""
    picked = [levels[level] for level in chosen]
    return _of_rows(levels, lambda name, stage: _number(picked[stage], name, stage), len(chosen))


def least(levels: Sequence[Cost], num_stages: int) -> Cost:
    """A cost with which no schedule takes longer, or more memory, than with any choice of levels."""

    def number(name: str, stage: int) -> float:
        values = [_number(level, name, stage) for level in levels]
        if name in _LINKS:  # the more of an action waits for a link the more may be hidden: all of it at most
            return min(max(values), *(level.of(kind, stage) for level in levels for kind in _LINKS[name]))
        return min(values)

    return _of_rows(levels, number, num_stages)


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


def _number(cost: Cost, name: str, stage: int) -> float:
    """What a cost says of a stage; where it says nothing, what follows from the rest."""
    if name in _TIMES:
        return cost.of(_TIMES[name], stage)
    return per_stage(getattr(cost, name), stage + 1)[stage]


def _of_rows(levels: Sequence[Cost], number: Callable[[str, int], float], num_stages: int) -> Cost:
    rows: dict[str, Any] = {name: tuple(number(name, stage) for stage in range(num_stages)) for name in _OWN}
    return replace(levels[0], **rows)
