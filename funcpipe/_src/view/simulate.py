"""simulate: a plan's programs by the clock, or those that a schedule alone would have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.arrows import arrows_of
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.program import lower
from funcpipe._src.schedules.legal import examine
from funcpipe._src.schedules.memory import running_sum
from funcpipe._src.view.play import Play

_ROUNDING = 1e-9
"""Shares of slices that differ by less are the same."""


def simulate(plan_or_schedule: Plan | Schedule, cost: Cost = Cost()) -> Timeline:  # noqa: B008  frozen
    """Run a plan or a schedule by the clock: every device in its order, every action as early as it
    can.

    A hop between devices takes ``cost.comm`` and occupies nobody; with ``cost.bandwidth``, values
    that go the same way wait for each other. Residuals on their way to the host or back (O, L)
    occupy the link between a device and its host, and the device only where it has to wait for
    them. With latency alone, these are the semantics by which the zero-bubble paper's tables 5 and
    8 come out to four digits (arXiv 2401.10241).

    >>> fp.simulate(fp.schedules.one_f_one_b(4, 8), fp.Cost(forward=1, backward=2)).makespan
    33.0

    A plan is simulated with its skips and its slots: a lane that sends waits until there is room at
    the other end, and the news of it has taken a hop, too. A schedule alone has the skips of the
    cost, and as much room as is wanted.

    Args:
        plan_or_schedule: what to run.
        cost: times and memory. A plan cuts slices by its own ``slices``: the cost has none, or the
            same.

    Returns:
        A timeline, its times in the unit of the cost.

    Raises:
        ScheduleError: this is no schedule or no cost, the schedule is not legal, or the cost has
            another number of stages, or other slices than the plan.
    """
    schedule = plan_or_schedule.schedule if isinstance(plan_or_schedule, Plan) else plan_or_schedule
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"simulate takes a plan or a schedule; got a {type(schedule).__name__}")
    if not isinstance(cost, Cost):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            "simulate takes a Cost (fp.models.profile measures one), as fp.Cost(forward=..., "
            f"backward=...); got {cost!r}"
        )
    examine(schedule)  # before anything is made for each stage that it names
    cost.check_stages(schedule.num_stages)
    if isinstance(plan_or_schedule, Plan):
        cost = sliced(plan_or_schedule, cost)
    program = (
        plan_or_schedule.program if isinstance(plan_or_schedule, Plan) else _blank(schedule, cost)
    )
    play = Play(program, cost, bounded=isinstance(plan_or_schedule, Plan))
    play.run()
    memory = tuple(running_sum(lane.changes) for lane in play.lanes)
    return Timeline(
        play.spans,
        schedule.num_devices,
        tuple(max((level for _, level in steps), default=0.0) for steps in memory),
        comm=cost.comm,
        name=schedule.name,
        memory=memory,
        path=play.critical_path,
        stages=tuple(part.name for part in plan_or_schedule.stages)
        if isinstance(plan_or_schedule, Plan)
        else (),
        arrows=arrows_of(program),
    )


def sliced(plan: Plan, cost: Cost) -> Cost:
    """The cost with the lengths by which a plan cuts its microbatches. Raises ScheduleError where
    it has others."""
    count = plan.schedule.num_slices
    lengths = plan.slices or (1,) * count
    if cost.slices:
        own, given = (
            [size for _, size in Cost(slices=each).slice_shares(count)]
            for each in (lengths, cost.slices)
        )
        if any(abs(one - other) > _ROUNDING for one, other in zip(own, given, strict=True)):
            raise ScheduleError(
                f"the plan cuts microbatches into slices of the lengths {lengths}, and the cost "
                f"has {cost.slices}; leave out Cost(slices=), or give the plan the same: "
                "fp.make_plan(..., slices=...)"
            )
    return replace(cost, slices=lengths if count > 1 else ())


def _blank(schedule: Schedule, cost: Cost) -> Lowered:
    """The program of a schedule alone: stages that do nothing, with the skips of the cost."""
    names = [(stash, pop, str(number)) for number, (stash, pop, _) in enumerate(cost.skips)]
    stages = [
        Stage(
            _nothing,
            stash=tuple(name for stash, _, name in names if stash == stage),
            pop=tuple(name for _, pop, name in names if pop == stage),
        )
        for stage in range(schedule.num_stages)
    ]
    return lower(stages, schedule, loss=schedule.has_backward, outputs=False)


def _nothing(params: Any, x: Any, **values: Any) -> Any:
    return x
