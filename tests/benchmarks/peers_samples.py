"""Samples of arms taken in turn: wall time, CPU time, and whether other processes used the machine
meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, perf_counter, process_time, sleep
from typing import NamedTuple

FOREIGN = 0.15
"""Cores that other processes may use during a clean sample."""

_TRIES = 5
"""How often a sample is taken at most."""

ENOUGH = 5
"""Clean samples that a median is taken of."""

_TICK = 0.01
"""Seconds: /proc/stat counts in ticks, so a short sample may see one too many."""

_STAT = Path("/proc/stat")
_STATUS, _HIGHEST = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Spent(NamedTuple):
    """Seconds of one step: by the clock, and of processor time in all processes that worked for
    it."""

    wall: float
    cpu: float


class Sample(NamedTuple):
    """One measured step, and if other processes left the machine alone."""

    wall: float
    cpu: float
    clean: bool


class Summary(NamedTuple):
    """An arm's samples. The figures are of the clean ones; of all, if there are too few: then they
    are noisy."""

    quartiles: tuple[float, float, float]
    cores: float
    clean: int
    count: int
    noisy: bool

    @property
    def median(self) -> float:
        return self.quartiles[1]


def here(step: Callable[[], object]) -> Callable[[], Spent]:
    """The step of an arm that works in this process."""

    def measured() -> Spent:
        wall, cpu = perf_counter(), process_time()
        step()
        return Spent(perf_counter() - wall, process_time() - cpu)

    return measured


def peak(step: Callable[[], object], clear: Callable[[], object]) -> float:
    """MiB by which this process grows at most during a step; nan where the system does not say.

    Before it gradients of earlier steps are dropped, and what the allocator keeps for later goes
    back to the system. So the figure holds everything that the step needs besides model and batch:
    activations, gradients, and what is lost between blocks.
    """
    clear()
    if not _HIGHEST.exists():
        return float("nan")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _HIGHEST.write_text("5")  # the mark goes down to what is used now
    before = _kib("VmRSS")
    step()
    return (_kib("VmHWM") - before) / 1024


def _kib(name: str) -> int:
    row = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(row.split()[1])


def take(
    arms: Mapping[str, Callable[[], Spent]], repeats: int, seconds: float
) -> dict[str, list[Sample]]:
    """So many samples of each arm, one of each in every round, the order shuffled.

    A sample that was disturbed is taken again, some times and while there are ``seconds`` left,
    then kept and marked.
    """
    end = monotonic() + seconds
    order, shuffle = list(arms), random.Random(0).shuffle
    samples: dict[str, list[Sample]] = {name: [] for name in arms}
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            samples[name].append(_sample(arms[name], end))
    return samples


def _sample(step: Callable[[], Spent], end: float) -> Sample:
    for more in reversed(range(_TRIES)):
        before = busy()
        spent = step()
        clean = undisturbed(before, spent)
        if clean or not more or monotonic() > end:
            break
        sleep(0.1)
    return Sample(*spent, clean)


def undisturbed(before: float | None, spent: Spent) -> bool:
    """Did other processes leave the machine alone; ``before`` is what `busy` said when the step
    began."""
    after = busy()
    return (
        before is None or after is None or after - before - spent.cpu < FOREIGN * spent.wall + _TICK
    )


def busy() -> float | None:
    """Seconds that all cores worked since the start of the machine, or were taken from it; None
    where nobody counts."""
    if not _STAT.exists():
        return None
    user, nice, system, _, _, _, _, steal = map(int, _STAT.read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


def summary(samples: Sequence[Sample]) -> Summary:
    """Quartiles of the time, and the cores that were used."""
    clean = [sample for sample in samples if sample.clean]
    noisy = len(clean) < min(ENOUGH, len(samples))
    used = samples if noisy else clean
    walls = [sample.wall for sample in used]
    low, middle, high = (
        statistics.quantiles(walls, n=4, method="inclusive") if len(walls) > 1 else walls * 3
    )
    cores = statistics.median(sample.cpu / sample.wall for sample in used)
    return Summary((low, middle, high), cores, len(clean), len(samples), noisy)
