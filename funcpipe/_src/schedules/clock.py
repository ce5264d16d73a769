"""One clock for all devices: when each action of a schedule starts if all run as early as they
can."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.kinds import COUNTED, KINDS, LINKS, MOVES, WHOLE, Flow, Kind, flowing
from funcpipe._src.data.schedule import Action

CODED = tuple(Kind)
"""The kinds by their codes, the numbers that those use who walk over all actions."""
CODE = {kind: code for code, kind in enumerate(CODED)}
F, B, I, W, R, O, L, G, *_ = range(len(CODED))


def coded(orders: Iterable[Iterable[Action]], slices: int = 1) -> list[list[tuple[int, int, int]]]:
    """The actions of each device as (code, stage, microbatch).

    Of a microbatch in so many slices each is a piece by itself, and the third number is that of the
    piece.
    """
    if slices == 1:
        return [
            [(CODE[kind], stage, microbatch) for kind, stage, microbatch, _ in order]
            for order in orders
        ]
    return [
        [
            (CODE[kind], stage, m if kind in WHOLE else m * slices + (number or 0))
            for kind, stage, m, number in order
        ]
        for order in orders
    ]


class Dependency(NamedTuple):
    """A value that one stage hands to another, every microbatch.

    Attributes:
        flow: forward: an activation or a skip; backward: a gradient. Sent by the kinds that flow
            this way, at their end.
        source, to: the stages.
        link: time that it occupies the link between the two devices.
        latency: time that it takes after that.
    """

    flow: Flow
    source: int
    to: int
    link: float = 0.0
    latency: float = 0.0


class ClockResult(NamedTuple):
    """What the clock showed.

    Attributes:
        starts: the start of each action, by device and position.
        stuck: the position at which each device is stuck, -1 where it is done; empty if all are.
    """

    starts: list[list[float]]
    stuck: list[int]


def chain(num_stages: int) -> list[Dependency]:
    """The activations and gradients between neighbours, each in no time."""
    forward = [Dependency(Flow.FORWARD, stage, stage + 1) for stage in range(num_stages - 1)]
    return forward + [Dependency(Flow.BACKWARD, edge.to, edge.source) for edge in forward]


def edges_of(cost: Cost, device_of: Sequence[int]) -> list[Dependency]:
    """Everything that crosses from stage to stage, with its times; the skips come after the
    chain."""
    bandwidth, sizes = cost.bandwidth or float("inf"), per_stage(cost.output, len(device_of))
    pairs = [(stage, stage + 1, sizes[stage]) for stage in range(len(device_of) - 1)]
    pairs += [(skip.stash, skip.pop, skip.size) for skip in cost.skips]
    out: list[Dependency] = []
    for stash, pop, size in pairs:
        away = device_of[stash] != device_of[pop]
        link, latency = (size / bandwidth, cost.latency(stash, pop)) if away else (0.0, 0.0)
        out += [
            Dependency(Flow.FORWARD, stash, pop, link, latency),
            Dependency(Flow.BACKWARD, pop, stash, link, latency),
        ]
    return out


def durations_of(cost: Cost, num_stages: int) -> list[list[float]]:
    """The time of each kind on each stage, by code."""
    return [[cost.of(kind, stage) for stage in range(num_stages)] for kind in CODED]


def clock(
    lanes: Sequence[Sequence[tuple[int, int, int]]],
    device_of: Sequence[int],
    microbatches: int,
    durations: Sequence[Sequence[float]],
    edges: Sequence[Dependency],
    pairs: Sequence[dict[int, float]] = (),
    *,
    loose: Sequence[Container[int]] = (),
) -> ClockResult:
    """When each action starts.

    What flows (`KindRow.flow`: F; B and I) waits for what flows from other stages to its own, and
    for the residual that an L brings back; everything else a device does for itself, in order.
    Values that cross from one device to another occupy the link between them, one after the other.
    O, L, G and U occupy a link of the device (G and U the same) as soon as the device comes to them
    and the link is free (L when its O has ended, too); the device goes on at once. What a stage
    computes waits for the last U of the stage before it. Two that overlap start when both can, and
    both end when both are done.

    Linear: a device that must wait is woken by the very value that it waits for.

    Args:
        lanes: for each device its actions as (code, stage, microbatch).
        device_of: of each stage.
        microbatches: how many.
        durations: by code and stage.
        edges: what is handed from stage to stage; those of one stage are sent in this order.
        pairs: for each device, by the position of the first of two that overlap, the time that both
            take; () for none.
        loose: for each device, which of its pairs may be taken out of ``pairs``: one at which a
            device waits is, whenever no device can go on.
    """
    arrivals = [
        [-1.0] * microbatches for _ in edges
    ]  # below -1: the device ``-2 - it`` waits for it
    receives: list[list[list[tuple[list[float], float]]]] = [[[] for _ in device_of] for _ in CODED]
    sends: list[list[list[tuple[list[float], int, float]]]] = [
        [[] for _ in device_of] for _ in CODED
    ]
    for (flow, source, to, link, latency), arrival in zip(edges, arrivals, strict=True):
        crossing = device_of[source] * len(lanes) + device_of[to]
        for code in map(CODE.__getitem__, flowing(flow)):
            receives[code][to].append((arrival, latency))
            sends[code][source].append((arrival, crossing, link))
    stages = len(device_of)
    steps = [
        list(zip(times, received, sent, strict=True))
        for times, received, sent in zip(durations, receives, sends, strict=True)
    ]
    ways = [LINKS.index(KINDS[kind].resource) if kind in MOVES else -1 for kind in CODED]
    counted = [kind in COUNTED for kind in CODED]
    busy: dict[int, float] = {}  # until when each link between devices is
    own_links = [
        [0.0] * len(LINKS) for _ in lanes
    ]  # and those to the host, from it, to other replicas
    moved: dict[
        tuple[int, int], float
    ] = {}  # when a residual is at the host, or back; of a stage and -1: parameters
    starts: list[list[float]] = [[] for _ in lanes]
    now = [0.0] * len(lanes)
    ready = list(range(len(lanes)))[::-1]

    def hand_on(
        sent: Sequence[tuple[list[float], int, float]], microbatch: int, time: float
    ) -> None:
        # The same stands below for what is alone: a call for each action would cost a tenth of all.
        for arrival, crossing, link in sent:
            arrived = time
            if link:
                arrived = busy[crossing] = max(time, busy.get(crossing, 0.0)) + link
            waiter = arrival[microbatch]
            arrival[microbatch] = arrived
            if waiter < -1:
                ready.append(int(-2 - waiter))

    while ready:
        device = ready.pop()
        lane, row, time = lanes[device], starts[device], now[device]
        joined = pairs[device] if pairs else None
        for position in range(len(row), len(lane)):
            code, stage, microbatch = lane[position]
            duration, needed, sent = steps[code][stage]
            way = ways[code]
            if way >= 0:
                at = (stage, -1 if counted[code] else microbatch)
                start = max(time, own_links[device][way], moved.get(at, 0.0))
                row.append(start)
                own_links[device][way] = moved[at] = start + duration
                continue
            for arrival, latency in needed:
                arrived = arrival[microbatch]
                if arrived < 0:
                    arrival[microbatch] = -2.0 - device
                    break
                if arrived + latency > time:
                    time = arrived + latency
            else:
                if moved:
                    time = max(
                        time,
                        moved.get((stage, microbatch), 0.0),
                        moved.get((stage % stages, -1), 0.0),
                    )
                row.append(time)
                if joined:
                    if position in joined:
                        continue  # the other one says when both start
                    if position - 1 in joined:
                        row[-2], duration = time, joined[position - 1]
                        code, stage, other = lane[position - 1]
                        hand_on(steps[code][stage][2], other, time + duration)
                time += duration
                for arrival, crossing, link in sent:
                    arrived = time
                    if link:
                        arrived = busy[crossing] = max(time, busy.get(crossing, 0.0)) + link
                    waiter = arrival[microbatch]
                    arrival[microbatch] = arrived
                    if waiter < -1:
                        ready.append(int(-2 - waiter))
                continue
            break
        now[device] = time
        if loose and not ready:
            ready += _parted(lanes, starts, pairs, loose)
    stuck = [
        len(row) if len(row) < len(lane) else -1 for lane, row in zip(lanes, starts, strict=True)
    ]
    return ClockResult(starts, stuck if any(position >= 0 for position in stuck) else [])


def _parted(
    lanes: Sequence[Sequence[object]],
    starts: Sequence[list[float]],
    pairs: Sequence[dict[int, float]],
    loose: Sequence[Container[int]],
) -> list[int]:
    """Take one pair apart at which a device waits; returns the device, or nothing where none waits
    at such a pair."""
    for device, (lane, row, joined) in enumerate(zip(lanes, starts, pairs, strict=True)):
        at = len(row) - (len(row) - 1 in joined)
        if at < len(lane) and at in joined and at in loose[device]:
            del joined[at], row[at:]  # the first has not begun either
            return [device]
    return []
