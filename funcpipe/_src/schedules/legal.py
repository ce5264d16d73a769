"""Check whether a schedule is legal, and find its plan order.

`clock.py` simulates with units and finds deadlocks. `pairs.py` checks pairs. This file checks all
other rules, and reports all faults of a schedule at once.
"""

from __future__ import annotations

from array import array
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
from funcpipe._src.schedules.clock import CODE, CODED, chain, clock, coded
from funcpipe._src.schedules.pairs import apart, joined_units

MOST_FAULTS = 20  # the most faults that a message about a schedule lists


def check(schedule: Schedule) -> None:
    """Raise ScheduleError if a schedule is not legal. `make_plan` and `simulate` call this.

    A schedule is legal if all these rules hold:

    - Stages and microbatches are numbered from 0 without gaps. A stage runs on one device.
    - Each (stage, microbatch) has one F. With backwards, it also has one B, or one I and then one
      W, after the F.
    - Between F and its backward there is at most one R, or one O and then one L.
    - If one microbatch is cut into slices, all are, and each slice has its own actions. On each
      stage, F run in the order of the slices, and B or I in the reverse order.
    - A stage has at most one G, then at most one S, after all its backwards.
    - Either all stages have U, or none. The first U of a stage comes before all its other actions.
      The U of a stage are numbered in their order, and the stage computes after each of them.
    - The two actions of a pair are neighbours on one device, both compute, and neither needs the
      other.
    - No devices wait for each other in a circle: the schedule has no deadlock.

    The check takes linear time in the number of actions.

    >>> fp.schedules.check(fp.Schedule.parse("0F0 0B0"))
    >>> try:
    ...     fp.schedules.check(fp.Schedule.parse("0B0 0F0"))
    ... except fp.ScheduleError as error:
    ...     print(error)
    schedule 'custom' is not legal:
      * 0B0 on device 0 comes too early: F must come first

    Args:
        schedule: the schedule to check.

    Raises:
        ScheduleError: the schedule is not legal. The message lists all faults, each like ``2F0 on
            device 1``. For a deadlock, it says which device waits for which action.
    """
    if not isinstance(schedule, Schedule):
        read = "; Schedule.parse(text) reads one" if isinstance(schedule, str) else ""
        raise ScheduleError(f"check takes a schedule; got a {type(schedule).__name__}{read}")
    examine(schedule)


def _examine(schedule: Schedule) -> array[int]:
    def refuse(faults: list[str]) -> None:
        raise_all(
            f"schedule {schedule.name!r} is not legal:", faults, ScheduleError, most=MOST_FAULTS
        )

    refuse(_malformed(schedule))
    stages, microbatches, slices = schedule.num_stages, schedule.num_pieces, schedule.num_slices
    lanes = tuple(coded(schedule.orders, slices))
    gaps = _gaps(schedule)
    # A mistyped huge index must raise here: below, memory is allocated for each (stage, piece).
    if not gaps and stages * microbatches > 5 * sum(map(len, lanes)):
        gaps = ["most of its actions are missing"]
    refuse(gaps)
    refuse(_incomplete(lanes, stages, microbatches, slices, schedule.device_of))
    refuse(apart(schedule))
    durations = [[float(KINDS[kind].units)] * stages for kind in CODED]
    pairs = joined_units(schedule)
    starts, stuck = clock(lanes, schedule.device_of, microbatches, durations, chain(stages), pairs)
    if stuck:
        raise ScheduleError(_waiting(schedule, lanes, stuck))
    times = [start for row in starts for start in row]
    # A stable sort of ascending rows: equal times stay ordered by device and position, so the plan
    # order is deterministic.
    order = sorted(range(len(times)), key=times.__getitem__)
    return array("i", order)


examine = Remembered(_examine)
"""Check a schedule, and return its plan order: the numbers of all actions, counted device by device,
ordered by their start if each action takes its `KindRow.units`. One thread can run the schedule in
this order. Each schedule is checked once, and its order is kept in a small array."""


