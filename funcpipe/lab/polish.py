"""Make a schedule shorter by moving one action at a time; whatever it is given stays legal and within the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from funcpipe.lab.problem import ROUNDING, Budget, CodedAction, Problem
from funcpipe.schedules.clock import CODED, B, F, I, L, O, R, W, clock, durations_of, edges_of
from funcpipe.schedules.memory import residual_table

_CLASS = {F: 0, R: 1, B: 2, I: 2, W: 3, O: 4, L: 5}
"""Actions of one class and stage keep their order: microbatches ascend."""


_REACH = 6
"""Places that an action moves at most."""


class Score(NamedTuple):
    """What is made small: the objective first, then how long all devices together are at work or waiting."""

    value: float
    total: float


class Bench:
    """Times orders for a problem, without the checks and the records of a simulation."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.durations = durations_of(problem.cost, problem.num_stages)
        self.edges = edges_of(problem.cost, problem.device_of)
        table = residual_table(problem.cost, problem.num_stages)
        self.takes = [table[kind][0] for kind in CODED]
        self.frees = [table[kind][1] for kind in CODED]

    def score(self, lanes: Sequence[Sequence[CodedAction]]) -> Score | None:
        """The times of some orders; None where they cannot come to their end."""
        problem = self.problem
        ticks = clock(lanes, problem.device_of, problem.num_microbatches, self.durations, self.edges)
        if ticks.stuck:
            return None
        ends = [
            row[-1] + self.durations[lane[-1][0]][lane[-1][1]] for row, lane in zip(ticks.starts, lanes, strict=True)
        ]
        spans = [end - row[0] for end, row in zip(ends, ticks.starts, strict=True)]
        if problem.objective == "makespan":
            return Score(max(ends), sum(ends))
        return Score(max(spans), sum(spans))

    def fits(self, device: int, lane: Sequence[CodedAction]) -> bool:
        """Does a device hold no more residuals than it may."""
        limit = self.problem.limits[device] * (1 + ROUNDING)
        again = {(stage, m) for code, stage, m in lane if code == R}
        held = 0.0
        takes, frees = self.takes, self.frees
        for code, stage, microbatch in lane:
            if code != F or (stage, microbatch) not in again:
                held += takes[code][stage]
                if held > limit:
                    return False
            held -= frees[code][stage]
        return True


def bounds_of(lane: Sequence[CodedAction], at: int) -> tuple[int, int]:
    """The first and last place that the action at a place can move to, past those that it must not cross."""
    code, stage, microbatch = lane[at]
    kind = _CLASS[code]
    low = at
    while low and not ((other := lane[low - 1])[1] == stage and (other[2] == microbatch or _CLASS[other[0]] == kind)):
        low -= 1
    high, last = at, len(lane) - 1
    while high < last and not (
        (other := lane[high + 1])[1] == stage and (other[2] == microbatch or _CLASS[other[0]] == kind)
    ):
        high += 1
    return low, high


def polish(
    bench: Bench, lanes: Sequence[Sequence[CodedAction]], rng: Random, budget: Budget, *, good: float
) -> Iterator[list[list[CodedAction]]]:
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
        at = rng.randrange(len(lane))
        low, high = bounds_of(lane, at)
        to = rng.randint(max(low, at - _REACH), min(high, at + _REACH))
        moved = lane[:at] + lane[at + 1 :]
        moved.insert(to, lane[at])
        if to == at or not bench.fits(device, moved):
            continue
        lanes[device] = moved
        budget.spend()
        found = bench.score(lanes)
        if found is None or found > best:
            lanes[device] = lane
            continue
        shorter = found.value < best.value * (1 - ROUNDING)
        best = found
        if shorter:
            yield lanes
