"""Schedules made from schedules: backwards whole again where nothing is gained by splitting them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from funcpipe.core.cost import Cost
from funcpipe.core.kinds import Kind
from funcpipe.core.schedule import Action, Schedule
from funcpipe.schedules.legal import check
from funcpipe.schedules.levels import Costs, levels_of
from funcpipe.schedules.periods import ends_of
from funcpipe.schedules.transforms import refuse_unfit

_ROUNDING = 1e-9
"""Relative: by so much the end may be later, for the same times are added in another order."""


def unsplit(schedule: Schedule, *, cost: Costs | None = None) -> Schedule:
    """Make I and W one backward again, B, wherever the schedule takes no longer for it.

    Schedules of the zero-bubble family (arXiv 2401.10241) split every backward, but in most places nobody waits for I: only
    while the pipeline fills or drains must a gradient go back before W. A whole backward of a compiled stage reads
    everything once and holds nothing for a W. On each device those in the middle become whole, as many as may: B stands
    where I did, so no device holds more than before.

    >>> print(fp.schedules.unsplit(fp.schedules.zb_h2(2, 4)))
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1I2 1F3 1I3 1W2 1W3

    Args:
        schedule: any legal schedule with backwards. What stays split stays where it is.
        cost: the times by which it may take no longer, of stages with levels those of each; F, I and W take equally long
            without one.

    Raises:
        ScheduleError: this is no schedule, or not a legal one, or it has no backwards; ``cost`` is no cost of its stages.
    """
    refuse_unfit("unsplit", schedule, because="there is nothing to make whole")
    check(schedule)
    cost = Cost() if cost is None else cost
    for level in levels_of(cost, "unsplit"):
        level.check_stages(schedule.num_stages)
    limit = ends_of(schedule, cost) * (1 + _ROUNDING)
    rows = [[action for action in order if action.kind is Kind.I] for order in schedule.orders]
    most = max(map(len, rows))
    if not most:
        return schedule

    def without(split: Sequence[int]) -> Schedule:
        # split: how many of each device are at its start, then how many at its end.
        ends = zip(rows, split[: len(rows)], split[len(rows) :], strict=True)
        pieces = [action for row, start, end in ends for action in row[start : len(row) - end]]
        return _whole(schedule, frozenset(pieces)) if pieces else schedule

    def fits(split: Sequence[int]) -> bool:
        return ends_of(without(split), cost) <= limit

    split = [len(row) // 2 for row in rows] + [len(row) - len(row) // 2 for row in rows]
    # First all devices alike, as what one has no more to spare another cannot have; then each what is left.
    starts, ends = range(len(rows)), range(len(rows), 2 * len(rows))
    for places in (starts, ends, *([place] for place in range(len(split)))):
        tried = [_shared(split, places, number, most) for number in range(most + 1)]
        split = tried[_least(most, lambda number, tried=tried: fits(tried[number]))]
    return without(split)


def _shared(counts: Sequence[int], places: Sequence[int], number: int, steps: int) -> list[int]:
    """With such a part, ``number / steps``, of the counts at some places."""
    return [count * number // steps if place in places else count for place, count in enumerate(counts)]


def _least(count: int, holds: Callable[[int], bool]) -> int:
    """The least number up to a count for which something holds that holds for all greater ones; for the count it does."""
    low, high = 0, count
    while low < high:
        tried = (low + high) // 2
        low, high = (low, tried) if holds(tried) else (tried + 1, high)
    return low


def _whole(schedule: Schedule, inputs: Set[Action]) -> Schedule:
    """The schedule with each of these I and its W as one B, where I stands."""
    weights = {action._replace(kind=Kind.W) for action in inputs}

    def joined(action: Action) -> Action:
        return action._replace(kind=Kind.B) if action in inputs else action

    pairs = frozenset((joined(first), joined(second)) for first, second in schedule.pairs)
    orders = [[joined(action) for action in order if action not in weights] for order in schedule.orders]
    return replace(schedule, pairs=pairs).reordered(orders, f"{schedule.name}+unsplit")
