"""Lower bounds from windows: the earliest start of each action, and the least time after its end.

Actions of one kind and stage form a row; number k of a row is the k-th action to start, of any
microbatch. Before it starts, certain numbers of actions of other rows have ended (`rows.py` derives
these constraints). A device runs one action at a time. So an action starts no earlier than `done`
of the earlier actions of its device. Each new bound improves others, until none changes. All bounds
are valid after each step. The same computation with reversed time gives the *tail* of each action:
the least time that the batch continues after its end.

Then each device gives a bound: take all its actions with a tail of at least ``t``. The last of them
ends no earlier than `done` of all of them, and the batch continues for at least ``t``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from operator import itemgetter

from funcpipe._src.schedules.clock import F, R
from funcpipe._src.search.problem import ROUNDING, Problem
from funcpipe._src.search.rows import RowCounts, RowKey, Rows, Ways, rows_of

_PASSES = 8  # the most passes over all actions; few problems take more than four
_ROUNDS = 4  # the most rounds in which constraints that follow from a time give further constraints
_MOST = 400_000
"""The largest product of all actions and the actions of a device for which windows are computed;
more would take more than a second."""


@dataclass(frozen=True)
class Windows:
    """The windows of a problem."""

    rows: Rows  # the precedence constraints
    heads: dict[RowKey, list[float]]  # the earliest start of each action, by row and number
    # The least time of the batch after each action's end, by row and number.
    tails: dict[RowKey, list[float]]

    @classmethod
    def of(cls, rows: Rows, ends: Sequence[float]) -> Windows:
        """Compute the windows. ``ends``: by device, the least time after its last action."""
        heads = earliest(rows, dict.fromkeys(rows.lengths, 0.0))
        tails = earliest(rows.reversed, {row: ends[rows.device_of[row[1]]] for row in rows.lengths})
        return cls(rows, heads, {row: column[::-1] for row, column in tails.items()})

    def bound(self, device: int) -> float:
        """Return the lower bound from one device's actions."""
        best = 0.0
        # With remat, the action that makes a residual may be its F, so only one row of both counts.
        for twice in {F, self.rows.makes}:
            windows = [
                (tail, head, self.rows.lengths[row])
                for row in self.rows.of_device[device]
                if row[0] not in (F, R) or row[0] == twice
                for tail, head in zip(self.tails[row], self.heads[row], strict=True)
            ]
            # By falling tail: each prefix has all actions whose tail is at least `tail`.
            windows.sort(key=itemgetter(0), reverse=True)
            longest: list[tuple[float, float]] = []
            for tail, equal in groupby(windows, key=itemgetter(0)):
                longest += [window[1:] for window in equal]
                best = max(best, done(longest) + tail)
        return best

    def within(self, value: float) -> Rows | None:
        """Return rows with the constraints of schedules of at most this length; None if no new
        ones.

        If an action could come after another action of its device only in a longer schedule, it
        must come before that action.
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
                ways.append([rows.both(way, earlier) for way in known])
                new = new or ways[-1] != list(known)
            after[row] = ways
        return replace(rows, after=after) if new else None


def windows_bound(problem: Problem) -> tuple[float, int]:
    """Return the lower bound from windows, and its device; 0 if the problem is too large."""
    best = 0.0, 0
    for rows, devices, ends in _views(problem):
        windows = Windows.of(rows, ends)
        best = max([best, *((windows.bound(device), device) for device in devices)])
    return best


def sharpened(
    problem: Problem, bound: float, value: float, late: Callable[[], bool], *, steps: int
) -> float:
    """Raise a lower bound by bisection: refute that a schedule of at most some length exists.

    ``value`` is the value of the best schedule, ``late`` returns whether the time is over, and
    ``steps`` is the number of bisection steps.
    """
    # The first question: is the best schedule optimal, so that the search can end?
    low, high, middle = bound, value, value * (1 - 2 * ROUNDING)
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
    """Return whether the windows prove that no schedule is as short as ``value``."""
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
    """Yield (rows, devices whose bounds hold, least time after each device's last action).

    For the makespan, one view has all rows. For the span there is one view per device: without the
    stages before its first stage, which may have ended long before, and without the time of other
    devices after their last action.
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
    """Return the earliest start of each action, by row and number.

    ``begins``: by row, a time before which no action of the row starts.
    """
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
                # At least one alternative holds, so only the weakest of their bounds is valid.
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
    """Return the earliest time when a device is done with actions, given as (earliest start,
    time)."""
    end = -inf
    for start, length in sorted(actions):
        end = max(end, start) + length
    return end
