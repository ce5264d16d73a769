"""Write and read the CSV of torch.distributed.pipelining, in its format "compute_only".

This format contains computing actions only. JSON and text are in `formats` and `Schedule`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.data.kinds import WHOLE, Kind
from funcpipe._src.data.schedule import Schedule, select, words_of
from funcpipe._src.schedules.formats import read_schedule, shown
from funcpipe._src.schedules.legal import MOST_FAULTS, check

_NO_ACTION = re.compile(r"[0-9]+[A-Z]{2}[A-Z_]*[0-9]*")
"""Actions of torch that funcpipe does not read: messages, gathering and reductions."""
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV for torch.distributed.pipelining, one row per rank.

    torch loads the text as a "compute_only" schedule, and adds its own sends, receives, gathering
    and reductions. So G, S and U are left out. Rank d has the stages of device d. A pair of an F
    and a B or I becomes torch's ``OVERLAP_F_B``.

    >>> print(fp.schedules.to_torch_csv(fp.schedules.zero_bubble(2, 2)), end="")
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1

    Args:
        schedule: a legal schedule of whole microbatches, with backwards, and without R, O and L.
            Its pairs consist of an F and a B or I.

    Returns:
        The CSV text, such as ``0F0,0F1,0B0,0B1`` for rank 0.

    Raises:
        ScheduleError: the schedule is not legal, or torch could not run it.
    """
    check(schedule)
    kinds = {action.kind for order in schedule.orders for action in order}
    alike = [pair for pair in schedule.pairs if [a.kind for a in pair].count(Kind.F) != 1]
    reasons = {
        "it has no backwards: torch has no forward-only schedules; evaluate with torch's "
        "`schedule.eval`": not schedule.has_backward,
        "its microbatches are cut into slices, which torch's schedules do not have; make it "
        "without num_slices=": schedule.num_slices > 1,
        "it has R: torch's schedules have no remat; write the schedule as it was before "
        "`fp.schedules.remat`, and checkpoint inside the stages": Kind.R in kinds,
        "it has O and L: torch's schedules have no offload; write it as it was before "
        "`fp.schedules.offload`": bool(kinds & {Kind.O, Kind.L}),
    }
    faults = [reason for reason, holds in reasons.items() if holds]
    if alike:
        first = "({} {})".format(*min(alike))
        faults.append(
            f"{first} overlaps, but in torch only a forward and a backward can overlap; write the "
            "schedule without pairs: fp.schedules.unpair(schedule)"
        )
    raise_all(
        f"torch.distributed.pipelining cannot run schedule {schedule.name!r}:",
        faults,
        ScheduleError,
    )
    computing = schedule.reordered(
        select(schedule.orders, lambda action: action.kind not in WHOLE), schedule.name
    )
    rows = [map(_cell, words_of(line)) for line in computing.lines()]
    return "".join(",".join(row) + "\n" for row in rows)


def _cell(words: tuple[str, ...]) -> str:
    """Return the cell of one action, or of a pair."""
    return words[0] if len(words) == 1 else f"({words[0]};{words[1]})OVERLAP_F_B"


def from_torch_csv(text: str, *, name: str = "torch") -> Schedule:
    """Read a "compute_only" CSV of torch.distributed.pipelining.

    ``OVERLAP_F_B`` becomes a pair (`Schedule.pairs`). Empty cells are waits, and are skipped.

    >>> print(fp.schedules.from_torch_csv("0F0,,0F1,0B0,0B1\\n1F0,(1F1;1B0)OVERLAP_F_B,1B1"))
    0F0 0F1 0B0 0B1
    1F0 (1F1 1B0) 1B1

    Args:
        text: the CSV text, with one row per rank.
        name: the name of the schedule.

    Returns:
        The schedule. Whether it is legal is not checked.

    Raises:
        ScheduleError: some cells are not actions. The message lists each with its row.
    """
    if not isinstance(text, str):
        raise ScheduleError(f"from_torch_csv takes text; got a {type(text).__name__}")
    faults: list[str] = []

    def rows() -> Iterator[tuple[str, list[Sequence[str]]]]:
        for number, line in enumerate(text.rstrip().split("\n"), 1):
            groups: list[Sequence[str]] = []
            for cell in filter(None, map(str.strip, line.split(","))):
                if _NO_ACTION.fullmatch(cell):
                    faults.append(
                        f"row {number}: {shown(cell)}: funcpipe does not know this action of torch; "
                        'let torch write the schedule with format="compute_only", which omits it'
                    )
                    continue
                pair = _PAIR.fullmatch(cell)
                groups.append([*map(str.strip, pair.groups())] if pair else [cell])
            yield f"row {number}", groups

    schedule = read_schedule(rows(), name, faults)
    raise_all(
        "the text is not a schedule of torch.distributed.pipelining:",
        faults,
        ScheduleError,
        most=MOST_FAULTS,
    )
    return schedule
