"""What is gained where no device waits for the others between batches?

    python tests/benchmarks/bench_batches.py [--width 768] [--microbatches 2 4 8] [--batches 4]
    [--repeats 15]

AdamW (fused) over `--batches` batches, two devices: lanes of one process, then two processes over
gloo (`fp.ranks`), each with one core. Arms, in turn, round by round:

    run, then step       a loop of `fp.run` and `fp.step`
    steps in runs        a loop of `fp.run(optimizer=)`, of a schedule that steps (`step_params`)
    run_batches          the same schedule, all batches in one call
    torch                in processes: torch.distributed.pipelining's schedule and the optimizer of each rank, batch by batch;
                         no rank waits for the others there either, and nothing is clipped

Stages are 4 x (Linear(width) + GELU), compiled; torch's are eager, which it runs alone, so that its
column has an eager `run_batches` beside it. A figure is the median over the rounds of the arm's
time over that of "run, then step" of the same round, eager ones over eager ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import funcpipe as fp

DEVICES, DEPTH, WARMUP = 2, 4, 3
FAMILIES = {"1F1B": fp.schedules.one_f_one_b, "zero-bubble": fp.schedules.zero_bubble}
FIRST = "run, then step"

Batches = Sequence[tuple[Tensor, Tensor]]
Arm = Callable[[Batches], object]


def parts(width: int) -> list[nn.Sequential]:
    """The stages as modules."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(DEVICES * DEPTH)]
    return [nn.Sequential(*layers[at * DEPTH : (at + 1) * DEPTH]) for at in range(DEVICES)]


def own_arms(
    given: argparse.Namespace, family: str, microbatches: int, stack: ExitStack, *, eager: bool
) -> dict[str, Arm]:
    """Ours, each with parameters and an executor of its own."""
    arms: dict[str, Arm] = {}
    schedule = FAMILIES[family](DEVICES, microbatches)
    for name in (FIRST, "steps in runs", "run_batches"):
        stages, params, _ = zip(*map(fp.from_module, parts(given.width)), strict=True)
        stages = stages if eager else tuple(map(fp.compile_stage, stages))
        plan = fp.make_plan(
            stages,
            schedule if name == FIRST else fp.schedules.step_params(schedule),
            loss=F.mse_loss,
            devices="cpu",
        )
        spread = dist.is_initialized()
        executor = stack.enter_context(fp.ranks(plan, timeout=60.0) if spread else fp.lanes(plan))
        params = fp.place(plan, params, *([executor] if spread else []))
        optimizer = torch.optim.AdamW(fp.leaves(params), lr=1e-4, fused=True)
        arms[name] = arm(
            name, plan, params, optimizer, {"executor": executor, "threads_per_lane": 1}
        )
    return arms


def arm(
    name: str, plan: fp.Plan, params: Any, optimizer: torch.optim.Optimizer, options: dict[str, Any]
) -> Arm:
    """One way to train on some batches."""

    def after(batches: Batches) -> None:
        for batch in batches:
            fp.step(optimizer, params, fp.run(plan, params, batch, **options))

    def inside(batches: Batches) -> None:
        for batch in batches:
            fp.run(plan, params, batch, optimizer=optimizer, **options)

    def together(batches: Batches) -> None:
        fp.run_batches(plan, params, batches, optimizer=optimizer, **options)

    return {FIRST: after, "steps in runs": inside, "run_batches": together}[name]


def torchs_arm(given: argparse.Namespace, microbatches: int) -> Arm:
    """That of torch.distributed.pipelining, on this rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    module = parts(given.width)[rank]
    stage = PipelineStage(module, rank, DEVICES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step(batches: Batches) -> None:
        for x, target in batches:
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=target, losses=[])
            optimizer.step()

    return step


def measure(arms: dict[str, Arm], batches: Batches, repeats: int) -> dict[str, list[float]]:
    """Seconds of each round, from the first start to the last end of all processes."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(WARMUP + repeats):
        for name, work in arms.items():
            if dist.is_initialized():
                dist.barrier()
            start = perf_counter()
            work(batches)
            times = torch.tensor([perf_counter(), -start], dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(times, dist.ReduceOp.MAX)
            if repeat >= WARMUP:
                found[name].append(float(times.sum()))
    return found


def tables(given: argparse.Namespace, say: Callable[[str], None]) -> None:
    """All cases, in this process or with the others."""
    where = "processes" if dist.is_initialized() else "lanes"
    for family in FAMILIES:
        for microbatches in given.microbatches:
            rows = given.rows * microbatches
            batches = [
                (torch.randn(rows, given.width), torch.randn(rows, given.width))
                for _ in range(given.batches)
            ]
            with ExitStack() as stack:
                arms = own_arms(given, family, microbatches, stack, eager=False)
                if dist.is_initialized() and family == "1F1B":
                    eager = own_arms(given, family, microbatches, stack, eager=True)
                    arms |= {f"{name}, eager": eager[name] for name in (FIRST, "run_batches")}
                    arms["torch"] = torchs_arm(given, microbatches)
                found = measure(arms, batches, given.repeats)
            say(line(f"{where}, {family}, M = {microbatches}", found))


def line(name: str, found: dict[str, list[float]]) -> str:
    """A row in markdown."""
    first = f"{FIRST}, eager" if "torch" in found else FIRST
    cells = [f"{statistics.median(found[FIRST]) * 1e3:.1f}"]
    for arm_name, base in (
        ("steps in runs", FIRST),
        ("run_batches", FIRST),
        ("run_batches, eager", first),
        ("torch", first),
    ):
        pairs = zip(found.get(arm_name, ()), found[base], strict=False)
        ratios = [one / other for one, other in pairs]
        cells.append(f"{statistics.median(ratios):.3f}" if ratios else "")
    return f"| {name} | {' | '.join(cells)} |"


def serve(rank: int, given: argparse.Namespace, folder: str) -> None:
    """One of two processes."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=DEVICES
    )
    tables(given, (lambda text: print(text, flush=True)) if rank == 0 else lambda _: None)
    dist.destroy_process_group()


def main() -> None:
    """One table."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=32, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    print(
        "| | run, then step, ms | steps in runs | run_batches | eager: run_batches | eager: "
        "torch, 1F1B |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    torch.set_num_threads(1)
    tables(given, lambda text: print(text, flush=True))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (given, folder), DEVICES)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
