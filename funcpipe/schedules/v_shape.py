"""Schedules on a V: the stages go down the devices and back up, so the first device has the input and the loss.

Device d has two stages, d on the way down and ``2D - 1 - d`` on the way up; together their residuals live as long on
one device as on any other, so memory is even. Two ways lead to an order. ZB-V and DualPipeV are spelled: a device has
phases, each phase repeats some words, each word takes the next microbatch of its stage. V-Half and V-Min are squeezed:
one microbatch is laid out in time slots, repeated every six slots, and what has to wait for nothing moves up. Both
visit microbatches in ascending order on every stage, as all families do.

Sources: ZB-V in zero bubble (arXiv 2401.10241) and controllable memory (arXiv 2405.15362), which has V-Half and V-Min;
DualPipeV is DualPipe (arXiv 2412.19437) cut in half.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import sub

from funcpipe.core.errors import ScheduleError
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.schedules.families import _counts as counts  # pyright: ignore[reportPrivateUsage]

_Phase = tuple[int, str]
"""So many times these words. ``F0``: the next forward of the stage on the way down, ``I1``: the next I of the other
one, ``W0``: the oldest W that this stage still owes, ``W``: the oldest that the device owes."""

_Lane = dict[int, Action]
"""What a device does in which slot; every action takes one."""

_Block = tuple[int, int, int, int]
"""The slots of microbatch 0 on a device: forward down, forward up, I up, I down."""

_KINDS = {kind.value: kind for kind in Kind}

_CHANGE = {Kind.F: 1, Kind.W: -1}
"""What an action changes in the number of residuals, where I gives back nothing."""

_NEVER = 10**9

_BLOCK = 6
"""Slots that one microbatch takes on a device: F, I and W of two stages."""


def zbv(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): the memory of 1F1B, on every device alike, and no bubble where F = I = W.

    Times below are of one stage, of which a device has two. Where F, I and W take the same time and ``M >= 2D - 1``,
    every device works without a pause: span ``6 M``, makespan ``6 M + D - 1``. Every device holds at most
    2D residuals of a stage, as many as the first device of 1F1B.

    >>> print(zbv(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; any number.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, or S is not twice D.
    """
    _, microbatches, devices = counts(num_stages, num_microbatches, num_devices, folded=True, share=2)
    full = max(microbatches, 2 * devices - 1)  # so many fill the V; of a longer schedule the first few are taken
    orders: list[list[Action]] = []
    for device in range(devices):
        below = devices - device
        phases = [
            (2 * below - 1, "F0"),
            (device, "F1 F0"),
            (below, "F1 I1 W1"),
            (full - 2 * devices + 1 + device, "F0 I0 W0 F1 I1 W1"),
            (devices - 1 - device, "I0 W0 F1 I1 W1"),
            (device, "I0 I1"),
            (below, "I0 W0"),
            (device, "W1"),
            (device, "W0"),
        ]
        orders.append(_spell(device, devices, phases))
    return Schedule(tuple(map(tuple, orders)), "ZB-V").first(microbatches)


