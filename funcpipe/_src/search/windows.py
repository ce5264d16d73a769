"""A bound from windows: how early each action can start, and for how long the batch goes on after
it at least.

Actions of one kind and stage are a row; the k-th of a row is the k-th that starts, whichever
microbatch it is of. Before it starts, so and so many of other rows have ended (`rows_of` says why).
A device runs one at a time, each no earlier than it can start, so with those that it runs itself it
is busy until `done` at the earliest: then this one starts, or later. What that says about one
action goes into the next, until nothing changes; after each step all of it is true. With time
turned round the same says for how long the batch goes on after the end of each.

At last each device: of all its actions after which the batch goes on for ``t`` or longer, one is
the last, and it ends when the device is done with all of them, at the earliest. So the batch takes
that long and ``t``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from operator import itemgetter

from funcpipe._src.schedules.clock import F, R
from funcpipe._src.search.problem import ROUNDING, Problem
from funcpipe._src.search.rows import RowCounts, RowKey, Rows, Ways, most, rows_of

_PASSES = 8
"""How often all actions are gone through at most; few problems take more than four."""
_ROUNDS = 4
"""How often orders that follow from a time give further ones, at most."""
_MOST = 400_000
"""The most actions, times those of a device, for which windows are worked out; with more that takes
more than a second."""


@dataclass(frozen=True)
class Windows:
    """The windows of a problem.

    Attributes:
        rows: what must come before what.
        heads: the earliest start of each action, by row and number.
        tails: for how long the batch goes on after its end, at least.
    """

    rows: Rows
    heads: dict[RowKey, list[float]]
    tails: dict[RowKey, list[float]]

    @classmethod
    def of(cls, rows: Rows, ends: Sequence[float]) -> Windows:
        """Work them out; ``ends``: by device, for how long the batch goes on after its last
        action."""
        heads = earliest(rows, dict.fromkeys(rows.lengths, 0.0))
        tails = earliest(rows.reversed, {row: ends[rows.device_of[row[1]]] for row in rows.lengths})
        return cls(rows, heads, {row: column[::-1] for row, column in tails.items()})

    def bound(self, device: int) -> float:
        """How long the batch takes at least, as far as one device says."""
        best = 0.0
        for twice in {
            F,
            self.rows.makes,
        }:  # with remat what makes a residual may be its F: one of them counts
            windows = [
                (tail, head, self.rows.lengths[row])
                for row in self.rows.of_device[device]
                if row[0] not in (F, R) or row[0] == twice
                for tail, head in zip(self.tails[row], self.heads[row], strict=True)
            ]
            windows.sort(key=itemgetter(0), reverse=True)
            longest: list[tuple[float, float]] = []
            for tail, equal in groupby(windows, key=itemgetter(0)):
                longest += [window[1:] for window in equal]
                best = max(best, done(longest) + tail)
        return best

    def within(self, value: float) -> Rows | None:
        """The rows of schedules that take no longer than this; None where that says nothing new.

        Where an action could come after another of its device only in a longer one, it comes
        before.
        """
        rows, new = self.rows, False
        after: dict[RowKey, list[Ways]] = {}
        for row, column in self.heads.items():
            length, ways = rows.lengths[row], list[Ways]()
            for begin, known in zip(column, rows.after[row], strict=True):
                earlier: RowCounts = {}
                for other in rows.of_device[rows.device_of[row[1]]]:
                    if other == row or (other[1] == row[1] and {other[0], row[0]} == {F, R}):
                        continue
                    latest = value * (1 + ROUNDING) - begin - length - rows.lengths[other]
                    n = next(
                        (n for n in range(rows.count, 0, -1) if self.tails[other][n - 1] > latest),
                        0,
                    )
                    if n:
                        earlier[other] = n
                ways.append([rows.once(most(way, earlier)) for way in known])
                new = new or ways[-1] != list(known)
            after[row] = ways
        return replace(rows, after=after) if new else None


def windows_bound(problem: Problem) -> tuple[float, int]:
    """A time that no schedule beats, and the device that it comes from; 0 where the problem is too
    large for it."""
    best = 0.0, 0
    for rows, devices, ends in _views(problem):
        windows = Windows.of(rows, ends)
        best = max([best, *((windows.bound(device), device) for device in devices)])
    return best


def sharpened(
    problem: Problem, bound: float, value: float, late: Callable[[], bool], *, steps: int
) -> float:
    """A bound between one and what was found, by halving: does any schedule take no longer than
    this.

    Args:
        problem: what to bound.
        bound: a bound.
        value: what was found.
        late: is the time over.
        steps: how often the distance is halved; the first asks whether anything shorter than what
            was found exists.
    """
    low, high, middle = (
        bound,
        value,
        value * (1 - 2 * ROUNDING),
    )  # first whether nothing shorter was left to find
    for _ in range(steps):
        if late() or low >= value * (1 - 4 * ROUNDING):
            break
        if not any(
            _refutes(rows, devices, ends, middle) for rows, devices, ends in _views(problem)
        ):
            high = middle
        else:
            low = value if middle >= value * (1 - 2 * ROUNDING) else middle
        middle = (low + high) / 2
    return low


def _refutes(rows: Rows, devices: Sequence[int], ends: Sequence[float], value: float) -> bool:
    """Is it so that no schedule takes so little."""
    known: Rows | None = rows
    for _ in range(_ROUNDS):
        windows = Windows.of(known, ends)
        if max(map(windows.bound, devices)) > value * (1 + ROUNDING):
            return True
        known = windows.within(value)
        if known is None:
            break
    return False


def _views(problem: Problem) -> Iterator[tuple[Rows, Sequence[int], Sequence[float]]]:
    """The rows to look at, whose devices' bounds hold, and for how long the batch goes on after
    each device's last action.

    The makespan has all of them. Of the span of a device the stages before its first one are left
    out, for they may be long done, and so is what other devices do for themselves.
    """
    everywhere = range(problem.num_devices)
    makespan = problem.objective == "makespan"
    if problem.num_actions**2 > _MOST * (problem.num_devices if makespan else 1):
        return
    if makespan:
        yield rows_of(problem), everywhere, [0.0] * problem.num_devices
        return
    for device, stages in enumerate(problem.local):
        if stages:
            yield (
                rows_of(problem, stages[0]),
                [device],
                [0.0 if other == device else -inf for other in everywhere],
            )


def earliest(rows: Rows, begins: Mapping[RowKey, float]) -> dict[RowKey, list[float]]:
    """The earliest start of each action, by row and number, where none of a row starts before it
    ``begins``."""
    starts = {row: [begin] * rows.count for row, begin in begins.items()}
    for _ in range(_PASSES):
        changed = False
        for number in range(rows.count):
            for row, length in rows.lengths.items():
                start = before = starts[row][number]
                if number:
                    start = max(start, starts[row][number - 1] + length)
                for other, delay in rows.follows[row]:
                    start = max(start, starts[other][number] + rows.lengths[other] + delay)
                soonest = inf
                for counts in rows.after[row][number]:
                    parts = [
                        (begin, rows.lengths[other])
                        for other, n in counts.items()
                        for begin in starts[other][:n]
                    ]
                    soonest = min(soonest, done(parts))
                    if soonest <= start:
                        break
                start = max(start, soonest)
                if start > before:
                    starts[row][number], changed = start, True
        if not changed:
            break
    return starts


def done(actions: Iterable[tuple[float, float]]) -> float:
    """When a device is done with actions, each given by its earliest start and its time."""
    end = -inf
    for start, length in sorted(actions):
        end = max(end, start) + length
    return end
