"""The published schedules on a line or a loop, all from one formula: warmup, steady, cooldown.

A device has a list of forwards and a list of backwards. It runs a few forwards (warmup), then one
forward and one backward in turn (steady), then the backwards that are left (cooldown). What differs
is how stages are placed, how the lists are ordered, how long the warmup is, and whether weight
gradients are held back. Every family visits microbatches in ascending order, so all of them
accumulate gradients alike and agree bit for bit.

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
    """The order of one device: ``warmup`` forwards, then forward and backward in turn, then the
    other backwards.

    Args:
        forwards: the device's forwards in their order.
        backwards: as many backwards (B, or I) in their order.
        warmup: steps of forwards before the first pair of forward and backward.
        size: actions that make one step (the stages of a block).
        weights: the W that belong to ``backwards``, if they are I.
        delay: so many steps of W are held back; they fill the waits of later I.
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
    """All forwards, then all backwards (GPipe, figure 2c of its paper).

    Bubble ``(D - 1) / (M + D - 1)`` for equal stages; every device holds M residuals, the schedule
    to use with `remat`.

    >>> print(fp.schedules.fill_drain(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages
            (blocks) each.
        num_slices: how many slices each microbatch is cut into, along its sequence.
        backward: False: the forward-only schedule for evaluation.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    schedule = _woven("fill-drain", counts, [counts.pieces] * counts.devices)
    return schedule if backward else Schedule(schedule.forwards().orders, "forward-only")


def one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """One forward, one backward (PipeDream-Flush, DAPPLE): the bubble of fill-drain, the memory of
    the pipeline's depth.

    Device d holds at most ``min(M, D - d)`` residuals of each of its stages; bubble ``(D - 1) / (M
    + D - 1)``.

    Over k slices of each microbatch it is Seq1F1B (arXiv 2406.03488): device d holds ``D - d + k -
    1`` residuals of a slice, each a k-th, and the bubble is that of k times as many microbatches.

    >>> print(fp.schedules.one_f_one_b(2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(fp.schedules.one_f_one_b(2, 1, num_slices=2))
    0F0.0 0F0.1 0B0.1 0B0.0
    1F0.0 1F0.1 1B0.1 1B0.0

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages
            (blocks) each.
        num_slices: how many slices each microbatch is cut into, along its sequence.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    return _woven("1F1B", counts, reversed(range(counts.devices)))


def eager_one_f_one_b(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Eager 1F1B (arXiv 2211.05322): 1F1B with twice the warmup, so that copies between devices
    keep nobody waiting.

    Device d holds at most ``min(M, 2 (D - d) - 1)`` residuals of each of its stages; the bubble of
    1F1B where copies take no time, and less where they do.

    >>> print(fp.schedules.eager_one_f_one_b(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages
            (blocks) each.
        num_slices: how many slices each microbatch is cut into, along its sequence.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    return _woven("eager-1F1B", counts, reversed(range(0, 2 * counts.devices, 2)))


def looped_bfs(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Breadth-first over looped stages: all microbatches through a stage, then the device's next
    stage.

    Stage s lies on device ``s mod D``. Bubble ``(D - 1) / v`` full microbatches with v stages a
    device, memory M. (torch runs the backwards in descending microbatch order; here they ascend, as
    in every family.)

    >>> print(fp.schedules.looped_bfs(4, 2, num_devices=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    Args:
        num_stages: how many stages, S; a multiple of D.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; by default two stages a device where S is even.
        num_slices: how many slices each microbatch is cut into, along its sequence.

    Raises:
        ScheduleError: a count that is not positive, or S is no multiple of D.
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
    """Interleaved 1F1B (Megatron-LM, figure 4): v looped stages a device make the bubble v times
    smaller.

    Stage s lies on device ``s mod D``. Microbatches go in rounds of about D through each local
    stage. Device d holds at most ``2 (D - 1 - d) + (v - 1) D + 1`` residuals where D divides M.

    Over k slices of each microbatch, k a multiple of D, it is the schedule of SlimPipe (arXiv
    2504.14519): a round is one microbatch, and device 0 holds ``k v + 2 (D - 1)`` residuals of
    slices, hardly more than the one microbatch of its stages; the bubble is ``(D - 1) / (k v)``
    microbatches.

    With ``group`` = g (GIS, the generalized interleaved schedule of PipeOffload, arXiv 2503.01328)
    they go in rounds of g, and after the first round a device begins a forward only every two
    slots: device d holds at most ``g (v - 1) + D
    - d`` residuals. Where copies take no time, g = D has the bubble of Megatron-LM's order; a
      smaller g has a larger
    one.

    >>> print(fp.schedules.interleaved(4, 2, num_devices=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Args:
        num_stages: how many stages, S; a multiple of D.
        num_microbatches: how many microbatches, M; any number (rounds differ by at most one
            microbatch).
        num_devices: how many devices, D; by default two stages a device where S is even.
        num_slices: how many slices each microbatch is cut into, along its sequence.
        group: microbatches of a round, from half of D to D; None: Megatron-LM's order.

    Raises:
        ScheduleError: a count that is not positive, S is no multiple of D, a group of another size,
            or of slices.
    """
    counts = schedule_counts(
        num_stages, num_microbatches, num_devices, num_slices=num_slices, looped=True, share=2
    )
    if group is not None:
        if counts.slices > 1:
            raise ScheduleError(
                "no such schedule: group= is of whole microbatches; leave it or num_slices= out"
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
    """The schedule in slots: a device begins a forward every two, a backward in those between, g of
    each stage in turn.

    From device to device is one slot, so from one local stage to the next are D; a round of g takes
    2 g, no less.
    """
    stages, microbatches, devices, _ = counts
    least = (devices + 1) // 2
    if type(group) is not int or not least <= group <= devices:
        raise ScheduleError(
            f"no such schedule: group is a whole number from {least} to {devices}, half of the "
            f"devices to all of them; got {group!r}"
        )
    share = stages // devices
    orders: list[tuple[Action, ...]] = []
    for device in range(devices):
        slots: list[tuple[int, Action]] = []
        for microbatch in range(microbatches):
            round_, position = divmod(microbatch, group)
            begin = 2 * (share * group * round_ + position)
            turn = (
                begin + 2 * (share - 1) * group + 2 * devices - 1 - device
            )  # B of the device's last stage
            for local in range(share):
                stage = local * devices + device
                slots.append(
                    (begin + 2 * local * group + device, Action(Kind.F, stage, microbatch))
                )
                slots.append(
                    (turn + 2 * group * (share - 1 - local), Action(Kind.B, stage, microbatch))
                )
        orders.append(tuple(action for _, action in sorted(slots, key=itemgetter(0))))
    return Schedule(tuple(orders), f"GIS-{group}")


def zero_bubble(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, num_slices: int = 1
) -> Schedule:
    """Zero bubble ZB-H1 (arXiv 2401.10241, figure 2): backwards split into I and W, and W fills the
    waits.

    Span ``M (F + I + W) + (D - 1)(F + I - W)`` at the memory of 1F1B. With fewer devices than
    stages the stages loop (stage s on device ``s mod D``): torch's ``InterleavedZeroBubble``.

    >>> print(fp.schedules.zero_bubble(2, 3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        num_stages: how many stages, S; a multiple of D.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default.
        num_slices: how many slices each microbatch is cut into, along its sequence.

    Raises:
        ScheduleError: a count that is not positive, or S is no multiple of D.
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
    """Zero bubble ZB-H2 (arXiv 2401.10241, figure 3): a longer warmup fills the bubble, at twice
    the memory of 1F1B.

    Span ``M (F + I + W) + (D - 1)(F + I - 2 W)`` while that bracket is positive: nothing is left
    where F = I = W. The makespan is ``M (F + I + W) + (D - 1) F`` then, the least that a line of
    stages allows. Device d holds at most ``2 (D - d) - 1`` residuals and what I leaves of 2 d more.

    >>> print(fp.schedules.zb_h2(2, 3))
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages
            (blocks) each.
        num_slices: how many slices each microbatch is cut into, along its sequence.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    counts = schedule_counts(num_stages, num_microbatches, num_devices, num_slices=num_slices)
    delays = range(0, 2 * counts.devices, 2)
    return _woven("ZB-H2", counts, reversed(delays), delays=delays)


def _rounds(counts: ScheduleCounts) -> tuple[list[range], int]:
    """The microbatches in rounds of about D pieces, and how many forwards of the longest come
    before the last stage."""
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
    """`weave` on every device; with delays, of split backwards.

    With rounds of microbatches the stages loop, and a device takes a round through one of them
    after the other; without, a device takes each microbatch through its neighbouring stages in one
    step. What holds for a microbatch holds for each slice; the slices of one go back from the last
    to the first, so all of them come before.
    """
    stages, microbatches, devices, slices = counts
    places = (
        [range(device, stages, devices) for device in range(devices)]
        if rounds
        else blocks(stages, devices)
    )
    numbers = [None] if slices == 1 else [*range(slices)]
    new = tuple.__new__  # a third of the time of Action(...), and there may be a hundred thousand

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
        warm = warmup + slices - 1
        orders.append(
            weave(forwards, backwards, warmup=warm, size=size, weights=weights, delay=delay)
        )
    return Schedule(tuple(orders), f"{name}, {slices} slices" if slices > 1 else name)
