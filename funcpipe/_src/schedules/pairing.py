"""Transform schedules: pair neighbouring actions so that they overlap, or remove all pairs.

The rules for pairs are in `pairs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Schedule
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.pairs import joinable, together
from funcpipe._src.schedules.transforms import refuse_unfit


def pair(schedule: Schedule, *, join: Callable[[Action, Action], bool] | None = None) -> Schedule:
    """Pair each forward with a neighbouring backward, if neither waits for the other.

    The two actions of a pair overlap. This saves time if stages wait for links between devices
    (`Cost.forward_link`). Otherwise it costs time: both actions begin when both can begin, and
    their results are ready when both have ended.

    >>> print(fp.schedules.pair(fp.schedules.one_f_one_b(2, 3)))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 (1B0 1F1) (1B1 1F2) 1B2

    Here ``(0F1 0B0)`` cannot be a pair on the first device: 0B0 needs the result of ``(1B0 1F1)``,
    and that pair needs 0F1.

    Args:
        schedule: a schedule with backwards. Its own pairs remain.
        join: ``(action, next action) -> bool``: whether two neighbours, an F and a B or I, become a
            pair. None: all that can.

    Raises:
        ScheduleError: ``schedule`` is not a schedule, is not legal, or has no backwards.
    """
    refuse_unfit("pair", schedule, because="there is nothing for forwards to overlap with")
    if join is not None and not callable(join):
        raise ScheduleError(
            f"join must be a function (action, action) -> bool, or None; got {join!r}"
        )
    check(schedule)
    return together(schedule, joinable(schedule, join))


def unpair(schedule: Schedule) -> Schedule:
    """Remove all pairs from a schedule: their actions run one after the other.

    >>> print(fp.schedules.unpair(fp.Schedule.parse("0F0 (0F1 0B0) 0B1")))
    0F0 0F1 0B0 0B1

    Raises:
        ScheduleError: ``schedule`` is not a schedule.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"unpair takes a schedule; got a {type(schedule).__name__}")
    return replace(schedule, pairs=frozenset()) if schedule.pairs else schedule
