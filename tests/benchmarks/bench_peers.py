"""One training step on two CPU lanes: funcpipe, torchgpipe, torch.distributed.pipelining, plain
loops.

    python tests/benchmarks/bench_peers.py [--work mlp] [--width 1024] [--depth 8] [--batch 256]
    [--microbatches 8] [--repeats 15]

A chain of equal layers in fp32 (Linear and GELU; with ``--work`` blocks of a transformer, residual
blocks with BatchNorm, or a U-Net cut at its lowest level), cut into equal parts; a step is forward,
mean squared error, backward, until the gradients of all parameters are there (those of the step
before are dropped inside of it; no optimizer). Every arm has the same weights and batch, one
intra-op thread per lane ("plain, 2 threads": two), and must give the gradients of plain autograd to
1e-5 (the U-Net to 1e-4, with ``--autocast`` to 2e-2) before it is timed. Arms take turns in a
shuffled order; a sample during which other processes used more than 0.15 cores is taken again, up
to four times and while --seconds last; "clean" counts those that were not disturbed, and figures
are of the clean samples (of all, with a star, where fewer than five are clean: such rows have no
ratio). "1F1B / this" and "fill-drain / this" are funcpipe's median with the same remat over this
row's: below 1 funcpipe is faster; "compiled 1F1B / this" is the same with compiled stages; "this /
torch's fastest" is the median of the ratios round by round, which a machine that gets slower
changes less. "cores" is CPU time over wall time, of all processes of the arm. "limit" is what two
lanes take that each do their half of the model on inputs that lie ready, waiting for nobody, times
(M + 1) / M for the fill and drain of 1F1B. "MiB" is by how much the processes of the arm grow at
most in a step, once what is left of earlier steps went back to the system (the median of three
steps of their own, not timed); of two processes the sum.

torchgpipe is measured if it is installed, as published: its two CPU partitions share one worker
thread. torch.distributed.pipelining runs as two processes over gloo, kept between steps, each
pinned to its share of the cores as funcpipe's lanes are, timed from the first rank's start to the
last rank's end (the signal to start is not counted); its looped and V schedules have two stages a
rank, and so have funcpipe's. "funcpipe, processes" is `fp.ranks`, two processes likewise;
"inductor", there and in lanes, has programs that torch's compiler built (their gradients to 2e-2);
"--arms 'processes|torch'" compares processes alone.

"--device cuda:0" has everything on one GPU, lanes as its streams, processes joined by NCCL over
sockets; a step's end is the device's, and memory is not measured.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = (
    "1"  # before torch: threads that peers start themselves obey nothing else
)
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn as nn
import torch.nn.functional as F
from peers_processes import ALONE, OWN, SCHEDULES, RankError, Ranks
from peers_samples import Sample, Spent, Summary, here, peak, summary, take
from peers_work import KINDS, LANES, Work, gradients
from results import add_option, write
from torch import Tensor

import funcpipe as fp

REMAT = ("never", "except_last", "always")
FUSED = 2e-2
"""How far gradients of stages that torch's compiler built may be from the wanted ones: a value that
it rounds to the other side of a relu's 0 changes a whole sum. Those of residual blocks are .002 to
.015 away, with four seeds; in float64 1e-14."""
WARMUP = 3


class Arm(NamedTuple):
    """One row: whose, what, which remat.

    Attributes:
        step: does one.
        error: how far its gradients are from the wanted ones.
        memory: MiB that a step needs.
    """

    system: str
    name: str
    remat: str
    step: Callable[[], Spent]
    error: Callable[[], float]
    memory: Callable[[], float]

    def __str__(self) -> str:
        return f"{self.system}, {self.name}, remat {self.remat}"


def plain(work: Work) -> Iterator[Arm]:
    """Plain autograd: over the whole batch and microbatch by microbatch in one thread, the latter
    also in one a lane."""
    model = work.model()

    def whole() -> None:
        model.zero_grad()
        loss(work.x, work.target).backward()

    def loss(x: Tensor, target: Tensor) -> Tensor:
        with work.casting():
            return F.mse_loss(model(x), target)

    def loop() -> None:
        model.zero_grad()
        for x, target in zip(
            work.x.chunk(work.microbatches), work.target.chunk(work.microbatches), strict=True
        ):
            (loss(x, target) / work.microbatches).backward()

    def loop_of_threads() -> None:
        torch.set_num_threads(LANES)
        loop()
        torch.set_num_threads(1)

    for name, step in (("whole batch", whole), ("microbatch loop", loop))[
        0 if work.rows_apart else 1 :
    ]:
        yield _module(Arm("plain, 1 thread", name, "never", *_NOTHING), model, work, step)
    yield _module(
        Arm(f"plain, {LANES} threads", "microbatch loop", "never", *_NOTHING),
        model,
        work,
        loop_of_threads,
    )


def _module(arm: Arm, model: nn.Module, work: Work, step: Callable[[], None]) -> Arm:
    """An arm whose gradients are where autograd puts them."""
    return _measured(arm, work, step, model.zero_grad)._replace(
        error=lambda: work.error(gradients(model))
    )


def funcpipe(work: Work, opened: ExitStack) -> Iterator[Arm]:
    """1F1B and fill-drain with every remat, interleaved, zero-bubble, eager and compiled; lanes are
    kept.

    By torch's compiler 1F1B and zero-bubble, without remat.
    """
    last = work.microbatches - 1
    keeps = {
        "never": lambda _: True,
        "except_last": lambda forward: forward.microbatch == last,
        "always": fp.schedules.never,
    }
    eager = {
        "1F1B": (fp.schedules.one_f_one_b, 1, REMAT),
        "fill-drain": (fp.schedules.fill_drain, 1, REMAT),
        "interleaved": (fp.schedules.interleaved, 2, REMAT[:1]),
    }
    split = {
        "1F1B": (fp.schedules.one_f_one_b, 1, REMAT),
        "fill-drain": (fp.schedules.fill_drain, 1, REMAT[:1]),
        "zero-bubble": (fp.schedules.zero_bubble, 1, REMAT[:1]),
        "interleaved": (fp.schedules.interleaved, 2, REMAT[:1]),
    }
    fused = {
        "1F1B": (fp.schedules.one_f_one_b, 1, REMAT[:1]),
        "zero-bubble": (fp.schedules.zero_bubble, 1, REMAT[:1]),
    }
    systems = {
        "funcpipe": (eager, ""),
        "funcpipe, compiled": (split, "graph"),
        "funcpipe, inductor": (fused, "inductor"),
    }
    for system, (makers, backend) in systems.items():
        for name, (maker, each, modes) in makers.items():
            count = LANES * each
            if work.depth % count:
                continue
            per, model = work.depth // count, work.model(fp.models)
            parts: list[nn.Sequential] = [model[i * per : (i + 1) * per] for i in range(count)]
            stages, params, state = zip(*map(fp.from_module, parts), strict=True)
            if backend:
                stages = tuple([fp.compile_stage(stage, backend=backend) for stage in stages])
            schedule = maker(count, work.microbatches, num_devices=LANES)
            for mode in modes:
                plan = fp.make_plan(
                    stages,
                    fp.schedules.remat(schedule, keep=keeps[mode]),
                    loss=F.mse_loss,
                    devices=str(work.device),
                )
                lanes = opened.enter_context(fp.lanes(plan))
                yield _planned(
                    Arm(system, name, mode, *_NOTHING), plan, (params, state), work, lanes
                )


_NOTHING: tuple[Any, Any, Any] = (None, None, None)


def _planned(
    arm: Arm, plan: fp.Plan, trees: tuple[Any, Any], work: Work, lanes: fp.typing.Lanes
) -> Arm:
    params, state = trees
    grads: tuple[dict[str, Tensor], ...] = ()

    def step() -> None:
        nonlocal grads
        with work.casting():
            grads = fp.run(
                plan, params, (work.x, work.target), state=state, executor=lanes, threads_per_lane=1
            ).grads

    def error() -> float:
        return work.error(
            [own[key] for own, tree in zip(grads, params, strict=True) for key in tree]
        )

    def clear() -> None:
        nonlocal grads
        grads = ()

    return _measured(arm, work, step, clear)._replace(error=error)


def _measured(arm: Arm, work: Work, step: Callable[[], object], clear: Callable[[], object]) -> Arm:
    """The step of an arm of this process, to the end of the device's work; memory is measured on
    the CPU alone."""

    def waited() -> None:
        step()
        work.wait()

    return arm._replace(
        step=here(waited),
        memory=partial(peak, step, clear) if work.device.type == "cpu" else lambda: float("nan"),
    )


def limit(work: Work, compiled: bool) -> Arm:
    """Two lanes without dependencies between them, and the fill and drain that 1F1B has besides."""
    per, model, count = work.depth // LANES, work.model(), work.microbatches
    with torch.no_grad(), work.casting():
        middle = torch.cat([model[:per](part) for part in work.x.chunk(count)])
    runs: list[Callable[[], Any]] = []
    for x, part in ((work.x, model[:per]), (middle, model[per:])):
        stage, params, state = fp.from_module(part)
        stage = fp.compile_stage(stage) if compiled else stage
        plan = fp.make_plan(
            [stage], fp.schedules.one_f_one_b(1, count), loss=F.mse_loss, devices="cpu"
        )
        runs.append(
            partial(
                fp.run,
                plan,
                (params,),
                (x, work.target),
                state=(state,),
                executor="serial",
                threads_per_lane=1,
            )
        )
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

    def step() -> Spent:
        def pinned(lane: int) -> None:
            if len(cores) >= LANES:
                os.sched_setaffinity(
                    0, cores[lane * len(cores) // LANES : (lane + 1) * len(cores) // LANES]
                )
            with work.casting():
                runs[lane]()

        threads = [threading.Thread(target=pinned, args=(lane,)) for lane in range(LANES)]

        def both() -> None:
            for one in threads:
                one.start()
            for one in threads:
                one.join()

        spent = here(both)()
        return Spent(spent.wall * (count + 1) / count, spent.cpu)

    return Arm(
        "limit",
        "compiled" if compiled else "eager",
        "never",
        step,
        lambda: 0.0,
        lambda: float("nan"),
    )


def torchgpipe(work: Work) -> Iterator[Arm]:
    """The published package, its two partitions on the CPU."""
    from torchgpipe import GPipe, skip

    for mode in REMAT:
        per = work.depth // LANES
        model = GPipe(
            work.model(skip),
            [per] * LANES,
            devices=["cpu"] * LANES,
            chunks=work.microbatches,
            checkpoint=mode,
        )

        def step(model: nn.Module = model) -> None:
            model.zero_grad()
            F.mse_loss(model(work.x), work.target).backward()

        yield _module(Arm("torchgpipe", "GPipe", mode, *_NOTHING), model, work, step)


def torch_pipelining(work: Work, opened: ExitStack) -> Iterator[Arm]:
    """Every schedule of torch that the depth allows, each with two processes of its own."""
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    work.to("cpu").save(folder / "work.pt")
    for name, each in SCHEDULES.items():
        if work.depth % (LANES * each):
            print(f"skipped: torch {name}; it takes a --depth that {LANES * each} divides")
            continue
        ranks = opened.enter_context(Ranks(name, folder, str(work.device)))
        yield Arm("torch pipelining", name, "never", ranks.step, ranks.error, ranks.memory)


def processes(work: Work, opened: ExitStack) -> Iterator[Arm]:
    """`fp.ranks`, the processes pinned and timed as torch's are."""
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    work.to("cpu").save(folder / "work.pt")
    each_of = {name: each for name, (_, each, _) in OWN.items()} | dict.fromkeys(
        ALONE if work.in_line else (), 1
    )
    for name, each in each_of.items():
        if work.depth % (LANES * each) == 0:
            ranks = opened.enter_context(Ranks(name, folder, str(work.device)))
            system, schedule = name.rsplit(", ", 1)
            yield Arm(system, schedule, "never", ranks.step, ranks.error, ranks.memory)


