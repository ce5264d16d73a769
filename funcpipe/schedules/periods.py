"""A schedule of few microbatches as one of many: its period is repeated.

At two moments of a schedule every stage may have the same microbatches under way, counted from the next one that begins, in
the same states. What devices do between the two is a period, and can be done again and again: the devices go on afterwards
as if nothing had been put in. So what takes long to find is found for few microbatches, and lasts for many.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import inf
from operator import itemgetter, sub
from typing import NamedTuple, TypeAlias

from funcpipe.core.cost import Cost
from funcpipe.core.errors import ScheduleError
from funcpipe.core.kinds import COUNTED, MOVES, ONCE, Kind
from funcpipe.core.schedule import Action, Schedule
from funcpipe.schedules.clock import CODED, clock, coded, durations_of, edges_of
from funcpipe.schedules.legal import check
from funcpipe.schedules.levels import Costs, at_levels, columns, levels_of


class Moment(NamedTuple):
    """A moment of a schedule: some actions have begun, with all that they wait for, and others not.

    Attributes:
        times: when each device comes there.
        microbatch: from which on others are counted.
        places: how many actions each device has begun.
    """

    times: tuple[float, ...]
    microbatch: int
    places: tuple[int, ...]


class Period(NamedTuple):
    """What can be repeated; compares by the time that it takes for a microbatch.

    Attributes:
        rate: time for a microbatch, on the device that takes the longest for it.
        microbatches: how many begin in it.
        first, last: between which moments.
    """

    rate: float
    microbatches: int
    first: Moment
    last: Moment


_Kinds: TypeAlias = frozenset[Kind]
_Standing: TypeAlias = tuple[tuple[int, _Kinds, _Kinds, int], ...]
"""What is under way in a stage: by piece, counted from a microbatch, what has been done, the way of its residual, its level."""

_WAYS = (Kind.R, Kind.O, Kind.L)
_ALL, _NONE, _GRADIENT = frozenset(Kind), frozenset[Kind](), frozenset({Kind.I})
_ROUNDING = 1e-9
"""Relative: times that differ by less count as equal."""
TRIED = 4
"""So many periods are tried, those that take the least time first: how long they take when they are repeated shows then."""


def lengthen(schedule: Schedule, num_microbatches: int, cost: Costs | None = None) -> Schedule:
    """The schedule for more microbatches, by repeating its period: what devices do between two moments that are alike.

    No device holds more residuals than before. So a schedule that took long to find serves for batches of any size. One of
    four times as many microbatches as devices nearly always has a period; `Schedule.first` is the way back.

    >>> print(fp.schedules.lengthen(fp.schedules.one_f_one_b(2, 4), 6))
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0B5
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5

    Args:
        schedule: any schedule without ``U`` (`gather_params` comes after).
        num_microbatches: how many there are to be.
        cost: the times by which moments are found and periods compared, of stages with levels those of each; all equal without
            one. Slices of a microbatch count as equally long.

    Raises:
        ScheduleError: this is no schedule, or not a legal one, it has ``U``, or more microbatches; ``cost`` is no cost of
            its stages; nothing in it is repeated, or what is repeated has other numbers of microbatches.
    """
    if not isinstance(schedule, Schedule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(f"lengthen takes a schedule; got a {type(schedule).__name__}")
    check(schedule)
    if type(num_microbatches) is not int or num_microbatches < schedule.num_microbatches:
        raise ScheduleError(
            f"lengthen keeps the {schedule.num_microbatches} microbatches of schedule {schedule.name!r}, or makes more; got "
            f"{num_microbatches!r} (fewer: schedule.first(n))"
        )
    if any(action.kind in COUNTED for order in schedule.orders for action in order):
        raise ScheduleError(f"schedule {schedule.name!r} has U, which are numbered through: apply gather_params last")
    cost = Cost() if cost is None else cost
    for level in levels_of(cost, "lengthen"):
        level.check_stages(schedule.num_stages)
    if num_microbatches == schedule.num_microbatches:
        return schedule
    every = [*periods(schedule, cost)]
    more = num_microbatches - schedule.num_microbatches
    found = fitting(every, more)[:TRIED]
    tried = dict.fromkeys(repeated(schedule, period, num_microbatches) for period in found)
    times = {one: ends for one in tried if (ends := ends_of(one, cost)) < inf}
    if times:
        return min(times, key=times.__getitem__)
    least = min((period.microbatches for period in every), default=0)
    if found or not every:
        raise ScheduleError(
            f"nothing in schedule {schedule.name!r} is repeated: it is too short, or keeps its microbatches to the end; begin "
            "with one of more microbatches, or another one"
        )
    fits = schedule.num_microbatches + more // least * least
    raise ScheduleError(
        f"schedule {schedule.name!r} has periods of {', '.join(map(str, sorted({one.microbatches for one in every})))} "
        f"microbatches, by which it does not come to {num_microbatches}; take {fits} or {fits + least}"
    )


def fitting(found: Iterable[Period], more: int) -> list[Period]:
    """The periods by which a schedule comes to so many microbatches more, those that take the least time for each first.

    Not each can be repeated: where devices are not at the same time in it, they may wait for each other for ever.
    """
    return sorted(period for period in found if more % period.microbatches == 0)


def repeated(schedule: Schedule, period: Period, num_microbatches: int) -> Schedule:
    """The schedule with a period so often that there are so many microbatches."""
    more = num_microbatches - schedule.num_microbatches
    orders: list[tuple[Action, ...]] = []
    pairs: set[tuple[Action, Action]] = set()
    levels: list[tuple[Action, int]] = []
    for order, first, last in zip(schedule.orders, period.first.places, period.last.places, strict=True):
        row: list[Action] = []
        turns = [(first, last, by) for by in range(0, more, period.microbatches)]
        for begin, end, by in ((0, first, 0), *turns, (first, len(order), more)):
            part = order[begin:end]
            pairs.update((_later(part[at], by), _later(part[at + 1], by)) for at in schedule.joined(part))
            row += [_later(action, by) for action in part]
            if schedule.levels:
                levels += [(_later(one, by), schedule.level(one)) for one in part if one.kind is Kind.F]
        orders.append(tuple(row))
    return Schedule(tuple(orders), schedule.name, frozenset(pairs), frozenset(levels))


def _later(action: Action, by: int) -> Action:
    return action if action.kind in ONCE else action._replace(microbatch=action.microbatch + by)


def periods(schedule: Schedule, cost: Costs) -> Iterator[Period]:
    """From each moment to the next one of its sort that is like it."""
    starts, _ = _times(schedule, cost)
    for moments in _moments(schedule, starts):
        states = zip(*(_states(schedule, device, moments) for device in range(schedule.num_devices)), strict=True)
        seen: dict[tuple[tuple[_Standing, ...], ...], Moment] = {}
        for moment, state in zip(moments, states, strict=True):
            before = seen.get(state)
            if before is not None and (count := moment.microbatch - before.microbatch) > 0:
                yield Period(max(map(sub, moment.times, before.times)) / count, count, before, moment)
            seen[state] = moment


def _moments(schedule: Schedule, starts: Sequence[Sequence[float]]) -> Iterator[list[Moment]]:
    """The moments of two sorts, one for each microbatch: when its first forward begins; and on each device its first there.

    The second sort does not see whether devices lie a little ahead or behind in one period and not in another.
    """
    begins: list[list[int]] = []
    for order in schedule.orders:
        first = min((stage for _, stage, *_ in order), default=0)
        row = [
            at for at, (kind, stage, _, number) in enumerate(order) if kind is Kind.F and stage == first and not number
        ]
        begins.append(row or [0] * schedule.num_microbatches)
    source = schedule.device_of[0]
    microbatches = [schedule.orders[source][at].microbatch for at in begins[source]]
    together: list[Moment] = []
    for microbatch, at in zip(microbatches, begins[source], strict=True):
        time = starts[source][at]
        places = tuple([bisect_left(row, time * (1 - _ROUNDING)) for row in starts])
        together.append(Moment((time,) * len(starts), microbatch, places))
    yield together
    times = [[row[at] if row else 0.0 for at in places] for row, places in zip(starts, begins, strict=True)]
    yield [*map(Moment, zip(*times, strict=True), microbatches, zip(*begins, strict=True))]


def _states(schedule: Schedule, device: int, moments: Sequence[Moment]) -> Iterator[tuple[_Standing, ...]]:
    """What is under way on a device at each moment, by its stages."""
    order, slices = schedule.orders[device], schedule.num_slices
    last = {Kind.B, Kind.W} if schedule.has_backward else {Kind.F}
    ways: dict[int, dict[int, _Kinds]] = {stage: {} for stage in sorted({action.stage for action in order})}
    for kind, stage, microbatch, number in order:
        if kind in _WAYS:
            piece = microbatch * slices + (number or 0)
            ways[stage][piece] = ways[stage].get(piece, _NONE) | {kind}
    levels: dict[int, dict[int, int]] = {stage: {} for stage in ways}
    for (_, stage, microbatch, number), level in schedule.levels:
        levels.get(stage, {})[microbatch * slices + (number or 0)] = level
    progress = {stage: _Pieces(row, levels[stage], last) for stage, row in ways.items()}
    done = 0
    for moment in moments:
        for kind, stage, microbatch, number in order[done : moment.places[device]]:
            progress[stage].add(kind, microbatch * slices + (number or 0))
        done = moment.places[device]
        yield tuple([each.state(moment.microbatch * slices) for each in progress.values()])


def ends_of(schedule: Schedule, cost: Costs) -> float:
    """When all of a schedule has ended, by a cost; infinite where it never does."""
    return _times(schedule, cost)[1]


def _times(schedule: Schedule, cost: Costs) -> tuple[list[list[float]], float]:
    """When each device comes to each of its actions, and when all have ended; infinite where they never do."""
    lanes = at_levels(coded(schedule.orders, schedule.num_slices), schedule)
    levels = levels_of(cost, "lengthen")
    own, width = columns(levels, schedule.num_stages, schedule.num_levels), max(len(levels), schedule.num_levels)
    durations, edges = durations_of(own, width * schedule.num_stages), edges_of(levels[0], schedule.device_of)
    pairs = [
        {at: own.both(*((CODED[code], stage, 1.0) for code, stage, _ in lane[at : at + 2])) for at in places}
        for lane, places in zip(lanes, map(schedule.joined, schedule.orders), strict=True)
    ]
    ticks = clock(lanes, schedule.device_of, schedule.num_pieces, durations, edges, pairs)
    if ticks.stuck:
        return [], inf
    rows: list[list[float]] = []
    ends = 0.0
    for order, lane, starts in zip(schedule.orders, lanes, ticks.starts, strict=True):
        # A move begins when its link is free; the device came to it before, and went on.
        row = [0.0 if action.kind in MOVES else start for action, start in zip(order, starts, strict=True)]
        rows.append([*accumulate(row, max)])
        ends = max(
            ends, *(start + durations[code][stage] for (code, stage, _), start in zip(lane, starts, strict=True))
        )
    return rows, ends


class _Pieces:
    """How far the pieces of a stage are.

    Attributes:
        ways: what else happens to the residuals of some pieces: R; O and L. A microbatch that is computed again holds less
            from its F on.
        levels: those of pieces that have one above 0.
        last: what ends a piece.
        low: all before this one are done.
        begun: of those from there on, what has been done, and what is the way of the residual, while that matters.
    """

    def __init__(self, ways: Mapping[int, _Kinds], levels: Mapping[int, int], last: Collection[Kind]) -> None:
        self.ways, self.levels, self.last = ways, levels, last
        self.low, self.begun = 0, dict[int, tuple[_Kinds, _Kinds]]()

    def add(self, kind: Kind, piece: int) -> None:
        """An action of a piece has begun."""
        if kind in self.last:
            self.begun[piece] = _ALL, _NONE
            while self.begun.get(self.low) == (_ALL, _NONE):
                del self.begun[self.low]
                self.low += 1
        elif kind is Kind.I:
            self.begun[piece] = _GRADIENT, _NONE
        else:
            done, _ = self.begun.get(piece, (_NONE, _NONE))
            self.begun[piece] = done | {kind}, self.ways.get(piece, _NONE)

    def state(self, base: int) -> _Standing:
        """What is under way, counted from a piece."""
        rows = [
            (piece - base, done, way, 0 if done == _ALL else self.levels.get(piece, 0))
            for piece, (done, way) in sorted(self.begun.items(), key=itemgetter(0))
        ]
        return ((self.low - base, _ALL, _NONE, 0), *rows)
