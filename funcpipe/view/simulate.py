"""The clock of a schedule under given costs: an interpreter without a device."""

from __future__ import annotations

from funcpipe.core.plan import Plan
from funcpipe.core.result import Cost, Span, Timeline
from funcpipe.core.schedule import Kind, Schedule
from funcpipe.schedules.check import clock, examine
from funcpipe.schedules.memory import residual_peak

_KINDS = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)


def simulate(plan_or_schedule: Plan | Schedule, cost: Cost = Cost()) -> Timeline:  # noqa: B008  frozen
    """Run a schedule by the clock: every device in its order, every action as early as it can.

    A hop between devices takes ``cost.comm`` and occupies nobody; skips never come later than the activations that
    follow them, so they do not show. These are the semantics by which the zero-bubble paper's tables 5 and 8 come out
    to four digits (arXiv 2401.10241).

    >>> from funcpipe.schedules.families import one_f_one_b
    >>> simulate(one_f_one_b(4, 8), Cost(forward=1, backward=2)).makespan
    33.0

    Args:
        plan_or_schedule: what to run.
        cost: times and memory.

    Returns:
        A timeline, its times in the unit of the cost.

    Raises:
        ScheduleError: the schedule is not legal, or the cost has another number of stages.
    """
    schedule = plan_or_schedule.schedule if isinstance(plan_or_schedule, Plan) else plan_or_schedule
    legal = examine(schedule)
    cost.check_stages(schedule.num_stages)
    device_of = schedule.device_of

    def latency(stage: int, to: int) -> float:
        return cost.comm if device_of[stage] != device_of[to] else 0.0

    starts, _ = clock(
        legal.lanes,
        schedule.num_stages,
        schedule.num_microbatches,
        lambda code, stage: cost.of(_KINDS[code], stage),
        latency,
    )
    durations = {(kind, stage): cost.of(kind, stage) for kind in Kind for stage in range(schedule.num_stages)}
    spans = [
        Span(device, start, start + durations[action[0], action[1]], action)
        for device, (row, order) in enumerate(zip(starts, schedule.orders, strict=True))
        for start, action in zip(row, order, strict=True)
    ]
    spans.sort(key=lambda span: (span.start, span.device))
    peak = tuple(residual_peak(order, schedule, cost) for order in schedule.orders)
    return Timeline(tuple(spans), schedule.num_devices, peak, "units", cost.comm, schedule.name)
