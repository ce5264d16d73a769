"""Schedules on a V: the stages go down the devices and back up, so the first device has the input
and the loss.

Device d has two stages, d on the way down and ``2D - 1 - d`` on the way up; together their
residuals live as long on one device as on any other, so memory is even. Two ways lead to an order.
ZB-V and DualPipeV are spelled: a device has phases, each phase repeats some words, each word takes
the next microbatch of its stage. V-Half and V-Min are squeezed: one microbatch is laid out in time
slots, repeated every six slots, and what has to wait for nothing moves up. Both visit microbatches
in ascending order on every stage, as all families do.

Sources: ZB-V in zero bubble (arXiv 2401.10241) and controllable memory (arXiv 2405.15362), which
has V-Half and V-Min; DualPipeV is DualPipe (arXiv 2412.19437) cut in half.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.clock import CODE, clock, coded
from funcpipe._src.schedules.clock import chain as neighbours
from funcpipe._src.schedules.counts import schedule_counts
from funcpipe._src.schedules.squeeze import BLOCK, Block, most_held, repeated, squeezed, steady

_Phase = tuple[int, str]
"""So many times these words. ``F0``: the next forward of the stage on the way down, ``I1``: the
next I of the other one, ``W0``: the oldest W that this stage still owes, ``W``: the oldest that the
device owes."""

_KINDS = {kind.value: kind for kind in Kind}


def zbv(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """ZB-V (arXiv 2401.10241, section 6): the memory of 1F1B, on every device alike, and no bubble
    where F = I = W.

    Times below are of one stage, of which a device has two. Where F, I and W take the same time and
    ``M >= 2D - 1``, every device works without a pause: span ``6 M``, makespan ``6 M + D - 1``.
    Every device holds at most 2D residuals of a stage, as many as the first device of 1F1B.

    >>> print(fp.schedules.zbv(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; any number.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, or S is not twice D.
    """
    _, microbatches, devices, _ = schedule_counts(
        num_stages, num_microbatches, num_devices, folded=True, share=2
    )
    full = max(
        microbatches, 2 * devices - 1
    )  # so many fill the V; of a longer schedule the first few are taken
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
    """DualPipeV: each forward stands beside a whole backward of the other stage, to hide each
    other's communication.

    DualPipe (arXiv 2412.19437, figure 5) cut in half: no second copy of the weights. Backwards are
    whole (B) but where the pipeline fills and drains. Every device holds at most ``2 D + 1``
    residuals of a stage. The F and the B are pairs that overlap (`Schedule.pairs`). Where F, I and
    W take the same time, 1 for a stage, makespan ``6 M + 2 (D - 1)`` if nothing is hidden, and ``6
    M + D - 1`` without pairs (`unpair`). Where a pair takes 2 instead of 3 (`Cost.forward_link`,
    `Cost.backward_link`), ``4 M + 3 D``.

    >>> print(fp.schedules.dualpipe_v(4, 4))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3 3B1) (3F2 0B0) 3B2 (3F3 0B1) 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 (2F2 1B0) (1F3 2B1) (2F3 1B1) 2B2 1B2 2I3 1I3 2W3 1W3

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; at least S.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, S is not twice D, or M is less than S.
    """
    stages, microbatches, devices, _ = schedule_counts(
        num_stages, num_microbatches, num_devices, folded=True, share=2
    )
    if microbatches < stages:
        raise ScheduleError(
            f"no such schedule: DualPipeV fills the V with {stages} microbatches, one for each "
            f"stage; got {microbatches}; take more microbatches, or fp.schedules.zbv, which takes "
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
    pairs[-1] = pairs[-1][
        1:
    ]  # the authors leave the very first apart: everybody waits for this backward
    return Schedule(tuple(map(tuple, orders)), "DualPipeV", frozenset(chain(*pairs)))


def v_half(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """V-Half (arXiv 2405.15362): about half the memory of 1F1B, on every device alike, and half its
    bubble.

    Every device holds at most ``2 (D // 2 + 1)`` residuals of a stage (1F1B: those of 2D), even if
    I gives back nothing of them. Where F, I and W take the same time, 1 for a stage, and ``M >= D >
    2``, the makespan is ``6 M + 3 D - 7``, or ``6 M + 3 D - 4`` for an odd D (1F1B: ``6 M + 6 (D -
    1)``). Where they differ, the bubble stays independent of M while ``W + 2 I >= 2 F`` and ``W + 2
    F >= 2 I``.

    >>> print(fp.schedules.v_half(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; any number.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, or S is not twice D.
    """
    _, microbatches, devices, _ = schedule_counts(
        num_stages, num_microbatches, num_devices, folded=True, share=2
    )
    return Schedule(steady(_half_block, devices, microbatches), "V-Half")


def v_min(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """V-Min (arXiv 2405.15362): about a third of the memory of 1F1B, on every device alike, and two
    thirds of its bubble.

    Every device holds at most ``2 ((D + 4) // 3)`` residuals of a stage (1F1B: those of 2D), even
    if I gives back nothing of them. Where F, I and W take the same time, 1 for a stage, and ``M >=
    D > 1``, the makespan is at most ``6 M + 4 D - 5``, and ``6 M + 4 D - 7`` where 3 divides D
    (1F1B: ``6 M + 6 (D - 1)``). Where they differ, a device may wait in every round, and its bubble
    grows with M; V-Half is robust.

    >>> print(fp.schedules.v_min(4, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 3W1 0I1 0W1 3F2 3I2 3W2 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2I1 1I1 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; any number.
        num_devices: how many devices, D; half of S.

    Raises:
        ScheduleError: a count that is not positive, or S is not twice D.
    """
    _, microbatches, devices, _ = schedule_counts(
        num_stages, num_microbatches, num_devices, folded=True, share=2
    )
    return Schedule(steady(_min_block, devices, microbatches), "V-Min")


def v_adaptive(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, residuals: int
) -> Schedule:
    """Between V-Min and ZB-V (arXiv 2405.15362): as little bubble as a given memory allows, the
    same on every device.

    Every device holds at most ``residuals`` residuals of a stage, even if I gives back nothing of
    them. The first devices hand their microbatches on as in V-Min, the others as where memory is no
    matter, as many as there is memory for. Where F, I and W take the same time, 1 for a stage, and
    ``M > 2 D``, the span is ``6 M + b``; for D = 4 and 4 to 8 residuals b is 11, 10, 5, 3 and 0.

    >>> print(fp.schedules.v_adaptive(4, 3, residuals=4))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    Args:
        num_stages: how many stages, S; twice D.
        num_microbatches: how many microbatches, M; any number.
        num_devices: how many devices, D; half of S.
        residuals: at least those of V-Min, ``2 ((D + 4) // 3)``; more than 2 D bring nothing.

    Raises:
        ScheduleError: a count that is not positive, S is not twice D, or fewer residuals than V-Min
            has.
    """
    stages, microbatches, devices, _ = schedule_counts(
        num_stages, num_microbatches, num_devices, folded=True, share=2
    )
    fewest = min(2 * ((devices + 4) // 3), 2 * microbatches)
    if not isinstance(residuals, int) or residuals < fewest:
        raise ScheduleError(
            f"no such schedule: residuals is a whole number from {fewest}, what V-Min holds on "
            f"{devices} devices; got {residuals!r}; or fp.search(..., remat=True)"
        )
    sample = min(microbatches, 2 * devices + 2)  # it is steady by then

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
            return None  # two of its actions would meet
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


def _spell(device: int, devices: int, phases: Sequence[_Phase]) -> list[Action]:
    """The order that the phases of a device spell."""
    stages = (device, 2 * devices - 1 - device)
    forwards, backwards = [0, 0], [0, 0]  # done of each stage
    owed: list[tuple[int, int]] = []  # W, as (which stage, microbatch)
    order: list[Action] = []
    new = tuple.__new__  # a third of the time of Action(...), and there may be a hundred thousand
    for times, words in phases:
        spelled = [(_KINDS[word[0]], int(word[1:] or -1)) for word in words.split()]
        if all(kind in (Kind.F, Kind.B) for kind, _ in spelled):
            # Nothing is owed: each word counts up by itself, so its actions are made in one go, and
            # dealt out.
            columns: list[list[Action]] = []
            steps = Counter(spelled)
            for kind, which in spelled:
                counter, step = forwards if kind is Kind.F else backwards, steps[kind, which]
                numbers = range(counter[which], counter[which] + step * times, step)
                columns.append(
                    [new(Action, (kind, stages[which], microbatch, None)) for microbatch in numbers]
                )
                counter[which] += 1
            for (kind, which), step in steps.items():
                (forwards if kind is Kind.F else backwards)[which] += step * (times - 1)
            order.extend(chain.from_iterable(zip(*columns, strict=True)))
            continue
        for kind, which in spelled * times:
            if kind is Kind.W:
                at = 0
                while which >= 0 and owed[at][0] != which:
                    at += 1
                owner, microbatch = owed.pop(at)
                order.append(new(Action, (kind, stages[owner], microbatch, None)))
                continue
            counter = forwards if kind is Kind.F else backwards
            microbatch = counter[which]
            counter[which] = microbatch + 1
            order.append(new(Action, (kind, stages[which], microbatch, None)))
            if kind is Kind.I:
                owed.append((which, microbatch))
    return order


def _half_block(device: int, devices: int) -> Block:
    gap = 0 if devices % 2 else 3  # else two microbatches would meet in a slot
    return (
        2 * device,
        3 * devices - 2 - device,
        3 * devices + gap + 2 * device - 1,
        6 * devices + gap - 2 - device,
    )


def _min_block(device: int, devices: int) -> Block:
    gap = 0 if devices % 3 else 2
    return (
        device,
        2 * devices - 1 - device,
        2 * devices + gap + device,
        4 * devices + gap - 1 - device,
    )


def _adaptive_block(device: int, devices: int, slow: int, gap: int) -> Block:
    """A block with one slot from each of the first ``slow`` devices to the next, three from the
    others, both ways."""

    def slots(hops: int) -> int:
        return min(hops, slow) + 3 * max(0, hops - slow)

    turn = slots(devices - 1)
    down, back = slots(device), turn - slots(device)
    return down, turn + 1 + back, 2 * turn + 2 + gap + down, 3 * turn + 3 + gap + back


def _span(orders: tuple[tuple[Action, ...], ...]) -> float:
    """The span where every action takes one unit of time."""
    schedule = Schedule(orders)
    lanes = coded(orders)
    stages = schedule.num_stages
    durations = [[1.0] * stages] * len(CODE)
    starts = clock(
        lanes, schedule.device_of, schedule.num_microbatches, durations, neighbours(stages)
    ).starts
    return max(row[-1] - row[0] for row in starts) + 1
