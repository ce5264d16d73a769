"""Weight backwards later, and together, as a pass: Schedule -> Schedule."""

from __future__ import annotations

from funcpipe.core.errors import ScheduleError
from funcpipe.core.schedule import Action, Kind, Schedule


def delay(schedule: Schedule, *, group: int = 1) -> Schedule:
    """Split every backward into I and W, and run W in groups: when so many of a stage wait, or at the end.

    The gradient of the input then goes back as early as it can, as in the zero-bubble schedules (arXiv 2401.10241), and
    W of one stage stand next to each other, so that compiled stages can merge them (``compile(merge=True)``). Up to
    ``group`` more microbatches of a stage hold what their W needs.

    >>> from funcpipe.schedules.families import one_f_one_b
    >>> print(delay(one_f_one_b(2, 4), group=2))
    0F0 0F1 0I0 0F2 0I1 0W0 0W1 0F3 0I2 0I3 0W2 0W3
    1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1F3 1I3 1W2 1W3

    Args:
        schedule: a schedule with backwards, whole or split.
        group: how many W of a stage run one after the other, from 1.

    Raises:
        ScheduleError: this is no schedule, it has no backwards, or the group is no positive int.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"delay takes a schedule; got a {type(schedule).__name__} (of a plan: fp.delay(plan.schedule))"
        )
    if type(group) is not int or group < 1:
        raise ScheduleError(f"group is how many W run one after the other, from 1; got {group!r}")
    if not schedule.has_backward:
        raise ScheduleError(f"schedule {schedule.name!r} has no backwards, so there is no W to delay")
    return Schedule(tuple(_delayed(order, group) for order in schedule.orders), f"{schedule.name}+delay")


def _delayed(order: tuple[Action, ...], group: int) -> tuple[Action, ...]:
    out: list[Action] = []
    waiting: dict[int, list[Action]] = {}
    for kind, stage, microbatch in order:
        if kind is Kind.W:
            continue
        if kind not in (Kind.B, Kind.I):
            out.append(Action(kind, stage, microbatch))
            continue
        out.append(Action(Kind.I, stage, microbatch))
        own = waiting.setdefault(stage, [])
        own.append(Action(Kind.W, stage, microbatch))
        if len(own) == group:
            out += own
            own.clear()
    return tuple(out + [action for own in waiting.values() for action in own])
