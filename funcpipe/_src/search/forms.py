"""The forms of a problem: as it is, and with stages next to each other on a device as one and
devices in order.

What is known of lines, loops and Vs then helps with any placement: stages on devices 2, 0, 0, 1 are
a line of three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import TypeAlias

from funcpipe._src.data.kinds import KINDS, Flow
from funcpipe._src.data.schedule import Action, Schedule
from funcpipe._src.search.problem import Problem

Lift: TypeAlias = Callable[[Schedule], Schedule]
"""Makes a schedule of a problem of one of its form."""


def forms(problem: Problem) -> list[tuple[Problem, Lift]]:
    """The forms of a problem, the simplest first; one where it is that already.

    >>> from funcpipe._src.data.cost import Cost
    >>> [form.device_of for form, _ in forms(Problem(Cost(), (2, 0, 0, 1), 2, (4.0, 5.0, 6.0)))]
    [(0, 1, 2), (2, 0, 0, 1)]
    """
    simple = simplest(problem)
    return [simple, (problem, _as_it_is)] if simple is not None else [(problem, _as_it_is)]


def simplest(problem: Problem) -> tuple[Problem, Lift] | None:
    """The simplest form of a problem; None: it has it."""
    runs = [(device, len([*group])) for device, group in groupby(problem.device_of)]
    devices = [*dict.fromkeys(problem.device_of)]
    if len(runs) == problem.num_stages and devices == sorted(devices):
        return None
    sizes = [size for _, size in runs]
    form = replace(
        problem,
        cost=problem.cost.group(sizes),
        device_of=tuple([devices.index(device) for device, _ in runs]),
        limits=tuple([problem.limits[device] for device in devices]),
    )
    stages = [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]
    return form, lambda schedule: _lifted(schedule, stages, devices)


def _lifted(schedule: Schedule, stages: Sequence[range], devices: Sequence[int]) -> Schedule:
    """The actions of each stage as those of the stages that it is made of; the orders by the
    devices that they had."""
    orders: list[tuple[Action, ...]] = [()] * len(devices)
    for device, order in zip(devices, schedule.orders, strict=True):
        orders[device] = tuple(
            [
                action._replace(stage=stage)
                for action in order
                for stage in _in_order(action, stages[action.stage])
            ]
        )
    return Schedule(tuple(orders), schedule.name)


def _in_order(action: Action, stages: range) -> Sequence[int]:
    return stages[::-1] if KINDS[action.kind].flow is Flow.BACKWARD else stages


def _as_it_is(schedule: Schedule) -> Schedule:
    return schedule
