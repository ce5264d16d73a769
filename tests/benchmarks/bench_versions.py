"""This version against another one, in one process, their steps in turn.

    git worktree add /tmp/before <commit> python tests/benchmarks/bench_versions.py /tmp/before
    [--repeats 15] [--overhead 200] [--works mlp gpt2 resnet unet]

First steps of the workloads of bench_peers.py on two kept lanes with one intra-op thread each (M =
8; 1F1B of eager stages, zero-bubble of compiled ones), then the host's time of stages of one
Linear(8) on kept lanes and on one thread. A column is the median of the other version, and the
median over rounds of this one's time over the other's: below 1 this one is faster. Versions that
catch draws by kernels of a dispatch key cannot share a process: the second falls back to a mode,
and its eager stages take twice as long. So compare with 42d21a7 or older, or look at the compiled
rows alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from peers_work import KINDS, Work

import funcpipe as this

SIZES = {"mlp": (1024, 8, 256), "gpt2": (128, 8, 32), "resnet": (32, 8, 64), "unet": (16, 8, 64)}
"""Width, layers and rows of each workload, as in docs/benchmarks.md."""
MICROBATCHES = 8


def other_version(tree: Path, folder: Path) -> Any:
    """The package of another checkout, under a name of its own."""
    shutil.copytree(tree / "funcpipe", folder / "funcpipe_before")
    for path in (folder / "funcpipe_before").rglob("*.py"):
        path.write_text(re.sub(r"\bfuncpipe\b(?=[. ])", "funcpipe_before", path.read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module("funcpipe_before")


def face(library: Any, module: str, name: str) -> Any:
    """The module of the public face that has a name; the package itself in versions before there
    were such modules."""
    found = getattr(library, module, library)
    return found if callable(getattr(found, name, None)) else library


def plan_of(library: Any, stages: Any, family: str, count: int, *, compiled: bool) -> Any:
    """A plan of two stages, by the names of whichever version."""
    make = getattr(face(library, "schedules", family), family)
    compiling = getattr(library, "compile_stage", None) or library.compile
    parts = [compiling(stage) for stage in stages] if compiled else stages
    return library.make_plan(parts, make(2, count), loss=F.mse_loss, devices="cpu")


def work_arms(
    library: Any, work: Work, lanes: ExitStack
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Steps of a workload."""
    split = library.split(work.model(face(library, "models", "skippable")), balance=[4, 4])
    for name, family, compiled in (
        ("1F1B, eager", "one_f_one_b", False),
        ("zero-bubble, compiled", "zero_bubble", True),
    ):
        plan = plan_of(library, split.stages, family, MICROBATCHES, compiled=compiled)
        executor = lanes.enter_context(library.lanes(plan))
        yield (
            name,
            lambda plan=plan, executor=executor: library.run(
                plan,
                split.params,
                (work.x, work.target),
                state=split.state,
                executor=executor,
                threads_per_lane=1,
            ),
        )


def overhead_arms(
    library: Any, count: int, lanes: ExitStack
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Steps in which little but the host works."""
    torch.manual_seed(0)
    params = tuple({"w": torch.randn(8, 8) / 3, "b": torch.zeros(8)} for _ in range(2))
    x = torch.randn(2 * count, 8)
    stages = [
        library.stage(lambda params, x: F.linear(x, params["w"], params["b"])) for _ in range(2)
    ]
    for compiled in (False, True):
        plan = plan_of(library, stages, "one_f_one_b", count, compiled=compiled)
        for executor in ("serial", lanes.enter_context(library.lanes(plan))):
            name = (
                f"{'compiled' if compiled else 'eager'}, "
                f"{'serial' if executor == 'serial' else 'kept lanes'}"
            )
            yield (
                name,
                lambda plan=plan, executor=executor: library.run(
                    plan, params, (x, x), executor=executor, threads_per_lane=1
                ),
            )


def measure(
    title: str, arms: dict[str, tuple[Callable[[], Any], Callable[[], Any]]], repeats: int
) -> None:
    """Time all arms in turn, both versions of each in a random order, and print their ratios."""
    times: dict[tuple[str, int], list[float]] = {
        (name, version): [] for name in arms for version in (0, 1)
    }
    for round_number in range(repeats + 2):
        for name, version in random.sample(list(times), len(times)):
            start = perf_counter()
            arms[name][version]()
            if round_number >= 2:
                times[name, version].append(perf_counter() - start)
    for name in arms:
        before, now = times[name, 0], times[name, 1]
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        print(
            f"{title:38}  {name:22}  {1e3 * statistics.median(before):8.2f} ms  {ratio:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", type=Path)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--overhead", type=int, default=200)
    parser.add_argument("--works", nargs="*", default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as lanes:
        versions = other_version(options.tree, Path(folder)), this
        for kind in options.works:
            width, depth, rows = SIZES[kind]
            work = Work.make(kind, width, depth, rows, MICROBATCHES, autocast=False)
            both = [dict(work_arms(library, work, lanes)) for library in versions]
            title = KINDS[kind].format(width=width)[:38]
            measure(
                title, {name: (both[0][name], both[1][name]) for name in both[0]}, options.repeats
            )
        for count in (8, 32):
            both = [dict(overhead_arms(library, count, lanes)) for library in versions]
            measure(
                f"Linear(8), M = {count}",
                {name: (both[0][name], both[1][name]) for name in both[0]},
                options.overhead,
            )


if __name__ == "__main__":
    main()
