"""The clock: the start of each action of a schedule if all actions run as early as possible.

A fast simulation on coded actions, for the check and for searches. It finds deadlocks. It knows no
slots, no memory and no unequal slices: `view/play.py` simulates plans with all of these.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.kinds import (
    BY_SIZE,
    COUNTED,
    KINDS,
    LINKS,
    MOVES,
    WHOLE,
    Flow,
    Kind,
    flowing,
)
from funcpipe._src.data.schedule import Action

CODED = tuple(Kind)  # the kinds by their codes: small ints for loops over all actions
CODE = {kind: code for code, kind in enumerate(CODED)}
F, B, I, W, R, O, L, G, *_ = range(len(CODED))


def coded(orders: Iterable[Iterable[Action]], slices: int = 1) -> list[list[tuple[int, int, int]]]:
    """Return the actions of each device as (code, stage, microbatch).

    With slices, the third number is the number of the piece.
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
    """A value that one stage sends to another for each microbatch."""

    # Forward for an activation or a skip, backward for a gradient. The kinds with this flow send
    # the value at their end.
    flow: Flow
    # `source`, `to`: the sending stage and the receiving stage.
    source: int
    to: int
    link: float = 0.0  # the time for which the value occupies the link between the two devices
    latency: float = 0.0  # the additional time until the value arrives


class ClockResult(NamedTuple):
    """The result of `clock`."""

    starts: list[list[float]]  # the start of each action, by device and position
    # The position of each device in a deadlock, -1 for a finished device. Empty: all devices have
    # finished.
    stuck: list[int]


def chain(num_stages: int) -> list[Dependency]:
    """Return the activations and gradients between neighbouring stages, without transfer times."""
    forward = [Dependency(Flow.FORWARD, stage, stage + 1) for stage in range(num_stages - 1)]
    return forward + [Dependency(Flow.BACKWARD, edge.to, edge.source) for edge in forward]


def edges_of(cost: Cost, device_of: Sequence[int]) -> list[Dependency]:
    """Return all values between stages with their times: first the chain, then the skips."""
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


def shares_column(kind: Kind) -> int | None:
    """Return the column of `Cost.piece_shares` that a kind's time takes: 0 is time, 1 is memory.

    None: the kind runs for all microbatches together.
    """
    return None if kind in WHOLE else int(kind in BY_SIZE)


def clock(
    lanes: Sequence[Sequence[tuple[int, int, int]]],
    device_of: Sequence[int],
    microbatches: int,
    durations: Sequence[Sequence[float]],
    edges: Sequence[Dependency],
    pairs: Sequence[dict[int, float]] = (),
    *,
    loose: Sequence[Container[int]] = (),
    shares: Sequence[tuple[float, float]] = (),
) -> ClockResult:
    """Compute the start of each action.

    The rules:

    - A device runs its actions in order. F, B and I wait for the values of other stages, and for a
      residual that L brings back.
    - Values between the same two devices occupy their link one after the other.
    - O, L, G and U occupy a link of the device (G and U the same link), and the device goes on at
      once. L also waits for its O.
    - The computing actions of a stage wait for the stage's last U before them.
    - The two actions of a pair start when both can start, and end together.

    Takes linear time: a device that waits is woken by the value that it waits for.

    Args:
        lanes: for each device its actions as (code, stage, microbatch).
        device_of: the device of each stage.
        microbatches: the number of microbatches, or of pieces.
        durations: the duration of each action, by code and stage.
        edges: the values between stages. Values of one stage are sent in this order.
        pairs: for each device, the duration of each pair, by the position of its first action. ():
            no pairs. Modified if ``loose`` is given.
        loose: for each device, the pairs that may be taken apart. Whenever all devices are blocked,
            one loose pair is removed from ``pairs``.
        shares: the (time factor, memory factor) of each microbatch or piece; (): all are 1.
    """
    # By edge and microbatch: the arrival of the value; -1 while it is not sent; ``-2 - device``
    # while a device waits for it.
    arrivals = [[-1.0] * microbatches for _ in edges]
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
    sized = [shares_column(kind) for kind in CODED]
    busy: dict[int, float] = {}  # until when each link between devices is
    own_links = [[0.0] * len(LINKS) for _ in lanes]  # until when each device's own links are busy
    # By (stage, microbatch): the time when a residual is at the host, or back. By (stage, -1): the
    # time when the parameters are gathered.
    moved: dict[tuple[int, int], float] = {}
    starts: list[list[float]] = [[] for _ in lanes]
    now = [0.0] * len(lanes)
    ready = list(range(len(lanes)))[::-1]

    def hand_on(
        sent: Sequence[tuple[list[float], int, float]], microbatch: int, time: float
    ) -> None:
        # The main loop repeats this code for single actions: a call per action would cost 10%.
        for arrival, crossing, link in sent:
            arrived = time
            if link:
                if shares:
                    link *= shares[microbatch][1]
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
            if shares and (column := sized[code]) is not None:
                duration *= shares[microbatch][column]
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
                        continue  # the second action of the pair decides when both start
                    if position - 1 in joined:
                        row[-2], duration = time, joined[position - 1]
                        code, stage, other = lane[position - 1]
                        hand_on(steps[code][stage][2], other, time + duration)
                time += duration
                for arrival, crossing, link in sent:
                    arrived = time
                    if link:
                        if shares:
                            link *= shares[microbatch][1]
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
    """Take apart one loose pair at which a device waits.

    Returns [device], or [] if no device waits at a loose pair.
    """
    for device, (lane, row, joined) in enumerate(zip(lanes, starts, pairs, strict=True)):
        at = len(row) - (len(row) - 1 in joined)
        if at < len(lane) and at in joined and at in loose[device]:
            del joined[at], row[at:]  # the pair has not begun, so the first action starts again
            return [device]
    return []
