"""`simulate`: compute the timeline of a plan or of a schedule alone.

`play.py` simulates the programs. `schedules/clock.py` is the faster simulation of the search, which
knows no slots and no memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.placed_cost import placed_cost
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.data.stage import Stage
from funcpipe._src.data.trace import arrows_of
from funcpipe._src.lower.program import lower
from funcpipe._src.schedules.legal import examine
from funcpipe._src.schedules.memory import running_sum
from funcpipe._src.view.play import Play

_ROUNDING = 1e-9  # shares of slices that differ by less count as equal


def simulate(plan_or_schedule: Plan | Schedule, cost: Cost = Cost()) -> Timeline:  # noqa: B008  frozen
    """Simulate a plan or a schedule: each device runs its actions in order, as early as possible.

    A hop between devices takes ``cost.comm``, during which the devices work. With
    ``cost.bandwidth``, values between the same two devices cross one after the other. Residuals
    that move to the host or back (O, L) occupy the link between a device and its host. With latency
    alone, the simulation reproduces tables 5 and 8 of the zero-bubble paper to four digits (arXiv
    2401.10241).

    >>> fp.simulate(fp.schedules.one_f_one_b(4, 8), fp.Cost(forward=1, backward=2)).makespan
    33.0

    For a plan, the simulation includes its skips and its slots: a lane that sends waits for a free
    slot at the other end, and learns of it one hop late. For a schedule alone, the skips are those
    of the cost, and slots are unlimited.

    Args:
        plan_or_schedule: the plan or the schedule.
        cost: times and memory. A plan cuts slices by its own ``slices``: the cost must have no
            ``slices``, or the same. Default: each of F, I and W takes one unit.

    Returns:
        A timeline, with times in the unit of the cost.

    Raises:
        ScheduleError: the first argument is not a plan or a schedule, or not legal; or the cost is
            not a `Cost`, has another number of stages, microbatches or devices, or has other
            slices than the plan.
    """
    schedule = plan_or_schedule.schedule if isinstance(plan_or_schedule, Plan) else plan_or_schedule
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"simulate takes a plan or a schedule; got a {type(schedule).__name__}")
    if not isinstance(cost, Cost):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            "simulate takes a Cost (fp.models.profile measures one), as fp.Cost(forward=..., "
            f"backward=...); got {cost!r}"
        )
    examine(schedule)  # first, because a mistyped huge index would allocate memory below
    cost.check_stages(schedule.num_stages)
    plan = plan_or_schedule if isinstance(plan_or_schedule, Plan) else None
    if plan is not None:
        cost = sliced(plan, cost)
    cost = placed_cost(cost, schedule.device_of, schedule.num_devices)
    program = _blank(schedule, cost) if plan is None else plan.program
    play = Play(program, cost, bounded=plan is not None)
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
        stages=() if plan is None else tuple(stage.name for stage in plan.stages),
        arrows=arrows_of(program),
    )


def sliced(plan: Plan, cost: Cost) -> Cost:
    """Return the cost with the slice lengths of a plan. Raises ScheduleError if they differ."""
    count = plan.schedule.num_slices
    lengths = plan.slices or (1,) * count
    if cost.slices:
        own, given = (
            [size for _, size in Cost(slices=each).slice_shares(count)]
            for each in (lengths, cost.slices)
        )
        if any(abs(one - other) > _ROUNDING for one, other in zip(own, given, strict=True)):
            raise ScheduleError(
                f"the plan cuts microbatches into slices of the lengths {lengths}, but the cost "
                f"has {cost.slices}; leave out Cost(slices=), or give the plan the same lengths: "
                "fp.make_plan(..., slices=...)"
            )
    return replace(cost, slices=lengths if count > 1 else ())


def _blank(schedule: Schedule, cost: Cost) -> Lowered:
    """Lower a schedule alone, with empty stages and the skips of the cost."""
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
