"""Host time per action over a hand-written loop with the same torch calls. ``python
tests/benchmarks/bench_overhead.py``.

Stages are as small as can be, so that what is left is the library. The loop does the actions in the
order of the plan with the torch calls that a pipeline cannot do without: detached leaves, lazy
copies at the borders, ``backward`` into the leaves and the sums. "bound" is the time from the first
action to the last (`RunStats.seconds`): stages bound, batch cut; "whole run" has everything. Arms
run interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from results import add_option, write

import funcpipe as fp


def by_hand(params, x, microbatches: int, order) -> None:
    """The actions of a plan for a chain of linear stages: leaves, borders, sums, and nothing
    else."""
    aliases = [{key: p.detach().requires_grad_() for key, p in own.items()} for own in params]
    for own in aliases:
        for alias in own.values():
            alias.grad = torch.zeros_like(alias)
    sums = [tuple(own.values()) for own in aliases]
    rows, last = len(x) // microbatches, len(aliases) - 1
    parts = x.split(rows)
    acts, residuals, grads, losses = {}, {}, {}, {}
    with torch.autograd.set_multithreading_enabled(False):
        for forward, stage, m in order:
            if forward:
                leaf = acts.pop((stage - 1, m)).detach().requires_grad_() if stage else parts[m]
                own = aliases[stage]
                y = F.linear(torch._lazy_clone(leaf), own["w"], own["b"])
                if stage == last:
                    y = F.mse_loss(torch._lazy_clone(y), torch._lazy_clone(parts[m]))
                    losses[m] = y.detach()
                else:
                    acts[stage, m] = y.detach()
                residuals[stage, m] = leaf, y
                continue
            leaf, y = residuals.pop((stage, m))
            gradient = grads.pop((stage, m)) if stage < last else torch.full_like(y, rows / len(x))
            leaves = (*sums[stage], leaf) if stage else sums[stage]
            torch.autograd.backward((y,), (gradient,), inputs=leaves)
            if stage:
                grads[stage - 1, m] = leaf.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=100)
    add_option(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)

    @fp.stage
    def linear(params, x):
        return F.linear(x, params["w"], params["b"])

    print(
        "| stages, M | arm | us per action | over the loop, us | of the loop "
        "|\n|---|---|---:|---:|---:|"
    )
    rows: list[dict[str, Any]] = []
    for stages, microbatches in [(2, 8), (2, 32), (4, 32)]:
        params = tuple({"w": torch.randn(8, 8) / 3, "b": torch.zeros(8)} for _ in range(stages))
        schedule = fp.schedules.one_f_one_b(stages, microbatches)
        plan, programs = (
            fp.make_plan([one] * stages, schedule, loss=F.mse_loss, devices="cpu")
            for one in (linear, fp.compile_stage(linear))
        )
        actions = [plan.program.action(code) for code in plan.program.order]
        order = [(action.kind is fp.Kind.F, action.stage, action.microbatch) for action in actions]
        x = torch.randn(2 * microbatches, 8)
        unit = 2 * stages * microbatches * 1e-6
        with fp.lanes(plan) as lanes:
            arms = {
                "by hand": lambda: by_hand(params, x, microbatches, order),
                "serial": lambda: fp.run(
                    plan, params, (x, x), executor="serial", threads_per_lane=1
                ),
                "compiled, serial": lambda: fp.run(
                    programs, params, (x, x), executor="serial", threads_per_lane=1
                ),
                "threads": lambda: fp.run(plan, params, (x, x), executor=lanes, threads_per_lane=1),
            }
            times: dict[str, list[float]] = {}
            for repeat in range(given.repeats + 3):
                for name, arm in arms.items():
                    start = time.perf_counter()
                    result = arm()
                    whole = time.perf_counter() - start
                    if repeat < 3:
                        continue
                    times.setdefault(name if result is None else f"{name}, bound", [])
                    if result is None:
                        times[name].append(whole / unit)
                    else:
                        times[f"{name}, bound"].append(result.stats.seconds / unit)
                        times.setdefault(f"{name}, whole run", []).append(whole / unit)
        base = statistics.median(times["by hand"])
        size = {"stages": stages, "microbatches": microbatches}
        for name, samples in times.items():
            median = statistics.median(samples)
            ratio = statistics.median(a / b for a, b in zip(samples, times["by hand"], strict=True))
            print(
                f"| {stages}, {microbatches} | {name} | {median:.1f} | {median - base:+.1f} | "
                f"{ratio:.2f} |"
            )
            rows.append({**size, "arm": name, "us": median, "ratio": ratio})
    write(given.json, rows)


if __name__ == "__main__":
    main()