def dualpipe_v(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """DualPipeV: each forward stands beside a whole backward of the other stage, to hide each other's communication.

    DualPipe (arXiv 2412.19437, figure 5) cut in half: no second copy of the weights. Backwards are whole (B) but where
    the pipeline fills and drains. Every device holds at most ``2 D + 1`` residuals of a stage. Where F, I and W take
    the same time, 1 for a stage, makespan ``6 M + D - 1``; if each F is joined with the B next to it into one action of
    the length of both, ``6 M + 2 (D - 1)``.

    >>> print(dualpipe_v(4, 4))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; at least S.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, S is not twice D, or M is less than S.
    """
    stages, microbatches, devices = counts(num_stages, num_microbatches, num_devices, folded=True, share=2)
    if microbatches < stages:
        raise ScheduleError(
            f"no such schedule: DualPipeV fills the V with {stages} microbatches, one for each stage; got {microbatches}; "
            "take more microbatches, or fp.zbv, which takes any number"
        )
    orders: list[list[Action]] = []
    for device in range(devices):
        below, half = devices - 1 - device, (device + 1) // 2
        phases = [
            (2 * below, "F0"),
            (device + 1, "F0 F1"),
            (below, "I1 W F1"),
            (microbatches - stages + device + 1, "F0 B1 F1 B0"),
            (below, "B1 F1 B0"),
            (half, "B1 B0"),
            (1 - device % 2, "B1 I0"),
            (half, "I1 I0"),
            (below, "W I0"),
            (device + 1, "W"),
        ]
        orders.append(_spell(device, devices, phases))
    return Schedule(tuple(map(tuple, orders)), "DualPipeV")


def v_half(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """V-Half (arXiv 2405.15362): about half the memory of 1F1B, on every device alike, and half its bubble.

    Every device holds at most ``2 (D // 2 + 1)`` residuals of a stage (1F1B: those of 2D), even if I gives back nothing
    of them. Where F, I and W take the same time, 1 for a stage, and ``M >= D > 2``, the makespan is ``6 M + 3 D - 7``,
    or ``6 M + 3 D - 4`` for an odd D (1F1B: ``6 M + 6 (D - 1)``). Where they differ, the bubble stays independent of M
    while ``W + 2 I >= 2 F`` and ``W + 2 F >= 2 I``.

    >>> print(v_half(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; any number.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, or S is not twice D.
    """
    orders = _squeezed(*counts(num_stages, num_microbatches, num_devices, folded=True, share=2), _half_block)
    return Schedule(orders, "V-Half")


def v_min(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """V-Min (arXiv 2405.15362): about a third of the memory of 1F1B, on every device alike, and two thirds of its bubble.

    Every device holds at most ``2 ((D + 4) // 3)`` residuals of a stage (1F1B: those of 2D), even if I gives back
    nothing of them. Where F, I and W take the same time, 1 for a stage, and ``M >= D > 1``, the makespan is at most
    ``6 M + 4 D - 5``, and ``6 M + 4 D - 7`` where 3 divides D (1F1B: ``6 M + 6 (D - 1)``). Where they differ, a device
    may wait in every round, and its bubble grows with M; V-Half is robust.

    >>> print(v_min(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; any number.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, or S is not twice D.
    """
    orders = _squeezed(*counts(num_stages, num_microbatches, num_devices, folded=True, share=2), _min_block)
    return Schedule(orders, "V-Min")


def _spell(device: int, devices: int, phases: Sequence[_Phase]) -> list[Action]:
    """The order that the phases of a device spell."""
    stages = (device, 2 * devices - 1 - device)
    forwards, backwards = [0, 0], [0, 0]  # done of each stage
    owed: list[tuple[int, int]] = []  # W, as (which stage, microbatch)
    order: list[Action] = []
    new = tuple.__new__  # a third of the time of Action(...), and there may be a hundred thousand
    for times, words in phases:
        spelled = [(_KINDS[word[0]], int(word[1:] or -1)) for word in words.split()]
        for kind, which in spelled * times:
            if kind is Kind.W:
                at = 0
                while which >= 0 and owed[at][0] != which:
                    at += 1
                done, microbatch = owed.pop(at)
                order.append(new(Action, (kind, stages[done], microbatch)))
                continue
            counter = forwards if kind is Kind.F else backwards
            microbatch = counter[which]
            counter[which] = microbatch + 1
            order.append(new(Action, (kind, stages[which], microbatch)))
            if kind is Kind.I:
                owed.append((which, microbatch))
    return order


def _half_block(device: int, devices: int) -> _Block:
    gap = 0 if devices % 2 else 3  # else two microbatches would meet in a slot
    return 2 * device, 3 * devices - 2 - device, 3 * devices + gap + 2 * device - 1, 6 * devices + gap - 2 - device


def _min_block(device: int, devices: int) -> _Block:
    gap = 0 if devices % 3 else 2
    return device, 2 * devices - 1 - device, 2 * devices + gap + device, 4 * devices + gap - 1 - device


def _squeezed(
    stages: int, microbatches: int, devices: int, block: Callable[[int, int], _Block]
) -> tuple[tuple[Action, ...], ...]:
    """Repeat a block every six slots, fill in W, then move up what can, twice, within the memory of the repeated blocks."""
    lanes: list[_Lane] = []
    for device in range(devices):
        down, up = device, stages - 1 - device
        cells = zip(block(device, devices), ((Kind.F, down), (Kind.F, up), (Kind.I, up), (Kind.I, down)), strict=True)
        lane = {
            start + _BLOCK * microbatch: Action(kind, stage, microbatch)
            for start, (kind, stage) in cells
            for microbatch in range(microbatches)
        }
        lanes.append(_fill(lane))
    ceiling = max(max(_levels(lane)) for lane in lanes)
    lanes = _squeeze(lanes, ceiling, drain=max(map(max, lanes)))
    last = Action(Kind.F, 0, microbatches - 1)
    lanes = _squeeze(lanes, ceiling, drain=next(slot for slot, action in lanes[0].items() if action == last))
    return tuple(tuple(lane[slot] for slot in sorted(lane)) for lane in lanes)


def _fill(lane: _Lane) -> _Lane:
    """F and I stay where they are, W go into the first free slots, in the order of their I."""
    filled: _Lane = {}
    owed: list[Action] = []
    done = slot = 0
    last = max(lane)
    while slot <= last or done < len(owed):
        action = lane.get(slot)
        if action is not None:
            filled[slot] = action
            if action.kind is Kind.I:
                owed.append(Action(Kind.W, action.stage, action.microbatch))
        elif done < len(owed):
            filled[slot] = owed[done]
            done += 1
        slot += 1
    return filled


def _levels(lane: _Lane) -> list[int]:
    """How many residuals a device holds in each slot, from F to W."""
    held, levels = 0, []
    for slot in range(max(lane) + 1):
        kind = lane[slot].kind if slot in lane else None
        held += 1 if kind is Kind.F else -1 if kind is Kind.W else 0
        levels.append(held)
    return levels


def _squeeze(lanes: list[_Lane], ceiling: int, *, drain: int) -> list[_Lane]:
    """Move every action up to the first slot that it can have: free, after all that it needs, memory under the ceiling.

    After slot ``drain`` no new microbatch comes in. From there on F and I take the slots of W too, and these come later:
    nobody waits for a W.
    """
    moved = [dict(lane) for lane in lanes]
    holes = [[slot for slot in range(max(lane)) if slot not in lane] for lane in lanes]
    changes = [
        [_CHANGE.get(lane[slot][0], 0) if slot in lane else 0 for slot in range(max(lane) + 1)] for lane in lanes
    ]
    held = [0] * len(lanes)  # by what a device has done before the slot that it has come to
    placed: dict[tuple[Kind, int, int], int] = {}
    for slot, device in sorted((slot, device) for device, lane in enumerate(lanes) for slot in lane):
        action = kind, stage, microbatch = lanes[device][slot]
        late = slot > drain
        if kind is not Kind.W or not late:  # else its slot is for the taking; `_fill` finds it another
            lane = moved[device]
            needs = (_needs(action, 2 * len(lanes)), (kind, stage, microbatch - 1))
            ready = 1 + max(placed.get(one, -1) for one in needs)
            best = ready if late else min(_after(holes[device], ready), slot)
            if late:
                best = _earliest(lane, held[device], best, slot, room=ceiling - (kind is Kind.F))
            elif kind is Kind.F and best < slot:
                full = _last_full(changes[device], held[device], best, slot, ceiling)
                best = min(_after(holes[device], full + 1), slot)
            if best < slot:
                del lane[slot]
                pushed = lane.get(best)
                if pushed is not None:
                    lane[slot] = pushed
                else:
                    holes[device].remove(best)
                    insort(holes[device], slot)
                lane[best] = action
                changes[device][slot] = 0 if pushed is None else -1
                changes[device][best] = _CHANGE.get(kind, 0)
            placed[action] = best
        held[device] += _CHANGE.get(kind, 0)
    return [_fill({slot: action for slot, action in lane.items() if action.kind is not Kind.W}) for lane in moved]


def _after(holes: list[int], slot: int) -> int:
    """The first free slot from one on."""
    at = bisect_left(holes, slot)
    return holes[at] if at < len(holes) else _NEVER


def _last_full(changes: list[int], held: int, first: int, slot: int, ceiling: int) -> int:
    """The last slot from ``first`` on, before another, at whose end a device holds all that it may; ``first - 1``: none."""
    levels = accumulate(reversed(changes[first + 1 : slot]), sub, initial=held)
    return next((slot - 1 - back for back, level in enumerate(levels) if level >= ceiling), first - 1)


def _earliest(lane: _Lane, held: int, ready: int, slot: int, *, room: int) -> int:
    """The first slot from ``ready`` up to its own that an action could have, with at most ``room`` held from it on.

    A free one, or that of a W, where one residual more has room.

    Args:
        lane: what the device does.
        held: what it holds just before ``slot``.
        ready, slot, room: see above.
    """
    best, most = slot, 0
    for early in range(slot - 1, ready - 1, -1):
        if held > room:
            break
        most = max(most, held)
        other = lane.get(early)
        if other is None or (other[0] is Kind.W and most < room):
            best = early
        held -= 0 if other is None else _CHANGE.get(other[0], 0)
    return best


def _needs(action: Action, stages: int) -> tuple[Kind, int, int]:
    """What an action waits for, beside its stage's microbatch before."""
    kind, stage, microbatch = action
    if kind is Kind.F:
        return Kind.F, stage - 1, microbatch
    if kind is Kind.W:
        return Kind.I, stage, microbatch
    return (Kind.I, stage + 1, microbatch) if stage + 1 < stages else (Kind.F, stage, microbatch)
