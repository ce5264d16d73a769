"""Levels: several costs, of which each stage has one for each microbatch.

Tables by stage have the levels as further columns: stage ``s`` at level ``l`` is column ``s + l * S``, and all actions of a
stage and microbatch have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

from funcpipe.core.cost import Cost, per_stage
from funcpipe.core.errors import ScheduleError, raise_all
from funcpipe.core.kinds import Kind
from funcpipe.core.schedule import Schedule

Costs: TypeAlias = Cost | Sequence[Cost]
"""One cost, of all levels, or that of each."""

_TIMES = {"forward": Kind.F, "backward_input": Kind.I, "backward_weight": Kind.W, "backward": Kind.B, "remat": Kind.R}
LINKS = {"forward_link": (Kind.F, Kind.R), "backward_link": (Kind.B, Kind.I)}
"""What waits for links, and the kinds that do."""
OWN = (*_TIMES, *LINKS, "offload", "residual", "weight_residual")
"""What may differ from level to level; the rest is of all."""


def levels_of(cost: Any, who: str) -> tuple[Cost, ...]:
    """The costs that a stage can have. Raises ScheduleError where they differ in more than a stage's own numbers."""
    if isinstance(cost, Cost):
        return (cost,)
    levels = tuple(cost) if isinstance(cost, Sequence) and not isinstance(cost, (str, bytes)) else ()
    if not levels or not all(isinstance(level, Cost) for level in levels):
        got = f"{[type(level).__name__ for level in levels]}" if isinstance(cost, (list, tuple)) else repr(cost)
        raise ScheduleError(
            f"{who} takes a Cost (fp.models.profile measures one), as fp.Cost(forward=..., backward=...), or several, one for "
            f"each level that stages offer; got {got}"
        )
    counts = {level.num_stages for level in levels} - {None}
    faults = [f"they have numbers of {sorted(map(str, counts))} stages"] if len(counts) > 1 else []
    for field in fields(Cost):
        values = [getattr(level, field.name) for level in levels]
        if field.name not in OWN and any(value != values[0] for value in values):
            faults.append(
                f"{field.name} is {' and '.join(map(repr, dict.fromkeys(values)))}; it is of all stages alike"
            )
    raise_all("these costs are not levels of the same stages:", faults, ScheduleError)
    return levels


def mixed(levels: Sequence[Cost], chosen: Sequence[int]) -> Cost:
    """The cost of stages that have these levels."""
    return of_rows(levels, lambda name, stage: number_of(levels[chosen[stage]], name, stage), len(chosen))


def columns(levels: Sequence[Cost], num_stages: int, num_levels: int = 1) -> Cost:
    """The cost of each column; a cost alone is that of so many levels."""
    if len(levels) == 1:
        if num_levels == 1:
            return levels[0]
        levels = [*levels] * num_levels
    return of_rows(
        levels, lambda name, at: number_of(levels[at // num_stages], name, at % num_stages), num_stages * len(levels)
    )


def at_levels(lanes: Iterable[list[tuple[int, int, int]]], schedule: Schedule) -> list[list[tuple[int, int, int]]]:
    """The actions of each device as (code, column, piece)."""
    if not schedule.levels:
        return [*lanes]
    stages, slices = schedule.num_stages, schedule.num_slices
    shift = {
        (stage, microbatch * slices + (number or 0)): level * stages
        for (_, stage, microbatch, number), level in schedule.levels
    }
    return [[(code, stage + shift.get((stage, piece), 0), piece) for code, stage, piece in lane] for lane in lanes]


def number_of(cost: Cost, name: str, stage: int) -> float:
    """What a cost says of a stage; where it says nothing, what follows from the rest."""
    if name in _TIMES:
        return cost.of(_TIMES[name], stage)
    return per_stage(getattr(cost, name), stage + 1)[stage]


def of_rows(levels: Sequence[Cost], number: Callable[[str, int], float], count: int) -> Cost:
    """A cost with these numbers of each stage, or column."""
    rows: dict[str, Any] = {name: tuple(number(name, at) for at in range(count)) for name in OWN}
    return replace(levels[0], **rows)