def installed(work: Work, opened: ExitStack) -> Iterator[Arm]:
    """All arms; for what is not installed, a line."""
    yield from plain(work)
    yield from funcpipe(work, opened)
    if work.in_line and work.device.type == "cpu":
        yield from (limit(work, compiled) for compiled in (False, True))
    if work.autocast or work.device.type != "cpu":
        print(
            "skipped: torchgpipe; its threads do not see autocast, and its partitions here are "
            "the CPU's"
        )
    elif find_spec("torchgpipe"):
        yield from torchgpipe(work)
    else:
        print(
            "skipped: torchgpipe is not installed; to measure it: pip install --no-deps "
            "torchgpipe==0.0.7"
        )
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        yield from processes(work, opened)
        yield from torch_pipelining(work, opened)
    else:
        print(
            "skipped: this torch was built without gloo; to measure torch pipelining: pip install "
            "torch==2.13.0"
        )


def proven(arms: list[Arm], limit: float) -> list[Arm]:
    """The arms that run, warm and with the right gradients. Raises SystemExit when some are
    wrong."""
    running: list[Arm] = []
    for arm in arms:
        try:
            for _ in range(WARMUP):
                arm.step()
            error = arm.error()
        except RankError as failure:
            print(f"skipped: {arm} does not run here: {failure}")
            continue
        most = FUSED if "inductor" in arm.system else limit
        if not error <= most:
            raise SystemExit(
                f"{arm}: its gradients are {error:.1e} away from the plain ones, more than {most:g}"
            )
        running.append(arm)
    return running


