"""Check whether a schedule is legal, and find its plan order.

`clock.py` simulates with units and finds deadlocks. `pairs.py` checks pairs. This file checks all
other rules, and reports all faults of a schedule at once.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import chain
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
from funcpipe._src.data.schedule import Action, Schedule, action_of
from funcpipe._src.schedules.clock import CODE, CODED, clock, coded
from funcpipe._src.schedules.clock import chain as neighbours
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
    refuse([*_stage_faults(schedule), *_order_faults(lanes, stages, microbatches, slices)])
    refuse(apart(schedule))
    durations = [[float(KINDS[kind].units)] * stages for kind in CODED]
    pairs = joined_units(schedule)
    starts, stuck = clock(
        lanes, schedule.device_of, microbatches, durations, neighbours(stages), pairs
    )
    if stuck:
        raise ScheduleError(_waiting(schedule, stuck))
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
    if not schedule.orders:
        return ["it has no devices"]
    faults: list[str] = []
    for device, order in enumerate(schedule.orders):
        if not order:
            faults.append(f"device {device} runs nothing; leave it out")
        faults += [
            f"{_show(action)} on device {device} is not an action: {_advice(action)}"
            for action in order
            if not _is_sound(action)
        ]
    if faults:
        return faults
    actions = [*chain.from_iterable(schedule.orders)]
    cut = next((a for a in actions if a.slice is not None), None)
    if cut is None:
        return []
    whole = next((a for a in actions if a.slice is None and a.kind not in WHOLE), None)
    if whole is not None:
        return [
            f"{whole} is for a whole microbatch, but {cut} is for a slice: cut all microbatches, "
            "or none"
        ]
    if schedule.num_slices == 1:
        return [
            f"{cut} is the only slice of its microbatch, so the microbatch is whole: write "
            f"{cut._replace(slice=None)}"
        ]
    return []


def _is_sound(action: Any) -> bool:
    """Return whether an item is an action with a kind and numbers from 0."""
    if type(action) is not Action:
        return False
    kind, stage, microbatch, number = action
    if type(kind) is not Kind or type(stage) is not int or type(microbatch) is not int:
        return False
    if stage < 0 or microbatch < 0:
        return False
    return number is None or (type(number) is int and number >= 0 and kind not in WHOLE)


def _advice(action: Any) -> str:
    """Say how to write an action in place of an item that is none."""
    text = "write Action(Kind.F, stage, microbatch) with numbers from 0"
    if isinstance(action, str):
        text += ", or read words: Action.parse('0F0'), Schedule.parse('0F0 0B0')"
    if type(action) is Action and action.slice is not None:
        text += (
            ", or Action(Kind.F, stage, microbatch, slice); "
            f"{' and '.join(map(str, WHOLE))} have no slice"
        )
    return text


def _show(action: Any) -> str:
    for shown in (str, repr) if isinstance(action, Action) else (repr,):
        try:
            return shown(action)
        except Exception:
            continue
    return object.__repr__(action)


def _stage_faults(schedule: Schedule) -> Iterator[str]:
    """Yield the faults of stages: actions on two devices, and a wrong order of G, S and U."""
    device_of = schedule.device_of
    once: dict[int, Action] = {}  # by stage, its latest G or S, which need all gradients
    gathers = Counter[int]()  # by stage, the number of its U so far
    begun: dict[int, Action] = {}  # by stage, its first action but U
    idle: dict[int, str] = {}  # by stage, the latest U after which it has not computed yet
    for device, order in enumerate(schedule.orders):
        for action in order:
            kind, stage, microbatch, _ = action
            if device_of[stage] != device:
                yield (
                    f"{action} on device {device}: stage {stage} is on device "
                    f"{device_of[stage]} too; a stage runs on one device"
                )
            if kind in COUNTED:
                name = f"{action} on device {device}"
                if stage in once:
                    yield f"{name} comes after {once[stage]}, after which its stage does not compute"
                elif microbatch != gathers[stage]:
                    yield (
                        f"{name} is the {kind} number {gathers[stage]} of its stage: write "
                        f"{action._replace(microbatch=gathers[stage])}"
                    )
                elif not microbatch and stage in begun:
                    yield f"{name} comes after {begun[stage]}, which needs the parameters"
                gathers[stage] += 1
                if stage in idle:
                    yield f"{idle[stage]} before {action}; leave it out"
                idle[stage] = f"{name} is not needed: stage {stage} does not compute"
                continue
            begun.setdefault(stage, action)
            if stage in idle and kind in COMPUTES:
                del idle[stage]
            if stage in once:
                latest = once[stage]
                # G comes before S, and both come after all gradients.
                if kind in (*ADDS, *ONCE[: ONCE.index(latest.kind)]):
                    yield (
                        f"{action} on device {device} comes after {latest}, which needs all "
                        "gradients"
                    )
            if kind in ONCE:
                once[stage] = action
                if microbatch:
                    yield (
                        f"{action} on device {device} has a microbatch ({microbatch}), but runs "
                        "once per batch"
                    )
    yield from (f"{words} after it; leave it out" for words in idle.values())
    yield from (
        f"{Action(Kind.U, stage)} is missing: all stages have {Kind.U}, or none"
        for stage in range(schedule.num_stages)
        if gathers and stage not in gathers
    )


def _order_faults(
    lanes: tuple[list[tuple[int, int, int]], ...], stages: int, microbatches: int, slices: int
) -> list[str]:
    """Return the faults of each (stage, microbatch): duplicates, missing actions, a wrong order."""
    faults: list[str] = []
    done = [bytearray(stages * microbatches) for _ in CODED]
    needed = [[(other, done[CODE[other]]) for other in _before(kind)] for kind in CODED]
    backwards = [done[CODE[kind]] for kind in ADDS]
    stands = {action for lane in lanes for action in lane}
    for device, lane in enumerate(lanes):
        for code, stage, microbatch in lane:
            kind, at = CODED[code], stage * microbatches + microbatch
            if kind in COUNTED:
                continue
            found: list[str] = []
            if done[code][at]:
                found.append("appears twice")
            done[code][at] = 1
            awaited = next((other for other, row in needed[code] if not row[at]), None)
            if awaited is None:
                # F needs no such rule: a backward that comes before its F is too early.
                if KINDS[kind].before_backward and any(row[at] for row in backwards):
                    found.append(f"comes too late: {kind} must come before the backward")
            # If the awaited action does not appear at all, it is reported as missing instead.
            elif (CODE[awaited], stage, microbatch) in stands:
                first = awaited is Kind.F
                rule = "F must come first" if first else f"{kind} must come after {awaited}"
                found.append(f"comes too early: {rule}")
            if slices > 1:
                found += _out_of_turn(kind, stage, microbatch, slices, done, at)
            for fault in found:
                action = action_of(kind, stage, microbatch, slices)
                faults.append(f"{action} on device {device} {fault}")
    return faults + _unpaired(dict(zip(CODED, done, strict=True)), microbatches, slices)


def _out_of_turn(
    kind: Kind, stage: int, piece: int, slices: int, done: list[bytearray], at: int
) -> list[str]:
    """Return the fault if a slice runs before the slice whose carry it reads."""
    flow = KINDS[kind].flow
    if flow is None:
        return []
    step, what = (1, "its carry") if flow is Flow.FORWARD else (-1, "the gradient of its carry")
    if not 0 <= piece % slices - step < slices or any(
        done[CODE[other]][at - step] for other in flowing(flow)
    ):
        return []
    return [
        f"comes before {action_of(kind, stage, piece - step, slices)}, from which it gets {what}"
    ]


def _before(kind: Kind) -> list[Kind]:
    """Return the kinds that must come before a kind, in their order."""
    after = KINDS[kind].after
    return [] if after is None else [*_before(after), after]


def _unpaired(done: dict[Kind, bytearray], microbatches: int, slices: int) -> list[str]:
    """Return faults of missing actions, and of actions that exclude each other."""

    def name(kind: Kind, at: int) -> str:
        return str(action_of(kind, *divmod(at, microbatches), slices))

    faults = [
        f"{name(Kind.F, at)} is missing" for at, stands in enumerate(done[Kind.F]) if not stands
    ]
    if any(any(row) for kind, row in done.items() if kind not in WITHOUT_BACKWARD):
        faults += [
            f"{name(Kind.B, at)} is missing (or {name(Kind.I, at)} and {name(Kind.W, at)})"
            for at, backwards in enumerate(zip(done[Kind.B], done[Kind.I], strict=True))
            if not any(backwards)
        ]
    for kind, row in KINDS.items():
        pair, excluded = row.pair, row.excludes
        if pair is not None and CODE[kind] < CODE[pair]:
            faults += [
                f"{name(pair if first else kind, at)} is missing: {kind} and {pair} come in pairs"
                + (f", without {name(Kind.B, at)}" if done[Kind.B][at] else "")
                for at, (first, second) in enumerate(zip(done[kind], done[pair], strict=True))
                if first != second
            ]
        if excluded is not None and CODE[kind] < CODE[excluded]:
            words = f"{row.word}, or {KINDS[excluded].word}, not both"
            faults += [
                f"{name(kind, at)} and {name(excluded, at)} both appear: {words}"
                for at, stands in enumerate(zip(done[kind], done[excluded], strict=True))
                if all(stands)
            ]
    return faults


def _gaps(schedule: Schedule) -> list[str]:
    """Return a fault for each gap in the numbers: they were counted from 1, or mistyped."""
    numbered = [a for order in schedule.orders for a in order if a.kind not in COUNTED]
    columns = [*zip(*numbered, strict=True)][1:]
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


def _waiting(schedule: Schedule, stuck: list[int]) -> str:
    """Describe a deadlock: for each waiting device, the action it waits for and its place."""
    place = {
        action: (device, at)
        for device, order in enumerate(schedule.orders)
        for at, action in enumerate(order)
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
        needs = [need for need in schedule.orders[device][position].needs() if need in place]
        awaited = next(need for need in needs if not is_done(*place[need]))
        other, where = place[awaited]
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
