"""Simplify problems: join neighbouring stages on one device, and renumber devices.

The published schedules for lines, loops and Vs then apply to any placement: stages on devices 2, 0,
0, 1 are a line of three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import TypeAlias

from funcpipe._src.data.kinds import KINDS, Flow
from funcpipe._src.data.schedule import Action, Schedule
from funcpipe._src.search.problem import Problem

Lift: TypeAlias = Callable[[Schedule], Schedule]
"""Turns a schedule of a form into a schedule of the problem."""


def forms(problem: Problem) -> list[tuple[Problem, Lift]]:
    """Return the forms of a problem: the simplest form and the problem itself, if they differ.

    >>> from funcpipe._src.data.cost import Cost
    >>> [form.device_of for form, _ in forms(Problem(Cost(), (2, 0, 0, 1), 2, (4.0, 5.0, 6.0)))]
    [(0, 1, 2), (2, 0, 0, 1)]
    """
    runs = [(device, len([*group])) for device, group in groupby(problem.device_of)]
    devices = [*dict.fromkeys(problem.device_of)]
    itself: tuple[Problem, Lift] = problem, lambda schedule: schedule
    if len(runs) == problem.num_stages and devices == sorted(devices):
        return [itself]
    sizes = [size for _, size in runs]
    form = replace(
        problem,
        cost=problem.cost.group(sizes),
        device_of=tuple([devices.index(device) for device, _ in runs]),
        limits=tuple([problem.limits[device] for device in devices]),
    )
    stages = [range(first, last) for first, last in pairwise(accumulate(sizes, initial=0))]

    def lift(schedule: Schedule) -> Schedule:
        """Replace each action of a joined stage by actions of its stages, on their devices."""
        orders: list[tuple[Action, ...]] = [()] * len(devices)
        for device, order in zip(devices, schedule.orders, strict=True):
            orders[device] = tuple(
                [
                    action._replace(stage=stage)
                    for action in order
                    for stage in stages[action.stage][:: _direction(action)]
                ]
            )
        return Schedule(tuple(orders), schedule.name)

    return [(form, lift), itself]


def _direction(action: Action) -> int:
    return -1 if KINDS[action.kind].flow is Flow.BACKWARD else 1
