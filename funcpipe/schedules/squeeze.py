"""Squeeze repeated blocks: lay one microbatch out in slots, repeat it every six, fill in W, move up what can.

How the schedules of controllable memory are made (arXiv 2405.15362), on a V: each device has two stages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate
from operator import sub

from funcpipe.core.schedule import Action, Kind

Lane = dict[int, Action]
"""What a device does in which slot; every action takes one."""

Block = tuple[int, int, int, int]
"""The slots of microbatch 0 on a device: forward down, forward up, I up, I down."""

BLOCK = 6
"""Slots that one microbatch takes on a device: F, I and W of two stages."""

_CHANGE = {Kind.F: 1, Kind.W: -1}
"""What an action changes in the number of residuals, where I gives back nothing."""

_NEVER = 10**9


def repeated(microbatches: int, blocks: Sequence[Block]) -> list[Lane]:
    """One block a device, repeated every six slots; W in the first free slots after their I."""
    lanes: list[Lane] = []
    for down, block in enumerate(blocks):
        up = 2 * len(blocks) - 1 - down
        cells = zip(block, ((Kind.F, down), (Kind.F, up), (Kind.I, up), (Kind.I, down)), strict=True)
        lane = {
            start + BLOCK * microbatch: Action(kind, stage, microbatch)
            for start, (kind, stage) in cells
            for microbatch in range(microbatches)
        }
        lanes.append(_fill(lane))
    return lanes


def most_held(lanes: Sequence[Lane]) -> int:
    """The most residuals of a stage that any device holds, from F to W."""
    return max(max(_levels(lane)) for lane in lanes)


def squeezed(lanes: Sequence[Lane], ceiling: int) -> tuple[tuple[Action, ...], ...]:
    """The orders of repeated blocks when all that can has moved up, twice, with at most ``ceiling`` residuals a device.

    Args:
        lanes: as `repeated` gives them.
        ceiling: at least `most_held` of them.
    """
    moved = _squeeze(lanes, ceiling, drain=max(map(max, lanes)))
    last = max(slot for slot, action in moved[0].items() if action.kind is Kind.F and action.stage == 0)
    moved = _squeeze(moved, ceiling, drain=last)
    return tuple(tuple(lane[slot] for slot in sorted(lane)) for lane in moved)


def _fill(lane: Lane) -> Lane:
    """F and I stay where they are, W go into the first free slots, in the order of their I."""
    filled: Lane = {}
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


def _levels(lane: Lane) -> list[int]:
    """How many residuals a device holds in each slot, from F to W."""
    held, levels = 0, []
    for slot in range(max(lane) + 1):
        kind = lane[slot].kind if slot in lane else None
        held += 1 if kind is Kind.F else -1 if kind is Kind.W else 0
        levels.append(held)
    return levels


def _squeeze(lanes: Sequence[Lane], ceiling: int, *, drain: int) -> list[Lane]:
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


def _earliest(lane: Lane, held: int, ready: int, slot: int, *, room: int) -> int:
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
