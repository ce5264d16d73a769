"""Rules for pairs of overlapping actions: which actions may overlap, and which pairs can coexist.

The public transforms `pair` and `unpair` are in `transforms`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from funcpipe._src.data.kinds import KINDS, MOVES, Kind
from funcpipe._src.data.schedule import Action, Pair, Schedule
from funcpipe._src.schedules.clock import CODED, chain, clock, coded

_OVERLAPPING = ({Kind.F, Kind.B}, {Kind.F, Kind.I})


def may_overlap(one: Action, other: Action) -> bool:
    """Return whether an action may overlap with its successor: both compute, and neither needs the
    other."""
    if one.kind in MOVES or other.kind in MOVES:
        return False
    return one[1:] != other[1:] and one not in other.needs()


def joined_units(schedule: Schedule) -> list[dict[int, float]]:
    """Return the pairs of a schedule for `clock`. Each pair takes the units of both actions."""
    return (
        [_units(order, schedule.joined(order)) for order in schedule.orders]
        if schedule.pairs
        else []
    )


def _units(order: Sequence[Action], pairs: Sequence[int]) -> dict[int, float]:
    return {
        at: float(sum(KINDS[action.kind].units for action in order[at : at + 2])) for at in pairs
    }


def apart(schedule: Schedule) -> list[str]:
    """Return the faults of single pairs.

    Finds actions that are not neighbours, that do not compute, or that need each other. Deadlocks
    between pairs are found by `clock`.
    """
    faults: list[str] = []
    found: set[Pair] = set()
    for device, order in enumerate(schedule.orders):
        ends = -1
        for at in schedule.joined(order):
            one, other = order[at], order[at + 1]
            found.add((one, other))
            name = f"({one} {other}) on device {device}"
            if at == ends:
                faults.append(
                    f"{name} begins with the last action of another pair; only two actions can "
                    "overlap"
                )
            ends = at + 1
            if one.kind in MOVES or other.kind in MOVES:
                move = one if one.kind in MOVES else other
                words = f"the device works on during {move}, in a pair or not"
                faults.append(f"{name} is not a pair: {words}; write {one} {other}")
            elif not may_overlap(one, other):
                faults.append(
                    f"{name} depends on itself: {other} needs the result of {one}; write {one} "
                    f"{other}"
                )
    return faults + sorted(map(_no_pair, schedule.pairs - found))


def _no_pair(pair: object) -> str:
    if (
        not isinstance(pair, tuple)
        or len(pair) != 2
        or not all(type(action) is Action for action in pair)
    ):
        return (
            f"{pair!r} is not a pair of actions: write pairs={{(first, second)}}, or "
            "fp.Schedule.parse('(0F1 0B0)')"
        )
    return f"({pair[0]} {pair[1]}) is not a pair: these two are not neighbours on any device"


def joinable(
    schedule: Schedule, join: Callable[[Action, Action], bool] | None = None
) -> list[list[int]]:
    """Return, for each order, the positions of actions that can overlap with their successor.

    Goes from left to right, so that no action is in two pairs. Includes the schedule's own pairs.
    """
    out: list[list[int]] = []
    for order in schedule.orders:
        joined = {*schedule.joined(order)}
        found: list[int] = []
        for at, (one, other) in enumerate(pairwise(order)):
            if found and found[-1] == at - 1:
                continue
            may = {one.kind, other.kind} in _OVERLAPPING and may_overlap(one, other)
            free = may and at + 1 not in joined
            if at in joined or (free and (join is None or join(one, other))):
                found.append(at)
        out.append(found)
    return out


def together(schedule: Schedule, places: Sequence[Sequence[int]]) -> Schedule:
    """Return the schedule with pairs at these positions, which include its own pairs.

    Where pairs would deadlock, a new pair is taken apart.
    """
    pairs = [_units(order, joined) for order, joined in zip(schedule.orders, places, strict=True)]
    stages = schedule.num_stages
    units = [[float(KINDS[kind].units)] * stages for kind in CODED]
    lanes = coded(schedule.orders, schedule.num_slices)
    loose = [
        {*joined}.difference(schedule.joined(order))
        for order, joined in zip(schedule.orders, places, strict=True)
    ]
    # The clock removes loose pairs from `pairs` until no device is blocked.
    clock(lanes, schedule.device_of, schedule.num_pieces, units, chain(stages), pairs, loose=loose)
    kept = [
        (order[at], order[at + 1])
        for order, joined in zip(schedule.orders, pairs, strict=True)
        for at in joined
    ]
    return replace(schedule, pairs=frozenset(kept))