def _malformed(schedule: Schedule) -> list[str]:
    """Return faults of single items: not an action, negative numbers, devices without actions."""
    faults: list[str] = []
    whole: Action | None = None  # the first action without a slice, and the first with one
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
            faults.append(f"{_show(action)} on device {device} is not an action: {text}")
    if whole is not None and cut is not None and not faults:
        faults.append(
            f"{whole} is for a whole microbatch, but {cut} is for a slice: cut all microbatches, "
            "or none"
        )
    elif cut is not None and not faults and schedule.num_slices == 1:
        faults.append(
            f"{cut} is the only slice of its microbatch, so the microbatch is whole: write "
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


def _incomplete(
    lanes: tuple[list[tuple[int, int, int]], ...],
    stages: int,
    microbatches: int,
    slices: int,
    device_of: tuple[int, ...],
) -> list[str]:
    """Return the faults of the orders.

    Finds duplicates, missing actions, stages on two devices, and a wrong order within a (stage,
    microbatch).
    """
    faults: list[str] = []
    done = [bytearray(stages * microbatches) for _ in CODED]
    needed = [[(other, done[CODE[other]]) for other in _before(kind)] for kind in CODED]
    spoilt = [[done[CODE[other]] for other in _later(kind)] for kind in CODED]
    once_done: dict[int, Action] = {}  # by stage, its latest G or S, which need all gradients
    times: dict[int, int] = {}  # by stage, the number of its U so far
    begun: dict[int, Action] = {}  # by stage, its first action
    idle: dict[int, str] = {}  # by stage, the latest U after which it has not computed yet
    stands = {(code, stage, microbatch) for lane in lanes for code, stage, microbatch in lane}
    for device, lane in enumerate(lanes):
        for code, stage, microbatch in lane:
            at = stage * microbatches + microbatch
            action = action_of(CODED[code], stage, microbatch, slices)
            if device_of[stage] != device:
                faults.append(
                    f"{action} on device {device}: stage {stage} is on device "
                    f"{device_of[stage]} too; a stage runs on one device"
                )
            if action.kind in COUNTED:
                faults += _miscounted(
                    action, device, times.get(stage, 0), begun.get(stage), once_done.get(stage)
                )
                times[stage] = times.get(stage, 0) + 1
                if stage in idle:
                    faults.append(f"{idle[stage]} before {action}; leave it out")
                idle[stage] = (
                    f"{action} on device {device} is not needed: stage {stage} does not compute"
                )
                continue
            if done[code][at]:
                faults.append(f"{action} on device {device} appears twice")
            done[code][at] = 1
            begun.setdefault(stage, action)
            if action.kind in COMPUTES:
                idle.pop(stage, None)
            if action.kind in ONCE:
                before = once_done.get(stage)
                if before is not None and ONCE.index(before.kind) > ONCE.index(action.kind):
                    faults.append(
                        f"{action} on device {device} comes after {before}, which needs all "
                        "gradients"
                    )
                once_done[stage] = action
                if microbatch:
                    faults.append(
                        f"{action} on device {device} has a microbatch ({microbatch}), but runs "
                        "once per batch"
                    )
                continue
            awaited = next((kind for kind, row in needed[code] if not row[at]), None)
            if awaited is None and any(row[at] for row in spoilt[code]):
                faults.append(
                    f"{action} on device {device} comes too late: {action.kind} must come before "
                    "the backward"
                )
            # If the awaited action does not appear at all, it is reported as missing instead.
            elif awaited is not None and (CODE[awaited], stage, microbatch) in stands:
                rule = (
                    f"{awaited} must come first"
                    if awaited is Kind.F
                    else f"{action.kind} must come after {awaited}"
                )
                faults.append(f"{action} on device {device} comes too early: {rule}")
            if slices > 1:
                faults += _out_of_turn(action, device, slices, done, at)
            if stage in once_done and action.kind in ADDS:
                faults.append(
                    f"{action} on device {device} comes after {once_done[stage]}, which needs all "
                    "gradients"
                )
    faults += [f"{words} after it; leave it out" for words in idle.values()]
    without = [stage for stage in range(stages) if times and stage not in times]
    faults += [
        f"{Action(Kind.U, stage)} is missing: all stages have {Kind.U}, or none"
        for stage in without
    ]
    faults += _unpaired(dict(zip(CODED, done, strict=True)), microbatches, slices)
    return faults


def _miscounted(
    action: Action, device: int, times: int, begun: Action | None, once: Action | None
) -> list[str]:
    """Return the faults of a U, after ``times`` earlier U of its stage, the stage's first other
    action, and its G or S."""
    if once is not None:
        return [
            (
                f"{action} on device {device} comes after {once}, after which its stage does not "
                "compute"
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
        return [f"{action} on device {device} comes after {begun}, which needs the parameters"]
    return []


def _out_of_turn(
    action: Action, device: int, slices: int, done: list[bytearray], at: int
) -> list[str]:
    """Return the fault if a slice runs before the slice whose carry it reads."""
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
    return [f"{action} on device {device} comes before {other}, from which it gets {what}"]


def _before(kind: Kind) -> list[Kind]:
    """Return the kinds that must come before a kind, in their order."""
    after = KINDS[kind].after
    return [] if after is None else [*_before(after), after]


def _later(kind: Kind) -> tuple[Kind, ...]:
    """Return the kinds that must not come before a kind.

    Not needed for F: a backward that comes before its F is already reported as too early.
    """
    return ADDS if KINDS[kind].before_backward else ()


def _unpaired(done: dict[Kind, bytearray], microbatches: int, slices: int) -> list[str]:
    """Return faults of missing actions, and of actions that exclude each other."""

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
                    whole = f", without {name(Kind.B, at)}" if done[Kind.B][at] else ""
                    faults.append(
                        f"{name(other if first else kind, at)} is missing: {kind} and {other} "
                        f"come in pairs{whole}"
                    )
        other = row.excludes
        if other is not None and CODE[kind] < CODE[other]:
            for at, (first, second) in enumerate(zip(done[kind], done[other], strict=True)):
                if first and second:
                    words = f"{row.word}, or {KINDS[other].word}, not both"
                    faults.append(f"{name(kind, at)} and {name(other, at)} both appear: {words}")
    return faults


def _gaps(schedule: Schedule) -> list[str]:
    """Return a fault for each gap in the numbers: they were counted from 1, or mistyped."""
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
                f"{what} {missing} is missing, but {what} {present[-1]} appears; number them from "
                "0, without gaps"
            )
    return faults


def _waiting(
    schedule: Schedule, lanes: tuple[list[tuple[int, int, int]], ...], stuck: list[int]
) -> str:
    """Describe a deadlock: for each waiting device, the action it waits for and its place."""
    place = {
        action: (device, at) for device, lane in enumerate(lanes) for at, action in enumerate(lane)
    }
    joined = [{*schedule.joined(order)} for order in schedule.orders]
    # A pair begins as a whole: a device that waits for the second action has not begun the first.
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
        detail = f"device {other} cannot start {awaited} either"
        if steps > (heads[other] in joined[other]):
            detail = (
                f"device {other} runs {awaited} {steps} action{'s' * (steps != 1)} after "
                f"{name(other)}, where it waits itself"
            )
        lines.append(f"device {device} cannot start {name(device)} before {awaited}; {detail}")
    title = (
        f"schedule {schedule.name!r} cannot come to its end; move one of these actions before "
        "what it blocks:"
    )
    return bullets(title, lines)
