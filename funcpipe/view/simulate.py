"""The clock of a schedule under given costs: an interpreter without a device."""

from __future__ import annotations

from funcpipe.core.cost import Cost
from funcpipe.core.errors import ScheduleError
from funcpipe.core.plan import Plan
from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Kind, Schedule
from funcpipe.schedules.check import examine
from funcpipe.schedules.clock import clock, durations_of, edges_of
from funcpipe.schedules.memory import memory_steps, running_sum
from funcpipe.view.play import Play


def simulate(plan_or_schedule: Plan | Schedule, cost: Cost = Cost()) -> Timeline:  # noqa: B008  frozen
    """Run a schedule by the clock: every device in its order, every action as early as it can.

    A hop between devices takes ``cost.comm`` and occupies nobody; with ``cost.bandwidth``, values that go the same way
    wait for each other. Residuals on their way to the host or back (O, L) occupy the link between a device and its
    host, and the device only where it has to wait for them. With latency alone, these are the semantics by which the
    zero-bubble paper's tables 5 and 8 come out to four digits (arXiv 2401.10241).

    >>> from funcpipe.schedules.families import one_f_one_b
    >>> simulate(one_f_one_b(4, 8), Cost(forward=1, backward=2)).makespan
    33.0

    Args:
        plan_or_schedule: what to run.
        cost: times and memory.

    Returns:
        A timeline, its times in the unit of the cost.

    Raises:
        ScheduleError: this is no schedule or no cost, the schedule is not legal, or the cost has another number of stages.
    """
    schedule = plan_or_schedule.schedule if isinstance(plan_or_schedule, Plan) else plan_or_schedule
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"simulate takes a plan or a schedule; got a {type(schedule).__name__}")
    if not isinstance(cost, Cost):
        raise ScheduleError(
            f"simulate takes a Cost beside the schedule: fp.Cost(forward=..., backward=...); got {cost!r}"
        )
    cost.check_stages(schedule.num_stages)
    if isinstance(plan_or_schedule, Plan):
        play = Play(plan_or_schedule.program, cost, bounded=True)
        play.run()
        spans = [
            Span(number, start, end, action)
            for number, lane in enumerate(play.lanes)
            for action, start, end in lane.spans
        ]
        memory = tuple(running_sum(lane.changes) for lane in play.lanes)
    else:
        spans, memory = _by_schedule(schedule, cost)
    spans.sort(key=lambda span: (span.start, span.device))
    peak = tuple(max((level for _, level in steps), default=0.0) for steps in memory)
    return Timeline(tuple(spans), schedule.num_devices, peak, "units", cost.comm, schedule.name, memory)


def _by_schedule(schedule: Schedule, cost: Cost) -> tuple[list[Span], tuple[tuple[tuple[float, float], ...], ...]]:
    """The spans of a schedule alone, with the skips of the cost and as many slots as are wanted; and the memory."""
    legal = examine(schedule)
    stages, device_of = schedule.num_stages, schedule.device_of
    starts, arrivals, _ = clock(
        legal.lanes, device_of, schedule.num_microbatches, durations_of(cost, stages), edges_of(cost, device_of)
    )
    durations = {(kind, stage): cost.of(kind, stage) for kind in Kind for stage in range(stages)}
    spans = [
        Span(device, start, start + durations[action[0], action[1]], action)
        for device, (row, order) in enumerate(zip(starts, schedule.orders, strict=True))
        for start, action in zip(row, order, strict=True)
    ]
    return spans, memory_steps(schedule, cost, starts, arrivals)
