"""The memory that an order of actions needs: residuals, counted or by cost."""

from __future__ import annotations

from funcpipe.core.result import Cost, per_stage
from funcpipe.core.schedule import Action, Kind, Schedule


def residual_levels(order: tuple[Action, ...], schedule: Schedule, cost: Cost = Cost()) -> list[tuple[float, float]]:  # noqa: B008  frozen
    """What a device holds in residuals from the start of each action of its order, and from its end.

    F takes ``residual`` at its start unless an R takes it later; I leaves ``weight_residual`` at its end; B and W free
    all at their end. Forwards alone keep none.
    """
    again = {(stage, microbatch) for kind, stage, microbatch in order if kind is Kind.R}
    whole = per_stage(cost.residual, schedule.num_stages)
    rest = per_stage(cost.weight_residual, schedule.num_stages)
    live = 0.0
    levels: list[tuple[float, float]] = []
    for kind, stage, microbatch in order:
        if schedule.has_backward and (kind is Kind.R or (kind is Kind.F and (stage, microbatch) not in again)):
            live += whole[stage]
        during = live
        if kind is Kind.B:
            live -= whole[stage]
        elif kind is Kind.I:
            live -= whole[stage] - rest[stage]
        elif kind is Kind.W:
            live -= rest[stage]
        levels.append((during, live))
    return levels


def residual_peak(order: tuple[Action, ...], schedule: Schedule, cost: Cost = Cost()) -> float:  # noqa: B008  frozen
    """The most memory that a device holds in residuals while it runs its order.

    A device runs one action after the other, so times do not matter.
    """
    return max((max(levels) for levels in residual_levels(order, schedule, cost)), default=0.0)
