"""Build, check and lower a schedule: funcpipe against torch.distributed.pipelining, in one process.

    python tests/benchmarks/bench_plan.py [--repeats 5] [--sizes 8,2,32 64,2,256] [--families
    64,2,256] [--largest 256,2,4096]

Both do what every rank does before the first step: compute the order of all devices, validate it,
add communication. torch's part is what the constructor of ``ScheduleInterleaved1F1B`` runs
(``_calculate_single_rank_operations`` for every rank, ``_validate_schedule``,
``_add_unshard_reshard``, ``_add_reduce_grad``, ``_add_send_recv``), called without a process group.
Ours is `interleaved`, `check` (across devices, which torch does not do) and `make_plan` for plain
stages with a loss. The two alternate; printed are the medians over the repeats, their range, and
their ratio. Then the same for every family with two stages a device (one, where it takes no more)
at one size, against torch's class that does the same, or its fastest of several stages a device
(interleaved 1F1B) where it has none; and one large schedule.
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

from results import add_option, write
from torch.distributed.pipelining import schedules as theirs

from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.schedules import families, v_shape
from funcpipe._src.schedules.legal import check

FAMILIES = {
    "interleaved": (families.interleaved, "ScheduleInterleaved1F1B"),
    "looped_bfs": (families.looped_bfs, "ScheduleLoopedBFS"),
    "zero_bubble": (families.zero_bubble, "ScheduleInterleavedZeroBubble"),
    "zbv": (v_shape.zbv, "ScheduleZBVZeroBubble"),
    "dualpipe_v": (v_shape.dualpipe_v, "ScheduleDualPipeV"),
    "fill_drain": (families.fill_drain, "ScheduleInterleaved1F1B"),
    "one_f_one_b": (families.one_f_one_b, "ScheduleInterleaved1F1B"),
    "eager_one_f_one_b": (families.eager_one_f_one_b, "ScheduleInterleaved1F1B"),
    "zb_h2": (families.zb_h2, "ScheduleInterleavedZeroBubble"),
    "v_half": (v_shape.v_half, "ScheduleZBVZeroBubble"),
    "v_min": (v_shape.v_min, "ScheduleZBVZeroBubble"),
}


def ours(
    devices: int, chunks: int, microbatches: int, family: Callable[..., Any] = families.interleaved
) -> int:
    """Build, check, lower; the number of tasks."""
    schedule = family(devices * chunks, microbatches, num_devices=devices)
    check(schedule)
    stages = [Stage(lambda params, x: x)] * (devices * chunks)
    plan = make_plan(stages, schedule, loss=lambda y, target: y)
    return len(plan.program.order)


def torchs(
    devices: int, chunks: int, microbatches: int, name: str = "ScheduleInterleaved1F1B"
) -> int:
    """What torch's constructor does to its tables; the number of actions."""
    made: Any = object.__new__(getattr(theirs, name))
    made._num_stages = made.num_stages = devices * chunks
    made._stages = [None] * chunks
    made.pp_group_size, made.n_local_stages, made._n_microbatches = devices, chunks, microbatches
    made.number_of_rounds = max(1, microbatches // devices)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    order = {rank: made._calculate_single_rank_operations(rank) for rank in range(devices)}
    rank_of = theirs._validate_schedule(order, devices, devices * chunks, microbatches)
    lowered: Any = {}
    for rank, row in order.items():
        lowered[rank] = theirs._add_reduce_grad(theirs._add_unshard_reshard(row), microbatches)
    lowered = theirs._add_send_recv(
        lowered, stage_to_rank=lambda s: rank_of[s], num_stages=devices * chunks
    )
    return sum(map(len, lowered.values()))


def seconds(work: Callable[..., int], size: tuple[int, int, int], *more: Any) -> float:
    """One run by the clock, starting from a clean heap."""
    gc.collect()
    start = perf_counter()
    work(*size, *more)
    return perf_counter() - start


def every_family(size: tuple[int, int, int], repeats: int) -> list[dict[str, Any]]:
    """Each against the class of torch that does the same, or the nearest."""
    rows: list[dict[str, Any]] = []
    for name, (family, cls) in FAMILIES.items():
        pairs = [(seconds(ours, size, family), seconds(torchs, size, cls)) for _ in range(repeats)]
        mine, other = (statistics.median(times) for times in zip(*pairs, strict=True))
        print(
            f"{name}: funcpipe {mine:.3f}  torch {cls} {other:.3f}  ratio {other / mine:.1f}x",
            flush=True,
        )
        rows.append(
            {"size": size, "family": name, "torch's class": cls, "funcpipe": mine, "torch": other}
        )
    return rows


def main() -> None:
    """Alternate, take medians, print one line a size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["8,2,32", "32,2,128", "64,2,256"],
        help="devices,chunks,microbatches",
    )
    parser.add_argument("--families", default="64,2,256", help="devices,chunks,microbatches")
    parser.add_argument(
        "--largest", default="256,2,4096", help="devices,chunks,microbatches; funcpipe alone"
    )
    add_option(parser)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        "interleaved 1F1B: build + check + lower, median s (range) of",
        options.repeats,
        "alternating repeats",
    )
    for text in options.sizes:
        devices, chunks, microbatches = map(int, text.split(","))
        size = (devices, chunks, microbatches)
        pairs = [(seconds(ours, size), seconds(torchs, size)) for _ in range(options.repeats)]
        mine, other = zip(*pairs, strict=True)
        rows.append(
            {
                "size": size,
                "family": "interleaved",
                "torch's class": "ScheduleInterleaved1F1B",
                "funcpipe": statistics.median(mine),
                "torch": statistics.median(other),
            }
        )
        shown = [f"{statistics.median(t):.4f} ({min(t):.4f}-{max(t):.4f})" for t in (mine, other)]
        ratio = statistics.median(other) / statistics.median(mine)
        print(
            f"p={devices} v={chunks} m={microbatches}: funcpipe {shown[0]}  torch {shown[1]}  "
            f"ratio {ratio:.1f}x",
            flush=True,
        )
    print(f"every family at p,v,m = {options.families}, median s of {min(3, options.repeats)}")
    size = tuple(map(int, options.families.split(",")))
    rows += every_family(size, min(3, options.repeats))
    write(options.json, rows)
    devices, chunks, microbatches = map(int, options.largest.split(","))
    print(
        f"interleaved at {options.largest}: {seconds(ours, (devices, chunks, microbatches)):.1f} s"
    )


if __name__ == "__main__":
    main()
