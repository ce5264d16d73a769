"""Lanes on one GPU against a plain accumulation loop. ``python tests/benchmarks/bench_gpu.py
[--table memory]``.

The workloads of ``bench_peers.py`` cut into two stages, both lanes on ``--device`` (default
``cuda:0``): one training step in fp32 (``--bf16``: under autocast), forward, mean squared error,
backward, all gradients there; no optimizer. Arms take turns; figures are medians of the wall time
of a step with the device waited for at its end, host time is until the last call returned, and MiB
the most that the allocator gave out above what lay there before the arm's first step (copies and
workspaces that it keeps count). Each arm's gradients are compared with the loop's first. A device
without graphs (``--device cpu``, to try the program) says so in its row.

The first table has CUDA graphs on and off. ``memory`` keeps, recomputes or offloads what the
forwards of all microbatches leave for their backwards, on one lane.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from peers_work import KINDS, Work, chain

import funcpipe as fp


def loop(
    model: torch.nn.Module, work: Work, batch: tuple[torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """The plain accumulation loop."""
    for p in model.parameters():
        p.grad = None
    for x, target in zip(*(one.chunk(work.microbatches) for one in batch), strict=True):
        (F.mse_loss(model(x), target) / work.microbatches).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


class Bench(NamedTuple):
    """The model in two parts, where it runs, and the batch there."""

    split: fp.Split
    device: str
    batch: tuple[torch.Tensor, torch.Tensor]
    stack: ExitStack

    def arms(
        self, schedule: fp.Schedule, options: dict[str, Any], executors: list[str]
    ) -> list[Callable[[], Any]]:
        """A step of a schedule for each way to run it; ``options`` compile the stages."""
        stages = [fp.compile_stage(one, **options) if options else one for one in self.split.stages]
        plan = fp.make_plan(
            stages, schedule, loss=F.mse_loss, devices=[self.device] * schedule.num_devices
        )
        params, state = fp.place(plan, self.split.params), fp.place(plan, self.split.state)
        ways = [
            self.stack.enter_context(fp.graphs(plan)) if one == "graphs" else one
            for one in executors
        ]
        return [
            partial(fp.run, plan, params, self.batch, state=state, executor=one) for one in ways
        ]


def graphs(bench: Bench, microbatches: int) -> dict[str, Callable[[], Any]]:
    """CUDA graphs of whole runs, of programs, and none."""
    one, zero = fp.schedules.one_f_one_b(2, microbatches), fp.schedules.zero_bubble(2, microbatches)
    out: dict[str, Callable[[], Any]] = {}
    both = ["serial", "graphs"]
    out["eager 1F1B"], out["eager 1F1B, one graph"] = bench.arms(one, {}, both)
    for name, schedule in (("1F1B", one), ("zero-bubble", zero)):
        out[f"compiled {name}"], out[f"compiled {name}, one graph"] = bench.arms(
            schedule, {"backend": "graph"}, both
        )
        if bench.device != "cpu":
            (out[f"compiled {name}, graph each"],) = bench.arms(
                schedule, {"backend": "cudagraphs"}, ["serial"]
            )
    return out


def memory(bench: Bench, microbatches: int) -> dict[str, Callable[[], Any]]:
    """Ways to bear the residuals of all microbatches."""
    kept = fp.schedules.fill_drain(2, microbatches, num_devices=1)
    found = {
        "kept": kept,
        "recomputed": fp.schedules.remat(kept),
        "offloaded": fp.schedules.offload(kept),
    }
    found["1F1B, kept"] = fp.schedules.one_f_one_b(2, microbatches, num_devices=1)
    return {name: bench.arms(schedule, {}, ["serial"])[0] for name, schedule in found.items()}


TABLES = {"graphs": graphs, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", choices=sorted(KINDS), default="gpt2")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--table", choices=sorted(TABLES), default="graphs")
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    cuda = given.device != "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    work = Work.make(
        given.work,
        given.width,
        given.depth,
        given.batch,
        given.microbatches,
        False,
        reference=False,
    )
    model = chain(given.work, given.width, given.depth)
    model.load_state_dict(work.weights)
    model.to(given.device)
    wait = torch.cuda.synchronize if cuda else lambda: None
    name = torch.cuda.get_device_name() if cuda else "cpu"
    print(
        f"{given.depth} x {KINDS[given.work].format(width=given.width)}, {given.batch} rows, M = "
        f"{given.microbatches}, {'bf16' if given.bf16 else 'fp32'}, torch {torch.__version__}, "
        f"{name}\n"
    )
    print(
        "| arm | step, ms (quartiles) | of the loop | host, ms | MiB | "
        "|\n|---|---:|---:|---:|---:|---|"
    )
    with ExitStack() as stack:
        batch = work.x.to(given.device), work.target.to(given.device)
        split = fp.split(model, balance=[given.depth // 2, given.depth - given.depth // 2])
        stack.enter_context(
            torch.autocast(batch[0].device.type, torch.bfloat16, enabled=given.bf16)
        )
        found: dict[str, Callable[[], Any]] = {
            "accumulation loop": lambda: loop(model, work, batch)
        }
        found |= TABLES[given.table](Bench(split, given.device, batch, stack), given.microbatches)
        wanted = sorted(float(one.norm()) for one in found["accumulation loop"]())
        reasons: dict[str, str] = {}
        most: dict[str, float] = {}
        for arm, step in found.items():
            before = torch.cuda.memory_allocated() if cuda else 0
            result = step()
            if isinstance(result, fp.Result):
                reasons[arm] = result.stats.reason if result.stats.reason != "asked for" else ""
                grads = fp.leaves(result.grads)
                torch.testing.assert_close(
                    sorted(float(one.norm()) for one in grads),
                    wanted,
                    rtol=2e-2 if given.bf16 else 1e-3,
                    atol=1e-6,
                    msg=arm,
                )
            del result
            step()
            wait()
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                step()
                wait()
                most[arm] = (torch.cuda.max_memory_allocated() - before) / 2**20
        times: dict[str, list[float]] = {arm: [] for arm in found}
        host: dict[str, list[float]] = {arm: [] for arm in found}
        for _ in range(given.repeats):
            for arm, step in found.items():
                wait()
                start = time.perf_counter()
                step()
                host[arm].append(time.perf_counter() - start)
                wait()
                times[arm].append(time.perf_counter() - start)
    base = times["accumulation loop"]
    for arm, samples in times.items():
        low, middle, high = statistics.quantiles(samples, n=4)
        ratio = statistics.median(a / b for a, b in zip(samples, base, strict=True))
        memory = f"{most[arm]:.1f}" if arm in most else "-"
        print(
            f"| {arm} | {middle * 1e3:.2f} ({low * 1e3:.2f}-{high * 1e3:.2f}) | {ratio:.2f} | "
            f"{statistics.median(host[arm]) * 1e3:.2f} | {memory} | {reasons.get(arm, '')} |"
        )


if __name__ == "__main__":
    main()
