"""Packed and ordered microbatches against sorted samples and arrival order, by the clock:
``python tests/benchmarks/bench_packing.py [--devices 4] [--microbatches 16] [--samples 64]``.

30 random distributions of lengths: ten lognormal, ten uniform, ten of short samples with some long
ones. Each gives one batch. *Arrival* and *sorted* cut it into microbatches of equally many samples;
*packed, shuffled* has the groups of `fp.batches.pack` in random order. Printed is the median, and
in parentheses the largest, of the simulated step as a multiple of the work of one device, below
which no schedule and no packing is. Nothing is measured: the table is the same on each machine.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

import funcpipe as fp

ATTENTION = 0.5
DISTRIBUTIONS = 30
SCHEDULES = {"1F1B": fp.schedules.one_f_one_b, "zero-bubble": fp.schedules.zero_bubble}
WAYS = ("arrival", "sorted", "packed, shuffled", "packed")


def lengths_of(number: int, samples: int) -> list[int]:
    """The lengths of a batch of a distribution, whose parameters are drawn first."""
    rng = random.Random(number)
    if number % 3 == 0:
        spread = rng.uniform(0.3, 1.2)
        return [1 + int(rng.lognormvariate(6, spread)) for _ in range(samples)]
    if number % 3 == 1:
        least = rng.randint(1, 1024)
        return [rng.randint(least, 2048) for _ in range(samples)]
    share, long = rng.uniform(0.02, 0.2), rng.randint(1024, 8192)
    return [long if rng.random() < share else rng.randint(64, 512) for _ in range(samples)]


def costs_of(lengths: Sequence[int]) -> list[float]:
    """The cost of each sample, as `fp.batches.pack` counts it."""
    longest = max(lengths)
    shares = [length / longest for length in lengths]
    return [(1 - ATTENTION) * share + ATTENTION * share**2 for share in shares]


def microbatches_of(number: int, samples: int, count: int) -> Iterator[tuple[str, list[float]]]:
    """The costs of the microbatches of a batch, by each way to make them."""
    lengths = lengths_of(number, samples)
    size = samples // count
    for way, order in (("arrival", lengths), ("sorted", sorted(lengths))):
        costs = costs_of(order)
        yield way, [sum(costs[at : at + size]) for at in range(0, samples, size)]
    packed = [*fp.batches.pack(lengths, count, attention=ATTENTION).costs]
    yield "packed, shuffled", random.Random(number).sample(packed, count)
    yield "packed", packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("devices", 4), ("microbatches", 16), ("samples", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    devices, count, samples = options.devices, options.microbatches, options.samples
    if samples % count:
        parser.error(f"{samples} samples do not divide into {count} equal microbatches")
    print(f"| schedule | {' | '.join(WAYS)} |\n|---|{'---:|' * len(WAYS)}")
    for name, family in SCHEDULES.items():
        schedule = family(devices, count)
        steps: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(DISTRIBUTIONS):
            for way, costs in microbatches_of(number, samples, count):
                timeline = fp.simulate(schedule, fp.Cost(microbatches=costs))
                steps[way].append(timeline.makespan / (3 * sum(costs)))
        cells = [f"{median(values):.2f} ({max(values):.2f})" for values in steps.values()]
        print(f"| {name} | {' | '.join(cells)} |")
    excesses = [
        fp.batches.pack(lengths_of(number, samples), count, attention=ATTENTION).excess
        for number in range(DISTRIBUTIONS)
    ]
    print(f"\nLargest microbatch above its bound: {median(excesses):.2%} ({max(excesses):.2%})")


if __name__ == "__main__":
    main()
