"""Remat as a pass: Schedule -> Schedule, an ``R`` before each backward whose residual is not kept."""

from __future__ import annotations

from collections.abc import Callable

from funcpipe.core.errors import ScheduleError
from funcpipe.core.schedule import Action, Kind, Schedule


def never(action: Action) -> bool:
    """Keep no residual: every microbatch of every stage is computed again."""
    return False


def remat(schedule: Schedule, *, keep: Callable[[Action], bool] = never) -> Schedule:
    """Compute residuals again instead of holding them: insert ``R`` just before the first backward.

    A device then holds the inputs of its stages and one residual at a time. ``R`` writes nothing but the residual, so
    statistics are never counted twice.

    >>> from funcpipe.schedules.families import one_f_one_b
    >>> print(remat(one_f_one_b(2, 2), keep=lambda action: action.stage == 1))
    0F0 0F1 0R0 0B0 0R1 0B1
    1F0 1B0 1F1 1B1

    Args:
        schedule: a schedule with backwards.
        keep: given the forward of a (stage, microbatch), should its residual be kept. GPipe's ``except_last`` is
            ``keep=lambda action: action.microbatch == last``.

    Raises:
        ScheduleError: this is no schedule, it has no backwards, or it has ``R`` already.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"remat takes a schedule; got a {type(schedule).__name__} (of a plan: fp.remat(plan.schedule))"
        )
    if not callable(keep):
        raise ScheduleError(
            f"keep is a function (action) -> bool; got {keep!r}; e.g. keep=lambda action: action.stage == 1"
        )
    if not schedule.has_backward:
        raise ScheduleError(f"schedule {schedule.name!r} has no backwards, so there is nothing to compute again")
    if any(action.kind is Kind.R for order in schedule.orders for action in order):
        raise ScheduleError(f"schedule {schedule.name!r} has R already; apply remat once, with keep=")

    def rows(order: tuple[Action, ...]) -> list[Action]:
        out: list[Action] = []
        for action in order:
            kind, stage, microbatch = action
            if (kind is Kind.B or kind is Kind.I) and not keep(Action(Kind.F, stage, microbatch)):
                out.append(Action(Kind.R, stage, microbatch))
            out.append(action)
        return out

    return Schedule(tuple(tuple(rows(order)) for order in schedule.orders), f"{schedule.name}+remat")
