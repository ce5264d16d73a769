"""What must come before what, counted by rows: a row has the actions of one kind and stage, the
k-th is the k-th to start.

Nothing here is about a certain microbatch, so it holds in whatever order they are, and for slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, inf
from typing import NamedTuple, TypeAlias

from funcpipe._src.schedules.clock import F, I, R, W
from funcpipe._src.search.problem import ROUNDING, Problem

RowKey: TypeAlias = tuple[int, int]
"""The code of a kind, and a stage. With remat (R, stage) makes the residuals: F where it is kept,
else R."""
RowCounts: TypeAlias = dict[RowKey, int]
"""How many of each row."""
Ways: TypeAlias = Sequence[RowCounts]
"""Counts of which one holds; {} is no condition."""


@dataclass(frozen=True)
class Rows:
    """The rows of a problem.

    Attributes:
        count: how many actions each row has.
        device_of: of each stage.
        lengths: the time of one action of each, rows after those that they follow.
        follows: by row, (another row, a delay): the k-th starts so long after the k-th of the other
            has ended, or later.
        after: by row and number, what its device has done before it starts.
        before: by row and number, what its device does after it ends, as far as ``after`` does not
            say so.
    """

    count: int
    device_of: tuple[int, ...]
    lengths: dict[RowKey, float]
    follows: dict[RowKey, list[tuple[RowKey, float]]]
    after: dict[RowKey, list[Ways]]
    before: dict[RowKey, list[Ways]]

    @property
    def reversed(self) -> Rows:
        """The same with time turned round: the last action of a row is its first.

        Where n of another row come before the k-th of this one, this one's from the k-th on come
        after each of those.
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
            after[row] = [[self.once(most(counts, way)) for way in ways] for counts, ways in pairs]
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
        """The code of what makes residuals."""
        return R if any(code == R for code, _ in self.lengths) else F

    def once(self, counts: RowCounts) -> RowCounts:
        """RowCounts without F beside as many or more that make their residuals: where those are
        kept it is the same actions.

        Without the latter where there are more F.
        """
        if self.makes == F:
            return counts
        fewer = {
            (R if counts.get((R, stage), 0) < n else F, stage)
            for (code, stage), n in counts.items()
            if code == F
        }
        return {
            row: n
            for row, n in counts.items()
            if row not in fewer or (R + F - row[0], row[1]) not in counts
        }


def most(counts: RowCounts, others: RowCounts) -> RowCounts:
    """Both together."""
    return counts | {row: max(n, counts.get(row, 0)) for row, n in others.items()}


class _RowStage(NamedTuple):
    """A stage, and the stages of its device that come earlier and later; what makes their
    residuals."""

    stage: int
    earlier: Sequence[int]
    later: Sequence[int]
    makes: int


def rows_of(problem: Problem, first: int = 0) -> Rows:
    """The rows of the stages from one on.

    Before the k-th I of a stage starts, k + 1 microbatches have come so far: their F on this stage
    and the earlier ones, their F and I on the later ones. So it is with F and W. A B counts as an I
    as short as it and the rest of it as W.
    """
    stages, count = range(first, problem.num_stages), problem.num_microbatches
    inward = list(map(min, problem.inward, problem.whole_backward))
    rows = zip(problem.whole_backward, problem.inward, problem.weight, inward, strict=True)
    weight = [min(whole, inward + weight) - least for whole, inward, weight, least in rows]
    makes = R if problem.remat else F
    lengths = {(F, stage): problem.forward[stage] for stage in stages}
    if problem.remat:
        lengths |= {
            (R, stage): min(problem.forward[stage], problem.again[stage]) for stage in stages
        }
    lengths |= {(I, stage): inward[stage] for stage in reversed(stages)}
    lengths |= {(W, stage): weight[stage] for stage in stages}
    follows: dict[RowKey, list[tuple[RowKey, float]]] = {row: [] for row in lengths}
    after: dict[RowKey, list[Ways]] = {row: [] for row in lengths}
    before: dict[RowKey, list[Ways]] = {row: [({},)] * count for row in lengths}
    for stage in stages:
        if stage > first:
            follows[F, stage].append(((F, stage - 1), problem.waits[0][stage - 1]))
            follows[I, stage - 1].append(((I, stage), problem.waits[1][stage]))
        if problem.remat:
            follows[R, stage].append(
                ((F, stage), -problem.forward[stage])
            )  # it starts with F at the earliest
        follows[I, stage].append(((makes, stage), 0.0))
        follows[W, stage].append(((I, stage), 0.0))
        local = [other for other in problem.local[problem.device_of[stage]] if other >= first]
        earlier, later = (
            [other for other in local if other < stage],
            [other for other in local if other > stage],
        )
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
    """The limit of a device; what a microbatch holds at least between F and I of a stage, and
    between its I and W.

    Between F and I the earlier stages of the device hold it too, unless they may have dropped it.
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
    """How many fit into so much memory, of so many."""
    return floor(min(most, room / size)) if size else most


def _room_for_one_more(problem: Problem, home: _RowStage, number: int) -> Ways:
    """What has ended when residual number k of a stage comes, for it to fit: a way for each number
    i of its I that may have.

    Then k + 1 - i microbatches are whole, on this stage and on the earlier ones of its device. What
    else lies there must fit beside them: what I left for W, here or elsewhere; whole ones of later
    stages; those of which I has run here and not yet on an earlier stage.

    Later stages are not shut out. Take residual number j of the last of them: when it comes, at
    most j microbatches have gone back, so of n that have come here n - j are whole, and they fit
    beside one residual of each later stage. Let c be the most that do. So number k comes here only
    after number k - c there (``ahead`` - 1), and what later stages have made by then lies there
    unless their I has run.
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
            residual, rest = (
                problem.residual[other],
                min(problem.rest[other], problem.residual[other]),
            )
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
    """What is still to come when I or W number k of a stage ends: the more of one kind the less of
    another.

    What its device has begun until then did fit: so many F at most with so many I and W.
    """
    limit, whole, rest = _sizes(problem, home)
    count, stage = problem.num_microbatches, home.stage
    if limit == inf:
        return [{}]
    ways: list[RowCounts] = []
    for backwards, weights in _done_at(number, code, count):
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


def _done_at(number: int, code: int, count: int) -> Iterator[tuple[int, int]]:
    """How many I and W have ended just before I or W number k does."""
    if code == I:
        return ((number, weights) for weights in range(number + 1))
    return ((backwards, number) for backwards in range(number + 1, count + 1))
