"""Search over rules: start from many seeds, improve the best few, then the best one alone.

`listing.py` turns rules into a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise, product
from random import Random
from typing import NamedTuple

from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.clock import F, I
from funcpipe._src.search.listing import DeviceRule, Listed, run
from funcpipe._src.search.problem import ROUNDING, Budget, Problem, Score

_POOL = 4
_TOGETHER = 600
"""The number of evaluations for all rules of the pool in turn. Then only the best rules remain."""
_WORTH = (-1.0, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5, 3.0)
_RESERVES = (0, 1, 2, 3)


class _Try(NamedTuple):
    """Rules with their schedule. Compares by score, then by age."""

    score: Score
    age: int
    rules: list[DeviceRule]
    listed: Listed


def climb(
    problem: Problem, budget: Budget, rng: Random, *, good: float, like: Schedule | None = None
) -> Iterator[Listed]:
    """Yield better and better orders, until the budget is spent or ``good`` is reached.

    Begins with rules similar to the schedule ``like``.
    """
    ages = iter(range(10**12))

    def attempt(rules: list[DeviceRule]) -> _Try | None:
        budget.spend()
        listed = run(problem, rules)
        return None if listed is None else _Try(listed.score, next(ages), rules, listed)

    pool: list[_Try] = []
    for rules in chain(() if like is None else near(problem, like), seeds(problem)):
        if budget.spent:
            break
        attempted = attempt(rules)
        if attempted is not None:
            pool = sorted([*pool, attempted])[:_POOL]
    if not pool:
        return
    best = pool[0]
    yield best.listed
    together = budget.evaluations + _TOGETHER
    turn = 0
    while not budget.spent and best.score.value > good * (1 + ROUNDING):
        if len(pool) > 1 and budget.evaluations > together:
            pool = [min(pool)]
        # The members of the pool take turns, so that an early winner does not use all evaluations.
        turn = (turn + 1) % len(pool)
        attempted = attempt(_changed(problem, pool[turn].rules, rng))
        # Equal scores are accepted: they let the search leave a plateau.
        if attempted is not None and attempted.score <= pool[turn].score:
            pool[turn] = attempted
            if attempted.score.value < best.score.value * (1 - ROUNDING):
                best = attempted
                yield attempted.listed


def near(problem: Problem, schedule: Schedule) -> Iterator[list[DeviceRule]]:
    """Yield rules that allow as many microbatches in flight as a schedule has."""
    windows = [
        _windows(problem.local[device], order) for device, order in enumerate(schedule.orders)
    ]
    count = problem.num_microbatches
    wholes = (True, False) if any(problem.cheaper) else (False,)
    for worth, first, whole in product((0.0, 0.5, 1.0), range(len(ranks(1))), wholes):
        orders = [ranks(len(stages)) for stages in problem.local]
        rows = zip(orders, windows, strict=True)
        yield [
            DeviceRule(order[first % len(order)], window, 0, worth, count, whole=whole)
            for order, window in rows
        ]


def _windows(stages: Sequence[int], order: Sequence[Action]) -> tuple[int, ...]:
    """Return, for each stage of a device, the most microbatches between F and the next stage."""
    ahead, widest = dict.fromkeys(stages, 0), dict.fromkeys(stages, 1)
    previous = {later: stage for stage, later in pairwise(stages)}
    for kind, stage, *_ in order:
        if kind is Kind.F:
            ahead[stage] += 1
            widest[stage] = max(widest[stage], ahead[stage])
            if stage in previous:
                ahead[previous[stage]] -= 1
        elif stage == stages[-1] and kind in (Kind.B, Kind.I):
            ahead[stage] -= 1
    return tuple(widest.values())


def seeds(problem: Problem) -> Iterator[list[DeviceRule]]:
    """Yield initial rules.

    They vary in the decrease of microbatches in flight from device to device, and in priorities.
    """
    devices, count, local = problem.num_devices, problem.num_microbatches, problem.local
    rooms = [_room(problem, device) for device in range(devices)]
    several = max(map(len, local)) > 1
    keeps = (10**9, 0, 1, 2, 4) if problem.remat else (10**9,)
    reserves = (1, 2, max(1, devices // 2)) if several else (0,)
    slopes = (1.0, 2.0, 3.0) if several else (1.0, 1.5, 2.0, 2.5, 3.0)
    wholes = (True, False) if any(problem.cheaper) else (False,)
    for slope, offset, worth, first, reserve, keep, whole in product(
        slopes, (0.0, 0.5, 1.0), (0.0, 0.5, 1.0), range(len(ranks(1))), reserves, keeps, wholes
    ):
        rules: list[DeviceRule] = []
        for device, stages in enumerate(local):
            window = max(1, min(count, rooms[device], round((devices - device) * slope - offset)))
            windows = (
                *[max(1, window + device * (slope > 1))] * (len(stages) - 1),
                count if several else window,
            )
            orders = ranks(len(stages))
            rules.append(
                DeviceRule(orders[first % len(orders)], windows, reserve, worth, count, keep, whole)
            )
        yield rules


def ranks(chunks: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the possible priorities of a device with ``chunks`` stages."""
    descending, ascending = range(chunks)[::-1], range(chunks)
    backwards, forwards = [(I, chunk) for chunk in descending], [(F, chunk) for chunk in descending]
    if chunks == 1:
        return [(*backwards, *forwards), (*forwards, *backwards)]
    woven = [pair for chunk in descending for pair in ((I, chunk), (F, chunk))]
    ahead = [pair for chunk in descending for pair in ((F, chunk), (I, chunk))]
    rising = [(I, chunk) for chunk in ascending]
    *deep, shallow = forwards
    orders = [
        woven,
        [*backwards, *forwards],
        [*rising, *forwards],
        [*deep, *backwards, shallow],
        ahead,
        [*deep, *rising, shallow],
        [rising[0], *deep, *rising[1:], shallow],
        [*forwards, *backwards],
    ]
    return [tuple(order) for order in orders]


