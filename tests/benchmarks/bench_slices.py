"""A causal transformer of long sequences on two lanes: whole microbatches against slices of them,
time and memory.

    python tests/benchmarks/bench_slices.py [--length 4096] [--rows 4] [--width 256] [--layers 2]
    [--repeats 5]

Two stages of hand-written blocks (attention by torch's kernel, an MLP; float32), one intra-op
thread a lane, microbatches of one row. Steps of all arms in turns, a column is the median, and the
median over rounds of its time over that of whole microbatches. Memory is the most that a process of
its own had in use during a step beyond what it had before it (peak resident set), and what the
simulator says device 0 holds, in microbatches of its stage.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "0")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

import funcpipe as fp

HEADS = 4


@cache
def mask_of(length: int, seen: int) -> torch.Tensor:
    """What is added to the scores of a slice: as large as these, so all layers and microbatches
    share it."""
    return torch.full((length, seen), float("-inf")).triu(seen - length + 1)


def block(p: dict[str, torch.Tensor], x: torch.Tensor, past: Any) -> tuple[torch.Tensor, Any]:
    """One transformer block on a slice: what it gives, and the keys and values of all slices so
    far."""
    rows, length, width = x.shape
    parts = (
        (F.layer_norm(x, (width,)) @ p["qkv"])
        .view(rows, length, 3, HEADS, -1)
        .permute(2, 0, 3, 1, 4)
    )
    query, key, value = parts.unbind(0)
    if past is None:
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        y = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask_of(length, key.shape[2])
        )
    x = x + y.transpose(1, 2).reshape(rows, length, width) @ p["out"]
    return x + F.gelu(F.layer_norm(x, (width,)) @ p["up"]) @ p["down"], (key, value)


def stage_of(number: int) -> fp.Stage:
    """Half of the blocks."""

    def run(params: list[dict[str, torch.Tensor]], x: torch.Tensor, *, carry: Any) -> fp.Out:
        after = []
        for p, past in zip(params, carry or [None] * len(params), strict=True):
            x, new = block(p, x, past)
            after.append(new)
        return fp.Out(x, carry=after)

    return fp.stage(run, name=f"blocks{number}")


def params_of(width: int, layers: int) -> tuple[list[dict[str, torch.Tensor]], ...]:
    """Parameters of both stages."""
    make = lambda *size: torch.randn(*size) / size[0] ** 0.5
    blocks = [
        {
            "qkv": make(width, 3 * width),
            "out": make(width, width),
            "up": make(width, 4 * width),
            "down": make(4 * width, width),
        }
        for _ in range(layers)
    ]
    return blocks[: layers // 2], blocks[layers // 2 :]


def schedules(rows: int) -> dict[str, tuple[fp.Schedule, float | None]]:
    """The arms: a schedule, and the share of attention by which its slices are balanced; None:
    equal ones."""
    one = fp.schedules.one_f_one_b
    whole = one(2, rows)
    return {
        "whole, 1F1B": (whole, None),
        "whole, 1F1B, remat": (fp.schedules.remat(whole), None),
        **{f"{count} slices, 1F1B": (one(2, rows, num_slices=count), None) for count in (2, 4, 8)},
        "8 slices, balanced": (one(2, rows, num_slices=8), 0.5),
        "4 slices, 1F1B, remat": (fp.schedules.remat(one(2, rows, num_slices=4)), None),
    }


def step_of(name: str, options: argparse.Namespace) -> tuple[Callable[[], fp.Result], fp.Plan]:
    """A step of an arm."""
    torch.manual_seed(0)
    params = params_of(options.width, options.layers)
    batch = torch.randn(2, options.rows, options.length, options.width).unbind(0)
    schedule, attention = schedules(options.rows)[name]
    slices = ()
    if attention is not None:
        slices = fp.schedules.balanced_slices(
            options.length, schedule.num_slices, attention=attention
        )
    stages = [stage_of(0), stage_of(1)]
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, slices=slices, devices="cpu")
    lanes = fp.lanes(plan)
    lanes.__enter__()
    return lambda: fp.run(plan, params, batch, executor=lanes, threads_per_lane=1), plan


def peak(name: str, options: argparse.Namespace) -> None:
    """Print the bytes that a step had in use beyond what was there, in this process."""
    step, _ = step_of(name, options)
    step()  # masks and memory that is kept for the next step
    Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts
    before = int(
        next(
            line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
        ).split()[1]
    )
    step()
    after = int(
        next(
            line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line
        ).split()[1]
    )
    print((after - before) * 1024)


def rows_of(options: argparse.Namespace) -> Iterator[str]:
    """The table in markdown."""
    steps = {name: step_of(name, options) for name in schedules(options.rows)}
    expected = steps["whole, 1F1B"][0]().grads
    for name, (step, _) in steps.items():
        for mine, other in zip(step().grads, expected, strict=True):
            for a, b in zip(mine, other, strict=True):
                for key in a:
                    torch.testing.assert_close(
                        a[key], b[key], rtol=1e-3, atol=1e-5, msg=f"{name}: {key}"
                    )
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeats):
        for name in random.sample([*steps], len(steps)):
            began = perf_counter()
            steps[name][0]()
            times[name].append(perf_counter() - began)
    yield "| schedule | step, ms | over whole | peak MiB of a step | device 0 holds |"
    yield "|---|---:|---:|---:|---:|"
    arguments = [f"--{key}={value}" for key, value in vars(options).items() if key != "peak"]
    for name, (_, plan) in steps.items():
        ratio = statistics.median(
            a / b for a, b in zip(times[name], times["whole, 1F1B"], strict=True)
        )
        command = [sys.executable, __file__, "--peak", name, *arguments]
        sizes = [
            int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
            for _ in range(3)
        ]
        held = fp.simulate(plan, fp.Cost(slices=plan.slices)).peak[0]
        yield (
            f"| {name} | {1e3 * statistics.median(times[name]):.0f} | {ratio:.2f} | "
            f"{statistics.median(sizes) / 2**20:.0f} | {held:.3g} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    for name, default in {
        "length": 4096,
        "rows": 4,
        "width": 256,
        "layers": 2,
        "repeats": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--peak")
    options = parser.parse_args()
    if options.peak:
        peak(options.peak, options)
        return
    for row in rows_of(options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
