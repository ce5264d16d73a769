"""Lanes on one GPU against a plain accumulation loop, CUDA graphs on and off. ``python tests/benchmarks/bench_gpu.py``.

The workloads of ``bench_peers.py`` cut into two stages, both lanes on ``--device`` (default ``cuda:0``): one training step in
fp32, forward, mean squared error, backward, all gradients there; no optimizer. Arms take turns; figures are medians of the
wall time of a step with the device waited for at its end, host time is until the last call returned, and MiB the most that
the allocator gave out above what lay there before the arm's first step (copies and workspaces that it keeps count). Each arm's gradients are compared with the loop's first. A device
without graphs (``--device cpu``, to try the program) says so in its row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from peers_work import KINDS, Work, chain

import funcpipe as fp


def loop(model: torch.nn.Module, work: Work, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """The plain accumulation loop."""
    for p in model.parameters():
        p.grad = None
    for x, target in zip(*(one.chunk(work.microbatches) for one in batch), strict=True):
        (F.mse_loss(model(x), target) / work.microbatches).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def arms(work: Work, model: Any, device: str, stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """What is compared, by name."""
    batch = work.x.to(device), work.target.to(device)
    out: dict[str, Callable[[], Any]] = {"accumulation loop": lambda: loop(model, work, batch)}
    depth = len(model)
    split = fp.split(model, balance=[depth // 2, depth - depth // 2])
    schedules = {
        "1F1B": fp.schedules.one_f_one_b(2, work.microbatches),
        "zero-bubble": fp.schedules.zero_bubble(2, work.microbatches),
    }
    kinds: dict[str, Any] = {"eager": {}, "compiled": {"backend": "graph"}}
    if device != "cpu":
        kinds["compiled, graph each"] = {"backend": "cudagraphs"}
    for name, schedule in schedules.items():
        for kind, options in kinds.items():
            if name == "zero-bubble" and kind == "eager":
                continue
            stages = [fp.compile_stage(one, **options) if options else one for one in split.stages]
            plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=[device] * 2)
            params, state = fp.place(plan, split.params), fp.place(plan, split.state)
            executors: dict[str, Any] = {"": "serial"}
            if kind in ("eager", "compiled"):
                executors[", one graph"] = stack.enter_context(fp.graphs(plan))
            for word, executor in executors.items():
                out[f"{kind} {name}{word}"] = lambda plan=plan, params=params, state=state, executor=executor: fp.run(
                    plan, params, batch, state=state, executor=executor
                )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--work", choices=sorted(KINDS), default="gpt2")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    cuda = given.device != "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    work = Work.make(given.work, given.width, given.depth, given.batch, given.microbatches, False)
    model = chain(given.work, given.width, given.depth)
    model.load_state_dict(work.weights)
    model.to(given.device)
    wait = torch.cuda.synchronize if cuda else lambda: None
    name = torch.cuda.get_device_name() if cuda else "cpu"
    print(
        f"{given.depth} x {KINDS[given.work].format(width=given.width)}, {given.batch} rows, M = {given.microbatches}, torch {torch.__version__}, {name}\n"
    )
    print("| arm | step, ms (quartiles) | of the loop | host, ms | MiB | |\n|---|---:|---:|---:|---:|---|")
    with ExitStack() as stack:
        found = arms(work, model, given.device, stack)
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
                    sorted(float(one.norm()) for one in grads), wanted, rtol=1e-3, atol=1e-6, msg=arm
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
            f"| {arm} | {middle * 1e3:.2f} ({low * 1e3:.2f}-{high * 1e3:.2f}) | {ratio:.2f} | {statistics.median(host[arm]) * 1e3:.2f} | {memory} | {reasons.get(arm, '')} |"
        )


if __name__ == "__main__":
    main()
