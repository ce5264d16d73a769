"""The memory of a device for residuals, from the order of its actions alone.

`view/play.py` computes memory over time, with outputs, skips and transfers.
"""

from __future__ import annotations

from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.kinds import KINDS, WHOLE, Held, Kind
from funcpipe._src.data.schedule import Action, Schedule


def residual_table(
    cost: Cost, num_stages: int
) -> dict[Kind, tuple[tuple[float, ...], tuple[float, ...]]]:
    """Return the memory that each kind takes at its start and frees at its end, by stage.

    The caller must handle two cases: an F takes nothing if an R recomputes its residual, or if the
    schedule has no backwards.
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
    """Return the memory of a device in residuals during each action of its order, and after it.

    Depends on the order only: O and L take no time here. The actions of a pair both take memory
    before either frees some.
    """
    if not schedule.has_backward:
        return [(0.0, 0.0)] * len(order)
    again = {action[1:] for action in order if action.kind is Kind.R}
    slices = schedule.num_slices
    shares = [size for _, size in cost.piece_shares(schedule.num_microbatches, slices)]
    table = residual_table(cost, schedule.num_stages)
    joined = {*schedule.joined(order)}
    live = 0.0
    late = 0.0  # freed by the first action of a pair, but only when the second ends
    levels: list[tuple[float, float]] = []
    for at, action in enumerate(order):
        kind, stage, microbatch, number = action
        share = 0.0 if kind in WHOLE else shares[microbatch * slices + (number or 0)]
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
    """Return the most memory of a device in residuals while it runs its order.

    A device runs one action after the other, so times do not matter.
    """
    return max((max(levels) for levels in residual_levels(order, schedule, cost)), default=0.0)


def running_sum(changes: list[tuple[float, float, float]]) -> tuple[tuple[float, float], ...]:
    """Add up changes of memory, as steps ``(time, amount)``.

    Changes are (time, rank among the changes of one time, difference). They are sorted in place.
    """
    changes.sort()
    level, steps = 0.0, list[tuple[float, float]]()
    for time, _, change in changes:
        level += change
        steps.append((time, level))
    return tuple(steps)
