"""What splitting a backward costs the host. ``python tests/benchmarks/bench_split_backward.py
[--repeats 30]``.

One stage, eight microbatches, one thread. "whole" is eager autograd's backward into the parameters'
gradients, "eager I + W" its halves; "I + W" the two programs of a compiled stage, "B" their whole
one, "inductor" I + W where torch's compiler built them; all as the recorded times of a run's
actions. torch's split backward (``stage_backward_input``, ``stage_backward_weight``) stands beside
its own ``stage_backward``, on the same module with the same microbatches. Arms take turns; figures
are medians, microseconds a microbatch, and ratios of these.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from peers_work import Block, Residual
from torch.distributed.pipelining import _backward as theirs

import funcpipe as fp

COUNT = 8


def works() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Small and wide stages, and the shape of a microbatch."""

    def mlp(width: int, depth: int) -> nn.Sequential:
        return nn.Sequential(
            *(one for _ in range(depth) for one in (nn.Linear(width, width), nn.GELU()))
        )

    return {
        "Linear(8), 2 rows": (nn.Linear(8, 8), (2, 8)),
        "4 x Linear(16) + GELU, 4 rows": (mlp(16, 4), (4, 16)),
        "transformer block of 32, 8 tokens": (Block(32), (1, 8, 32)),
        "residual block of 4 channels, 8x8": (Residual(4), (2, 4, 8, 8)),
        "4 x Linear(1024) + GELU, 32 rows": (mlp(1024, 4), (32, 1024)),
        "transformer block of 256, 64 tokens": (Block(256), (4, 64, 256)),
    }


def ours(model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """Arms that give microseconds a microbatch: B, I + W, of the compiled stage B and I + W, also
    by torch's compiler."""
    stage, params, state = fp.from_module(model)
    batch = torch.randn(COUNT * shape[0], *shape[1:]), torch.randn(COUNT * shape[0], *shape[1:])
    whole = fp.schedules.one_f_one_b(2, COUNT, num_devices=2)
    halves = fp.schedules.delay(whole)

    def arm(last: fp.Stage, schedule: fp.Schedule) -> Any:
        # The stage before it makes it compute gradients of its input, too.
        first = fp.stage(lambda params, x: x + params)
        plan = fp.make_plan([first, last], schedule, loss=F.mse_loss, devices="cpu")
        trees = (torch.zeros(()), params), ((), state)

        def once() -> float:
            given = {"state": trees[1], "trainable": True, "record": True}
            result = fp.run(plan, trees[0], batch, executor="serial", threads_per_lane=1, **given)
            assert result.timeline is not None
            spans = [
                one
                for one in result.timeline.spans
                if one.action.stage == 1 and one.action.kind is not fp.Kind.F
            ]
            return sum(one.end - one.start for one in spans) / COUNT * 1e6

        return once

    compiled, built = fp.compile_stage(stage), fp.compile_stage(stage, backend="inductor")
    return {
        "whole": arm(stage, whole),
        "eager I + W": arm(stage, halves),
        "B": arm(compiled, whole),
        "I + W": arm(compiled, halves),
        "inductor": arm(built, halves),
    }


def torchs(model: nn.Module, shape: tuple[int, ...]) -> dict[str, Any]:
    """Arms over torch's own functions."""
    parts = torch.randn(COUNT, *shape), torch.randn(COUNT, *shape)

    def arm(backward: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[], float]:
        def once() -> float:
            model.zero_grad()
            spent = 0.0
            for number in range(COUNT):
                x = parts[0][number].detach().requires_grad_()
                loss = F.mse_loss(model(x), parts[1][number])
                start = perf_counter()
                backward(loss, x)
                spent += perf_counter() - start
            return spent / COUNT * 1e6

        return once

    def halves(loss: torch.Tensor, x: torch.Tensor) -> None:
        _, groups = theirs.stage_backward_input([loss], None, [x], iter(model.parameters()))
        theirs.stage_backward_weight(iter(model.parameters()), groups)

    return {
        "torch whole": arm(lambda loss, x: theirs.stage_backward(loss, None, [x])),
        "torch I + W": arm(halves),
    }


def main() -> None:
    """Take turns, print the table."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = ["whole", "eager I + W", "B", "I + W", "inductor", "torch whole", "torch I + W"]
    print(
        f"| stage | {' | '.join(names)} | eager I + W / whole | B / whole | I + W / whole | "
        "inductor / whole | torch's |\n"
        f"|---|{'---:|' * 12}"
    )
    for title, (model, shape) in works().items():
        arms = {**ours(model, shape), **torchs(model, shape)}
        times: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(given.repeats + 3):
            for name, arm in arms.items():
                spent = arm()
                if repeat >= 3:
                    times[name].append(spent)
        found = {name: median(samples) for name, samples in times.items()}
        ratios = [found[name] / found["whole"] for name in names[1:5]] + [
            found["torch I + W"] / found["torch whole"]
        ]
        print(
            f"| {title} | {' | '.join(f'{found[name]:.0f}' for name in names)} | "
            f"{' | '.join(f'{one:.2f}' for one in ratios)} |"
        )


if __name__ == "__main__":
    main()
