"""Make a schedule shorter by moving one action at a time; it stays legal and within the memory.

Where a move needs more memory than there is, the residual that waits for longest is computed again or sent to the host, if
the problem allows it; an R, or an O with its L, that is drawn goes where that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from funcpipe.lab.problem import ROUNDING, Budget, CodedAction, CodedLanes, Problem, Score
from funcpipe.schedules.clock import CODED, B, F, I, L, O, R, W, clock, durations_of, edges_of
from funcpipe.schedules.memory import residual_table, running_sum

_CLASS = {F: 0, R: 1, B: 2, I: 2, W: 3, O: 4, L: 5}
"""Actions of one class and stage keep their order: microbatches ascend, backwards of slices descend."""

_REACH = 6
"""The most positions by which an action moves."""
_RELIEFS = 3
"""The most residuals that go at once."""


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

    def score(self, lanes: Sequence[Sequence[CodedAction]]) -> Score | None:
        """The score of orders; None where they deadlock, or hold too much while residuals are on their way."""
        problem = self.problem
        ticks = clock(lanes, problem.device_of, problem.num_microbatches, self.durations, self.edges)
        if ticks.stuck:
            return None
        if problem.offload and not all(map(self._fits_in_time, range(len(lanes)), lanes, ticks.starts)):
            return None
        ends = [
            row[-1] + self.durations[lane[-1][0]][lane[-1][1]] for row, lane in zip(ticks.starts, lanes, strict=True)
        ]
        return problem.score((row[0] for row in ticks.starts), ends)

    def _fits_in_time(self, device: int, lane: Sequence[CodedAction], starts: Sequence[float]) -> bool:
        """Does a device stay within its limit; what leaves for the host lies there until it is gone."""
        if not any(code == O for code, _, _ in lane):
            return True  # then schedules that hold too much are for others to relieve
        again = {(stage, m) for code, stage, m in lane if code == R}
        changes: list[tuple[float, float, float]] = []
        for place, ((code, stage, m), start) in enumerate(zip(lane, starts, strict=True)):
            if code != F or (stage, m) not in again:
                changes.append((start, 2 * place, self.takes[code][stage]))
            changes.append((start + self.durations[code][stage], 2 * place + 1, -self.frees[code][stage]))
        levels = (level for _, level in running_sum(changes))
        return max(levels) <= self.problem.limits[device] * (1 + ROUNDING)

    def fits(self, device: int, lane: Sequence[CodedAction]) -> bool:
        """Do the residuals of a device stay within its memory limit."""
        return self.overflow(device, lane) < 0

    def overflow(self, device: int, lane: Sequence[CodedAction]) -> int:
        """The position of the first action for which there is no room on a device; -1: there is for all."""
        limit = self.problem.limits[device] * (1 + ROUNDING)
        again = {(stage, m) for code, stage, m in lane if code == R}
        memory = 0.0
        takes, frees = self.takes, self.frees
        for position, (code, stage, microbatch) in enumerate(lane):
            if code != F or (stage, microbatch) not in again:
                memory += takes[code][stage]
                if memory > limit:
                    return position
            memory -= frees[code][stage]
        return -1

    def relieved(self, device: int, lane: list[CodedAction], rng: Random) -> list[CodedAction] | None:
        """A lane that holds too much, with some residuals less while it does; None where that did not succeed."""
        for _ in range(_RELIEFS):
            position = self.overflow(device, lane)
            if position < 0:
                return lane
            relieved = self._without_longest(lane, position, rng)
            if relieved is None:
                return None
            lane = relieved
        return lane if self.fits(device, lane) else None

    def _without_longest(self, lane: list[CodedAction], position: int, rng: Random) -> list[CodedAction] | None:
        """A lane where the residual with the last backward, of those that are there, is computed again or moved away."""
        problem = self.problem
        gone = {(stage, m) for code, stage, m in lane if code in (O, R)}
        held = {(stage, m): at for at, (code, stage, m) in enumerate(lane[: position + 1]) if code == F}
        for at in reversed(range(position + 1, len(lane))):
            code, stage, m = lane[at]
            begun = held.get((stage, m), position + 1)
            if code not in (B, I) or begun > position or (stage, m) in gone:
                continue
            if problem.remat and not (problem.offload and rng.random() < 0.5):
                return [*lane[:at], (R, stage, m), *lane[at:]]
            if problem.offload and begun < position:
                back = at if rng.random() < 0.5 else rng.randint(position + 1, at)
                return [*lane[: begun + 1], (O, stage, m), *lane[begun + 1 : back], (L, stage, m), *lane[back:]]
        return None


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
        moved = _moved(bench, device, lane, position, rng)
        if moved is None:
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


def _moved(bench: Bench, device: int, lane: list[CodedAction], position: int, rng: Random) -> list[CodedAction] | None:
    """A lane with one action elsewhere, or without an R or a move to the host; None: that changes nothing, or has no room."""
    code, stage, microbatch = lane[position]
    if code in (R, O, L) and rng.random() < (0.5 if code == R else 0.1):
        moved = [action for action in lane if action[1:] != (stage, microbatch) or action[0] not in (R, O, L)]
        return moved if bench.fits(device, moved) else None
    low, high = bounds_of(lane, position)
    target = rng.randint(max(low, position - _REACH), min(high, position + _REACH))
    if target == position:
        return None
    moved = lane[:position] + lane[position + 1 :]
    moved.insert(target, lane[position])
    return moved if bench.fits(device, moved) else bench.relieved(device, moved, rng)
