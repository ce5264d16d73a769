"""Shorten a schedule by random changes of single actions. It stays legal and within memory.

A change moves an action, pairs or unpairs two actions, or splits or joins a backward. If a change
exceeds memory, the residual that waits longest is recomputed or offloaded, as the problem allows.
If a random change hits an R, O or L, the action is often removed, if memory allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from funcpipe._src.schedules.clock import CODED, B, F, I, L, O, R, W, clock, edges_of, shares_column
from funcpipe._src.schedules.memory import residual_table, running_sum
from funcpipe._src.search.problem import ROUNDING, Budget, CodedAction, Problem, Score

_CLASS = {F: {0}, R: {1}, B: {2, 3}, I: {2}, W: {3}, O: {4}, L: {5}}
"""The classes of each kind. Actions of one class and stage keep their order: microbatches ascend,
backwards of slices descend."""

_REACH = 6  # the most positions by which an action moves

_RELIEFS = 3  # the most residuals that are recomputed or offloaded for one change

_TURNS = 0.5
"""If actions wait for links: the probability that two actions are paired or unpaired instead of a
move, and the probability that a moved action and its old neighbours are paired."""

_OVERLAPPING = ({F, B}, {F, I})

_HALVES = 0.3
"""If B is cheaper than I and W: the probability that a backward is split or joined instead of a
move."""


class Bench:
    """Scores orders for a problem, without the checks and records of `simulate`."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.hides = problem, problem.cost.hides
        self.durations = [problem.times(kind) for kind in CODED]
        edges = edges_of(problem.cost, problem.device_of)
        self.edges = [edge._replace(link=problem.piece(edge.link, 1)) for edge in edges]
        table = residual_table(problem.cost, problem.num_stages)
        self.takes = [[problem.piece(size, 1) for size in table[kind][0]] for kind in CODED]
        self.frees = [[problem.piece(size, 1) for size in table[kind][1]] for kind in CODED]
        self.growth, self.sizes = problem.growth, [size for _, size in problem.growth]
        self.columns = [shares_column(kind) or 0 for kind in CODED]

    def score(
        self, lanes: Sequence[Sequence[CodedAction]], joined: Sequence[Iterable[int]] = ()
    ) -> Score | None:
        """Return the score of orders; None if they deadlock, or exceed memory during transfers.

        ``joined`` has the positions of the pairs of each order.
        """
        problem = self.problem
        pairs = [
            {at: self.both(lane[at], lane[at + 1]) for at in places}
            for lane, places in zip(lanes, joined)
        ]
        ticks = clock(
            lanes,
            problem.device_of,
            problem.num_microbatches,
            self.durations,
            self.edges,
            pairs,
            shares=self.growth if problem.unequal else (),
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
        """Return the end of each action of a device. The actions of a pair end together."""
        durations, growth, columns = self.durations, self.growth, self.columns
        ends = [
            start + durations[code][stage] * growth[m][columns[code]]
            for (code, stage, m), start in zip(lane, starts, strict=True)
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
        """Return whether a device with O stays within its limit.

        A residual that moves to the host occupies memory until its O ends.
        """
        if not any(code == O for code, _, _ in lane):
            return True  # without O, `relieved` and `Best` check memory by the order alone
        again = {(stage, m) for code, stage, m in lane if code == R}
        changes: list[tuple[float, float, float]] = []
        for place, ((code, stage, m), start, end) in enumerate(
            zip(lane, starts, ends, strict=True)
        ):
            if code != F or (stage, m) not in again:
                changes.append((start, 2 * place, self.takes[code][stage] * self.sizes[m]))
            changes.append((end, 2 * place + 1, -self.frees[code][stage] * self.sizes[m]))
        amounts = (amount for _, amount in running_sum(changes))
        return max(amounts) <= self.problem.limits[device] * (1 + ROUNDING)

    def both(self, one: CodedAction, other: CodedAction) -> float:
        """Return the time of a pair."""
        share = self.problem.piece(1.0, 0)
        first, second = (
            (CODED[code], stage, share * self.growth[m][0]) for code, stage, m in (one, other)
        )
        return self.problem.cost.both(first, second)

    def fits(self, device: int, lane: OrderedLane) -> bool:
        """Return whether the residuals of a device stay within its memory limit."""
        return self.overflow(device, lane) < 0

    def overflow(self, device: int, lane: OrderedLane) -> int:
        """Return the position of the first action without room in memory; -1 if all have room."""
        limit = self.problem.limits[device] * (1 + ROUNDING)
        again = {(stage, m) for code, stage, m in lane.actions if code == R}
        joined = lane.joined
        memory = late = 0.0
        takes, frees, sizes = self.takes, self.frees, self.sizes
        for at, (code, stage, microbatch) in enumerate(lane.actions):
            if code != F or (stage, microbatch) not in again:
                memory += takes[code][stage] * sizes[microbatch]
                if memory > limit:
                    return at
            if joined and at in joined:
                late = frees[code][stage] * sizes[microbatch]
                continue
            memory -= frees[code][stage] * sizes[microbatch] + late
            late = 0.0
        return -1

    def relieved(self, device: int, lane: OrderedLane, rng: Random) -> OrderedLane | None:
        """Return the lane, with some residuals recomputed or offloaded if it exceeds memory.

        None if that is not enough.
        """
        for _ in range(_RELIEFS):
            position = self.overflow(device, lane)
            relieved = lane if position < 0 else self._without_longest(lane, position, rng)
            if relieved is None or relieved is lane:
                return relieved
            lane = relieved
        return lane if self.fits(device, lane) else None

    def _without_longest(
        self, whole: OrderedLane, position: int, rng: Random
    ) -> OrderedLane | None:
        """Return a lane where the residual with the latest backward is recomputed or offloaded."""
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
    """An order, and its pairs of overlapping neighbours."""

    actions: list[CodedAction]
    pairs: frozenset[tuple[CodedAction, CodedAction]]

    @property
    def joined(self) -> list[int]:
        """The positions of the pairs."""
        if not self.pairs:
            return []
        return [at for at, pair in enumerate(pairwise(self.actions)) if pair in self.pairs]

    def of(self, actions: list[CodedAction]) -> OrderedLane:
        """Return a lane with other actions. Pairs whose actions are still neighbours remain."""
        pairs = self.pairs.intersection(pairwise(actions)) if self.pairs else self.pairs
        return OrderedLane(actions, pairs)

    def moved(self, position: int, target: int) -> OrderedLane:
        """Return a lane with an action moved to another position."""
        actions = self.actions[:position] + self.actions[position + 1 :]
        actions.insert(target, self.actions[position])
        return self.of(actions)

    def turned(self, position: int) -> OrderedLane | None:
        """Pair or unpair an action and its successor; None if they cannot overlap."""
        if position + 1 == len(self.actions):
            return None
        two = one, other = self.actions[position], self.actions[position + 1]
        if {one[0], other[0]} not in _OVERLAPPING or one[1:] == other[1:]:
            return None
        if two in self.pairs:
            return self._replace(pairs=self.pairs - {two})
        apart = frozenset(pair for pair in self.pairs if {*pair}.isdisjoint(two))
        return self._replace(pairs=apart | {two})

    def halved(self, position: int, rng: Random) -> OrderedLane | None:
        """Split a B, or join an I and its W; None if that would reorder actions of one class."""
        code, stage, microbatch = self.actions[position]
        actions = [*self.actions]
        if code == B:
            actions[position : position + 1] = [(I, stage, microbatch), (W, stage, microbatch)]
            latest = min(bounds_of(actions, position + 1)[1], position + 1 + _REACH)
            return self.of(actions).moved(position + 1, rng.randint(position + 1, latest))
        if code not in (I, W):
            return None
        halves = (I, stage, microbatch), (W, stage, microbatch)
        first, last = map(actions.index, halves)
        places = [first] * (bounds_of(actions, last)[0] == first + 1)
        places += [last] * (bounds_of(actions, first)[1] == last - 1)
        if not places:
            return None
        actions[rng.choice(places)] = (B, stage, microbatch)
        return self.of([action for action in actions if action not in halves])

    def closed(self, *places: int) -> OrderedLane:
        """Add pairs at these positions, for unpaired neighbours that can overlap."""
        lane = self
        for at in places:
            taken = {action for pair in lane.pairs for action in pair}
            if at >= 0 and taken.isdisjoint(lane.actions[at : at + 2]):
                lane = lane.turned(at) or lane
        return lane


def bounds_of(lane: Sequence[CodedAction], position: int) -> tuple[int, int]:
    """Return the first and last position of an action between the actions that it must not
    cross."""
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
    """Make random changes and keep those that do not lengthen the schedule. Yield each new best,
    until the budget is spent or ``good`` is reached."""
    lanes = list(lanes)
    joined = [lane.joined for lane in lanes]
    best = bench.score([lane.actions for lane in lanes], joined)
    if best is None:
        return
    tries = 0
    # Changes that are rejected before scoring spend no evaluation, so tries are bounded separately.
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
        # Changes with an equal score are kept: they let the search leave a plateau.
        if score is None or score > best:
            lanes[device], joined[device] = lane, places
            continue
        shorter = score.value < best.value * (1 - ROUNDING)
        best = score
        if shorter:
            yield lanes


def _changed(bench: Bench, device: int, lane: OrderedLane, rng: Random) -> OrderedLane | None:
    """Return a lane with one random change; None if it changes nothing or exceeds memory."""
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
