"""Which neighbours of an order should overlap: all that can, and then one pair more or less at a time."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from funcpipe.core.schedule import Schedule
from funcpipe.lab.polish import Bench
from funcpipe.lab.problem import ROUNDING, Budget
from funcpipe.schedules.clock import coded
from funcpipe.schedules.memory import residual_peak
from funcpipe.schedules.pairs import can_join


def joined_better(bench: Bench, schedule: Schedule, rng: Random, budget: Budget, *, good: float) -> Iterator[Schedule]:
    """Join or part two neighbours after the other, as long as that makes nothing longer; yields what is shorter.

    Args:
        bench: times the orders.
        schedule: where to begin, its pairs included; its orders stay.
        rng: what to try.
        budget: how often.
        good: stop at this value.
    """
    problem = bench.problem
    lanes = coded(schedule.orders, problem.num_slices)
    joined = [{*schedule.joined(order)} for order in schedule.orders]
    places = [(device, at) for device, order in enumerate(schedule.orders) for at in can_join(order)]
    best = bench.score(lanes, joined)
    if best is None or not places:
        return
    while not budget.spent and best.value > good * (1 + ROUNDING):
        device, at = rng.choice(places)
        before = joined[device]
        joined[device] = before - {at} if at in before else before - {at - 1, at + 1} | {at}
        budget.spend()
        score = bench.score(lanes, joined)
        tried = _with_pairs(schedule, joined) if score is not None and score <= best else None
        if (
            score is None
            or tried is None
            or residual_peak(tried.orders[device], tried, problem.cost) > problem.limits[device] * (1 + ROUNDING)
        ):
            joined[device] = before
            continue
        shorter = score.value < best.value * (1 - ROUNDING)
        best = score
        if shorter:
            yield tried


def _with_pairs(schedule: Schedule, joined: list[set[int]]) -> Schedule:
    rows = zip(schedule.orders, joined, strict=True)
    return Schedule(
        schedule.orders, schedule.name, frozenset((o[at], o[at + 1]) for o, places in rows for at in places)
    )
