"""Bubble, memory, traffic and latency of schedules on many devices, by the clock.

    python tests/benchmarks/scaling.py [--devices 8 64 256 1024] [--most 17]

Prints the tables of `docs/scaling.md`. A device has a p-th of the model, whose F, I and W of one
microbatch take one unit each; where it has v stages, each takes a v-th of that. Residuals likewise:
what a forward of the device's whole share keeps is one unit, and half of it is left after I. The
clock is the one that `fp.simulate` agrees with (eight devices are done by both, and compared);
without lane programs it goes through millions of actions. What has more than ``--most`` million is
left out.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import funcpipe as fp
from funcpipe._src.data.kinds import MOVES
from funcpipe._src.schedules.clock import CODED, clock, coded, edges_of
from funcpipe._src.schedules.memory import residual_peak

S = fp.schedules
FAMILIES: dict[str, tuple[Callable[..., fp.Schedule], int, int]] = {
    "fill-drain": (S.fill_drain, 1, 2),
    "1F1B": (S.one_f_one_b, 1, 2),
    "eager 1F1B": (S.eager_one_f_one_b, 1, 2),
    "interleaved, v = 2": (S.interleaved, 2, 4),
    "interleaved, v = 4": (S.interleaved, 4, 8),
    "ZB-H1": (S.zero_bubble, 1, 3),
    "ZB-H2": (S.zb_h2, 1, 3),
    "ZB-V": (S.zbv, 2, 6),
    "DualPipeV": (S.dualpipe_v, 2, 6),
    "V-Half": (S.v_half, 2, 6),
    "V-Min": (S.v_min, 2, 6),
}
"""The family, stages of a device, and actions of a device and microbatch (at most)."""

LATENCIES = (0.01, 0.1, 0.3)
MESHES = ((1, 1024, 1), (16, 64, 1), (128, 8, 1), (2, 64, 8), (16, 8, 8))
MICROBATCHES = 2048


class Found(NamedTuple):
    """What the clock says of one schedule.

    Attributes:
        bubble: the share of the makespan in which a device waits.
        peak: the most that a device holds, in residuals of its share.
        values: how many cross from a device to another in a step, for each device and microbatch.
        slower: by how much latency prolongs the makespan.
    """

    bubble: float
    peak: float
    values: float
    slower: tuple[float, ...]


@cache
def look(name: str, devices: int, microbatches: int, latencies: Sequence[float] = ()) -> Found:
    """One schedule."""
    family, each, _ = FAMILIES[name]
    schedule = family(devices * each, microbatches, num_devices=devices)
    cost = partial(fp.Cost, *[1 / each] * 3, residual=1 / each, weight_residual=1 / each / 2)
    lanes, place = coded(schedule.orders), schedule.device_of
    durations = [[cost().of(kind, stage) for stage in range(len(place))] for kind in CODED]
    busy = max(
        sum(durations[code][stage] for code, stage, _ in lane if CODED[code] not in MOVES)
        for lane in lanes
    )

    def makespan(latency: float) -> float:
        starts, _ = clock(
            lanes, place, microbatches, durations, edges_of(cost(comm=latency), place)
        )
        return max(
            row[-1] + durations[lane[-1][0]][lane[-1][1]]
            for row, lane in zip(starts, lanes, strict=True)
        )

    whole = makespan(0.0)
    peak = max(residual_peak(order, schedule, cost()) for order in schedule.orders)
    values = 2 * sum(a != b for a, b in zip(place, place[1:], strict=False)) / devices
    if devices == 8:
        for latency in (0.0, *latencies):
            other = fp.simulate(schedule, cost(comm=latency))
            assert abs(other.makespan - makespan(latency)) < 1e-6, (name, latency)
            assert abs(max(other.peak) - peak) < 1e-6, name
    return Found(
        1 - busy / whole,
        peak,
        values,
        tuple(makespan(latency) / whole - 1 for latency in latencies),
    )


def cells(
    name: str, pairs: Sequence[tuple[int, int]], show: Callable[[Found], str], most: float
) -> Iterator[str]:
    """One cell for each (devices, microbatches)."""
    for devices, microbatches in pairs:
        yield (
            show(look(name, devices, microbatches))
            if fits(name, devices, microbatches, most)
            else "-"
        )
        gc.collect()


def fits(name: str, devices: int, microbatches: int, most: float) -> bool:
    """Is there such a schedule, and has it at most so many million actions."""
    enough = name != "DualPipeV" or microbatches >= 2 * devices
    return enough and devices * microbatches * FAMILIES[name][2] <= most * 1e6


def table(
    title: str,
    heads: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    show: Callable[[Found], str],
    most: float,
) -> None:
    """A row for each family."""
    print(f"\n| {title} | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for name in FAMILIES:
        print(f"| {name} | {' | '.join(cells(name, pairs, show, most))} |", flush=True)


def least(name: str, devices: int, bubble: float) -> int:
    """The fewest microbatches with a bubble of no more, by halving."""

    def enough(microbatches: int) -> bool:
        return look(name, devices, microbatches).bubble <= bubble + 1e-9

    low = high = 2 * devices if name == "DualPipeV" else 1
    while not enough(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def latency(devices: int, times: Sequence[int]) -> None:
    """What a hop costs."""
    heads = [f"M = {time}p, {hop:g}" for time in times for hop in LATENCIES]
    print(f"\n| longer by, p = {devices:,} | {' | '.join(heads)} |\n|---|{'---:|' * len(heads)}")
    for name in FAMILIES:
        found = [
            slower
            for time in times
            for slower in look(name, devices, time * devices, LATENCIES).slower
        ]
        print(f"| {name} | {' | '.join(f'{one:.1%}' for one in found)} |", flush=True)


def meshes(most: float) -> None:
    """The same devices in several meshes."""
    names = ("1F1B", "interleaved, v = 2", "ZB-H1", "ZB-V")
    print(
        f"\n| dp x pp x tp | M | {' | '.join(names)} | residuals of 1F1B "
        f"|\n|---|---:|{'---:|' * (len(names) + 1)}"
    )
    for dp, pp, tp in MESHES:
        count = MICROBATCHES // dp
        shown = [*cells_of(names, pp, count, most)]
        print(
            f"| {dp} x {pp} x {tp} | {count:,} | {' | '.join(shown)} | "
            f"{look('1F1B', pp, count).peak / pp / tp:.3g} |",
            flush=True,
        )


def cells_of(names: Sequence[str], devices: int, microbatches: int, most: float) -> Iterator[str]:
    """The bubble of each family."""
    for name in names:
        yield from cells(name, [(devices, microbatches)], lambda found: f"{found.bubble:.1%}", most)


def main() -> None:
    """All tables."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--most", type=float, default=17.0, help="million actions")
    given = parser.parse_args()
    sizes = [f"p = {devices:,}" for devices in given.devices]

    def percent(found: Found) -> str:
        return f"{found.bubble:.1%}"

    times = (1, 2, 4, 8, 16)
    table(
        "bubble, p = 64",
        [f"M = {time}p" for time in times],
        [(64, 64 * time) for time in times],
        percent,
        given.most,
    )
    table("bubble, M = 2p", sizes, [(p, 2 * p) for p in given.devices], percent, given.most)
    table(
        "residuals, M = 2p",
        sizes,
        [(p, 2 * p) for p in given.devices],
        lambda found: f"{found.peak:g}",
        given.most,
    )
    table(
        "values, M = 2p",
        sizes,
        [(p, 2 * p) for p in given.devices],
        lambda found: f"{found.values:.2f}",
        given.most,
    )
    print("\n| fewest M with a bubble of at most 10 % | p = 8 | p = 64 |\n|---|---:|---:|")
    for name in FAMILIES:
        print(f"| {name} | {' | '.join(f'{least(name, p, 0.1):,}' for p in (8, 64))} |", flush=True)
    latency(64, (2, 8))
    meshes(given.most)


if __name__ == "__main__":
    main()
