"""Levels: stages that keep all or checkpoint their layers, by microbatch, under a memory limit; simulated and run.

    python tests/benchmarks/bench_levels.py [--repeats 11]
    python tests/benchmarks/bench_levels.py --small 60

Two lanes with a stage each, four residual layers (norm, product, GELU, product) and 8 microbatches. Level 0 is eager and keeps
everything, level 1 has every layer in a ``torch.utils.checkpoint``. Both are profiled with both lanes at work. Limits are in
residuals of level 0; for each, `fp.search` finds a schedule of one level for all stages (the shorter that fits), of one level for
each stage, and of levels by microbatch. All are run in turn, and the medians compared with the schedule without a limit;
"simulated" is the same ratio by the clock.

With ``--small``: so many small random instances, with a level that keeps half for a longer backward, against CP-SAT.
"""

import argparse
import os
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcpipe as fp
from funcpipe.schedules.levels import mixed

WIDTH, LAYERS, ROWS, MICROBATCHES, DEVICES = 256, 4, 512, 8, 2


class Layer(nn.Module):
    """A residual layer, which keeps its input alone if it is wrapped."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        self.wrap = wrap
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self.body, x, use_reentrant=False) if self.wrap else self.body(x))


def stage_of(number: int) -> tuple[fp.Stage, object]:
    """A stage with both levels, and its parameters."""
    made = []
    for wrap in (False, True):
        torch.manual_seed(number)
        made.append(fp.from_module(nn.Sequential(*[Layer(wrap) for _ in range(LAYERS)]), name=f"stage{number}"))
    return fp.levels(*(stage for stage, _, _ in made)), made[0][1]


def searched(costs: fp.Cost | list[fp.Cost], limit: float | None) -> fp.typing.Found | None:
    """What is found within a limit; None: nothing."""
    counts = {"num_devices": DEVICES, "num_microbatches": MICROBATCHES}
    try:
        return fp.search(costs, memory_limit=limit, evaluations=3000, seconds=60, **counts)
    except fp.ScheduleError:
        return None


def with_levels(schedule: fp.Schedule, chosen: tuple[int, ...]) -> fp.Schedule:
    """A schedule with a level for each stage."""
    forwards = [action for order in schedule.orders for action in order if action.kind is fp.Kind.F]
    return replace(schedule, levels={forward: chosen[forward.stage] for forward in forwards})


def best_of(choices: list[tuple[int, ...]], costs: list[fp.Cost], limit: float) -> fp.Schedule | None:
    """The shortest of these choices of one level a stage."""
    found = [(searched(mixed(costs, chosen), limit), chosen) for chosen in choices]
    fitting = [(one.value, with_levels(one.schedule, chosen)) for one, chosen in found if one is not None]
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else None


def against_proofs(count: int) -> None:
    """How many optima are found, and how far bounds are below them."""
    from search_reference import at_levels, reference, small

    ratios: list[float] = []
    shares: list[float] = []
    for number in range(count):
        one = at_levels(small(number))
        options = {"num_stages": len(one.placement), "placement": one.placement, "memory_limit": one.limit}
        counts = {"num_devices": one.devices, "num_microbatches": one.microbatches}
        found = fp.search(one.costs, **counts, **options, evaluations=3000, seconds=60)
        known = reference(one, found.schedule, seconds=20)
        ratios.append(found.value / known.makespan)
        if known.bound >= known.makespan:
            shares.append(found.lower_bound / known.makespan)
    exact = sum(ratio <= 1 + 1e-9 for ratio in ratios)
    print(
        f"found the best known: {exact} of {count}, within 1 %: {sum(ratio <= 1.01 for ratio in ratios)}; worst {max(ratios):.3f}"
    )
    print(f"of {len(shares)} proven optima the bound is {sum(share >= 1 - 1e-9 for share in shares)}; ", end="")
    print(f"within 2 % of {sum(share >= 0.98 for share in shares)}; worst {min(shares):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", type=int)
    parser.add_argument("--repeats", type=int, default=11)
    given = parser.parse_args()
    if given.small:
        against_proofs(given.small)
        return
    stages, params = zip(*map(stage_of, range(DEVICES)), strict=True)
    x = torch.randn(ROWS, WIDTH)
    costs = [
        fp.models.profile(stages, x, params=params, lanes=DEVICES, threads_per_lane=1, level=level, repeats=15)
        for level in range(2)
    ]
    # Eager stages do not split: I is the whole backward, and W nothing.
    costs = [replace(cost, backward_input=cost.backward, backward_weight=0.0, weight_residual=0.0) for cost in costs]
    whole = max(costs[0].residual)
    ratio = max(costs[1].residual) / whole
    print(
        f"level 1 keeps {ratio:.2f} of level 0, its B takes {costs[1].backward[0] / costs[0].backward[0]:.2f} of level 0's"
    )
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH), torch.randn(MICROBATCHES * ROWS, WIDTH)
    free = searched(costs[0], None)
    assert free is not None
    rows: list[tuple[str, str, fp.Schedule]] = [("none", "level 0", free.schedule)]
    for limit in (1.6, 1.2):
        alike = best_of([(0,) * DEVICES, (1,) * DEVICES], costs, limit * whole)
        by_stage = best_of([*product(range(2), repeat=DEVICES)], costs, limit * whole)
        by_microbatch = searched(costs, limit * whole)
        for name, schedule in (
            ("one level for all", alike),
            ("one for each stage", by_stage),
            ("by microbatch", by_microbatch and by_microbatch.schedule),
        ):
            if schedule is not None:
                rows.append((f"{limit:g}", name, schedule))
    plans = [fp.make_plan(stages, row[2], loss=nn.functional.mse_loss, devices="cpu") for row in rows]
    times: list[list[float]] = [[] for _ in plans]
    for repeat in range(given.repeats + 2):
        for plan, row in zip(plans, times, strict=True):
            began = perf_counter()
            fp.run(plan, params, batch, threads_per_lane=1)
            if repeat > 1:
                row.append(perf_counter() - began)
    first = fp.simulate(rows[0][2], costs)
    print(f"without a limit {1000 * first.makespan:.0f} ms are simulated")
    print("limit | levels | at level 1 | ms | ratio | simulated | peak")
    for (limit, name, schedule), row in zip(rows, times, strict=True):
        timeline = fp.simulate(schedule, costs)
        share = sum(level for _, level in schedule.levels) / (DEVICES * MICROBATCHES)
        ratios = median(mine / base for mine, base in zip(row, times[0], strict=True))
        peak = max(timeline.peak) / whole
        print(
            f"{limit} | {name} | {share:.0%} | {1000 * median(row):.0f} | {ratios:.2f} | "
            f"{timeline.makespan / first.makespan:.2f} | {peak:.2f}"
        )


if __name__ == "__main__":
    main()
