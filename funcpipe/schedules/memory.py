"""The memory that a device needs for residuals and for what waits for its actions: by its order, or over time."""

from __future__ import annotations

from collections.abc import Sequence

from funcpipe.core.cost import Cost, per_stage
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.schedules.clock import edges_of


def residual_table(cost: Cost, num_stages: int) -> dict[Kind, tuple[tuple[float, ...], tuple[float, ...]]]:
    """What each kind takes at its start and frees at its end, by stage: of residuals, the only place that says so.

    Where an R computes a residual again, its F takes none; forwards alone keep none.
    """
    whole, rest = per_stage(cost.residual, num_stages), per_stage(cost.weight_residual, num_stages)
    gone = tuple(one - left for one, left in zip(whole, rest, strict=True))
    none = (0.0,) * num_stages
    takes = {Kind.F: whole, Kind.R: whole, Kind.L: whole}
    frees = {Kind.B: whole, Kind.O: whole, Kind.I: gone, Kind.W: rest}
    return {kind: (takes.get(kind, none), frees.get(kind, none)) for kind in Kind}


def _changes(order: Sequence[Action], schedule: Schedule, cost: Cost) -> list[tuple[float, float]]:
    """What each action of a device takes and frees of residuals."""
    if not schedule.has_backward:
        return [(0.0, 0.0)] * len(order)
    again = {(stage, microbatch) for kind, stage, microbatch in order if kind is Kind.R}
    table = residual_table(cost, schedule.num_stages)
    rows: list[tuple[float, float]] = []
    for kind, stage, microbatch in order:
        takes, frees = table[kind]
        kept = kind is not Kind.F or (stage, microbatch) not in again
        rows.append((takes[stage] if kept else 0.0, frees[stage]))
    return rows


def residual_levels(order: tuple[Action, ...], schedule: Schedule, cost: Cost = Cost()) -> list[tuple[float, float]]:  # noqa: B008  frozen
    """What a device holds in residuals from the start of each action of its order, and from its end.

    By the order alone: O and L move all of a residual in no time here.
    """
    live = 0.0
    levels: list[tuple[float, float]] = []
    for taken, freed in _changes(order, schedule, cost):
        during = live + taken
        live = during - freed
        levels.append((during, live))
    return levels


def residual_peak(order: tuple[Action, ...], schedule: Schedule, cost: Cost = Cost()) -> float:  # noqa: B008  frozen
    """The most memory that a device holds in residuals while it runs its order.

    A device runs one action after the other, so times do not matter.
    """
    return max((max(levels) for levels in residual_levels(order, schedule, cost)), default=0.0)


def memory_steps(
    schedule: Schedule, cost: Cost, starts: Sequence[Sequence[float]], arrivals: Sequence[Sequence[float]] = ()
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """What each device holds over time: ``(from when, how much)``.

    Args:
        schedule: a legal one.
        cost: times and memory, as in `Cost`.
        starts: of each action, by device and position.
        arrivals: when each value had crossed, for the edges of `clock.edges_of`; () leaves values between stages out.
    """
    changes = [_residuals(order, row, schedule, cost) for order, row in zip(schedule.orders, starts, strict=True)]
    if arrivals and (cost.skips or any(per_stage(cost.output, schedule.num_stages))):
        _add_waiting(changes, schedule, cost, starts, arrivals)
    return tuple(map(running_sum, changes))


_Change = tuple[float, float, float]
"""When, its place among those of the same time, by how much."""


def _residuals(order: Sequence[Action], starts: Sequence[float], schedule: Schedule, cost: Cost) -> list[_Change]:
    """What the actions take and free of residuals; the place of an action's start is twice its position."""
    changes: list[_Change] = []
    rows = zip(order, starts, _changes(order, schedule, cost), strict=True)
    for at, ((kind, stage, _), start, (taken, freed)) in enumerate(rows):
        if taken or not schedule.has_backward:
            changes.append((start, 2.0 * at, taken))
        if freed:
            changes.append((start + cost.of(kind, stage), 2.0 * at + 1, -freed))
    return changes


def _add_waiting(
    changes: list[list[_Change]],
    schedule: Schedule,
    cost: Cost,
    starts: Sequence[Sequence[float]],
    arrivals: Sequence[Sequence[float]],
) -> None:
    """What lies at its reader: it comes last among what happens at a time, and goes with the action that takes it."""
    sizes = per_stage(cost.output, schedule.num_stages)
    weights = [*sizes[:-1], *(skip.size for skip in cost.skips)]
    edges = edges_of(cost, schedule.device_of)
    taken: dict[Action, _Change] = {}  # when the action takes what waits for it; of a forward that keeps nothing, its R
    for order, row in zip(schedule.orders, starts, strict=True):
        for at, ((kind, stage, microbatch), start) in enumerate(zip(order, row, strict=True)):
            if kind is Kind.F and not schedule.has_backward:
                taken[Action(Kind.F, stage, microbatch)] = (start + cost.of(kind, stage), 2.0 * at + 1, 0.0)
            elif kind is Kind.F or kind is Kind.R:
                taken[Action(Kind.F, stage, microbatch)] = (start, 2.0 * at, 0.0)
            elif kind is Kind.B or kind is Kind.I:
                taken[Action(Kind.B, stage, microbatch)] = (start + cost.of(kind, stage), 2.0 * at + 1, 0.0)
    for number, (edge, row) in enumerate(zip(edges, arrivals, strict=True)):
        weight = weights[number // 2]
        for microbatch, arrived in enumerate(row):
            if weight and arrived >= 0:
                end, place, _ = taken[Action(Kind.B if edge.backward else Kind.F, edge.to, microbatch)]
                device = changes[schedule.device_of[edge.to]]
                device += [(arrived, float("inf"), weight), (end, place, -weight)]


def running_sum(changes: list[_Change]) -> tuple[tuple[float, float], ...]:
    """The running sum; what comes and goes at one time leaves its highest level, and the level after it."""
    changes.sort()
    level, steps = 0.0, list[tuple[float, float]]()
    for time, _, change in changes:
        level += change
        steps.append((time, level))
    return tuple(steps)
