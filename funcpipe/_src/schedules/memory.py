"""The memory that a device needs for residuals, by its order."""

from __future__ import annotations

from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.kinds import KINDS, Held, Kind
from funcpipe._src.data.schedule import Action, Schedule


def residual_table(
    cost: Cost, num_stages: int
) -> dict[Kind, tuple[tuple[float, ...], tuple[float, ...]]]:
    """What each kind takes at its start and frees at its end, by stage, of residuals.

    Where an R computes a residual again, its F takes none; forwards alone keep none.
    """
    whole, rest = per_stage(cost.residual, num_stages), per_stage(cost.weight_residual, num_stages)
    amounts: dict[Held | None, tuple[float, ...]] = {
        Held.RESIDUAL: whole,
        Held.WEIGHT_RESIDUAL: rest,
        Held.DIFFERENCE: tuple(
            all_of_it - left for all_of_it, left in zip(whole, rest, strict=True)
        ),
        None: (0.0,) * num_stages,
    }
    return {kind: (amounts[row.takes], amounts[row.frees]) for kind, row in KINDS.items()}


def residual_levels(
    order: tuple[Action, ...],
    schedule: Schedule,
    cost: Cost = Cost(),  # noqa: B008  frozen
) -> list[tuple[float, float]]:
    """What a device holds in residuals from the start of each action of its order, and from its
    end.

    By the order alone: O and L move all of a residual in no time here. Two that overlap take theirs
    before either frees.
    """
    if not schedule.has_backward:
        return [(0.0, 0.0)] * len(order)
    again = {action[1:] for action in order if action.kind is Kind.R}
    shares = [size for _, size in cost.slice_shares(schedule.num_slices)]
    table = residual_table(cost, schedule.num_stages)
    joined = {*schedule.joined(order)}
    live = 0.0
    late = 0.0  # what the first of two that overlap frees
    levels: list[tuple[float, float]] = []
    for at, action in enumerate(order):
        kind, stage, share = action.kind, action.stage, shares[action.slice or 0]
        takes, frees = table[kind]
        kept = kind is not Kind.F or action[1:] not in again
        during = live + takes[stage] * share if kept else live
        if at in joined:
            live, late = during, frees[stage] * share
        else:
            live, late = during - late - frees[stage] * share, 0.0
        levels.append((during, live))
    return levels


def residual_peak(order: tuple[Action, ...], schedule: Schedule, cost: Cost = Cost()) -> float:  # noqa: B008  frozen
    """The most memory that a device holds in residuals while it runs its order.

    A device runs one action after the other, so times do not matter.
    """
    return max((max(levels) for levels in residual_levels(order, schedule, cost)), default=0.0)


def running_sum(changes: list[tuple[float, float, float]]) -> tuple[tuple[float, float], ...]:
    """What is held, ``(from when, how much)``; changes are (when, place among those of one time, by
    how much)."""
    changes.sort()
    level, steps = 0.0, list[tuple[float, float]]()
    for time, _, change in changes:
        level += change
        steps.append((time, level))
    return tuple(steps)
