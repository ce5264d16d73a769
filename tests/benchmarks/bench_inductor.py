"""One stage by torch's compiler: as it makes it of each program, and as
``compile_stage(backend="inductor")`` has it made.

    python tests/benchmarks/bench_inductor.py [--repeats 40]

The second half of each model of ``bench_peers.py`` (the whole U-Net, whose halves need each other),
on inputs that lie ready, in one thread: all microbatches forward and backward in turn. "compiler"
is torch's compiler given each program as it is, "inductor" our backend, which has it call kernels
from C++. Arms take turns; milliseconds of the thread's own time, medians, and medians of the ratios
round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch._inductor
import torch.nn.functional as F
from peers_work import KINDS, Work

import funcpipe as fp

WORKS = [
    ("mlp", 64, 256, 8),
    ("mlp", 1024, 256, 8),
    ("gpt2", 32, 32, 8),
    ("gpt2", 128, 32, 8),
    ("resnet", 32, 64, 8),
    ("resnet", 32, 64, 32),
    ("unet", 16, 64, 8),
]
"""Kind, width, rows, microbatches."""
DEPTH, WARMUP = 8, 4
BACKENDS: dict[str, Any] = {
    "graph": "graph",
    "compiler": torch._inductor.compile,
    "inductor": "inductor",
}


def arms(work: Work) -> dict[str, Callable[[], object]]:
    """A step for each way to run the stage; of the U-Net, whose halves need each other, the
    whole."""
    model, x = work.model(), work.x
    if work.in_line:
        first, model = model[: DEPTH // 2], model[DEPTH // 2 :]
        with torch.no_grad():
            x = torch.cat([first(part) for part in x.chunk(work.microbatches)])
    stage, params, state = fp.from_module(model)
    stages = {"eager": stage} | {
        name: fp.compile_stage(stage, backend=one) for name, one in BACKENDS.items()
    }

    def arm(stage: fp.Stage) -> Callable[[], object]:
        plan = fp.make_plan(
            [stage], fp.schedules.one_f_one_b(1, work.microbatches), loss=F.mse_loss, devices="cpu"
        )
        options: dict[str, Any] = {"state": (state,), "executor": "serial", "threads_per_lane": 1}
        return lambda: fp.run(plan, (params,), (x, work.target), **options)

    return {name: arm(stage) for name, stage in stages.items()}


def main() -> None:
    """Take turns, print the table."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(
        "| workload | eager, ms | graph | compiler | inductor | inductor / compiler | inductor / "
        "eager |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind, width, rows, microbatches in WORKS:
        steps = arms(Work.make(kind, width, DEPTH, rows, microbatches, False, reference=False))
        times: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(repeats + WARMUP):
            for name, step in steps.items():
                start = thread_time()
                step()
                if repeat >= WARMUP:
                    times[name].append(thread_time() - start)
        found = [f"{statistics.median(own) * 1e3:.1f}" for own in times.values()]
        ratios = [
            statistics.median(a / b for a, b in zip(times["inductor"], times[base], strict=True))
            for base in ("compiler", "eager")
        ]
        depth = DEPTH if kind == "unet" else DEPTH // 2
        title = f"{depth} x {KINDS[kind].format(width=width)}, {rows} rows; M = {microbatches}"
        print(
            f"| {title} | {' | '.join(found)} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
