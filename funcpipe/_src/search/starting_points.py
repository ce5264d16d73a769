"""The schedules with which a search begins: published ones, and one that needs least memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from inspect import signature
from itertools import product
from math import isfinite

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Kind, Schedule, action_of
from funcpipe._src.schedules import families, v_shape
from funcpipe._src.schedules.transforms import remat as rematted
from funcpipe._src.search.forms import forms
from funcpipe._src.search.problem import ROUNDING, Problem

PUBLISHED: tuple[Callable[..., Schedule], ...] = (
    families.zb_h2,
    families.zero_bubble,
    families.one_f_one_b,
    families.eager_one_f_one_b,
    families.interleaved,
    families.looped_bfs,
    families.fill_drain,
    v_shape.zbv,
    v_shape.v_half,
    v_shape.v_min,
    v_shape.dualpipe_v,
)
"""The families, the most promising first."""
_SMALL = 16  # the most devices for which an adaptive V is made; more would take seconds


def starting_points(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    """Yield the published schedules for the forms of a problem, the most promising first."""
    for form, lift in forms(problem):
        for source, schedule in _published(form):
            yield source, lift(schedule)


def _published(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    stages, devices, slices = problem.num_stages, problem.num_devices, problem.num_slices
    microbatches = problem.num_microbatches // slices
    options = {"num_devices": devices, **({"num_slices": slices} if slices > 1 else {})}
    if any(map(isfinite, problem.limits)):
        # First, because this schedule needs the least memory: if any schedule fits, this one does.
        yield "one at a time", _one_at_a_time(problem)
    for make in PUBLISHED:
        if slices > 1 and "num_slices" not in signature(make).parameters:
            continue
        try:
            schedule = make(stages, microbatches, **options)
        except ScheduleError:
            continue
        if schedule.device_of == problem.device_of:
            yield schedule.name, schedule
            if problem.remat:
                yield f"{schedule.name}+remat", rematted(schedule)
    if slices > 1:
        return  # the remaining families work for whole microbatches only
    loops = stages > devices and stages % devices == 0
    if loops and problem.device_of == tuple(stage % devices for stage in range(stages)):
        for group in sorted({(devices + 1) // 2, (3 * devices + 3) // 4, devices}):
            schedule = families.interleaved(stages, microbatches, num_devices=devices, group=group)
            yield schedule.name, schedule
    room = min(problem.limits) / max(*problem.residual, 1e-300) / problem.largest
    if problem.is_v and isfinite(room) and devices <= _SMALL:
        with suppress(ScheduleError):  # less memory than V-Min needs
            schedule = v_shape.v_adaptive(
                stages, microbatches, residuals=int(min(room * (1 + ROUNDING), stages))
            )
            yield schedule.name, schedule


def _one_at_a_time(problem: Problem) -> Schedule:
    """Return the schedule that runs one microbatch at a time: slow, with the least memory."""
    orders: list[list[Action]] = [[] for _ in range(problem.num_devices)]
    slices, devices = problem.num_slices, [*enumerate(problem.device_of)]
    for first in range(0, problem.num_microbatches, slices):
        pieces = range(first, first + slices)
        for piece, (stage, device) in product(pieces, devices):
            orders[device].append(action_of(Kind.F, stage, piece, slices))
        for piece, (stage, device) in product(reversed(pieces), reversed(devices)):
            for kind in (Kind.I, Kind.W):
                orders[device].append(action_of(kind, stage, piece, slices))
    return Schedule(tuple(map(tuple, orders)), "one-at-a-time")


def fused(problem: Problem, schedule: Schedule) -> Schedule | None:
    """Join I and a directly following W to B, where B takes less time or memory; None if
    nowhere."""
    if not any(problem.cheaper):
        return None

    def joined(order: Sequence[Action]) -> tuple[Action, ...]:
        row: list[Action] = []
        for action in order:
            is_weight = action.kind is Kind.W and problem.cheaper[action.stage]
            if is_weight and row and row[-1] == action._replace(kind=Kind.I):
                row[-1] = action._replace(kind=Kind.B)
            else:
                row.append(action)
        return tuple(row)

    orders = tuple(map(joined, schedule.orders))
    return None if orders == schedule.orders else Schedule(orders, schedule.name)
