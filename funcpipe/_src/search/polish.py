"""Make a schedule shorter by moving, joining or parting single actions; it stays legal and within
memory.

If a move exceeds memory, the residual that waits for longest is computed again or sent to the host,
as the problem allows. A drawn R, or an O with its L, is often removed, if memory allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from funcpipe._src.schedules.clock import CODED, B, F, I, L, O, R, W, clock, durations_of, edges_of
from funcpipe._src.schedules.memory import residual_table, running_sum
from funcpipe._src.search.problem import ROUNDING, Budget, CodedAction, Problem, Score

_CLASS = {F: {0}, R: {1}, B: {2, 3}, I: {2}, W: {3}, O: {4}, L: {5}}
"""Actions of one class and stage keep their order: microbatches ascend, backwards of slices
descend."""

_REACH = 6
"""The most positions by which an action moves."""

_RELIEFS = 3
"""The most residuals that go at once."""

_TURNS = 0.5
"""Where something can be hidden, how often two are joined or parted, else an action moves; and of
those that move, how many are joined with their new neighbours, and those that they leave, too."""

_OVERLAPPING = ({F, B}, {F, I})

_HALVES = 0.3
"""Where a backward takes less as a whole, how often it is parted, or its halves are joined, else an
action moves."""


class Bench:
    """Scores orders for a problem, without the checks and the records of a simulation."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.hides, slices = problem, problem.cost.hides, problem.num_slices
        durations = durations_of(problem.cost, problem.num_stages)
        self.durations = [[time / slices for time in row] for row in durations]
        edges = edges_of(problem.cost, problem.device_of)
        self.edges = [edge._replace(link=edge.link / slices) for edge in edges]
        table = residual_table(problem.cost, problem.num_stages)
        self.takes = [[size / slices for size in table[kind][0]] for kind in CODED]
        self.frees = [[size / slices for size in table[kind][1]] for kind in CODED]

    def score(
        self, lanes: Sequence[Sequence[CodedAction]], joined: Sequence[Iterable[int]] = ()
    ) -> Score | None:
        """The score of orders; None where they deadlock, or hold too much while residuals are on
        their way.

        ``joined``: where each has pairs that overlap.
        """
        problem = self.problem
        pairs = [
            {at: self.both(lane[at], lane[at + 1]) for at in places}
            for lane, places in zip(lanes, joined)
        ]
        ticks = clock(
            lanes, problem.device_of, problem.num_microbatches, self.durations, self.edges, pairs
        )
        if ticks.stuck:
            return None
        ends = [
            self._ends(*row)
            for row in zip(lanes, ticks.starts, pairs or [{}] * len(lanes), strict=True)
        ]
        if problem.offload and not all(
            map(self._fits_in_time, range(len(lanes)), lanes, ticks.starts, ends)
        ):
            return None
        return problem.score((row[0] for row in ticks.starts), [row[-1] for row in ends])

    def _ends(
        self, lane: Sequence[CodedAction], starts: Sequence[float], pairs: Mapping[int, float]
    ) -> Sequence[float]:
        """When each action of a device ends; two that overlap end together."""
        ends = [
            start + self.durations[code][stage]
            for (code, stage, _), start in zip(lane, starts, strict=True)
        ]
        for at, length in pairs.items():
            ends[at] = ends[at + 1] = starts[at] + length
        return ends

    def _fits_in_time(
        self,
        device: int,
        lane: Sequence[CodedAction],
        starts: Sequence[float],
        ends: Sequence[float],
    ) -> bool:
        """Does a device stay within its limit; what leaves for the host lies there until it is
        gone."""
        if not any(code == O for code, _, _ in lane):
            return True  # then schedules that hold too much are for others to relieve
        again = {(stage, m) for code, stage, m in lane if code == R}
        changes: list[tuple[float, float, float]] = []
        for place, ((code, stage, m), start, end) in enumerate(
            zip(lane, starts, ends, strict=True)
        ):
            if code != F or (stage, m) not in again:
                changes.append((start, 2 * place, self.takes[code][stage]))
            changes.append((end, 2 * place + 1, -self.frees[code][stage]))
        amounts = (amount for _, amount in running_sum(changes))
        return max(amounts) <= self.problem.limits[device] * (1 + ROUNDING)

    def both(self, one: CodedAction, other: CodedAction) -> float:
        """The time of two that overlap."""
        share = 1 / self.problem.num_slices
        return self.problem.cost.both(
            (CODED[one[0]], one[1], share), (CODED[other[0]], other[1], share)
        )

    def fits(self, device: int, lane: OrderedLane) -> bool:
        """Do the residuals of a device stay within its memory limit."""
        return self.overflow(device, lane) < 0

    def overflow(self, device: int, lane: OrderedLane) -> int:
        """The position of the first action for which there is no room on a device; -1: there is for
        all."""
        limit = self.problem.limits[device] * (1 + ROUNDING)
        again = {(stage, m) for code, stage, m in lane.actions if code == R}
        joined = lane.joined
        memory = late = 0.0
        takes, frees = self.takes, self.frees
        for at, (code, stage, microbatch) in enumerate(lane.actions):
            if code != F or (stage, microbatch) not in again:
                memory += takes[code][stage]
                if memory > limit:
                    return at
            if joined and at in joined:
                late = frees[code][stage]
                continue
            memory -= frees[code][stage] + late
            late = 0.0
        return -1

    def relieved(self, device: int, lane: OrderedLane, rng: Random) -> OrderedLane | None:
        """A lane, and where it holds too much with some residuals less; None where that did not
        succeed."""
        for left in reversed(range(_RELIEFS + 1)):
            position = self.overflow(device, lane)
            if position < 0:
                return lane
            relieved = self._without_longest(lane, position, rng) if left else None
            if relieved is None:
                return None
            lane = relieved
        return None

    def _without_longest(
        self, whole: OrderedLane, position: int, rng: Random
    ) -> OrderedLane | None:
        """Return a lane where the waiting residual with the last backward is computed again, or
        sent to the host."""
        problem, lane = self.problem, whole.actions
        if not (problem.remat or problem.offload):
            return None
        gone = {(stage, m) for code, stage, m in lane if code in (O, R)}
        held = {
            (stage, m): at for at, (code, stage, m) in enumerate(lane[: position + 1]) if code == F
        }
        for at in reversed(range(position + 1, len(lane))):
            code, stage, m = lane[at]
            begun = held.get((stage, m), position + 1)
            if code not in (B, I) or begun > position or (stage, m) in gone:
                continue
            if problem.remat and not (problem.offload and rng.random() < 0.5):
                return whole.of([*lane[:at], (R, stage, m), *lane[at:]])
            if problem.offload and begun < position:
                back = at if rng.random() < 0.5 else rng.randint(position + 1, at)
                moved = [(O, stage, m), *lane[begun + 1 : back], (L, stage, m)]
                return whole.of([*lane[: begun + 1], *moved, *lane[back:]])
        return None


