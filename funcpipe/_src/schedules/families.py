"""The published schedules on a line or a loop, all from one formula: warmup, steady, cooldown.

A device has a list of forwards and a list of backwards. It runs a few forwards (warmup), then one
forward and one backward in turn (steady), then the remaining backwards (cooldown). The families
differ in the placement of stages, the order of the lists, the length of the warmup, and the delay
of weight gradients. Each family visits microbatches in ascending order, so all families accumulate
gradients in the same order, and their gradients are bit-identical.

Schedules on a V are in `v_shape`.

Sources: GPipe (arXiv 1811.06965), PipeDream-Flush / DAPPLE for 1F1B (arXiv 2006.09503, 2007.01045),
eager 1F1B (arXiv 2211.05322), Megatron-LM for interleaved (arXiv 2104.04473), breadth-first (arXiv
2211.05953), zero bubble (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.counts import ScheduleCounts, blocks, schedule_counts


def weave(
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    *,
    warmup: int,
    size: int = 1,
    weights: Sequence[Action] = (),
    delay: int = 0,
) -> tuple[Action, ...]:
    """Return the order of one device: warmup, steady phase, cooldown.

    Args:
        forwards: the device's forwards in their order.
        backwards: the same number of backwards (B, or I) in their order.
        warmup: the number of steps of forwards before forwards and backwards alternate.
        size: the number of actions per step: the stages of a block.
        weights: the W of the backwards, if these are I.
        delay: the number of steps by which W come later than their I. Delayed W fill waits before
            later I.
    """
    steps = len(forwards) // size
    warm = min(warmup, steps)
    order = list(forwards[: warm * size])
    for step in range(steps):
        order += forwards[(warm + step) * size : (warm + step + 1) * size]
        order += backwards[step * size : (step + 1) * size]
        if weights and step >= delay:
            order += weights[(step - delay) * size : (step - delay + 1) * size]
    order += weights[max(0, steps - delay) * size :]
    return tuple(order)


def fill_drain(
    num_stages: int,
    num_microbatches: int,
    *,
    num_devices: int | None = None,
    num_slices: int = 1,
    backward: bool = True,
) -> Schedule:
    """Make a fill-drain schedule: all forwards, then all backwards.

    The bubble is ``(D - 1) / (M + D - 1)`` for equal stages. Each device holds M residuals of each
    of its stages, so this schedule is usually combined with `remat`. Source: GPipe (arXiv
    1811.06965, figure 2c).

    >>> print(fp.schedules.fill_drain(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2

    Args:
        num_stages: the number of stages, S.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: S. With fewer devices, each runs a block of
            neighbouring stages.
        num_slices: the number of slices per microbatch, along its sequence. Default: 1, not cut.
        backward: False returns the forward-only schedule, for evaluation.

    Raises:
        ScheduleError: a count is not positive, or there are more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    schedule = _woven("fill-drain", counts, [counts.pieces] * counts.devices)
    return schedule if backward else Schedule(schedule.forwards().orders, "forward-only")


def one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Make a 1F1B schedule: after a warmup, one forward and one backward in turn.

    The bubble equals that of `fill_drain`, ``(D - 1) / (M + D - 1)``, but device d holds at most
    ``min(M, D - d)`` residuals of each of its stages. Source: PipeDream-Flush (arXiv 2006.09503),
    DAPPLE (arXiv 2007.01045).

    With k slices per microbatch, the schedule is Seq1F1B (arXiv 2406.03488). Device d then holds
    ``D - d + k - 1`` residuals of slices, each 1/k of a whole residual. The bubble is as small as
    with k times as many microbatches.

    >>> print(fp.schedules.one_f_one_b(2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(fp.schedules.one_f_one_b(2, 1, num_slices=2))
    0F0.0 0F0.1 0B0.1 0B0.0
    1F0.0 1F0.1 1B0.1 1B0.0

    Args:
        num_stages: the number of stages, S.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: S. With fewer devices, each runs a block of
            neighbouring stages.
        num_slices: the number of slices per microbatch, along its sequence. Default: 1, not cut.

    Raises:
        ScheduleError: a count is not positive, or there are more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    return _woven("1F1B", counts, reversed(range(counts.devices)))


def eager_one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Make an eager 1F1B schedule: 1F1B with twice the warmup, to hide copies between devices.

    Device d holds at most ``min(M, 2 (D - d) - 1)`` residuals of each of its stages. The bubble
    equals the bubble of 1F1B if copies take no time, and is smaller if they take time. Source:
    arXiv 2211.05322.

    >>> print(fp.schedules.eager_one_f_one_b(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        num_stages: the number of stages, S.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: S. With fewer devices, each runs a block of
            neighbouring stages.
        num_slices: the number of slices per microbatch, along its sequence. Default: 1, not cut.

    Raises:
        ScheduleError: a count is not positive, or there are more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    return _woven("eager-1F1B", counts, reversed(range(0, 2 * counts.devices, 2)))


def looped_bfs(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Make a breadth-first schedule: all microbatches through a stage, then the device's next
    stage.

    Stages loop over the devices: stage s is on device ``s mod D``. With v stages per device, the
    bubble takes as long as ``(D - 1) / v`` microbatches on a device. Each device holds M residuals
    of each of its stages. Backwards run in ascending microbatch order, unlike in torch's schedule.
    Source: arXiv 2211.05953.

    >>> print(fp.schedules.looped_bfs(4, 2, num_devices=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    Args:
        num_stages: the number of stages, S: a multiple of D.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: half of S if S is even, else S.
        num_slices: the number of slices per microbatch, along its sequence. Default: 1, not cut.

    Raises:
        ScheduleError: a count is not positive, or S is not a multiple of D.
    """
    counts = schedule_counts(
        num_stages, num_microbatches, num_devices, num_slices=num_slices, looped=True, share=2
    )
    warmups = [counts.stages * counts.pieces] * counts.devices
    return _woven("looped-BFS", counts, warmups, [range(counts.microbatches)])


def interleaved(
    num_stages: int,
    num_microbatches: int,
    *,
    num_devices: int | None = None,
    num_slices: int = 1,
    group: int | None = None,
) -> Schedule:
    """Make an interleaved 1F1B schedule: v looped stages per device divide the bubble by v.

    Stage s is on device ``s mod D``. A device takes rounds of about D microbatches through each of
    its stages. Device d holds at most ``2 (D - 1 - d) + (v - 1) D + 1`` residuals if D divides M.
    Source: Megatron-LM (arXiv 2104.04473, figure 4).

    With k slices per microbatch, k a multiple of D, the schedule is that of SlimPipe (arXiv
    2504.14519). A round is then one microbatch. Device 0 holds ``k v + 2 (D - 1)`` residuals of
    slices, hardly more than one microbatch of its stages. The bubble takes as long as ``(D - 1) /
    (k v)`` microbatches.

    With ``group`` = g, the schedule is GIS, the generalized interleaved schedule of PipeOffload
    (arXiv 2503.01328). Rounds then have g microbatches, and after the first round a device begins a
    forward only in every second slot. Device d holds at most ``g (v - 1) + D - d`` residuals. If
    copies take no time, g = D has the bubble of Megatron-LM's order, and a smaller g has a larger
    bubble.

    >>> print(fp.schedules.interleaved(4, 2, num_devices=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Args:
        num_stages: the number of stages, S: a multiple of D.
        num_microbatches: the number of microbatches, M. D need not divide M: rounds then differ by
            one microbatch.
        num_devices: the number of devices, D. Default: half of S if S is even, else S.
        num_slices: the number of slices per microbatch, along its sequence. Default: 1, not cut.
        group: the number of microbatches per round, from half of D to D. None: Megatron-LM's order.

    Raises:
        ScheduleError: a count is not positive, S is not a multiple of D, the group is out of range,
            or a group is given together with slices.
    """
    counts = schedule_counts(
        num_stages, num_microbatches, num_devices, num_slices=num_slices, looped=True, share=2
    )
    if group is not None:
        if counts.slices > 1:
            raise ScheduleError(
                "no such schedule: group= works for whole microbatches only; leave out group= or "
                "num_slices="
            )
        return _grouped(counts, group)
    rounds, before = _rounds(counts)
    return _woven(
        "interleaved",
        counts,
        [before + more for more in reversed(range(0, 2 * counts.devices, 2))],
        rounds,
    )


def _grouped(counts: ScheduleCounts, group: int) -> Schedule:
    """Make a GIS schedule from time slots.

    A device begins a forward in every second slot and a backward in the slots between, for a round
    of g microbatches per stage. A microbatch needs one slot from device to device, so D slots from
    one stage of a device to the next. A round of g microbatches takes 2 g slots, so g must be at
    least half of D.
    """
    stages, microbatches, devices, _ = counts
    least = (devices + 1) // 2
    if type(group) is not int or not least <= group <= devices:
        raise ScheduleError(
            f"no such schedule: group must be a whole number from {least} to {devices} (half of "
            f"the devices to all of them); got {group!r}"
        )
    share = stages // devices
    orders: list[tuple[Action, ...]] = []
    for device in range(devices):
        slots: list[tuple[int, Action]] = []
        for microbatch in range(microbatches):
            round_, position = divmod(microbatch, group)
            begin = 2 * (share * group * round_ + position)
            # The slot of B in the device's last stage.
            turn = begin + 2 * (share - 1) * group + 2 * devices - 1 - device
            for local in range(share):
                forward = Action(Kind.F, local * devices + device, microbatch)
                slots.append((begin + 2 * local * group + device, forward))
                backward = forward._replace(kind=Kind.B)
                slots.append((turn + 2 * group * (share - 1 - local), backward))
        orders.append(tuple(action for _, action in sorted(slots, key=itemgetter(0))))
    return Schedule(tuple(orders), f"GIS-{group}")


def zero_bubble(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Make the zero-bubble schedule ZB-H1: backwards are split into I and W, and W fills waits.

    The span is ``M (F + I + W) + (D - 1)(F + I - W)``, with the memory of 1F1B. With fewer devices
    than stages, the stages loop (stage s is on device ``s mod D``), as in torch's
    ``InterleavedZeroBubble``. Source: arXiv 2401.10241, figure 2.

    >>> print(fp.schedules.zero_bubble(2, 3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        num_stages: the number of stages, S: a multiple of D.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: S.
        num_slices: the number of slices per microbatch, along its sequence. Default: 1, not cut.

    Raises:
        ScheduleError: a count is not positive, or S is not a multiple of D.
    """
    counts = schedule_counts(
        num_stages, num_microbatches, num_devices, num_slices=num_slices, looped=True
    )
    rounds, before = _rounds(counts)
    delays = range(counts.devices)
    name = "ZB-H1" if counts.stages == counts.devices else "interleaved-ZB"
    return _woven(name, counts, [before + more for more in reversed(delays)], rounds, delays)


def zb_h2(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Make the zero-bubble schedule ZB-H2: a longer warmup fills the bubble.

    The span is ``M (F + I + W) + (D - 1)(F + I - 2 W)`` if ``F + I > 2 W``. With F = I = W the span
    has no bubble, and the makespan is ``M (F + I + W) + (D - 1) F``, the least for a line of
    stages. The memory is about twice that of 1F1B: device d holds at most ``2 (D - d) - 1``
    residuals, and the weight residuals of 2 d more microbatches. Source: arXiv 2401.10241, figure
    3.

    >>> print(fp.schedules.zb_h2(2, 3))
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Args:
        num_stages: the number of stages, S.
        num_microbatches: the number of microbatches, M.
        num_devices: the number of devices, D. Default: S. With fewer devices, each runs a block of
            neighbouring stages.
        num_slices: the number of slices per microbatch, along its sequence. Default: 1, not cut.

    Raises:
        ScheduleError: a count is not positive, or there are more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    delays = range(0, 2 * counts.devices, 2)
    return _woven("ZB-H2", counts, reversed(delays), delays=delays)


def _rounds(counts: ScheduleCounts) -> tuple[list[range], int]:
    """Return the rounds of about D pieces, and the forwards of a round before the last stage.

    The second value is for the longest round, and counts forwards of a device before its last
    stage.
    """
    number = max(1, min(counts.microbatches, counts.pieces // counts.devices))
    rounds = blocks(counts.microbatches, number)
    return rounds, (counts.stages // counts.devices - 1) * max(map(len, rounds)) * counts.slices


def _woven(
    name: str,
    counts: ScheduleCounts,
    warmups: Iterable[int],
    rounds: Sequence[range] = (),
    delays: Sequence[int] = (),
) -> Schedule:
    """Call `weave` for each device.

    Args:
        name: the name of the schedule.
        counts: the counts.
        warmups: the warmup of each device, in steps.
        rounds: groups of microbatches. With rounds the stages loop, and a device takes a round
            through one of its stages after the other. Without rounds, a device takes each
            microbatch through its block of stages in one step.
        delays: the delay of W on each device. Without delays, backwards are not split.
    """
    stages, microbatches, devices, slices = counts
    places = (
        [range(device, stages, devices) for device in range(devices)]
        if rounds
        else blocks(stages, devices)
    )
    numbers = [None] if slices == 1 else [*range(slices)]
    # A schedule may have 100,000 actions; tuple.__new__ takes a third of the time of Action(...).
    new = tuple.__new__

    def row(kind: Kind, place: range) -> list[Action]:
        forward = kind is Kind.F
        local, own = (place, numbers) if forward else (place[::-1], numbers[::-1])
        groups = [
            [(m, number) for m in group for number in own]
            for group in rounds or [range(microbatches)]
        ]
        if not rounds:
            groups = [[piece] for piece in groups[0]]
        return [
            new(Action, (kind, stage, *piece))
            for group in groups
            for stage in local
            for piece in group
        ]

    orders: list[tuple[Action, ...]] = []
    for place, warmup, delay in zip(places, warmups, delays or repeat(0), strict=False):
        forwards, backwards = row(Kind.F, place), row(Kind.I if delays else Kind.B, place)
        weights, size = row(Kind.W, place) if delays else (), 1 if rounds else len(place)
        # Slices go back from the last to the first, so the first backward of a microbatch needs the
        # forwards of all its slices. A shorter warmup would deadlock.
        warm = warmup + slices - 1
        orders.append(
            weave(forwards, backwards, warmup=warm, size=size, weights=weights, delay=delay)
        )
    return Schedule(tuple(orders), f"{name}, {slices} slices" if slices > 1 else name)
