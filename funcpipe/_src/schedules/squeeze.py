"""Squeeze repeated blocks into orders: the method of controllable memory (arXiv 2405.15362).

One microbatch is laid out in time slots and repeated every six slots. W fill free slots. Then each
action moves up to the earliest slot that it can have. The stages are on a V: each device has one
stage on the way down and one on the way up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, zip_longest
from operator import sub

from funcpipe._src.data.schedule import Action, Kind

Lane = list[int]  # the code of a device's action in each slot: ``6 microbatch + word``, or FREE

Block = tuple[int, int, int, int]  # the slots of microbatch 0 on a device, for the words 0 to 3

BLOCK = 6  # the number of slots of one microbatch on a device: one for each word

FREE = -1

_KINDS = (Kind.F, Kind.F, Kind.I, Kind.I, Kind.W, Kind.W)
"""The words: forward down, forward up, I up, I down, W up, W down. The W of an I is 2 words
later."""

_CHANGE = (1, 1, 0, 0, -1, -1)  # by word, the change in the number of residuals, if I frees nothing

_FROM = (-1, 1, -1, 1)
"""By word, the offset to the device whose equal word it waits for. At an end of the V it waits for
the previous word of its own device."""

_I, _W = 2, 4  # the first words of I and of W

_NEVER = 10**9


def repeated(microbatches: int, blocks: Sequence[Block]) -> list[Lane]:
    """Repeat one block per device every six slots, and put W into free slots after their I."""
    lanes: list[Lane] = []
    for block in blocks:
        lane = [FREE] * (max(block) + BLOCK * (microbatches - 1) + 1)
        for word, start in enumerate(block):
            lane[start : start + BLOCK * microbatches : BLOCK] = range(
                word, word + BLOCK * microbatches, BLOCK
            )
        lanes.append(_fill(lane))
    return lanes


def most_held(lanes: Sequence[Lane]) -> int:
    """Return the most residuals of a stage that any device holds, from F to W."""
    return max(max(accumulate(_changes(lane))) for lane in lanes)


def squeezed(
    lanes: Sequence[Lane], ceiling: int, *, more: int = 0
) -> tuple[tuple[Action, ...], ...]:
    """Squeeze `repeated` blocks twice, and return the orders of the devices.

    Args:
        lanes: the lanes of `repeated`.
        ceiling: the most residuals per device; at least `most_held` of the lanes.
        more: the number of microbatches to add where the orders repeat. They must repeat then.
    """
    moved = _squeeze(lanes, ceiling, drain=max(map(len, lanes)))
    last = max(slot for slot, code in enumerate(moved[0]) if code % BLOCK == 0)
    moved = _squeeze(moved, ceiling, drain=last)
    orders = [_lengthened([code for code in lane if code != FREE], more) for lane in moved]
    return tuple(
        tuple(_actions(codes, device, 2 * len(lanes) - 1 - device))
        for device, codes in enumerate(orders)
    )


def steady(
    block: Callable[[int, int], Block], devices: int, microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Squeeze blocks within their own memory, with few microbatches, and repeat the steady part.

    Without spare memory, the orders of D devices repeat from one microbatch to the next after at
    most ``2 D + 4`` microbatches. So the cost of squeezing does not grow with the microbatches.
    """
    sample = min(microbatches, 2 * devices + 4)
    lanes = repeated(sample, [block(device, devices) for device in range(devices)])
    return squeezed(lanes, most_held(lanes), more=microbatches - sample)


def _lengthened(codes: list[int], more: int) -> list[int]:
    """Insert ``more`` microbatches into an order, at the end of its longest repeating part."""
    if not more:
        return codes
    # 1 where the action six places later is the same action of the next microbatch.
    same = bytes(map(BLOCK.__eq__, map(sub, codes[BLOCK:], codes)))
    end = same.index(max(same.split(b"\0"), key=len)) + BLOCK
    rounds = zip(
        *(range(code + BLOCK, code + BLOCK * more + 1, BLOCK) for code in codes[end - BLOCK : end])
    )
    return [
        *codes[:end],
        *chain.from_iterable(rounds),
        *(code + BLOCK * more for code in codes[end:]),
    ]


def _actions(codes: list[int], down: int, up: int) -> Iterable[Action]:
    stages = (down, up, up, down, up, down)
    for code in codes:
        microbatch, word = divmod(code, BLOCK)
        yield Action(_KINDS[word], stages[word], microbatch)


def _fill(lane: Lane) -> Lane:
    """Return a lane with the same F and I, and with W in the first free slots after their I."""
    filled: Lane = []
    owed: list[int] = []
    done = 0
    for code in lane:
        word = code % BLOCK
        if word < _W:  # false for FREE, because -1 % 6 is 5
            filled.append(code)
            if word >= _I:
                owed.append(code + 2)
        elif done < len(owed):
            filled.append(owed[done])
            done += 1
        else:
            filled.append(FREE)
    return filled + owed[done:]


def _changes(lane: Lane) -> list[int]:
    """Return the change of each slot in the number of residuals."""
    return [0 if code == FREE else _CHANGE[code % BLOCK] for code in lane]


def _squeeze(lanes: Sequence[Lane], ceiling: int, *, drain: int) -> list[Lane]:
    """Move each action up to the earliest slot that is free, after its inputs, and within memory.

    After slot ``drain`` no new microbatch begins. From there on, F and I also take slots of W, and
    these W come later: no action waits for a W.
    """
    moved = [list(lane) for lane in lanes]
    residuals = [0] * len(lanes)  # by device, held before the present slot
    placed = [[_NEVER] * (max(lane) + 1) for lane in lanes]
    for slot, column in enumerate(zip_longest(*lanes, fillvalue=FREE)):
        late = slot > drain
        for device, code in enumerate(column):
            if code == FREE:
                continue
            word, slot_of = code % BLOCK, placed[device]
            change = _CHANGE[word]
            if word >= _W:
                if late:  # other actions may take its slot; `_fill` finds it another
                    residuals[device] += change
                    continue
                ready = slot_of[code - 2] + 1
            elif 0 <= device + _FROM[word] < len(lanes):
                ready = placed[device + _FROM[word]][code] + 1
            else:
                ready = slot_of[code - 1] + 1 if word else 0
            if code >= BLOCK and slot_of[code - BLOCK] >= ready:
                ready = slot_of[code - BLOCK] + 1
            lane, room = moved[device], ceiling - (change > 0)
            best = _earliest(lane, residuals[device], ready, slot, room=room, weights=late)
            lane[slot], lane[best] = lane[best], code
            slot_of[code] = best
            residuals[device] += change
    return [_fill([FREE if code % BLOCK >= _W else code for code in lane]) for lane in moved]


def _earliest(
    lane: Lane, residuals: int, ready: int, slot: int, *, room: int, weights: bool
) -> int:
    """Return the first slot from ``ready`` to its own ``slot`` that an action can take.

    The slot must be free; with ``weights``, it may also belong to a W, if memory has room for one
    more residual. Until ``slot``, at most ``room`` residuals may be held; ``residuals`` are held
    just before it.
    """
    best, peak = slot, 0
    for early in range(slot - 1, ready - 1, -1):
        if residuals > room:
            break
        peak = max(peak, residuals)
        occupant = lane[early]
        if occupant == FREE:
            best = early
            continue
        change = _CHANGE[occupant % BLOCK]
        if weights and change < 0 and peak < room:
            best = early
        residuals -= change
    return best