def table(
    arms: list[Arm], samples: dict[str, list[Sample]], needs: dict[str, float]
) -> Iterator[str]:
    """The rows in markdown."""
    found = {name: summary(own) for name, own in samples.items()}
    theirs = [str(arm) for arm in arms if arm.system == "torch pipelining"]
    fastest = min(theirs, key=lambda name: found[name].median, default="")
    own = {(arm.system, arm.name, arm.remat): found[str(arm)] for arm in arms}
    bases = (("funcpipe", "1F1B"), ("funcpipe", "fill-drain"), ("funcpipe, compiled", "1F1B"))
    yield (
        "| system | schedule | remat | median ms (quartiles) | cores | 1F1B / this | fill-drain / "
        "this | compiled 1F1B / this | this / torch's fastest | MiB | clean |"
    )
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for arm in arms:
        this = found[str(arm)]
        low, middle, high = (f"{seconds * 1e3:.1f}" for seconds in this.quartiles)
        ratios = " | ".join(_ratio(own.get((*base, arm.remat)), this) for base in bases)
        first = (
            f"{arm.system} | {arm.name} | {arm.remat} | {middle}{'*' * this.noisy} ({low}-{high}) "
            f"| {this.cores:.2f}"
        )
        need = needs[str(arm)]
        memory = f"{need:.1f}" if need == need else "-"
        over = [
            own.wall / base.wall
            for own, base in zip(samples[str(arm)], samples.get(fastest, ()), strict=False)
        ]
        by_round = f"{statistics.median(over):.2f}" if over else "-"
        yield f"| {first} | {ratios} | {by_round} | {memory} | {this.clean}/{this.count} |"


