"""Schedules as the CSV of torch.distributed.pipelining, in its format of computing actions alone
("compute_only")."""

from __future__ import annotations

import re
from collections.abc import Sequence

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.data.kinds import COUNTED, ONCE, Kind
from funcpipe._src.data.schedule import Action, Pair, Schedule, select
from funcpipe._src.schedules.formats import read_actions, shown
from funcpipe._src.schedules.legal import MOST_FAULTS, check

_NO_ACTION = re.compile(r"[0-9]+[A-Z]{2}[A-Z_]*[0-9]*")
"""What torch writes of messages, gathering and reductions as "compute_comms", and its newer
actions."""
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule) -> str:
    """The schedule in the format of torch.distributed.pipelining: a row for each rank,
    ``0F0,0F1,0B0,0B1``.

    torch loads it as a "compute_only" schedule, and adds its sends, receives, gathering and
    reductions (U and G are left out). Rank d has the stages of device d. An F that overlaps with a
    B or an I is torch's ``OVERLAP_F_B``.

    >>> print(fp.schedules.to_torch_csv(fp.schedules.zero_bubble(2, 2)), end="")
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1

    Args:
        schedule: a legal schedule of whole microbatches with backwards and without R, O and L; in
            its pairs are an F and a B or I.

    Raises:
        ScheduleError: torch could not run it.
    """
    check(schedule)
    faults: list[str] = []
    if not schedule.has_backward:
        faults.append(
            "it has no backwards: torch has no schedules that only evaluate (there: "
            "`schedule.eval`)"
        )
    if schedule.num_slices > 1:
        faults.append(
            "its microbatches are in slices, which torch's schedules do not have; make it without "
            "num_slices="
        )
    kinds = {action.kind for order in schedule.orders for action in order}
    if Kind.R in kinds:
        faults.append(
            "it has R: torch's schedules have no remat; write the schedule as it was before "
            "`fp.schedules.remat`, and checkpoint inside the stages"
        )
    if kinds & {Kind.O, Kind.L}:
        faults.append(
            "it has O and L: torch's schedules have no offload; write it as it was before "
            "`fp.schedules.offload`"
        )
    alike = [
        pair
        for pair in schedule.pairs
        if Kind.F not in (kinds_of := {pair[0].kind, pair[1].kind}) or len(kinds_of) < 2
    ]
    if alike:
        first = "({} {})".format(*min(alike))
        faults.append(
            f"{first} overlaps: in torch a forward overlaps with a backward, nothing else does; "
            "write the schedule as it is without pairs: fp.schedules.unpair(schedule)"
        )
    raise_all(
        f"torch.distributed.pipelining cannot run schedule {schedule.name!r}:",
        faults,
        ScheduleError,
    )
    computing = schedule.reordered(
        select(schedule.orders, lambda action: action.kind not in (*ONCE, *COUNTED)), schedule.name
    )
    return "".join(",".join(_cells(computing, order)) + "\n" for order in computing.orders)


def _cells(schedule: Schedule, order: Sequence[Action]) -> list[str]:
    """The actions of an order, each alone or with the one that it overlaps with."""
    joined = {*schedule.joined(order)}
    return [
        f"({order[at]};{order[at + 1]})OVERLAP_F_B" if at in joined else str(order[at])
        for at in range(len(order))
        if at - 1 not in joined
    ]


def from_torch_csv(text: str, *, name: str = "torch") -> Schedule:
    """Read a schedule that torch.distributed.pipelining or a tool for it wrote as "compute_only".

    ``OVERLAP_F_B`` is a pair (`Schedule.pairs`). Empty cells are waits, no actions here.

    >>> print(fp.schedules.from_torch_csv("0F0,,0F1,0B0,0B1\\n1F0,(1F1;1B0)OVERLAP_F_B,1B1"))
    0F0 0F1 0B0 0B1
    1F0 (1F1 1B0) 1B1

    Args:
        text: the CSV, a row for each rank.
        name: of the schedule.

    Raises:
        ScheduleError: some cells are no actions; each is named with its row. Whether the schedule
            is legal is for `check`.
    """
    if not isinstance(text, str):
        raise ScheduleError(f"from_torch_csv takes text; got a {type(text).__name__}")
    faults: list[str] = []
    known: dict[str, Action] = {}
    orders: list[tuple[Action, ...]] = []
    pairs: set[Pair] = set()
    for row, line in enumerate(text.rstrip().split("\n"), 1):
        words: list[str] = []
        places: list[int] = []
        for cell in map(str.strip, line.split(",")):
            pair = _PAIR.fullmatch(cell)
            if pair:
                places.append(len(words))
                words += map(str.strip, pair.groups())
            elif not cell:
                continue
            elif _NO_ACTION.fullmatch(cell):
                faults.append(
                    f"row {row}: {shown(cell)}: funcpipe does not know this action of torch; let "
                    "torch write the "
                    'schedule with format="compute_only", which has none of these'
                )
            else:
                words.append(cell)
        order = read_actions(words, f"row {row}", known=known, fault=faults.append)
        orders.append(order)
        pairs |= {(order[at], order[at + 1]) for at in places if len(order) == len(words)}
    raise_all(
        "this is no schedule of torch.distributed.pipelining:",
        faults,
        ScheduleError,
        most=MOST_FAULTS,
    )
    return Schedule(tuple(orders), name, frozenset(pairs))
