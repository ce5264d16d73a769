"""Do two CPU lanes use two cores, and are they faster than one thread? ``python
tests/benchmarks/bench_lanes.py``.

Arms run interleaved in one process; ratios are of medians. "cores" is process CPU time over wall
time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn as nn

import funcpipe as fp


def arms(
    width: int,
    layers: int,
    rows: int,
    microbatches: int,
    lanes: fp.typing.Lanes,
    plan: fp.Plan,
    model,
    params,
    x,
):
    loss = nn.functional.mse_loss

    def loop():
        """The plain microbatched loop, one thread."""
        for p in model.parameters():
            p.grad = None
        for part in x.chunk(microbatches):
            (loss(model(part), part) / microbatches).backward()

    return {
        "plain loop, 1 thread": loop,
        "serial": lambda: fp.run(plan, params, (x, x), executor="serial", threads_per_lane=1),
        "threads, fresh": lambda: fp.run(
            plan, params, (x, x), executor="threads", threads_per_lane=1
        ),
        "threads, kept": lambda: fp.run(plan, params, (x, x), executor=lanes, threads_per_lane=1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| width x layers, rows, M | arm | median ms | x plain loop | cores "
        "|\n|---|---|---:|---:|---:|"
    )
    for width, layers, rows, microbatches in [
        (1024, 8, 256, 8),
        (512, 8, 256, 8),
        (256, 8, 256, 8),
        (8, 2, 64, 8),
    ]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *[m for _ in range(layers) for m in (nn.Linear(width, width), nn.GELU())]
        )
        stages, params, _ = zip(
            fp.from_module(model[:layers]), fp.from_module(model[layers:]), strict=True
        )
        schedule = fp.schedules.one_f_one_b(2, microbatches)
        plan = fp.make_plan(stages, schedule, loss=nn.functional.mse_loss, devices="cpu")
        x = torch.randn(rows, width)
        with fp.lanes(plan) as lanes:
            found = arms(width, layers, rows, microbatches, lanes, plan, model, params, x)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
            for repeat in range(given.repeats + 2):
                for name, arm in found.items():
                    wall, cpu = time.perf_counter(), time.process_time()
                    arm()
                    if repeat >= 2:
                        times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
        base = statistics.median(wall for wall, _ in times["plain loop, 1 thread"])
        for name, samples in times.items():
            median = statistics.median(wall for wall, _ in samples)
            cores = statistics.median(cpu / wall for wall, cpu in samples)
            print(
                f"| {width} x {layers}, {rows}, {microbatches} | {name} | {median * 1e3:.1f} | "
                f"{median / base:.2f} | {cores:.2f} |"
            )


if __name__ == "__main__":
    main()
