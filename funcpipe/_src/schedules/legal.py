"""Is a schedule legal, and in which order can it run: every fault at once, or one clock for all
devices."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from funcpipe._src.core.errors import ScheduleError, bullets, raise_all
from funcpipe._src.core.remembered import Remembered
from funcpipe._src.data.kinds import (
    ADDS,
    COMPUTES,
    COUNTED,
    KINDS,
    ONCE,
    WHOLE,
    WITHOUT_BACKWARD,
    Flow,
    Kind,
    flowing,
)
from funcpipe._src.data.schedule import Action, Schedule, action_of, select
from funcpipe._src.schedules.clock import CODE, CODED, B, F, G, I, R, W, chain, clock, coded
from funcpipe._src.schedules.pairs import apart, joined_units

MOST_FAULTS = 20
"""A message about a schedule lists no more."""


@dataclass(frozen=True)
class Legal:
    """What `check` learned of a legal schedule; packed, because it is remembered as long as the
    schedule lives.

    Attributes:
        plan_order: every action by its number, counted device by device, by the time at which it
            starts when each takes its `KindRow.units`: an order in which one thread can run the
            schedule.
        rematted: ``stage * M + microbatch`` of each R; of slices their pieces are counted.
    """

    plan_order: array[int]
    rematted: frozenset[int]


def check(schedule: Schedule) -> None:
    """Refuse a schedule that is not legal, with every fault found.

    Legal means: stages and microbatches are numbered without gaps, a stage lives on one device,
    each (stage, microbatch) runs one F and, if the schedule has backwards, one B or one I and one
    W, in the order F B or F I W; between F and its backward stands at most one R, or one O and
    after it one L; where a microbatch is cut into slices, all are, each slice has its own actions,
    and at every stage F come in the order of the slices, B or I in the reverse one; at most one G
    of a stage, then at most one S, comes after all its backwards; the first U of a stage, if it has
    any, comes before all else of it, they are numbered as they stand, and after each the stage
    computes before the next; all stages have U, or none; what overlaps stands side by side on one
    device, computes, and neither waits for the other; and all devices come to their end.

    Time is linear in the number of actions.

    >>> fp.schedules.check(fp.Schedule.parse("0F0 0B0"))
    >>> try:
    ...     fp.schedules.check(fp.Schedule.parse("0B0 0F0"))
    ... except fp.ScheduleError as error:
    ...     print(error)
    schedule 'custom' is not legal:
      * 0B0 on device 0 stands too early: F comes first

    Raises:
        ScheduleError: with all faults, each named like ``2F0 on device 1``; where devices wait for
            each other, with the picture of who waits for what.
    """
    if not isinstance(schedule, Schedule):
        read = "; Schedule.parse(text) reads one" if isinstance(schedule, str) else ""
        raise ScheduleError(f"check takes a schedule; got a {type(schedule).__name__}{read}")
    examine(schedule)


def _examine(schedule: Schedule) -> Legal:
    def refuse(faults: list[str]) -> None:
        raise_all(
            f"schedule {schedule.name!r} is not legal:", faults, ScheduleError, most=MOST_FAULTS
        )

    refuse(_malformed(schedule))
    stages, microbatches, slices = schedule.num_stages, schedule.num_pieces, schedule.num_slices
    lanes = tuple(coded(schedule.orders, slices))
    if stages * microbatches > 5 * sum(
        map(len, lanes)
    ):  # absurd indices: named before anything is allocated by them
        refuse(_gaps(schedule) or ["most of its actions are missing"])
    rematted: frozenset[int] = frozenset()
    if not _plain(lanes, stages, microbatches, slices):
        refuse(_gaps(schedule))
        faults, rematted = _incomplete(lanes, stages, microbatches, slices, schedule.device_of)
        refuse(faults)
    refuse(apart(schedule))
    durations = [[float(KINDS[kind].units)] * stages for kind in CODED]
    pairs = joined_units(schedule)
    starts, stuck = clock(lanes, schedule.device_of, microbatches, durations, chain(stages), pairs)
    if stuck:
        raise ScheduleError(_waiting(schedule, lanes, stuck))
    times = [start for row in starts for start in row]
    order = sorted(
        range(len(times)), key=times.__getitem__
    )  # rows ascend: a merge; equal times by device and position
    return Legal(array("i", order), rematted)


examine = Remembered(_examine)
"""`check` with its findings, for each schedule once."""


def _malformed(schedule: Schedule) -> list[str]:
    """Faults in the words themselves: not actions, negative numbers, devices without work."""
    faults: list[str] = []
    whole: Action | None = None  # the first that has no slice, and the first that has one
    cut: Action | None = None
    if not schedule.orders:
        return ["it has no devices"]
    for device, order in enumerate(schedule.orders):
        if not order:
            faults.append(f"device {device} runs nothing; leave it out")
        for action in order:
            if type(action) is Action:
                kind, stage, microbatch, number = action
                if (
                    type(stage) is int
                    and type(microbatch) is int
                    and stage >= 0 <= microbatch
                    and type(kind) is Kind
                ):
                    if number is None:
                        whole = whole or (None if kind in WHOLE else action)
                        continue
                    if type(number) is int and number >= 0 and kind not in WHOLE:
                        cut = cut or action
                        continue
            text = "write Action(Kind.F, stage, microbatch) with numbers from 0"
            if isinstance(action, str):
                text += ", or read words: Action.parse('0F0'), Schedule.parse('0F0 0B0')"
            if type(action) is Action and action.slice is not None:
                text += (
                    ", or Action(Kind.F, stage, microbatch, slice); "
                    f"{' and '.join(map(str, WHOLE))} have no slice"
                )
            faults.append(f"{_show(action)} on device {device} is no action: {text}")
    if whole is not None and cut is not None and not faults:
        faults.append(
            f"{whole} is of a whole microbatch, and {cut} of a slice: cut all microbatches, or none"
        )
    elif cut is not None and not faults and schedule.num_slices == 1:
        faults.append(
            f"{cut} is the only slice of its microbatch, so that is whole: write "
            f"{cut._replace(slice=None)}"
        )
    return faults


def _show(action: Any) -> str:
    for shown in (str, repr) if isinstance(action, Action) else (repr,):
        try:
            return shown(action)
        except Exception:
            continue
    return object.__repr__(action)


def _plain(
    lanes: tuple[list[tuple[int, int, int]], ...], stages: int, microbatches: int, slices: int
) -> bool:
    """Is all as most are: each stage on one device, F before its B (or I, then W), microbatches in
    ascending order.

    Backwards of the slices of one microbatch come in descending order. True: there is no fault.
    False: who wants to know more must look at every action for itself.
    """
    forwards: list[list[int]] = [
        [] for _ in range(stages)
    ]  # where F of each microbatch stands on its device
    backwards: list[list[int]] = [[] for _ in range(stages)]
    counts: set[int] = set()
    for lane in lanes:
        owed: set[tuple[int, int]] = set()
        stages_here: set[int] = set()
        reduced: set[int] = set()
        for position, (code, stage, microbatch) in enumerate(lane):
            if code == F:
                row = forwards[stage]
                stages_here.add(stage)
            elif code in (B, I) and stage in stages_here:
                row = backwards[stage]
                if code == I:
                    owed.add((stage, microbatch))
            elif code == W and (stage, microbatch) in owed:
                owed.remove((stage, microbatch))
                continue
            elif code == G and stage in stages_here and stage not in reduced and not microbatch:
                if len(backwards[stage]) != microbatches or any(
                    other == stage for other, _ in owed
                ):
                    return False
                reduced.add(stage)
                continue
            else:
                return False
            at = len(row)
            if code != F and slices > 1:
                at += slices - 1 - 2 * (at % slices)
            if at != microbatch:
                return False
            row.append(position)
        if owed or any(len(forwards[stage]) != microbatches for stage in stages_here):
            return False
        for stage in stages_here:
            back = backwards[stage]
            counts.add(len(back))
            if slices > 1 and len(back) == microbatches:
                back = [back[at + slices - 1 - 2 * (at % slices)] for at in range(len(back))]
            if back and not all(map(int.__lt__, forwards[stage], back)):
                return False
    # A device can end with all backwards of its stages or with none, and another one cannot have
    # them.
    return all(forwards) and counts in ({0}, {microbatches})


def _incomplete(
    lanes: tuple[list[tuple[int, int, int]], ...],
    stages: int,
    microbatches: int,
    slices: int,
    device_of: tuple[int, ...],
) -> tuple[list[str], frozenset[int]]:
    """Faults in the whole: gaps, duplicates, stages on two devices, wrong order within a (stage,
    microbatch)."""
    faults: list[str] = []
    done = [bytearray(stages * microbatches) for _ in CODED]
    needed = [[(other, done[CODE[other]]) for other in _before(kind)] for kind in CODED]
    spoilt = [[done[CODE[other]] for other in _later(kind)] for kind in CODED]
    once_done: dict[
        int, Action
    ] = {}  # by stage, the last action that wants all gradients of the stage to be there
    times: dict[int, int] = {}  # by stage, how often what is counted has stood
    begun: dict[int, Action] = {}  # by stage, its first action
    idle: dict[int, str] = {}  # by stage, what is counted and has served nothing so far
    stands = {(code, stage, microbatch) for lane in lanes for code, stage, microbatch in lane}
    for device, lane in enumerate(lanes):
        for code, stage, microbatch in lane:
            at = stage * microbatches + microbatch
            action = action_of(CODED[code], stage, microbatch, slices)
            if device_of[stage] != device:
                faults.append(
                    f"{action} on device {device}: stage {stage} lives on device "
                    f"{device_of[stage]} too; a stage lives on one device"
                )
            if action.kind in COUNTED:
                faults += _miscounted(
                    action, device, times.get(stage, 0), begun.get(stage), once_done.get(stage)
                )
                times[stage] = times.get(stage, 0) + 1
                if stage in idle:
                    faults.append(f"{idle[stage]} before {action}; leave it out")
                idle[stage] = (
                    f"{action} on device {device} is for nothing: stage {stage} does not compute"
                )
                continue
            if done[code][at]:
                faults.append(f"{action} on device {device} stands twice")
            done[code][at] = 1
            begun.setdefault(stage, action)
            if action.kind in COMPUTES:
                idle.pop(stage, None)
            if action.kind in ONCE:
                before = once_done.get(stage)
                if before is not None and ONCE.index(before.kind) > ONCE.index(action.kind):
                    faults.append(
                        f"{action} on device {device} stands after {before}, which is for all "
                        "gradients"
                    )
                once_done[stage] = action
                if microbatch:
                    faults.append(
                        f"{action} on device {device} has a microbatch ({microbatch}); it stands "
                        "once a batch"
                    )
                continue
            awaited = next((kind for kind, row in needed[code] if not row[at]), None)
            if awaited is None and any(row[at] for row in spoilt[code]):
                faults.append(
                    f"{action} on device {device} stands too late: {action.kind} comes before the "
                    "backward"
                )
            elif (
                awaited is not None and (CODE[awaited], stage, microbatch) in stands
            ):  # else it is named as missing
                rule = (
                    f"{awaited} comes first"
                    if awaited is Kind.F
                    else f"{action.kind} comes after {awaited}"
                )
                faults.append(f"{action} on device {device} stands too early: {rule}")
            if slices > 1:
                faults += _out_of_turn(action, device, slices, done, at)
            if stage in once_done and action.kind in ADDS:
                faults.append(
                    f"{action} on device {device} stands after {once_done[stage]}, which is for "
                    "all gradients"
                )
    faults += [f"{words} after it; leave it out" for words in idle.values()]
    without = [stage for stage in range(stages) if times and stage not in times]
    faults += [
        f"{Action(Kind.U, stage)} is missing: all stages have {Kind.U}, or none"
        for stage in without
    ]
    faults += _unpaired(dict(zip(CODED, done, strict=True)), microbatches, slices)
    return faults, frozenset(at for at, stands in enumerate(done[R]) if stands)


def _miscounted(
    action: Action, device: int, times: int, begun: Action | None, once: Action | None
) -> list[str]:
    """What is wrong with an action whose number counts, which has stood so often; its stage has
    begun with another."""
    if once is not None:
        return [
            (
                f"{action} on device {device} stands after {once}, after which its stage computes "
                "nothing"
            )
        ]
    if action.microbatch != times:
        right = action._replace(microbatch=times)
        return [
            (
                f"{action} on device {device} is the {action.kind} number {times} of its stage: "
                f"write {right}"
            )
        ]
    if not times and begun is not None:
        return [f"{action} on device {device} stands after {begun}, which needs what it gathers"]
    return []


def _out_of_turn(
    action: Action, device: int, slices: int, done: list[bytearray], at: int
) -> list[str]:
    """What is wrong with the order of slices: each reads what another of its stage and microbatch
    has left."""
    flow, number = KINDS[action.kind].flow, action.slice or 0
    if flow is None:
        return []
    step = 1 if flow is Flow.FORWARD else -1
    if not 0 <= number - step < slices or any(
        done[CODE[kind]][at - step] for kind in flowing(flow)
    ):
        return []
    other = action._replace(slice=number - step)
    what = "its carry" if flow is Flow.FORWARD else "the gradient of its carry"
    return [f"{action} on device {device} stands before {other}, from which it gets {what}"]


def _before(kind: Kind) -> list[Kind]:
    """What must have stood, the first first."""
    after = KINDS[kind].after
    return [] if after is None else [*_before(after), after]


def _later(kind: Kind) -> tuple[Kind, ...]:
    """What must not have stood yet. (What an F comes too late for has said already that it stands
    too early.)"""
    return ADDS if KINDS[kind].before_backward else ()


def _unpaired(done: dict[Kind, bytearray], microbatches: int, slices: int) -> list[str]:
    """What is missing, and what must not stand together."""

    def name(kind: Kind, at: int) -> str:
        return str(action_of(kind, *divmod(at, microbatches), slices))

    faults = [
        f"{name(Kind.F, at)} is missing" for at, stands in enumerate(done[Kind.F]) if not stands
    ]
    if any(any(row) for kind, row in done.items() if kind not in WITHOUT_BACKWARD):
        for at, (whole, half) in enumerate(zip(done[Kind.B], done[Kind.I], strict=True)):
            if not whole and not half:
                faults.append(
                    f"{name(Kind.B, at)} is missing (or {name(Kind.I, at)} and {name(Kind.W, at)})"
                )
    for kind, row in KINDS.items():
        other = row.pair
        if other is not None and CODE[kind] < CODE[other] and done[kind] != done[other]:
            for at, (first, second) in enumerate(zip(done[kind], done[other], strict=True)):
                if first != second:
                    faults.append(
                        f"{name(other if first else kind, at)} is missing: {kind} and {other} "
                        "come in pairs"
                    )
        other = row.excludes
        if other is not None and CODE[kind] < CODE[other]:
            for at, (first, second) in enumerate(zip(done[kind], done[other], strict=True)):
                if first and second:
                    words = f"{row.word}, or {KINDS[other].word}, not both"
                    faults.append(f"{name(kind, at)} and {name(other, at)} both stand: {words}")
    return faults


def _gaps(schedule: Schedule) -> list[str]:
    """Numbers that no action has, though there are larger ones: counted from 1, or mistyped."""
    orders = select(schedule.orders, lambda action: action.kind not in COUNTED)
    columns = [*zip(*(action for order in orders for action in order), strict=True)][1:]
    faults: list[str] = []
    for what, column in zip(("stage", "microbatch", "slice"), columns, strict=False):
        present = sorted({number or 0 for number in column})
        missing = next(
            (expected for expected, number in enumerate(present) if expected != number), None
        )
        if missing is not None:
            faults.append(
                f"{what} {missing} is missing, but {what} {present[-1]} stands; number them from "
                "0, without gaps"
            )
    return faults


def _waiting(
    schedule: Schedule, lanes: tuple[list[tuple[int, int, int]], ...], stuck: list[int]
) -> str:
    """The picture of a schedule that cannot go on: each waiting device, what it waits for, and
    where that stands."""
    place = {
        action: (device, at) for device, lane in enumerate(lanes) for at, action in enumerate(lane)
    }
    joined = [{*schedule.joined(order)} for order in schedule.orders]
    # A device that waits for what the second of a pair needs has not begun the first.
    heads = [at - (at - 1 in pairs) for at, pairs in zip(stuck, joined, strict=True)]

    def name(device: int) -> str:
        order, at = schedule.orders[device], heads[device]
        return f"({order[at]} {order[at + 1]})" if at in joined[device] else str(order[at])

    def is_done(device: int, at: int) -> bool:
        return stuck[device] < 0 or at < heads[device]

    lines: list[str] = []
    for device, position in enumerate(stuck):
        if position < 0:
            lines.append(f"device {device} is done")
            continue
        code, stage, microbatch = lanes[device][position]
        flow = KINDS[CODED[code]].flow
        sources = [CODE[kind] for kind in flowing(flow)] if flow is not None else []
        other_stage = stage - 1 if flow is Flow.FORWARD else stage + 1
        keys = [
            key for key in ((source, other_stage, microbatch) for source in sources) if key in place
        ]
        needs = next((key for key in keys if not is_done(*place[key])), keys[0])
        other, where = place[needs]
        awaited = action_of(CODED[needs[0]], *needs[1:], schedule.num_slices)
        steps = where - heads[other]
        detail = f"on device {other}, at which that device waits"
        if steps > (heads[other] in joined[other]):
            detail = (
                f"on device {other}, {steps} action{'s' * (steps != 1)} behind {name(other)}, at "
                "which that device waits"
            )
        lines.append(
            f"device {device} waits before {name(device)} for {awaited}, which is {detail}"
        )
    title = (
        f"schedule {schedule.name!r} cannot come to its end; move one of these actions before "
        "what it blocks:"
    )
    return bullets(title, lines)