class OrderedLane(NamedTuple):
    """An order, and which of its neighbours overlap."""

    actions: list[CodedAction]
    pairs: frozenset[tuple[CodedAction, CodedAction]]

    @property
    def joined(self) -> list[int]:
        """Where its pairs are."""
        return (
            [at for at, pair in enumerate(pairwise(self.actions)) if pair in self.pairs]
            if self.pairs
            else []
        )

    def of(self, actions: list[CodedAction]) -> OrderedLane:
        """With other actions; pairs that are no neighbours any more are none."""
        return OrderedLane(
            actions, self.pairs.intersection(pairwise(actions)) if self.pairs else self.pairs
        )

    def moved(self, position: int, target: int) -> OrderedLane:
        """With an action elsewhere."""
        actions = self.actions[:position] + self.actions[position + 1 :]
        actions.insert(target, self.actions[position])
        return self.of(actions)

    def turned(self, position: int) -> OrderedLane | None:
        """With a pair more, or less; None where these two cannot overlap."""
        if position + 1 == len(self.actions):
            return None
        two = self.actions[position], self.actions[position + 1]
        if {two[0][0], two[1][0]} not in _OVERLAPPING or two[0][1:] == two[1][1:]:
            return None
        if two in self.pairs:
            return OrderedLane(self.actions, self.pairs - {two})
        return OrderedLane(
            self.actions, frozenset(pair for pair in self.pairs if {*pair}.isdisjoint(two)) | {two}
        )

    def halved(self, position: int, rng: Random) -> OrderedLane | None:
        """With a whole backward in halves, or halves as a whole; None where that would change the
        order of others."""
        code, stage, microbatch = self.actions[position]
        actions = [*self.actions]
        if code == B:
            actions[position : position + 1] = [(I, stage, microbatch), (W, stage, microbatch)]
            latest = min(bounds_of(actions, position + 1)[1], position + 1 + _REACH)
            return self.of(actions).moved(position + 1, rng.randint(position + 1, latest))
        if code not in (I, W):
            return None
        first, last = (actions.index((half, stage, microbatch)) for half in (I, W))
        places = [first] * (bounds_of(actions, last)[0] == first + 1) + [last] * (
            bounds_of(actions, first)[1] == last - 1
        )
        if not places:
            return None
        actions[rng.choice(places)] = (B, stage, microbatch)
        return self.of(
            [
                action
                for action in actions
                if action not in ((I, stage, microbatch), (W, stage, microbatch))
            ]
        )

    def closed(self, *places: int) -> OrderedLane:
        """With pairs at these places, where two that are in none can overlap."""
        lane = self
        for at in places:
            taken = {action for pair in lane.pairs for action in pair}
            if at >= 0 and taken.isdisjoint(lane.actions[at : at + 2]):
                lane = lane.turned(at) or lane
        return lane


