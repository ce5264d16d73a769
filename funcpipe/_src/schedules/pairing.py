"""Schedules made from schedules: neighbours that overlap, and without any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Schedule
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.pairs import joinable, together
from funcpipe._src.schedules.transforms import refuse_unfit


def pair(schedule: Schedule, *, join: Callable[[Action, Action], bool] | None = None) -> Schedule:
    """Let each forward overlap with the backward that stands next to it, where neither waits for
    the other.

    What the two do at once is worth something where stages wait for links between devices
    (`Cost.forward_link`), and costs something where they do not: both begin when both can, and what
    they hand on is there when both are done.

    >>> print(fp.schedules.pair(fp.schedules.one_f_one_b(2, 3)))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 (1B0 1F1) (1B1 1F2) 1B2

    On the first device ``(0F1 0B0)`` cannot be a pair, too: 0B0 comes of ``(1B0 1F1)``, which needs
    0F1.

    Args:
        schedule: a schedule with backwards. Pairs that it has stay.
        join: given two neighbours of an order, an F and a B or I, the first first: should they
            overlap. None: all that can.

    Raises:
        ScheduleError: this is no schedule, it is not legal, or it has no backwards.
    """
    refuse_unfit("pair", schedule, because="there is nothing for forwards to overlap with")
    if join is not None and not callable(join):
        raise ScheduleError(f"join is a function (action, action) -> bool, or None; got {join!r}")
    check(schedule)
    return together(schedule, joinable(schedule, join))


def unpair(schedule: Schedule) -> Schedule:
    """The schedule without pairs: their actions one after the other.

    >>> print(fp.schedules.unpair(fp.Schedule.parse("0F0 (0F1 0B0) 0B1")))
    0F0 0F1 0B0 0B1
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"unpair takes a schedule; got a {type(schedule).__name__}")
    return replace(schedule, pairs=frozenset()) if schedule.pairs else schedule
