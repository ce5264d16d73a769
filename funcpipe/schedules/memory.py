"""The memory that an order of actions needs: residuals, counted or by cost."""

from __future__ import annotations

from funcpipe.core.result import Cost, per_stage
from funcpipe.core.schedule import Action, Kind, Schedule


def residual_peak(order: tuple[Action, ...], schedule: Schedule, cost: Cost = Cost()) -> float:  # noqa: B008  frozen
    """The most memory that a device holds in residuals while it runs its order.

    F takes ``residual`` at its start unless an R takes it later; I leaves ``weight_residual``; B and W free all at
    their end. A device runs one action after the other, so times do not matter.
    """
    if not schedule.has_backward:
        return 0.0
    again = {(stage, microbatch) for kind, stage, microbatch in order if kind is Kind.R}
    whole = per_stage(cost.residual, schedule.num_stages)
    rest = per_stage(cost.weight_residual, schedule.num_stages)
    live = peak = 0.0
    for kind, stage, microbatch in order:
        if kind is Kind.R or (kind is Kind.F and (stage, microbatch) not in again):
            live += whole[stage]
            peak = max(peak, live)
        elif kind is Kind.B:
            live -= whole[stage]
        elif kind is Kind.I:
            live -= whole[stage] - rest[stage]
            peak = max(peak, live)
        elif kind is Kind.W:
            live -= rest[stage]
    return peak
