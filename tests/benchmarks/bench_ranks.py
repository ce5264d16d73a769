"""Does the clock predict processes whose values take time to arrive?

    python tests/benchmarks/bench_ranks.py [--work pauses] [--processes 2 4] [--latency 0 .1 1 10]
    [--spare 0 2] [--repeats 9]

`fp.ranks` on one machine, against `fp.simulate`. Stages either compute (``--work chain``: Linear
and GELU; as many processes as there are cores) or do next to nothing and sleep (``--work pauses``:
F, I and W of ``--forward`` ms a device, so any number of processes). The latency is made at the end
that receives, on every edge between processes: values, and what says that a slot is free, are put
into the lane's mailbox one latency after they have come. ``--spare`` are spare slots of the plan.

Exchanges (what all processes tell each other before and after the actions) have no latency. Each
schedule goes through its latencies in turn, round by round; figures are medians over the rounds,
ratios those of each round's ratio. The costs are the mean times of the round's run without latency,
and ``comm`` is the latency and the hop that was measured there: the median time from the end of an
action to the start of one that waited for nothing else, on another process. "whole" is `fp.run` on
rank 0, "actions" from the first to the last of all ranks; the ratios are of the simulated makespan
over these. "schedule" is `fp.simulate` of the schedule, "plan" that of the plan, whose lanes wait
to send until the slot at the other end is free. Rounds in which other processes used the machine,
during this run or the one without latency, are left out; "clean" says how many were left, and a
star that figures are of all, because fewer than five were.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from peers_samples import ENOUGH, Spent, busy, undisturbed
from torch import Tensor

import funcpipe as fp
from funcpipe._src.processes import remote
from funcpipe._src.processes.remote import Arrivals

WARMUP = 3
FAMILIES = {
    "1F1B": (fp.schedules.one_f_one_b, 1),
    "zero-bubble": (fp.schedules.zero_bubble, 1),
    "interleaved": (fp.schedules.interleaved, 2),
    "fill-drain": (fp.schedules.fill_drain, 1),
}
"""The schedules, and the stages that each process holds."""


def sleep_until(due: float) -> None:
    """Sleep until a moment of `perf_counter`."""
    sleep(max(0.0, due - perf_counter()))


class LateArrivals(Arrivals):
    """What comes from other processes, over a network that takes its time: seconds, each way."""

    latency = 0.0
    later: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, *given: Any) -> None:
        self._late(super().put, *given)

    def is_free(self, *given: Any) -> None:
        self._late(super().is_free, *given)

    def _late(self, job: Callable[..., None], *given: Any) -> None:
        if self.latency:
            self.later.put((perf_counter() + self.latency, job, given))
        else:
            job(*given)

    @classmethod
    def hand_on(cls) -> None:
        """Deliver what is due, in order."""
        while True:
            due, job, given = cls.later.get()
            sleep_until(due)
            job(*given)


@torch.library.custom_op("bench_ranks::pause", mutates_args=())
def pause(x: Tensor, seconds: float, what: int) -> Tensor:
    """The same numbers after some time; ``what`` keeps two of the same length apart."""
    sleep(seconds)
    return x.clone()


@pause.register_fake
def _(x: Tensor, seconds: float, what: int) -> Tensor:
    return torch.empty_like(x)


class Pauses(torch.autograd.Function):
    """A sum whose forward, gradient of the input and gradient of the weight take a time each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return pause(x + weight, seconds, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return pause(grads[0], ctx.seconds, 1), pause(grads[0], ctx.seconds, 2).sum(0), None


class Paused(nn.Module):
    """A layer of `Pauses`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return Pauses.apply(x, self.weight, self.seconds)


class Case(NamedTuple):
    """A schedule to measure."""

    name: str
    spare: int
    plan: fp.Plan
    params: Any
    batch: tuple[Tensor, Tensor]


def cases(size: int, given: argparse.Namespace) -> Iterator[Case]:
    """Every schedule on so many processes."""
    for name, (family, each) in FAMILIES.items():
        if name not in given.schedules:
            continue
        torch.manual_seed(0)
        count = size * each
        if given.work == "pauses":
            layers = [Paused(given.forward / 1e3 / each) for _ in range(count)]
            batch = torch.randn(given.microbatches, 8), torch.randn(given.microbatches, 8)
        else:
            layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
            batch = torch.randn(256, 1024), torch.randn(256, 1024)
        per = len(layers) // count
        parts = [nn.Sequential(*layers[i * per : (i + 1) * per]) for i in range(count)]
        stages, params, _ = zip(*map(fp.from_module, parts), strict=True)
        stages = tuple(map(fp.compile_stage, stages)) if name == "zero-bubble" else stages
        schedule = family(count, given.microbatches, num_devices=size)
        for spare in given.spare:
            plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu", spare_slots=spare)
            yield Case(name, spare, plan, params, batch)


class Step(NamedTuple):
    """What was measured of one run: `fp.run`, its actions, and if other processes left the machine
    alone."""

    whole: float
    timeline: fp.Timeline
    clean: bool


def measure(case: Case, latencies: Sequence[float], repeats: int) -> dict[float, list[Step]]:
    """All latencies in turn, on these ranks."""
    found: dict[float, list[Step]] = {latency: [] for latency in latencies}
    with fp.ranks(case.plan, timeout=60.0) as ranks:
        params = fp.place(case.plan, case.params, ranks)
        for repeat in range(WARMUP + repeats):
            for latency, steps in found.items():
                LateArrivals.latency = latency
                before, cpu, start = busy(), process_time(), perf_counter()
                result = fp.run(
                    case.plan, params, case.batch, executor=ranks, threads_per_lane=1, record=True
                )
                seconds, spent = perf_counter() - start, torch.tensor(process_time() - cpu)
                dist.all_reduce(spent)
                clean = undisturbed(before, Spent(seconds, float(spent)))
                timeline = ranks.timeline(result)  # all wait for all here
                if repeat >= WARMUP:
                    steps.append(Step(seconds, timeline, clean))
    return found


def serve(rank: int, size: int, given: argparse.Namespace, folder: str, pipe: Any) -> None:
    """One process: all cases; rank 0 says what was found."""
    torch.set_num_threads(1)
    remote.Arrivals = LateArrivals
    threading.Thread(target=LateArrivals.hand_on, daemon=True).start()
    where = f"file://{folder}/{size}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    late = [latency / 1e3 for latency in given.latency if latency]
    for case in cases(size, given):
        found = measure(case, [0.0, *late], given.repeats)
        if rank == 0:
            pipe.send((f"{case.name}, {case.spare} spare", [*rows(case.plan, found)]))
    dist.destroy_process_group()


class Row(NamedTuple):
    """Medians: seconds, and what the clock says over them.

    Attributes:
        latency: for how many seconds values travelled.
        clean, count: of so many rounds.
        whole, actions: measured seconds.
        schedule, plan: the simulated makespans over the actions.
        of_whole: that of the plan over the whole.
    """

    latency: float
    clean: int
    count: int
    whole: float
    actions: float
    schedule: float
    plan: float
    of_whole: float


def rows(plan: fp.Plan, found: dict[float, list[Step]]) -> Iterator[Row]:
    """One for each latency."""
    fast = found[0.0]
    for latency, steps in found.items():
        each: list[tuple[float, ...]] = []
        clean = [one.clean and other.clean for one, other in zip(fast, steps, strict=True)]
        for one, other, good in zip(fast, steps, clean, strict=True):
            if good or sum(clean) < ENOUGH:
                cost = one.timeline.cost(handover=True)
                slow = replace(cost, comm=cost.comm + latency)
                clocks = [fp.simulate(what, slow).makespan for what in (plan.schedule, plan)]
                actions = other.timeline.makespan
                each.append(
                    (
                        other.whole,
                        actions,
                        clocks[0] / actions,
                        clocks[1] / actions,
                        clocks[1] / other.whole,
                    )
                )
        yield Row(latency, sum(clean), len(clean), *map(statistics.median, zip(*each, strict=True)))


def table(size: int, given: argparse.Namespace) -> Iterator[str]:
    """The lines of the processes of one size, as they come; last what is further than 10 % away."""
    context = multiprocessing.get_context("spawn")
    far: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        mine, its = context.Pipe(duplex=False)
        make = partial(context.Process, target=serve, daemon=True)
        processes = [
            make(args=(rank, size, given, folder, its if rank == 0 else None))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        its.close()
        while True:
            try:
                name, found = mine.recv()
            except EOFError:
                break
            for row in found:
                yield line(size, name, row)
                for what, ratio in (("schedule", row.schedule), ("plan", row.plan)):
                    if not 0.9 <= ratio <= 1.1:
                        far.append(f"{what} of {name}, {row.latency * 1e3:g} ms")
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit(f"a process ended with {process.exitcode}")
    yield f"\nfurther than 10 % from the actions: {'; '.join(far) or 'none'}"


def line(size: int, name: str, row: Row) -> str:
    """A row in markdown."""
    measured = f"{row.whole * 1e3:.1f} | {row.actions * 1e3:.1f}"
    ratios = " | ".join(f"{ratio:.2f}" for ratio in (row.schedule, row.plan, row.of_whole))
    clean = f"{row.clean}/{row.count}{'*' * (row.clean < ENOUGH)}"
    return f"| {size} | {name} | {row.latency * 1e3:g} | {measured} | {ratios} | {clean} |"


def main() -> None:
    """One table for each number of processes."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=["pauses", "chain"], default="pauses")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--latency", type=float, nargs="+", default=[0.0, 0.1, 1.0, 10.0], help="milliseconds"
    )
    parser.add_argument(
        "--spare", type=int, nargs="+", default=[0, 2], help="spare slots of the plan"
    )
    parser.add_argument(
        "--forward",
        type=float,
        default=10.0,
        help="milliseconds that a device sleeps for F, I and W",
    )
    parser.add_argument("--schedules", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    if min(given.processes) < 2 or (given.work == "chain" and not {*given.processes} <= {2, 4}):
        parser.error("--processes are 2 or more; of the chain, which has 8 layers, 2 or 4")
    for size in given.processes:
        print(
            "| processes | schedule | latency, ms | whole, ms | actions, ms | schedule / actions "
            "| plan / actions | plan / whole | clean |"
        )
        print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
        for text in table(size, given):
            print(text, flush=True)
        print(f"load {os.getloadavg()[0]:.1f}\n")


if __name__ == "__main__":
    main()