def _room(problem: Problem, device: int) -> int:
    """Return how many residuals of average size fit on a device."""
    if problem.remat or problem.limits[device] == float("inf"):
        return problem.num_microbatches
    stages = problem.local[device]
    mean = sum(problem.residual[stage] for stage in stages) / len(stages)
    return int(problem.limits[device] * (1 + ROUNDING) / mean) if mean else problem.num_microbatches


def _changed(problem: Problem, rules: list[DeviceRule], rng: Random) -> list[DeviceRule]:
    """Return rules with one to three random changes, each on one device or several neighbours."""
    rules = list(rules)
    devices, count = len(rules), problem.num_microbatches
    for _ in range(rng.choice((1, 1, 2, 3))):
        first = rng.randrange(devices)
        reached = range(
            first,
            first + 1 if rng.random() < 0.6 else min(devices, first + rng.randint(1, devices)),
        )
        field, step = rng.random(), rng.choice((-2, -1, 1, 2))
        worth, owed = rng.choice(_WORTH), rng.choice((count, 0, 1, 2, 3, 4, 5, 6, 8, 10, 12))
        draw, reserve, order_draw = rng.random(), rng.choice(_RESERVES), rng.random()
        for device in reached:
            rule = rules[device]
            chunks = len(rule.window)
            if field < 0.35:
                chunk = int(draw * chunks)
                window = [*rule.window]
                window[chunk] = max(1, min(count + 1, window[chunk] + step))
                rules[device] = replace(rule, window=tuple(window))
            elif field < 0.6:
                rules[device] = replace(rule, worth=worth)
            elif field < 0.75:
                orders = ranks(chunks)
                rules[device] = replace(rule, ranks=orders[int(order_draw * len(orders))])
            elif field < 0.85 and (chunks > 1 or problem.remat):
                if problem.remat and (chunks == 1 or draw < 0.5):
                    rules[device] = replace(rule, keep=max(0, min(count, rule.keep) + step))
                else:
                    rules[device] = replace(rule, reserve=reserve)
            elif any(problem.cheaper) and draw < 0.5:
                rules[device] = replace(rule, whole=not rule.whole)
            else:
                rules[device] = replace(rule, owed=owed)
    return rules
