"""Build, check and lower a schedule: funcpipe against torch.distributed.pipelining, in one process.

    python tests/benchmarks/bench_plan.py [--repeats 5] [--sizes 8,2,32 64,2,256]

Both do what every rank does before the first step: compute the order of all devices, validate it, add communication.
torch's part is what the constructor of ``ScheduleInterleaved1F1B`` runs (``_calculate_single_rank_operations`` for
every rank, ``_validate_schedule``, ``_add_unshard_reshard``, ``_add_reduce_grad``, ``_add_send_recv``), called without
a process group. Ours is `interleaved`, `check` (across devices, which torch does not do) and `make_plan` for plain
stages with a loss. The two alternate; printed are the medians over the repeats, their range, and their ratio.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from torch.distributed.pipelining import schedules as theirs

from funcpipe.core.stage import Stage
from funcpipe.lower.plan import make_plan
from funcpipe.schedules.check import check
from funcpipe.schedules.families import interleaved


def ours(devices: int, chunks: int, microbatches: int) -> int:
    """Build, check, lower; the number of tasks."""
    schedule = interleaved(devices * chunks, microbatches, num_devices=devices)
    check(schedule)
    stages = [Stage(lambda params, x: x)] * (devices * chunks)
    plan = make_plan(stages, schedule, loss=lambda y, target: y)
    return len(plan.program.order)


def torchs(devices: int, chunks: int, microbatches: int) -> int:
    """What torch's constructor does to its tables; the number of actions."""
    made: Any = object.__new__(theirs.ScheduleInterleaved1F1B)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = devices, chunks, microbatches
    made.number_of_rounds = max(1, microbatches // devices)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    order = {rank: made._calculate_single_rank_operations(rank) for rank in range(devices)}
    rank_of = theirs._validate_schedule(order, devices, devices * chunks, microbatches)
    lowered: Any = {}
    for rank, row in order.items():
        lowered[rank] = theirs._add_reduce_grad(theirs._add_unshard_reshard(row), microbatches)
    lowered = theirs._add_send_recv(lowered, stage_to_rank=lambda s: rank_of[s], num_stages=devices * chunks)
    return sum(map(len, lowered.values()))


def seconds(work: Callable[..., int], size: tuple[int, int, int]) -> float:
    """One run by the clock, starting from a clean heap."""
    gc.collect()
    start = perf_counter()
    work(*size)
    return perf_counter() - start


def main() -> None:
    """Alternate, take medians, print one line a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--sizes", nargs="+", default=["8,2,32", "32,2,128", "64,2,256"], help="devices,chunks,microbatches"
    )
    options = parser.parse_args()
    print("interleaved 1F1B: build + check + lower, median s (range) of", options.repeats, "alternating repeats")
    for text in options.sizes:
        devices, chunks, microbatches = map(int, text.split(","))
        size = (devices, chunks, microbatches)
        pairs = [(seconds(ours, size), seconds(torchs, size)) for _ in range(options.repeats)]
        mine, other = zip(*pairs, strict=True)
        shown = [f"{statistics.median(t):.4f} ({min(t):.4f}-{max(t):.4f})" for t in (mine, other)]
        ratio = statistics.median(other) / statistics.median(mine)
        print(
            f"p={devices} v={chunks} m={microbatches}: funcpipe {shown[0]}  torch {shown[1]}  ratio {ratio:.1f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
