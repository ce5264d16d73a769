"""Does the clock predict a run? ``python tests/benchmarks/bench_simulated.py [--repeats 15] [--picture FILE]``.

A compute-bound chain on two CPU lanes. Costs come from `fp.models.profile(lanes=2)`, the schedules run on kept lanes; printed are
the median of the measured makespans, the predicted one, and their ratio. The same for a profile of one lane alone, which
does not see that two share caches and memory, and for the mean times of a recorded run of another schedule (fill-drain).
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import nn

import funcpipe as fp

WIDTH, LAYERS, ROWS, COUNT = 1024, 8, 512, 8


def main() -> None:
    """One line a schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--picture", type=Path, help="an SVG of 1F1B, simulated above measured")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())])
    x = torch.randn(ROWS, WIDTH)
    split = fp.split(model, balance=[LAYERS, LAYERS])
    alone = fp.models.profile(split, x[: ROWS // COUNT], threads_per_lane=1, repeats=9)
    profiled = fp.models.profile(split, x[: ROWS // COUNT], threads_per_lane=1, lanes=2, repeats=25)
    schedules = {
        "1F1B": fp.schedules.one_f_one_b(2, COUNT),
        "fill-drain": fp.schedules.fill_drain(2, COUNT),
        "1F1B, remat": fp.schedules.remat(fp.schedules.one_f_one_b(2, COUNT)),
    }
    plans = {
        name: fp.make_plan(split.stages, one, loss=nn.functional.mse_loss, devices="cpu")
        for name, one in schedules.items()
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    last: dict[str, fp.Timeline] = {}
    with fp.lanes(plans["1F1B"]) as lanes:
        for repeat in range(given.repeats + 2):
            for name, plan in plans.items():
                result = fp.run(plan, split.params, (x, x), executor=lanes, threads_per_lane=1, record=True)
                assert result.timeline is not None
                if repeat >= 2:
                    times[name].append(result.timeline.makespan)
                    last[name] = result.timeline
    together = last["fill-drain"].cost()
    print(
        "| schedule | measured ms | profiled, two lanes | ratio | profiled, one alone | ratio | from another run | ratio |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, schedule in schedules.items():
        median = statistics.median(times[name])
        cells = [
            f"{one * 1e3:.1f} | {one / median:.2f}"
            for one in (fp.simulate(schedule, cost).makespan for cost in (profiled, alone, together))
        ]
        print(f"| {name} | {median * 1e3:.1f} | {' | '.join(cells)} |")
    if given.picture:
        fp.draw(fp.simulate(schedules["1F1B"], profiled), last["1F1B"], memory=True).save(given.picture)


if __name__ == "__main__":
    main()