def bounds_of(lane: Sequence[CodedAction], position: int) -> tuple[int, int]:
    """The first and last position that an action can move to without crossing those that it must
    not cross."""
    code, stage, microbatch = lane[position]
    kinds = _CLASS[code]

    def apart(other: CodedAction) -> bool:
        return other[1] != stage or (other[2] != microbatch and kinds.isdisjoint(_CLASS[other[0]]))

    low = position
    while low and apart(lane[low - 1]):
        low -= 1
    high, last = position, len(lane) - 1
    while high < last and apart(lane[high + 1]):
        high += 1
    return low, high


def polish(
    bench: Bench, lanes: Sequence[OrderedLane], rng: Random, budget: Budget, *, good: float
) -> Iterator[list[OrderedLane]]:
    """Change one thing after the other, as long as that makes nothing longer; yields what is
    shorter than all before.

    Args:
        bench: times the orders.
        lanes: where to begin; not changed.
        rng: what to try.
        budget: how often.
        good: stop at this value.
    """
    lanes = list(lanes)
    joined = [lane.joined for lane in lanes]
    best = bench.score([lane.actions for lane in lanes], joined)
    if best is None:
        return
    tries = 0
    while not budget.spent and best.value > good * (1 + ROUNDING) and tries < 20 * budget.most:
        tries += 1
        device = rng.randrange(len(lanes))
        lane, places = lanes[device], joined[device]
        changed = _changed(bench, device, lane, rng)
        if changed is None:
            continue
        lanes[device], joined[device] = changed, changed.joined
        budget.spend()
        score = bench.score([lane.actions for lane in lanes], joined)
        if score is None or score > best:
            lanes[device], joined[device] = lane, places
            continue
        shorter = score.value < best.value * (1 - ROUNDING)
        best = score
        if shorter:
            yield lanes


def _changed(bench: Bench, device: int, lane: OrderedLane, rng: Random) -> OrderedLane | None:
    """A lane with one thing changed; None: that changes nothing, or has no room."""
    position = rng.randrange(len(lane.actions))
    code, stage, microbatch = lane.actions[position]
    if bench.hides and rng.random() < _TURNS:
        changed = lane.turned(position)
        return changed if changed is not None and bench.fits(device, changed) else None
    if bench.problem.cheaper[stage] and rng.random() < _HALVES:
        changed = lane.halved(position, rng)
        return None if changed is None else bench.relieved(device, changed, rng)
    if code in (R, O, L) and rng.random() < (0.5 if code == R else 0.1):
        kept = [
            action
            for action in lane.actions
            if action[1:] != (stage, microbatch) or action[0] not in (R, O, L)
        ]
        changed = lane.of(kept)
        return changed if bench.fits(device, changed) else None
    low, high = bounds_of(lane.actions, position)
    target = rng.randint(max(low, position - _REACH), min(high, position + _REACH))
    if target == position:
        return None
    changed = lane.moved(position, target)
    if bench.hides and rng.random() < _TURNS:
        changed = changed.closed(target, target - 1, position, position - 1)
    return bench.relieved(device, changed, rng)
