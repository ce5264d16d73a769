"""Schedules on a V: stages go down the devices and back up.

The first device has the first and the last stage. Device d has two stages: d on the way down, and
``2D - 1 - d`` on the way up. The lifetimes of their residuals add up to the same on each device, so
memory is even.

There are two methods to make an order. ZB-V and DualPipeV are *spelled*: a device has phases, each
phase repeats some words, and each word takes the next microbatch of its stage. V-Half and V-Min are
*squeezed* (`squeeze.py`): one microbatch is laid out in time slots, repeated every six slots, and
actions move up to earlier slots. Both methods visit microbatches in ascending order on each stage,
as all families do.

Sources: ZB-V in zero bubble (arXiv 2401.10241); V-Half, V-Min and the adaptive V in controllable
memory (arXiv 2405.15362); DualPipeV is DualPipe (arXiv 2412.19437) cut in half.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, pairwise

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.clock import CODE, clock, coded
from funcpipe._src.schedules.clock import chain as neighbours
from funcpipe._src.schedules.counts import schedule_counts
from funcpipe._src.schedules.squeeze import BLOCK, Block, most_held, repeated, squeezed, steady

_Phase = tuple[int, str]
"""(repetitions, words). ``F0`` is the next forward of the stage on the way down, ``I1`` the next I
of the stage on the way up. ``W0`` is the oldest pending W of the stage on the way down, ``W`` the
oldest pending W of the device."""

_KINDS = {kind.value: kind for kind in Kind}


def zbv(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """Make the ZB-V schedule: the memory of 1F1B, even over the devices, and no bubble if F = I = W.

    Let F, I and W of a stage take one unit each; a device has two stages. With ``M >= 2D - 1`` each
    device works without a pause: the span is ``6 M``, the makespan ``6 M + D - 1``. Each device
    holds at most 2D residuals of a stage, as many as the first device of 1F1B. Source: arXiv
    2401.10241, section 6.

    >>> print(fp.schedules.zbv(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:
        num_stages: the number of stages, S: twice D.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: half of S.

    Raises:
        ScheduleError: a count is not positive, or S is not twice D.
    """
    _, microbatches, devices = _folded(num_stages, num_microbatches, num_devices)
    # The phases need enough microbatches to fill the V. For fewer, the schedule is cut at the end.
    full = max(microbatches, 2 * devices - 1)
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


def dualpipe_v(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None
) -> Schedule:
    """Make the DualPipeV schedule: a forward of one stage overlaps with a backward of the other.

    The overlap hides communication, such as an all-to-all of experts. DualPipeV is DualPipe (arXiv
    2412.19437, figure 5) cut in half, so it needs no second copy of the weights. Backwards are
    whole (B), except while the pipeline fills and drains. Each device holds at most ``2 D + 1``
    residuals of a stage.

    Let F, I and W of a stage take one unit each. The makespan is ``6 M + 2 (D - 1)`` if pairs hide
    nothing, and ``6 M + D - 1`` without pairs (`unpair`). If a pair takes 2 units instead of 3
    (`Cost.forward_link`, `Cost.backward_link`), the makespan is ``4 M + 3 D``.

    >>> print(fp.schedules.dualpipe_v(4, 4))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3 3B1) (3F2 0B0) 3B2 (3F3 0B1) 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 (2F2 1B0) (1F3 2B1) (2F3 1B1) 2B2 1B2 2I3 1I3 2W3 1W3

    Args:
        num_stages: the number of stages, S: twice D.
        num_microbatches: the number of microbatches, M: at least S.
        num_devices: the number of devices, D. Default: half of S.

    Raises:
        ScheduleError: a count is not positive, S is not twice D, or M is less than S.
    """
    stages, microbatches, devices = _folded(num_stages, num_microbatches, num_devices)
    if microbatches < stages:
        raise ScheduleError(
            f"no such schedule: DualPipeV needs {stages} microbatches, one for each stage, to fill "
            f"the V; got {microbatches}; take more microbatches, or fp.schedules.zbv, which takes "
            "any number"
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
    pairs = [
        [pair for pair in pairwise(order) if pair[0].kind is Kind.F and pair[1].kind is Kind.B]
        for order in orders
    ]
    # The authors do not pair the first backward of all: all devices wait for this backward.
    pairs[-1] = pairs[-1][1:]
    return Schedule(tuple(map(tuple, orders)), "DualPipeV", frozenset(chain(*pairs)))


def v_half(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """Make the V-Half schedule: about half the memory of 1F1B, and half its bubble.

    Each device holds at most ``2 (D // 2 + 1)`` residuals of a stage, even if I frees no part of
    them. The first device of 1F1B holds 2D.

    Let F, I and W of a stage take one unit each, and ``M >= D > 2``. The makespan is ``6 M + 3 D -
    7``, or ``6 M + 3 D - 4`` for an odd D. 1F1B takes ``6 M + 6 (D - 1)``. For other times, the
    bubble is independent of M if ``W + 2 I >= 2 F`` and ``W + 2 F >= 2 I``. Source: arXiv
    2405.15362.

    >>> print(fp.schedules.v_half(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    Args:
        num_stages: the number of stages, S: twice D.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: half of S.

    Raises:
        ScheduleError: a count is not positive, or S is not twice D.
    """
    _, microbatches, devices = _folded(num_stages, num_microbatches, num_devices)
    return Schedule(steady(_half_block, devices, microbatches), "V-Half")


def v_min(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """Make the V-Min schedule: about a third of the memory of 1F1B, and two thirds of its bubble.

    Each device holds at most ``2 ((D + 4) // 3)`` residuals of a stage, even if I frees no part of
    them. The first device of 1F1B holds 2D.

    Let F, I and W of a stage take one unit each, and ``M >= D > 1``. The makespan is at most ``6 M
    + 4 D - 5``, and ``6 M + 4 D - 7`` if 3 divides D. 1F1B takes ``6 M + 6 (D - 1)``. If the times
    differ, a device may wait in each round, so the bubble grows with M. V-Half is more robust.
    Source: arXiv 2405.15362.

    >>> print(fp.schedules.v_min(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Args:
        num_stages: the number of stages, S: twice D.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: half of S.

    Raises:
        ScheduleError: a count is not positive, or S is not twice D.
    """
    _, microbatches, devices = _folded(num_stages, num_microbatches, num_devices)
    return Schedule(steady(_min_block, devices, microbatches), "V-Min")


def v_adaptive(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, residuals: int
) -> Schedule:
    """Make an adaptive V schedule: a small bubble within a given memory, between V-Min and ZB-V.

    Each device holds at most ``residuals`` residuals of a stage, even if I frees no part of them.
    The first devices pass microbatches on as in V-Min. The other devices pass them on as if memory
    were unlimited. The memory decides how many devices do so.

    Let F, I and W of a stage take one unit each, and ``M > 2 D``. The span is ``6 M + b``. For D =
    4 and 4 to 8 residuals, b is 11, 10, 5, 3 and 0. Source: arXiv 2405.15362.

    >>> print(fp.schedules.v_adaptive(4, 3, residuals=4))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    Args:
        num_stages: the number of stages, S: twice D.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: half of S.
        residuals: the largest number of residuals per device. At least those of V-Min, ``2 ((D + 4)
            // 3)``. More than 2 D do not help.

    Raises:
        ScheduleError: a count is not positive, S is not twice D, or ``residuals`` is less than
            V-Min needs.
    """
    stages, microbatches, devices = _folded(num_stages, num_microbatches, num_devices)
    fewest = min(2 * ((devices + 4) // 3), 2 * microbatches)
    if not isinstance(residuals, int) or residuals < fewest:
        raise ScheduleError(
            f"no such schedule: residuals must be a whole number of at least {fewest}, which V-Min "
            f"needs on {devices} devices; got {residuals!r}; for less memory, use "
            "fp.search(..., remat=True)"
        )
    # Orders repeat by this number of microbatches, so a short schedule shows the bubble of a long
    # one, and choosing the best block takes a time that does not grow with M.
    sample = min(microbatches, 2 * devices + 2)

    def best(slow: int) -> tuple[float, int] | None:
        tried = [
            (_span(orders), gap)
            for gap in range(BLOCK)
            if (orders := make(slow, gap, sample)) is not None
        ]
        return min(tried, default=None)

    def make(slow: int, gap: int, count: int) -> tuple[tuple[Action, ...], ...] | None:
        blocks = [_adaptive_block(device, devices, slow, gap) for device in range(devices)]
        if any(len({slot % BLOCK for slot in block}) < len(block) for block in blocks):
            return None  # two actions of a device would need the same slot
        lanes = repeated(count, blocks)
        return squeezed(lanes, residuals) if most_held(lanes) <= residuals else None

    least = bisect_left(range(devices - 1), True, key=lambda slow: best(slow) is not None)
    choices = [
        (*choice, slow)
        for slow in (least, least + 1)
        if slow < devices and (choice := best(slow)) is not None
    ]
    orders = make(min(choices)[2], min(choices)[1], microbatches) if choices else None
    return Schedule(orders, f"V-{residuals}") if orders is not None else v_min(stages, microbatches)


def _folded(
    num_stages: int, num_microbatches: int, num_devices: int | None
) -> tuple[int, int, int]:
    """Return the counts of stages, microbatches and devices on a V. Raises ScheduleError."""
    return schedule_counts(num_stages, num_microbatches, num_devices, folded=True, share=2)[:3]


def _spell(device: int, devices: int, phases: Sequence[_Phase]) -> list[Action]:
    """Return the order that the phases of a device spell."""
    stages = (device, 2 * devices - 1 - device)
    forwards, backwards = [0, 0], [0, 0]  # done of each stage
    owed: list[tuple[int, int]] = []  # pending W, as (which stage, microbatch)
    order: list[Action] = []
    for times, words in phases:
        spelled = [(_KINDS[word[0]], int(word[1:] or -1)) for word in words.split()]
        for kind, which in spelled * times:
            if kind is Kind.W:
                at = next(at for at, (owner, _) in enumerate(owed) if which in (owner, -1))
                owner, microbatch = owed.pop(at)
            else:
                counter = forwards if kind is Kind.F else backwards
                owner, microbatch = which, counter[which]
                counter[which] += 1
                if kind is Kind.I:
                    owed.append((owner, microbatch))
            order.append(Action(kind, stages[owner], microbatch))
    return order


def _half_block(device: int, devices: int) -> Block:
    gap = 0 if devices % 2 else 3  # without the gap two microbatches would need the same slot
    return (
        2 * device,
        3 * devices - 2 - device,
        3 * devices + gap + 2 * device - 1,
        6 * devices + gap - 2 - device,
    )


def _min_block(device: int, devices: int) -> Block:
    return _adaptive_block(device, devices, slow=devices, gap=0 if devices % 3 else 2)


def _adaptive_block(device: int, devices: int, slow: int, gap: int) -> Block:
    """Return a block in which a microbatch takes one slot per hop between the first ``slow``
    devices, and three slots per hop between the others, in both directions."""

    def slots(hops: int) -> int:
        return min(hops, slow) + 3 * max(0, hops - slow)

    turn = slots(devices - 1)
    down, back = slots(device), turn - slots(device)
    return down, turn + 1 + back, 2 * turn + 2 + gap + down, 3 * turn + 3 + gap + back


def _span(orders: tuple[tuple[Action, ...], ...]) -> float:
    """Return the span if each action takes one unit of time."""
    schedule = Schedule(orders)
    lanes = coded(orders)
    stages = schedule.num_stages
    durations = [[1.0] * stages] * len(CODE)
    starts = clock(
        lanes, schedule.device_of, schedule.num_microbatches, durations, neighbours(stages)
    ).starts
    return max(row[-1] - row[0] for row in starts) + 1
