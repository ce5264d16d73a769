"""Precedence constraints between rows, for the bounds of `windows`.

A row has all actions of one kind and stage; number k of a row is the k-th action to start. The
constraints do not mention microbatches, so they hold for any order of microbatches, and for slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, inf
from typing import NamedTuple, TypeAlias

from funcpipe._src.schedules.clock import F, I, R, W
from funcpipe._src.search.problem import ROUNDING, Problem

RowKey: TypeAlias = tuple[int, int]
"""(code of a kind, stage). With remat, the row (R, stage) has the actions that make residuals: F if
the residual is kept, else R."""
RowCounts: TypeAlias = dict[RowKey, int]  # a number of actions for some rows
Ways: TypeAlias = Sequence[RowCounts]
"""Alternative counts, at least one of which holds; {} is no condition."""


@dataclass(frozen=True)
class Rows:
    """The rows of a problem, with their constraints."""

    count: int  # the number of actions per row
    device_of: tuple[int, ...]  # the device of each stage
    # The time of an action, by row. A row comes after the rows that it follows.
    lengths: dict[RowKey, float]
    # By row, (another row, delay): the k-th action starts at least ``delay`` after the end of the
    # other row's k-th action.
    follows: dict[RowKey, list[tuple[RowKey, float]]]
    # By row and number, the actions of the same device that end before it starts.
    after: dict[RowKey, list[Ways]]
    # By row and number, the actions of the same device that start after it ends, beyond those that
    # follow from ``after``.
    before: dict[RowKey, list[Ways]]

    @property
    def reversed(self) -> Rows:
        """The rows with time reversed: the last action of a row becomes its first.

        If n actions of another row come before the k-th action of a row, then the actions from
        number k on come after each of these n.
        """
        follows: dict[RowKey, list[tuple[RowKey, float]]] = {row: [] for row in self.lengths}
        later: dict[RowKey, list[RowCounts]] = {
            row: [{} for _ in range(self.count)] for row in self.lengths
        }
        for row, others in self.follows.items():
            for other, delay in others:
                follows[other].append((row, delay))
            for number, ways in enumerate(self.after[row]):
                for other in ways[0]:
                    for counts in later[other][: min(way.get(other, 0) for way in ways)]:
                        counts.setdefault(row, self.count - number)
        after: dict[RowKey, list[Ways]] = {}
        for row, column in later.items():
            pairs = list(zip(column, self.before[row], strict=True))[::-1]
            after[row] = [[self.both(counts, way) for way in ways] for counts, ways in pairs]
        lengths = dict(reversed(self.lengths.items()))
        return Rows(self.count, self.device_of, lengths, follows, after, {})

    @cached_property
    def of_device(self) -> dict[int, list[RowKey]]:
        """The rows of each device."""
        rows: dict[int, list[RowKey]] = {device: [] for device in self.device_of}
        for row in self.lengths:
            rows[self.device_of[row[1]]].append(row)
        return rows

    @cached_property
    def makes(self) -> int:
        """The code of the row that makes residuals: R with remat, else F."""
        return R if any(code == R for code, _ in self.lengths) else F

    def both(self, counts: RowCounts, others: RowCounts) -> RowCounts:
        """Return the counts of both conditions together. No action is counted twice.

        With remat, an action that makes a residual may be its F itself. So of the counts of F and R
        of a stage, only the larger remains.
        """
        joined = counts | {row: max(n, counts.get(row, 0)) for row, n in others.items()}
        for stage in [stage for code, stage in joined if code == F]:
            forward, maker = (F, stage), (R, stage)
            if maker in joined:
                del joined[min(forward, maker, key=joined.__getitem__)]
        return joined


class _RowStage(NamedTuple):
    """A stage, the earlier and later stages of its device, and the code that makes residuals."""

    stage: int
    earlier: Sequence[int]
    later: Sequence[int]
    makes: int


def rows_of(problem: Problem, first: int = 0) -> Rows:
    """Return the rows of the stages from ``first`` on.

    Before I number k of a stage starts, k + 1 microbatches have reached it: their F on this and the
    earlier stages of the device, and their F and I on the later stages, have ended. The same holds
    for F and W. A B counts as an I of its least time, with the remaining time as W.
    """
    stages, count = range(first, problem.num_stages), problem.num_microbatches
    makes = R if problem.remat else F
    lengths = {(F, stage): problem.forward[stage] for stage in stages}
    if problem.remat:
        lengths |= {
            (R, stage): min(problem.forward[stage], problem.again[stage]) for stage in stages
        }
    lengths |= {(I, stage): problem.backward[stage] for stage in reversed(stages)}
    for stage in stages:
        split = problem.backward[stage] + problem.weight[stage]
        whole = problem.whole_backward[stage]
        lengths[W, stage] = min(whole, split) - problem.backward[stage]
    follows: dict[RowKey, list[tuple[RowKey, float]]] = {row: [] for row in lengths}
    after: dict[RowKey, list[Ways]] = {row: [] for row in lengths}
    before: dict[RowKey, list[Ways]] = {row: [({},)] * count for row in lengths}
    for stage in stages:
        if stage > first:
            follows[F, stage].append(((F, stage - 1), problem.waits[0][stage - 1]))
            follows[I, stage - 1].append(((I, stage), problem.waits[1][stage]))
        if problem.remat:
            # The action that makes a residual may be F itself, so it starts with F at the earliest.
            follows[R, stage].append(((F, stage), -problem.forward[stage]))
        follows[I, stage].append(((makes, stage), 0.0))
        follows[W, stage].append(((I, stage), 0.0))
        local = [other for other in problem.local[problem.device_of[stage]] if other >= first]
        earlier = [other for other in local if other < stage]
        later = [other for other in local if other > stage]
        home = _RowStage(stage, earlier, later, makes)
        for number in range(count):
            come = {(F, other): number + 1 for other in earlier}
            made = come | {(makes, other): number + 1 for other in (stage, *later)}
            back = made | {(I, other): number + 1 for other in later}
            if problem.remat:
                after[F, stage].append([come | {(F, stage): number}])
            freed = _room_for_one_more(problem, home, number)
            after[makes, stage].append([come | {(makes, stage): number} | way for way in freed])
            after[I, stage].append([back | {(I, stage): number}])
            after[W, stage].append([back | {(I, stage): number + 1, (W, stage): number}])
        before[I, stage] = [_left_at(problem, home, number, I) for number in range(count)]
        before[W, stage] = [_left_at(problem, home, number, W) for number in range(count)]
    return Rows(count, problem.device_of, lengths, follows, after, before)


def _sizes(problem: Problem, home: _RowStage) -> tuple[float, float, float]:
    """Return a device's limit, and the least memory of a microbatch between F and I, and I and W.

    Between F and I of a stage, the residuals of the device's earlier stages are also held, except
    with remat, where they may have been dropped.
    """
    residual = problem.residual
    whole = residual[home.stage] + (
        0.0 if problem.remat else sum(residual[other] for other in home.earlier)
    )
    limit = (
        inf if problem.offload else problem.limits[problem.device_of[home.stage]] * (1 + ROUNDING)
    )
    return limit, whole, min(problem.rest[home.stage], residual[home.stage])


def _fitting(room: float, size: float, most: int) -> int:
    """Return how many of ``most`` amounts of a size fit into a memory."""
    return floor(min(most, room / size)) if size else most


def _room_for_one_more(problem: Problem, home: _RowStage, number: int) -> Ways:
    """Return the actions that must have ended for residual number k of a stage to fit into memory.

    There is one alternative for each number i of I of the stage that may have ended. Then k + 1 - i
    microbatches hold whole residuals, on this stage and on earlier stages of the device. The other
    residuals must fit beside them: weight residuals here or on other stages, whole residuals of
    later stages, and residuals on earlier stages whose I has run here but not there.

    Later stages must be able to make progress. Take residual number j of the last later stage. When
    it is made, at most j microbatches have gone back. So of n microbatches that have come here, n -
    j are whole, and they fit beside one residual of each later stage. Let c be the largest number
    that fits. So residual number k is made here only after residual number k - c there (``ahead`` -
    1). The residuals that later stages have made by then are held unless their I has run.
    """
    stage, earlier, later, makes = home
    limit, whole, _ = _sizes(problem, home)
    if limit == inf:
        return [{}]
    ahead = 0
    if later and not problem.remat:
        beside = limit - sum(problem.residual[other] for other in later)
        ahead = number + 1 - max(1, _fitting(beside, whole, number + 1))
    others = later if problem.remat else (*earlier, *later)
    ways: list[RowCounts] = []
    for backwards in range(number + 1):
        room = limit - (number + 1 - backwards) * whole
        if room < 0:
            continue
        way: RowCounts = {(I, stage): backwards}
        for other in (stage, *others):
            residual = problem.residual[other]
            rest = min(problem.rest[other], problem.residual[other])
            made = backwards if other <= stage else max(backwards, ahead)
            way[W, other] = made - _fitting(room, rest, made)
            if other > stage:
                way[makes, other] = made
                way[I, other] = max(backwards, made - _fitting(room, residual, made))
            elif other < stage:
                way[I, other] = made - _fitting(room, residual, made)
        ways.append(way)
    return ways or [{}]


def _left_at(problem: Problem, home: _RowStage, number: int, code: int) -> Ways:
    """Return the actions that remain when I or W number k of a stage ends, as alternatives.

    The residuals that the device has begun by then did fit into memory. This limits the number of F
    for given numbers of I and W.
    """
    limit, whole, rest = _sizes(problem, home)
    count, stage = problem.num_microbatches, home.stage
    if limit == inf:
        return [{}]
    # The possible numbers of I and W that have ended before.
    if code == I:
        ended = [(number, weights) for weights in range(number + 1)]
    else:
        ended = [(backwards, number) for backwards in range(number + 1, count + 1)]
    ways: list[RowCounts] = []
    for backwards, weights in ended:
        room = limit - (backwards - weights) * rest
        begun = min(count, backwards + _fitting(room, whole, count)) if room >= 0 else 0
        if begun >= max(backwards, number + 1):
            left = {
                (home.makes, stage): begun,
                (I, stage): max(backwards, number + 1),
                (W, stage): weights + (code == W),
            }
            ways.append({row: count - done for row, done in left.items()})
    return ways or [{}]