def rows_of(
    arms: list[Arm], samples: dict[str, list[Sample]], needs: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """The same figures for a file: seconds and MiB."""
    for arm in arms:
        this, need = summary(samples[str(arm)]), needs[str(arm)]
        yield {
            "system": arm.system,
            "schedule": arm.name,
            "remat": arm.remat,
            "seconds": this.quartiles,
            "mib": need if need == need else None,
            "clean": this.clean,
            "samples": this.count,
        }


def _ratio(ours: Summary | None, this: Summary) -> str:
    """Of the medians; none where one was disturbed, or left out."""
    return "-" if ours is None or ours.noisy or this.noisy else f"{ours.median / this.median:.2f}"


def main() -> None:
    """Prove, take turns, print."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=list(KINDS), default="mlp")
    for name, value in (
        ("width", 1024),
        ("depth", 8),
        ("batch", 256),
        ("microbatches", 8),
        ("repeats", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--autocast", action="store_true", help="every arm under torch.autocast to bfloat16"
    )
    parser.add_argument(
        "--device", default="cpu", help="where everything runs; cuda:0: all on one GPU"
    )
    parser.add_argument(
        "--arms", default="", help="only those in whose name this regular expression is found"
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="how long to repeat disturbed samples"
    )
    add_option(parser)
    given = parser.parse_args()
    if given.depth % LANES or given.batch % given.microbatches:
        parser.error(
            f"{LANES} must divide --depth, and --microbatches must divide --batch, for the sake "
            "of the peers"
        )
    torch.set_num_threads(1)
    work = Work.make(
        given.work, given.width, given.depth, given.batch, given.microbatches, given.autocast
    )
    work = work.to(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with ExitStack() as opened:
        arms = proven(
            [arm for arm in installed(work, opened) if re.search(given.arms, str(arm))], work.limit
        )
        samples = take({str(arm): arm.step for arm in arms}, given.repeats, given.seconds)
        needs = {str(arm): statistics.median(arm.memory() for _ in range(3)) for arm in arms}
    print(
        f"{given.depth} x {KINDS[given.work].format(width=given.width)}, {given.batch} "
        f"rows{', autocast to bfloat16' * given.autocast}, M = {given.microbatches}, torch "
        f"{torch.__version__}, load {os.getloadavg()[0]:.1f}\n"
    )
    for line in table(arms, samples, needs):
        print(line)
    write(given.json, list(rows_of(arms, samples, needs)))


if __name__ == "__main__":
    main()
