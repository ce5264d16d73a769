"""Host time per action over a hand-written loop with the same torch calls. ``python tests/benchmarks/bench_overhead.py``.

Stages are as small as can be, so that what is left is the library. Arms run interleaved; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import funcpipe as fp


def by_hand(params, x, microbatches: int) -> None:
    """1F1B's actions of a chain of linear stages in microbatch order: leaves, borders, sums, and nothing else."""
    aliases = [{key: p.detach().requires_grad_() for key, p in own.items()} for own in params]
    for own in aliases:
        for alias in own.values():
            alias.grad = torch.zeros_like(alias)
    inputs = [list(own.values()) for own in aliases]
    rows = len(x) // microbatches
    for part in x.split(rows):
        value, residuals = part, []
        for stage, own in enumerate(aliases):
            leaf = value.detach().requires_grad_() if stage else value
            y = F.linear(torch._lazy_clone(leaf), own["w"], own["b"])
            residuals.append((leaf, y))
            value = y.detach()
        loss = F.mse_loss(y, part)
        roots, gradient = loss, torch.full_like(loss, rows / len(x))
        for stage in reversed(range(len(aliases))):
            leaf, y = residuals[stage]
            leaves = [*inputs[stage], leaf] if stage else inputs[stage]
            torch.autograd.backward([roots if stage == len(aliases) - 1 else y], [gradient], inputs=leaves)
            gradient = leaf.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)

    @fp.stage
    def linear(params, x):
        return F.linear(x, params["w"], params["b"])

    print("| stages, M | arm | us per action | over the hand-written loop, us |\n|---|---|---:|---:|")
    for stages, microbatches in [(2, 8), (2, 32), (4, 32)]:
        params = tuple({"w": torch.randn(8, 8) / 3, "b": torch.zeros(8)} for _ in range(stages))
        plan = fp.make_plan([linear] * stages, fp.one_f_one_b(stages, microbatches), loss=F.mse_loss, devices="cpu")
        x = torch.randn(2 * microbatches, 8)
        with fp.lanes(plan) as lanes:
            arms = {
                "by hand": lambda: by_hand(params, x, microbatches),
                "serial": lambda: fp.run(plan, params, (x, x), executor="serial", threads_per_lane=1),
                "threads": lambda: fp.run(plan, params, (x, x), executor=lanes, threads_per_lane=1),
            }
            times: dict[str, list[float]] = {name: [] for name in arms}
            for repeat in range(given.repeats + 3):
                for name, arm in arms.items():
                    start = time.perf_counter()
                    arm()
                    if repeat >= 3:
                        times[name].append((time.perf_counter() - start) / (2 * stages * microbatches) * 1e6)
        base = statistics.median(times["by hand"])
        for name, samples in times.items():
            median = statistics.median(samples)
            print(f"| {stages}, {microbatches} | {name} | {median:.1f} | {median - base:.1f} |")


if __name__ == "__main__":
    main()
