"""Make a schedule shorter by moving one action at a time; it stays legal and within the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from funcpipe.lab.problem import ROUNDING, Budget, CodedAction, CodedLanes, Problem, Score
from funcpipe.schedules.clock import CODED, B, F, I, L, O, R, W, clock, durations_of, edges_of
from funcpipe.schedules.memory import residual_table

_CLASS = {F: 0, R: 1, B: 2, I: 2, W: 3, O: 4, L: 5}
"""Actions of one class and stage keep their order: microbatches ascend, backwards of slices descend."""

_REACH = 6
"""The most positions by which an action moves."""


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

    def fits(self, device: int, lane: Sequence[CodedAction]) -> bool:
        """Do the residuals of a device stay within its memory limit."""
        limit = self.problem.limits[device] * (1 + ROUNDING)
        again = {(stage, m) for code, stage, m in lane if code == R}
        memory = 0.0
        takes, frees = self.takes, self.frees
        for code, stage, microbatch in lane:
            if code != F or (stage, microbatch) not in again:
                memory += takes[code][stage]
                if memory > limit:
                    return False
            memory -= frees[code][stage]
        return True


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


def polish(
    bench: Bench, lanes: Sequence[Sequence[CodedAction]], rng: Random, budget: Budget, *, good: float
) -> Iterator[CodedLanes]:
    """Move one action after the other, as long as that makes nothing longer; yields what is shorter than all before.

    Args:
        bench: times the orders.
        lanes: where to begin; not changed.
        rng: what to try.
        budget: how often.
        good: stop at this value.
    """
    lanes = [list(lane) for lane in lanes]
    best = bench.score(lanes)
    if best is None:
        return
    tries = 0
    while not budget.spent and best.value > good * (1 + ROUNDING) and tries < 20 * budget.most:
        tries += 1
        device = rng.randrange(len(lanes))
        lane = lanes[device]
        position = rng.randrange(len(lane))
        low, high = bounds_of(lane, position)
        target = rng.randint(max(low, position - _REACH), min(high, position + _REACH))
        moved = lane[:position] + lane[position + 1 :]
        moved.insert(target, lane[position])
        if target == position or not bench.fits(device, moved):
            continue
        lanes[device] = moved
        budget.spend()
        score = bench.score(lanes)
        if score is None or score > best:
            lanes[device] = lane
            continue
        shorter = score.value < best.value * (1 - ROUNDING)
        best = score
        if shorter:
            yield lanes
