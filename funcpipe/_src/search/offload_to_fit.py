"""Bring a schedule within its memory limits by offloading the residuals that wait longest."""

from __future__ import annotations

from collections.abc import Callable

from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.transforms import inserted
from funcpipe._src.search.problem import ROUNDING, Budget, Problem

Timed = Callable[[Schedule], Timeline]


def offload_to_fit(
    problem: Problem, schedule: Schedule, time: Timed, budget: Budget
) -> Schedule | None:
    """Offload residuals until each device stays within its limit; None if that fails.

    Each round looks at the peak of each device above its limit, and offloads the residual of that
    moment with the longest wait. The residual leaves directly after its forward, and is back when
    its backward starts. ``time`` simulates a schedule.
    """
    away: set[Action] = set()
    bare = schedule
    while not budget.late:
        timeline = time(schedule)
        over = [
            device
            for device, peak in enumerate(timeline.peak)
            if peak > problem.limits[device] * (1 + ROUNDING)
        ]
        if not over:
            return schedule
        chosen = {
            place
            for device in over
            if (place := _longest(problem, timeline, device, away)) is not None
        }
        # A device above its limit without a residual to move cannot be helped.
        if len(chosen) < len(over):
            return None
        away |= chosen
        schedule = _insert(problem, bare, time(bare), away)
    return None


def _longest(problem: Problem, timeline: Timeline, device: int, away: set[Action]) -> Action | None:
    """Return the forward whose residual waits longest, among residuals at the device's peak."""
    steps = timeline.memory[device]
    peak = max(level for _, level in steps)
    moment = next(time for time, level in steps if level >= peak)
    begins: dict[Action, float] = {}
    best, wait = None, 0.0
    for span in timeline.spans:
        if span.device != device:
            continue
        kind = span.action.kind
        place = span.action._replace(kind=Kind.F)
        if kind is Kind.F:
            begins[place] = span.end
        elif kind in (Kind.R, Kind.O):
            begins.pop(place, None)  # recomputed or offloaded already: nothing to move
        elif (kind is Kind.B or kind is Kind.I) and place in begins and place not in away:
            move = _move(problem, place._replace(kind=Kind.O))
            # The move helps only if the peak is between the end of O and the start of L.
            if (
                begins[place] + move <= moment < span.start - move + ROUNDING
                and span.start - begins[place] - 2 * move > wait
            ):
                best, wait = place, span.start - begins[place] - 2 * move
    return best


def _move(problem: Problem, action: Action) -> float:
    """Return the time of an O or L."""
    piece = action.microbatch * problem.num_slices + (action.slice or 0)
    return problem.piece(problem.cost.of(action.kind, action.stage), 1) * problem.growth[piece][1]


def _insert(problem: Problem, bare: Schedule, timeline: Timeline, away: set[Action]) -> Schedule:
    """Return a schedule with O after each F of ``away``, and L as late as possible."""
    starts = {span.action: span.start for span in timeline.spans}
    orders: list[tuple[Action, ...]] = []
    for order in bare.orders:
        loads: dict[int, list[Action]] = {}
        forwards = {
            action: position for position, action in enumerate(order) if action.kind is Kind.F
        }
        link = float("inf")  # loads queue: each must be done before the next one begins
        for position in reversed(range(len(order))):
            action = order[position]
            place = action._replace(kind=Kind.F)
            if place not in away or action.kind not in (Kind.B, Kind.I):
                continue
            begin = link = min(link, starts[action]) - _move(problem, place._replace(kind=Kind.L))
            target = position
            while target - 1 > forwards[place] and starts[order[target]] > begin:
                target -= 1
            loads.setdefault(target, []).insert(0, action._replace(kind=Kind.L))
        leaves = {
            forwards[place]: [place._replace(kind=Kind.O)] for place in away if place in forwards
        }
        orders.append(inserted(order, loads, leaves))
    return bare.reordered(orders, f"{bare.name}+offload")
