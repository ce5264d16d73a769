"""Does the clock predict a run? ``python tests/benchmarks/bench_simulated.py [--work mlp ...]
[--keep] [--rounds 15] [--picture FILE]``.

The layers of `bench_peers.py` on two CPU lanes, M = 8. Between runs of a schedule
`fp.models.profile_plan` measures its stages in one run of four microbatches, of 1F1B for 1F1B and
fill-drain, of fill-drain for interleaved, of ZB-H2 (compiled stages) for zero-bubble. Printed are
the median of the measured makespans, and the median and the quartiles of what `fp.simulate` makes
of such a cost over the mean of the two runs beside it. What other processes disturb is done again,
and does not count if it stays disturbed.

``--keep``: glibc keeps the memory that a run gives back (mallopt), so that the next one need not
fetch it page by page from the system.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from peers_samples import Spent, busy, undisturbed
from peers_work import Work
from torch.nn.functional import mse_loss

import funcpipe as fp

LANES, COUNT, PROFILED, PROFILES, ENOUGH = 2, 8, 4, 3, 10
SIZES = {"mlp": (1024, 256), "gpt2": (128, 32), "resnet": (32, 64), "unet": (16, 64)}
"""Width and rows of each kind of layer."""
MMAP_THRESHOLD, TRIM_THRESHOLD, TOP_PAD = -3, -1, -2
"""Of glibc's mallopt: larger allocations come from the system; more free memory goes back to it; it
takes so much more."""


class Case(NamedTuple):
    """One schedule, and the one whose run tells what its actions take.

    Attributes:
        name: of the schedule.
        plan, profiled: with the same stages.
        params, state: of these.
    """

    name: str
    plan: fp.Plan
    profiled: fp.Plan
    params: Any
    state: Any


def cases(work: Work) -> list[Case]:
    """Four schedules of the same layers."""
    families = fp.schedules
    rows: list[tuple[str, int, bool, Callable[..., fp.Schedule], Callable[..., fp.Schedule]]] = [
        ("1F1B", LANES, False, families.one_f_one_b, families.one_f_one_b),
        ("fill-drain", LANES, False, families.fill_drain, families.one_f_one_b),
        ("interleaved", 2 * LANES, False, families.interleaved, families.fill_drain),
        ("zero-bubble", LANES, True, families.zero_bubble, families.zb_h2),
    ]
    found: list[Case] = []
    for name, count, compiled, family, other in rows:
        per, model = work.depth // count, work.model(fp.models)
        stages, params, state = zip(
            *(fp.from_module(model[i * per : (i + 1) * per]) for i in range(count)), strict=True
        )
        stages = tuple(map(fp.compile_stage, stages)) if compiled else stages
        plan, profiled = (
            fp.make_plan(
                stages, maker(count, number, num_devices=LANES), loss=mse_loss, devices="cpu"
            )
            for maker, number in ((family, COUNT), (other, PROFILED))
        )
        found.append(Case(name, plan, profiled, params, state))
    return found


def alone(step: Callable[[], Any]) -> tuple[Any, bool]:
    """What a step gives, and whether other processes left the machine alone; tried five times."""
    for _ in range(5):
        before, wall, cpu = busy(), perf_counter(), process_time()
        made = step()
        if undisturbed(before, Spent(perf_counter() - wall, process_time() - cpu)):
            return made, True
    return made, False


class Measured(NamedTuple):
    """Seconds: simulated with what one run has shown, and the makespans of the runs before and
    after it.

    Attributes:
        clean: did other processes leave the machine alone.
    """

    simulated: float
    before: float
    after: float
    clean: bool

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return 2 * self.simulated / (self.before + self.after)


def measure(case: Case, work: Work, lanes: Any) -> Iterator[Measured]:
    """One round: `PROFILES` times between runs."""
    rows = len(work.x) // COUNT * PROFILED
    options: dict[str, Any] = {"state": case.state, "executor": lanes, "threads_per_lane": 1}
    batch = work.x[:rows], work.target[:rows]

    def simulated() -> float:
        cost = fp.models.profile_plan(
            case.profiled, case.params, batch, repeats=1, warmup=0, **options
        )
        return fp.simulate(case.plan, cost).makespan

    def measured() -> float:
        result = fp.run(case.plan, case.params, (work.x, work.target), record=True, **options)
        assert result.timeline is not None
        return result.timeline.makespan

    for step in (measured, simulated):
        step()
    before, clean = alone(measured)
    for _ in range(PROFILES):
        told, quiet = alone(simulated)
        after, still = alone(measured)
        yield Measured(told, before, after, clean and quiet and still)
        before, clean = after, still


def keep_memory() -> None:
    """Let glibc keep what is freed, and fetch more than is asked for."""
    libc = ctypes.CDLL(None)
    for option, value in (
        (MMAP_THRESHOLD, 1 << 30),
        (TRIM_THRESHOLD, (1 << 31) - 1),
        (TOP_PAD, 64 << 20),
    ):
        assert libc.mallopt(option, value), (option, value)


def main() -> None:
    """One line for each kind of layer and schedule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--keep", action="store_true", help="keep memory that was given back")
    parser.add_argument(
        "--picture", type=Path, help="an SVG of 1F1B of the first work, simulated above measured"
    )
    given = parser.parse_args()
    if given.keep:
        keep_memory()
    torch.set_num_threads(1)
    print(
        "| layers | schedule | measured ms | simulated / measured | quartiles | clean "
        "|\n|---|---|---:|---:|---|---:|"
    )
    for kind in given.work:
        width, rows = SIZES[kind]
        work = Work.make(kind, width, 8, rows, COUNT, False, reference=False)
        every = cases(work)
        found: dict[str, list[Measured]] = {case.name: [] for case in every}
        with fp.lanes(every[0].plan) as lanes:
            for _ in range(given.rounds):
                for case in every:
                    found[case.name] += measure(case, work, lanes)
            if given.picture and kind == given.work[0]:
                draw(every[0], work, lanes, given.picture)
        for name, several in found.items():
            print(f"| {kind} | {name} | {row(several)} |", flush=True)


def row(every: Sequence[Measured]) -> str:
    """The figures of one schedule: of what nobody disturbed; of all, with a star, where that is too
    little."""
    clean = [one for one in every if one.clean]
    used = clean if len(clean) >= ENOUGH else every
    low, middle, high = statistics.quantiles([one.ratio for one in used], n=4)
    measured = statistics.median(one.after for one in used) * 1e3
    star = "*" if used is not clean else ""
    return (
        f"{measured:.1f} | {middle:.2f}{star} | {low:.2f} to {high:.2f} | {len(clean)} of "
        f"{len(every)}"
    )


def draw(case: Case, work: Work, lanes: Any, path: Path) -> None:
    """The simulation above a run."""
    options: dict[str, Any] = {"state": case.state, "executor": lanes, "threads_per_lane": 1}
    cost = fp.models.profile_plan(case.plan, case.params, (work.x, work.target), **options)
    last = fp.run(case.plan, case.params, (work.x, work.target), record=True, **options).timeline
    fp.draw(fp.simulate(case.plan, cost), last, memory=True).save(path)


if __name__ == "__main__":
    main()
