"""Make a schedule shorter by moving one action, or joining or parting two, at a time; it stays legal and within memory."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import NamedTuple

from funcpipe.lab.problem import ROUNDING, Budget, CodedAction, Problem, Score
from funcpipe.schedules.clock import CODED, B, F, I, L, O, R, W, clock, durations_of, edges_of
from funcpipe.schedules.memory import residual_table

_CLASS = {F: 0, R: 1, B: 2, I: 2, W: 3, O: 4, L: 5}
"""Actions of one class and stage keep their order: microbatches ascend, backwards of slices descend."""

_REACH = 6
"""The most positions by which an action moves."""

_TURNS = 0.5
"""Where something can be hidden, how often two are joined or parted, else an action moves; and of those that move, how many
are joined with their new neighbours, and those that they leave, too."""

_OVERLAPPING = ({F, B}, {F, I})


class Bench:
    """Scores orders for a problem, without the checks and the records of a simulation."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        slices = problem.num_slices
        self.durations = [[time / slices for time in row] for row in durations_of(problem.cost, problem.num_stages)]
        edges = edges_of(problem.cost, problem.device_of)
        self.edges = [edge._replace(link=edge.link / slices) for edge in edges]
        table = residual_table(problem.cost, problem.num_stages)
        self.takes = [[size / slices for size in table[kind][0]] for kind in CODED]
        self.frees = [[size / slices for size in table[kind][1]] for kind in CODED]

    def score(self, lanes: Sequence[Sequence[CodedAction]], joined: Sequence[Iterable[int]] = ()) -> Score | None:
        """The score of orders; None where they deadlock. ``joined``: where each has pairs that overlap."""
        problem = self.problem
        pairs = [{at: self.both(lane[at], lane[at + 1]) for at in places} for lane, places in zip(lanes, joined)]
        ticks = clock(lanes, problem.device_of, problem.num_microbatches, self.durations, self.edges, pairs)
        if ticks.stuck:
            return None
        ends = [
            row[-1] + self.durations[lane[-1][0]][lane[-1][1]] for row, lane in zip(ticks.starts, lanes, strict=True)
        ]
        for device, lengths in enumerate(pairs):
            at = len(lanes[device]) - 2
            if at in lengths:
                ends[device] = ticks.starts[device][at] + lengths[at]
        return problem.score((row[0] for row in ticks.starts), ends)

    def both(self, one: CodedAction, other: CodedAction) -> float:
        """The time of two that overlap."""
        share = 1 / self.problem.num_slices
        return self.problem.cost.both((CODED[one[0]], one[1], share), (CODED[other[0]], other[1], share))

    def fits(self, device: int, lane: Sequence[CodedAction], joined: Container[int] = ()) -> bool:
        """Do the residuals of a device stay within its memory limit. ``joined``: where it has pairs that overlap."""
        limit = self.problem.limits[device] * (1 + ROUNDING)
        again = {(stage, m) for code, stage, m in lane if code == R}
        memory = late = 0.0
        takes, frees = self.takes, self.frees
        for at, (code, stage, microbatch) in enumerate(lane):
            if code != F or (stage, microbatch) not in again:
                memory += takes[code][stage]
                if memory > limit:
                    return False
            if joined and at in joined:
                late = frees[code][stage]
                continue
            memory -= frees[code][stage] + late
            late = 0.0
        return True


class Lane(NamedTuple):
    """An order, and which of its neighbours overlap."""

    actions: list[CodedAction]
    pairs: frozenset[tuple[CodedAction, CodedAction]]

    @property
    def joined(self) -> list[int]:
        """Where its pairs are."""
        return [at for at, pair in enumerate(pairwise(self.actions)) if pair in self.pairs] if self.pairs else []

    def moved(self, position: int, target: int) -> Lane:
        """With an action elsewhere; pairs that are no neighbours any more are none."""
        actions = self.actions[:position] + self.actions[position + 1 :]
        actions.insert(target, self.actions[position])
        return Lane(actions, self.pairs.intersection(pairwise(actions)) if self.pairs else self.pairs)

    def turned(self, position: int) -> Lane | None:
        """With a pair more, or less; None where these two cannot overlap."""
        if position + 1 == len(self.actions):
            return None
        two = self.actions[position], self.actions[position + 1]
        if {two[0][0], two[1][0]} not in _OVERLAPPING or two[0][1:] == two[1][1:]:
            return None
        if two in self.pairs:
            return Lane(self.actions, self.pairs - {two})
        return Lane(self.actions, frozenset(pair for pair in self.pairs if {*pair}.isdisjoint(two)) | {two})

    def closed(self, *places: int) -> Lane:
        """With pairs at these places, where two that are in none can overlap."""
        lane = self
        for at in places:
            taken = {action for pair in lane.pairs for action in pair}
            if at >= 0 and taken.isdisjoint(lane.actions[at : at + 2]):
                lane = lane.turned(at) or lane
        return lane


def bounds_of(lane: Sequence[CodedAction], position: int) -> tuple[int, int]:
    """The first and last position that an action can move to without crossing those that it must not cross."""
    code, stage, microbatch = lane[position]
    kind = _CLASS[code]
    low = position
    while low and not ((other := lane[low - 1])[1] == stage and (other[2] == microbatch or _CLASS[other[0]] == kind)):
        low -= 1
    high, last = position, len(lane) - 1
    while high < last and not (
        (other := lane[high + 1])[1] == stage and (other[2] == microbatch or _CLASS[other[0]] == kind)
    ):
        high += 1
    return low, high


def polish(bench: Bench, lanes: Sequence[Lane], rng: Random, budget: Budget, *, good: float) -> Iterator[list[Lane]]:
    """Change one thing after the other, as long as that makes nothing longer; yields what is shorter than all before.

    Args:
        bench: times the orders.
        lanes: where to begin; not changed.
        rng: what to try.
        budget: how often.
        good: stop at this value.
    """
    lanes = list(lanes)
    joined = [lane.joined for lane in lanes]
    hides = bench.problem.cost.hides
    best = bench.score([lane.actions for lane in lanes], joined)
    if best is None:
        return
    tries = 0
    while not budget.spent and best.value > good * (1 + ROUNDING) and tries < 20 * budget.most:
        tries += 1
        device = rng.randrange(len(lanes))
        lane, places = lanes[device], joined[device]
        position = rng.randrange(len(lane.actions))
        if hides and rng.random() < _TURNS:
            changed = lane.turned(position)
        else:
            low, high = bounds_of(lane.actions, position)
            target = rng.randint(max(low, position - _REACH), min(high, position + _REACH))
            changed = lane.moved(position, target) if target != position else None
            if changed is not None and hides and rng.random() < _TURNS:
                changed = changed.closed(target, target - 1, position, position - 1)
        if changed is None or not bench.fits(device, changed.actions, places_of := changed.joined):
            continue
        lanes[device], joined[device] = changed, places_of
        budget.spend()
        score = bench.score([lane.actions for lane in lanes], joined)
        if score is None or score > best:
            lanes[device], joined[device] = lane, places
            continue
        shorter = score.value < best.value * (1 - ROUNDING)
        best = score
        if shorter:
            yield lanes
