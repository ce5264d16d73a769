"""Schedules as the CSV of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from funcpipe.core.errors import ScheduleError, raise_all
from funcpipe.core.kinds import COUNTED, KINDS, ONCE, Flow, Kind
from funcpipe.core.schedule import Action, Pair, Schedule, select
from funcpipe.schedules.formats import read_actions, shown
from funcpipe.schedules.legal import MOST_FAULTS, check

_COMMS = re.compile(r"[0-9]+(?:(?:WAIT_SEND|SEND|RECV)_[FB][0-9]+|(?:UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)[0-9]*)")
"""The actions of torch 2.15 and older that say nothing to a plan, which derives messages."""
_NEWER = re.compile(r"[0-9]+[A-Z]{2}[A-Z_]*[0-9]*")
_SHARED = re.compile(r"([0-9]{1,9})(UNSHARD|REDUCE_GRAD)")
_BACKWARD = re.compile(r"([0-9]+)[BI]([0-9]+)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def to_torch_csv(schedule: Schedule, *, messages: bool = False, waits: bool | None = None) -> str:
    """The schedule in the format of torch.distributed.pipelining: a row for each rank, ``0F0,0F1,0B0,0B1``.

    torch loads it as a "compute_only" schedule, and adds its sends, receives, gathering and reductions (U and G are left
    out). Rank d has the stages of device d. An F that overlaps with a B or an I is torch's ``OVERLAP_F_B``.

    >>> print(fp.schedules.to_torch_csv(fp.schedules.zero_bubble(2, 2)), end="")
    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1

    With ``messages`` it is what torch makes of that, which it loads as "compute_comms"; from 2.15 on with ``waits``:

    >>> print(fp.schedules.to_torch_csv(fp.schedules.fill_drain(2, 1), messages=True, waits=False), end="")
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    >>> print(fp.schedules.to_torch_csv(fp.schedules.fill_drain(2, 1), messages=True, waits=True), end="")
    0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0
    1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0

    Args:
        schedule: a legal schedule of whole microbatches with backwards and without R, O and L; in its pairs are an F and
            a B or I.
        messages: write sends and receives, in the order in which torch puts them in; of U (`gather_params`) ``UNSHARD``,
            and ``RESHARD`` where the stage has computed for the last time before the next one; of G (`reduce_grads`)
            ``REDUCE_GRAD``.
        waits: write with the messages where each send, and each reduction, is waited for, as torch 2.15 does and wants it;
            older ones do not know these words. None: as it is with the torch that is installed.

    Raises:
        ScheduleError: torch could not run it.
    """
    check(schedule)
    faults: list[str] = []
    if not schedule.has_backward:
        faults.append("it has no backwards: torch has no schedules that only evaluate (there: `schedule.eval`)")
    if schedule.num_slices > 1:
        faults.append(
            "its microbatches are in slices, which torch's schedules do not have; make it without num_slices="
        )
    kinds = {action.kind for order in schedule.orders for action in order}
    if Kind.R in kinds:
        faults.append(
            "it has R: torch's schedules have no remat; write the schedule as it was before `fp.schedules.remat`, and "
            "checkpoint inside the stages"
        )
    if kinds & {Kind.O, Kind.L}:
        faults.append(
            "it has O and L: torch's schedules have no offload; write it as it was before `fp.schedules.offload`"
        )
    alike = [
        pair for pair in schedule.pairs if Kind.F not in (kinds_of := {pair[0].kind, pair[1].kind}) or len(kinds_of) < 2
    ]
    if alike:
        first = "({} {})".format(*min(alike))
        faults.append(
            f"{first} overlaps: in torch a forward overlaps with a backward, nothing else does; write the schedule "
            "as it is without pairs: fp.schedules.unpair(schedule)"
        )
    raise_all(f"torch.distributed.pipelining cannot run schedule {schedule.name!r}:", faults, ScheduleError)
    if messages:
        rows = _with_messages(schedule, waits=_wants_waits() if waits is None else waits)
    else:
        computing = schedule.reordered(
            select(schedule.orders, lambda action: action.kind not in (*ONCE, *COUNTED)), schedule.name
        )
        rows = [[_cell(group) for group in _groups(computing, order)] for order in computing.orders]
    return "".join(",".join(row) + "\n" for row in rows)


def _wants_waits() -> bool:
    """Is the torch that is installed one that wants them."""
    major, minor, *_ = version("torch").split(".")
    return (int(major), int(minor)) >= (2, 15)


def _groups(schedule: Schedule, order: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    """The actions of an order, each alone or with the one that it overlaps with."""
    joined = {*schedule.joined(order)}
    return [order[at : at + 1 + (at in joined)] for at in range(len(order)) if at - 1 not in joined]


def _cell(group: Sequence[Action]) -> str:
    if len(group) == 2:
        return f"({group[0]};{group[1]})OVERLAP_F_B"
    (action,) = group
    words = {Kind.U: "UNSHARD", Kind.G: "REDUCE_GRAD"}
    return f"{action.stage}{words[action.kind]}" if action.kind in words else str(action)


def _with_messages(schedule: Schedule, *, waits: bool) -> list[list[str]]:
    """The cells of each rank with what torch puts in; its optimizers are stepped outside of schedules, so S is left out.

    Ranks take turns; each does its next action if what that reads has come. A sender puts in the receiver's word too, so
    that what two ranks send each other has one order in both.
    """
    schedule = schedule.reordered(select(schedule.orders, lambda action: action.kind is not Kind.S), schedule.name)
    device_of, last = schedule.device_of, schedule.num_stages - 1
    rows: list[list[str]] = [[] for _ in schedule.orders]
    come: set[tuple[Flow, int, int]] = set()
    left = [deque(_turns(schedule, order, waits=waits)) for order in schedule.orders]

    def reads(action: Action) -> bool:
        flow = KINDS[action.kind].flow
        first = flow is None or action.stage == (0 if flow is Flow.FORWARD else last)
        return first or (flow, action.stage, action.microbatch) in come

    while any(left):
        for device, waiting in enumerate(left):
            if not waiting or not all(map(reads, waiting[0][1])):
                continue
            cell, group = waiting.popleft()
            rows[device].append(cell)
            for action in group:
                flow = KINDS[action.kind].flow
                to = action.stage + (1 if flow is Flow.FORWARD else -1)
                if flow is not None and 0 <= to <= last:
                    come.add((flow, to, action.microbatch))
                    if device_of[to] != device:
                        letter = "F" if flow is Flow.FORWARD else "B"
                        rows[device].append(f"{action.stage}SEND_{letter}{action.microbatch}")
                        rows[device_of[to]].append(f"{to}RECV_{letter}{action.microbatch}")
    return [*map(_with_waits, rows)] if waits else rows


def _with_waits(row: Sequence[str]) -> list[str]:
    """The cells of a rank with a wait for each send: of F after its backward, which says that it has come, else at the end."""
    out: list[str] = []
    sent: dict[str, str] = {}
    for cell in row:
        out.append(cell)
        if "SEND" in cell:
            sent[cell] = cell.replace("SEND", "WAIT_SEND")
        for stage, microbatch in _BACKWARD.findall(cell):
            wait = sent.pop(f"{stage}SEND_F{microbatch}", None)
            if wait is not None:
                out.append(wait)
    return [*out, *sent.values()]


def _turns(schedule: Schedule, order: tuple[Action, ...], *, waits: bool) -> Iterator[tuple[str, tuple[Action, ...]]]:
    """What a rank does one after the other: the cells, and the actions in them."""
    resharded = _reshards(order)
    for group in _groups(schedule, order):
        yield _cell(group), group
        if waits and group[0].kind is Kind.G:
            yield f"{group[0].stage}WAIT_REDUCE_GRAD", ()
        yield from ((f"{action.stage}RESHARD", ()) for action in group if action in resharded)


def _reshards(order: Sequence[Action]) -> set[Action]:
    """After which actions a stage's parameters, which U has gathered, are parts again: its last ones before the next U.

    G comes before that where it follows at once.
    """
    found: set[Action] = set()
    waiting = {action.stage for action in order if action.kind is Kind.U}
    after: Action | None = None
    for action in reversed(order):
        if action.kind is Kind.U:
            waiting.add(action.stage)
        elif action.kind is not Kind.G and action.stage in waiting:
            waiting.remove(action.stage)
            found.add(after if after is not None and after.kind is Kind.G and after.stage == action.stage else action)
        after = action
    return found


def from_torch_csv(text: str, *, name: str = "torch", replicas: bool = False) -> Schedule:
    """Read a schedule that torch.distributed.pipelining or a tool for it wrote, "compute_only" or "compute_comms".

    What torch says of sends and receives, and of waiting for them, is left out: a plan derives all of it.
    ``OVERLAP_F_B`` is a pair (`Schedule.pairs`). Empty cells are waits, no actions here.

    >>> print(fp.schedules.from_torch_csv("0F0,0SEND_F0,,0F1,0RECV_B0,0B0,0B1\\n1RECV_F0,1F0,(1F1;1B0)OVERLAP_F_B,1B1"))
    0F0 0F1 0B0 0B1
    1F0 (1F1 1B0) 1B1

    Args:
        text: the CSV, a row for each rank.
        name: of the schedule.
        replicas: read ``UNSHARD`` as U (`gather_params`) and ``REDUCE_GRAD`` as G (`reduce_grads`); else they are left out.
            ``RESHARD`` and ``WAIT_REDUCE_GRAD`` say nothing more: parameters are parts again when the stage has computed for
            the last time before its next U, and sums are waited for at the end.

    Raises:
        ScheduleError: some cells are no actions; each is named with its row. Whether the schedule is legal is for
            `check`.
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
        times = Counter[int]()
        for cell in map(str.strip, line.split(",")):
            pair = _PAIR.fullmatch(cell)
            if pair:
                places.append(len(words))
                words += map(str.strip, pair.groups())
            elif replicas and (found := _SHARED.fullmatch(cell)):
                stage = int(found[1])
                if found[2] == "REDUCE_GRAD":
                    words.append(f"{stage}G")
                else:
                    words.append(f"{stage}U{times[stage]}")
                    times[stage] += 1
            elif not cell or _COMMS.fullmatch(cell):
                continue
            elif _NEWER.fullmatch(cell):
                faults.append(
                    f"row {row}: {shown(cell)}: funcpipe does not know this action of torch; let torch write the "
                    'schedule with format="compute_only", which has none of these'
                )
            else:
                words.append(cell)
        order = read_actions(words, f"row {row}", known=known, fault=faults.append)
        orders.append(order)
        pairs |= {(order[at], order[at + 1]) for at in places if len(order) == len(words)}
    raise_all("this is no schedule of torch.distributed.pipelining:", faults, ScheduleError, most=MOST_FAULTS)
    return Schedule(tuple(orders), name, frozenset(pairs))
