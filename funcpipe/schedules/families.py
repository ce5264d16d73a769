"""The published schedules on a line or a loop, all from one formula: warmup, steady, cooldown.

A device has a list of forwards and a list of backwards. It runs a few forwards (warmup), then one forward and one
backward in turn (steady), then the backwards that are left (cooldown). What differs is how stages are placed, how the
lists are ordered, how long the warmup is, and whether weight gradients are held back. Every family visits microbatches
in ascending order, so all of them accumulate gradients alike and agree bit for bit.

Sources: GPipe (arXiv 1811.06965), PipeDream-Flush / DAPPLE for 1F1B (arXiv 2006.09503, 2007.01045), eager 1F1B (arXiv
2211.05322), Megatron-LM for interleaved (arXiv 2104.04473), breadth-first (arXiv 2211.05953), zero bubble (arXiv
2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

from funcpipe.core.errors import ScheduleError, raise_all
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.schedules.counts import counted


def weave(
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    *,
    warmup: int,
    size: int = 1,
    weights: Sequence[Action] = (),
    delay: int = 0,
) -> tuple[Action, ...]:
    """The order of one device: ``warmup`` forwards, then forward and backward in turn, then the other backwards.

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
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, backward: bool = True
) -> Schedule:
    """All forwards, then all backwards (GPipe, figure 2c of its paper).

    Bubble ``(D - 1) / (M + D - 1)`` for equal stages; every device holds M residuals, the schedule to use with `remat`.

    >>> print(fill_drain(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1F1 1F2 1B0 1B1 1B2

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages (blocks) each.
        backward: False: the forward-only schedule for evaluation.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    stages, microbatches, devices = _counts(num_stages, num_microbatches, num_devices)
    orders: list[tuple[Action, ...]] = []
    for block in _blocks(stages, devices):
        forwards, backwards = _straight(block, microbatches)
        orders.append(weave(forwards, backwards, warmup=microbatches, size=len(block)) if backward else tuple(forwards))
    return Schedule(tuple(orders), "fill-drain" if backward else "forward-only")


def one_f_one_b(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """One forward, one backward (PipeDream-Flush, DAPPLE): the bubble of fill-drain, the memory of the pipeline's depth.

    Device d holds at most ``min(M, D - d)`` residuals of each of its stages; bubble ``(D - 1) / (M + D - 1)``.

    >>> print(one_f_one_b(2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages (blocks) each.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    stages, microbatches, devices = _counts(num_stages, num_microbatches, num_devices)
    orders = [
        weave(*_straight(block, microbatches), warmup=devices - 1 - device, size=len(block))
        for device, block in enumerate(_blocks(stages, devices))
    ]
    return Schedule(tuple(orders), "1F1B")


def eager_one_f_one_b(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """Eager 1F1B (arXiv 2211.05322): 1F1B with twice the warmup, so that copies between devices keep nobody waiting.

    Device d holds at most ``min(M, 2 (D - d) - 1)`` residuals of each of its stages; the bubble of 1F1B where copies
    take no time, and less where they do.

    >>> print(eager_one_f_one_b(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages (blocks) each.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    stages, microbatches, devices = _counts(num_stages, num_microbatches, num_devices)
    orders = [
        weave(*_straight(block, microbatches), warmup=2 * (devices - 1 - device), size=len(block))
        for device, block in enumerate(_blocks(stages, devices))
    ]
    return Schedule(tuple(orders), "eager-1F1B")


def looped_bfs(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """Breadth-first over looped stages: all microbatches through a stage, then the device's next stage.

    Stage s lies on device ``s mod D``. Bubble ``(D - 1) / v`` full microbatches with v stages a device, memory M.
    (torch runs the backwards in descending microbatch order; here they ascend, as in every family.)

    >>> print(looped_bfs(4, 2, num_devices=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    Args:
        num_stages: how many stages, S; a multiple of D.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; by default two stages a device where S is even.

    Raises:
        ScheduleError: a count that is not positive, or S is no multiple of D.
    """
    stages, microbatches, devices = _counts(num_stages, num_microbatches, num_devices, looped=True, share=2)
    rounds = [range(microbatches)]
    orders: list[tuple[Action, ...]] = []
    for device in range(devices):
        forwards, backwards = (_looped(kind, device, stages, devices, rounds) for kind in (Kind.F, Kind.B))
        orders.append(weave(forwards, backwards, warmup=len(forwards)))
    return Schedule(tuple(orders), "looped-BFS")


def interleaved(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None, group: int | None = None
) -> Schedule:
    """Interleaved 1F1B (Megatron-LM, figure 4): v looped stages a device make the bubble v times smaller.

    Stage s lies on device ``s mod D``. Microbatches go in rounds of about D through each local stage. Device d holds at
    most ``2 (D - 1 - d) + (v - 1) D + 1`` residuals where D divides M.

    With ``group`` = g (GIS, the generalized interleaved schedule of PipeOffload, arXiv 2503.01328) they go in rounds of
    g, and after the first round a device begins a forward only every two slots: device d holds at most ``g (v - 1) + D
    - d`` residuals. Where copies take no time, g = D has the bubble of Megatron-LM's order; a smaller g has a larger
    one.

    >>> print(interleaved(4, 2, num_devices=2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Args:
        num_stages: how many stages, S; a multiple of D.
        num_microbatches: how many microbatches, M; any number (rounds differ by at most one microbatch).
        num_devices: how many devices, D; by default two stages a device where S is even.
        group: microbatches of a round, from half of D to D; None: Megatron-LM's order.

    Raises:
        ScheduleError: a count that is not positive, S is no multiple of D, or a group of another size.
    """
    stages, microbatches, devices = _counts(num_stages, num_microbatches, num_devices, looped=True, share=2)
    if group is not None:
        return _grouped(stages, microbatches, devices, group)
    rounds, longest = _rounds(microbatches, devices)
    orders: list[tuple[Action, ...]] = []
    for device in range(devices):
        forwards, backwards = (_looped(kind, device, stages, devices, rounds) for kind in (Kind.F, Kind.B))
        warmup = (stages // devices - 1) * longest + 2 * (devices - 1 - device)
        orders.append(weave(forwards, backwards, warmup=warmup))
    return Schedule(tuple(orders), "interleaved")


def _grouped(stages: int, microbatches: int, devices: int, group: int) -> Schedule:
    """The schedule in slots: a device begins a forward every two, a backward in those between, g of each stage in turn.

    From device to device is one slot, so from one local stage to the next are D; a round of g takes 2 g, no less.
    """
    least = (devices + 1) // 2
    if type(group) is not int or not least <= group <= devices:
        raise ScheduleError(
            f"no such schedule: group is a whole number from {least} to {devices}, half of the devices to all of "
            f"them; got {group!r}"
        )
    share = stages // devices
    orders: list[tuple[Action, ...]] = []
    for device in range(devices):
        slots: list[tuple[int, Action]] = []
        for microbatch in range(microbatches):
            round_, position = divmod(microbatch, group)
            begin = 2 * (share * group * round_ + position)
            turn = begin + 2 * (share - 1) * group + 2 * devices - 1 - device  # B of the device's last stage
            for local in range(share):
                stage = local * devices + device
                slots.append((begin + 2 * local * group + device, Action(Kind.F, stage, microbatch)))
                slots.append((turn + 2 * group * (share - 1 - local), Action(Kind.B, stage, microbatch)))
        orders.append(tuple(action for _, action in sorted(slots, key=itemgetter(0))))
    return Schedule(tuple(orders), f"GIS-{group}")


def zero_bubble(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """Zero bubble ZB-H1 (arXiv 2401.10241, figure 2): backwards split into I and W, and W fills the waits.

    Span ``M (F + I + W) + (D - 1)(F + I - W)`` at the memory of 1F1B. With fewer devices than stages the stages loop
    (stage s on device ``s mod D``): torch's ``InterleavedZeroBubble``.

    >>> print(zero_bubble(2, 3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        num_stages: how many stages, S; a multiple of D.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default.

    Raises:
        ScheduleError: a count that is not positive, or S is no multiple of D.
    """
    stages, microbatches, devices = _counts(num_stages, num_microbatches, num_devices, looped=True)
    rounds, longest = _rounds(microbatches, devices)
    chunks = stages // devices
    orders: list[tuple[Action, ...]] = []
    for device in range(devices):
        forwards, inputs, weights = (
            _looped(kind, device, stages, devices, rounds) for kind in (Kind.F, Kind.I, Kind.W)
        )
        warmup = (chunks - 1) * longest + (devices - 1 - device)
        orders.append(weave(forwards, inputs, warmup=warmup, weights=weights, delay=device))
    return Schedule(tuple(orders), "ZB-H1" if chunks == 1 else "interleaved-ZB")


def zb_h2(num_stages: int, num_microbatches: int, *, num_devices: int | None = None) -> Schedule:
    """Zero bubble ZB-H2 (arXiv 2401.10241, figure 3): a longer warmup fills the bubble, at twice the memory of 1F1B.

    Span ``M (F + I + W) + (D - 1)(F + I - 2 W)`` while that bracket is positive: nothing is left where F = I = W. The
    makespan is ``M (F + I + W) + (D - 1) F`` then, the least that a line of stages allows. Device d holds at most
    ``2 (D - d) - 1`` residuals and what I leaves of 2 d more.

    >>> print(zb_h2(2, 3))
    0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2

    Args:
        num_stages: how many stages, S.
        num_microbatches: how many microbatches, M.
        num_devices: how many devices, D; S by default. Fewer devices run neighbouring stages (blocks) each.

    Raises:
        ScheduleError: a count that is not positive, or more devices than stages.
    """
    stages, microbatches, devices = _counts(num_stages, num_microbatches, num_devices)
    orders: list[tuple[Action, ...]] = []
    for device, block in enumerate(_blocks(stages, devices)):
        forwards, inputs = _straight(block, microbatches, Kind.I)
        weights = [Action(Kind.W, stage, microbatch) for _, stage, microbatch in inputs]
        warmup, delay = 2 * (devices - 1 - device), 2 * device
        orders.append(weave(forwards, inputs, warmup=warmup, size=len(block), weights=weights, delay=delay))
    return Schedule(tuple(orders), "ZB-H2")


def _counts(
    num_stages: int,
    num_microbatches: int,
    num_devices: int | None,
    *,
    looped: bool = False,
    folded: bool = False,
    share: int = 1,
) -> tuple[int, int, int]:
    """The counts as ints; all faults of them in one message.

    Without ``num_devices`` there is one device for ``share`` stages, where that divides them, else for each.
    """
    faults: list[str] = []
    arguments = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_devices": num_devices}
    counts = counted(arguments, faults, optional="num_devices")
    stages, devices = counts.get("num_stages", 0), counts.get("num_devices", 0)
    if stages > 0 and num_devices is None:
        devices = stages // share if stages % share == 0 else stages
    if 0 < stages < devices:
        faults.append(f"num_devices is at most num_stages; got {devices} devices for {stages} stages")
    elif looped and stages > 0 and devices > 0 and stages % devices:
        divisors = [d for d in range(1, stages + 1) if stages % d == 0]
        faults.append(
            f"looped stages are spread evenly, so num_devices divides num_stages; got {stages} stages on {devices} "
            f"devices; take num_devices from {divisors}"
        )
    elif folded and stages > 0 and devices > 0 and stages != 2 * devices:
        remedy = f"take num_devices={stages // 2}" if stages % 2 == 0 else f"take num_stages={stages + 1}"
        faults.append(
            f"a V has two stages a device, so num_stages is twice num_devices; got {stages} stages on {devices} "
            f"devices; {remedy}"
        )
    raise_all("no such schedule:", faults, ScheduleError)
    return stages, counts["num_microbatches"], devices


def _blocks(stages: int, devices: int) -> list[range]:
    """Neighbouring stages for each device, as equal as can be."""
    size, larger = divmod(stages, devices)
    starts = [device * size + min(device, larger) for device in range(devices + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def _straight(block: range, microbatches: int, backward: Kind = Kind.B) -> tuple[list[Action], list[Action]]:
    """Forwards and backwards (B, or I) of a block of stages, microbatch by microbatch."""
    forwards = [Action(Kind.F, s, m) for m in range(microbatches) for s in block]
    backwards = [Action(backward, s, m) for m in range(microbatches) for s in reversed(block)]
    return forwards, backwards


def _rounds(microbatches: int, devices: int) -> tuple[list[range], int]:
    """The microbatches in rounds of D (of a bit more where D does not divide M), and the longest round."""
    rounds = _blocks(microbatches, max(1, microbatches // devices))
    return rounds, max(map(len, rounds))


def _looped(kind: Kind, device: int, stages: int, devices: int, rounds: list[range]) -> list[Action]:
    """The actions of one kind on a device with looped stages: each round through one local stage after the other."""
    local = range(device, stages, devices)
    chain = local if kind is Kind.F else local[::-1]
    new = tuple.__new__  # a third of the time of Action(...), and there may be a hundred thousand
    return [new(Action, (kind, s, m)) for around in rounds for s in chain for m in around]
