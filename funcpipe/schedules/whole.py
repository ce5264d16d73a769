"""Schedules made from schedules: backwards whole again, as far as nothing is gained by splitting them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial

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
    """Make I and W one backward again, B, in the middle of each device's order, as far as the schedule takes no longer for it.

    Schedules of the zero-bubble family (arXiv 2401.10241) split every backward. Where enough microbatches are under way, as in
    ZB-H2 and ZB-V, a gradient must go back before W only while the pipeline fills or drains. ZB-H1 holds fewer, and stays
    split but for its first device. B stands where I did and leaves nothing for a W, so no device holds more than before.
    Takes as many runs of the clock as there are devices, times twice the logarithm of the microbatches.

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
        part = partial(_shared, split, places, most)
        split = part(bisect_left(range(most), True, key=lambda number, part=part: fits(part(number))))
    return without(split)


def _shared(counts: Sequence[int], places: Sequence[int], steps: int, number: int) -> list[int]:
    """With such a part, ``number / steps``, of the counts at some places."""
    return [count * number // steps if place in places else count for place, count in enumerate(counts)]


def _whole(schedule: Schedule, inputs: Set[Action]) -> Schedule:
    """The schedule with each of these I and its W as one B, where I stands."""
    weights = {action._replace(kind=Kind.W) for action in inputs}

    def joined(action: Action) -> Action:
        return action._replace(kind=Kind.B) if action in inputs else action

    pairs = frozenset((joined(first), joined(second)) for first, second in schedule.pairs)
    orders = [[joined(action) for action in order if action not in weights] for order in schedule.orders]
    return replace(schedule, pairs=pairs).reordered(orders, f"{schedule.name}+unsplit")
