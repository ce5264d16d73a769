"""Cut a chain of layers into contiguous parts so that the slowest part is as fast as possible.

The result is exact. `plan_for` also chooses the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import fsum, inf
from operator import index
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError, ScheduleError, bullets, raise_all
from funcpipe._src.core.notebook import page, shown
from funcpipe._src.core.shown import guarded
from funcpipe._src.core.table import Table
from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.schedule import Kind

_ROUNDING = 1 + 1e-12
"""Bottlenecks that differ by less than this factor are equal: sums of floats round."""


class Balance(tuple[int, ...]):
    """The number of layers of each part: a tuple of ints with its times and memory.

    >>> parts = fp.models.balance([1, 1, 1, 1, 3, 3], 5)
    >>> tuple(parts), parts.times
    ((2, 1, 1, 1, 1), (2.0, 1.0, 1.0, 3.0, 3.0))

    Attributes:
        bottleneck: the time of the slowest part, in the unit of the costs.
        bound: a lower bound of the bottleneck: the larger of all work over all speeds, and the
            largest layer on the fastest device.
        times: the time of each part, with its borders.
        memory: the memory of each part, in the unit of ``memory`` and ``fixed``.
        remat: for each part, whether it runs its forward again in the backward.
    """

    bottleneck: float
    bound: float
    times: tuple[float, ...]
    memory: tuple[float, ...]
    remat: tuple[bool, ...]

    def __str__(self) -> str:
        return f"{list(self)}: bottleneck {self.bottleneck:.6g}, lower bound {self.bound:.6g}"

    @guarded
    def __repr__(self) -> str:
        return f"<Balance {self}>"

    @shown
    def _repr_html_(self) -> str:
        facts = [
            ("of", f"{sum(self)} layers in {len(self)} parts"),
            ("bottleneck", f"{self.bottleneck:.6g}"),
            ("lower bound", f"{self.bound:.6g}"),
        ]
        ends = pairwise(accumulate(self, initial=0))
        columns = zip(self, ends, self.times, self.memory, self.remat, strict=True)
        rows: list[tuple[str, ...]] = []
        for part, (count, (first, end), time, memory, remat) in enumerate(columns):
            which = f"{first}-{end - 1}" if count > 1 else str(first)
            kept = f"{memory:.6g}" if any(self.memory) else ""
            words = f"{time:.6g}", kept, "yes" if remat else ""
            rows.append((str(part), str(count), which, *words))
        heads = ("part", "layers", "which", "time", "memory", "remat")
        return page("Balance", facts, Table("Parts", heads, tuple(rows)).html())


class _PartCost(NamedTuple):
    """The cost of one way to run a part on one device: work and memory of each layer."""

    remat: bool
    work: Sequence[float]
    memory: Sequence[float]


class _BalanceProblem(NamedTuple):
    """For each part its options, speed and limit, and the time of each border."""

    options: Sequence[Sequence[_PartCost]]
    speeds: Sequence[float]
    limits: Sequence[float]
    comm: Sequence[float]

    def times(self, part: int, starts: Tensor) -> Tensor:
        """The time of a part for each start and each end, or inf; [len(starts), layers + 1]."""
        comm = torch.tensor(self.comm, dtype=torch.float64)
        best = comm.new_full((len(starts), len(comm)), inf)
        for option in self.options[part]:
            work, memory = _sums(option.work), _sums(option.memory)
            # In place: with thousands of layers, new matrices would take most of the time.
            time = (work + comm)[None, :] - (work - comm)[starts, None]
            fits = memory[None, :] - memory[starts, None] <= self.limits[part]
            best = torch.minimum(best, time.div_(self.speeds[part]).masked_fill_(~fits, inf))
        return best.masked_fill_(torch.arange(len(comm))[None, :] <= starts[:, None], inf)

    def fastest(self, part: int, start: int, end: int) -> tuple[float, _PartCost]:
        """The time of a part with these layers, by its fastest option that fits."""
        borders = self.comm[start] + self.comm[end]
        timed = [
            ((fsum(option.work[start:end]) + borders) / self.speeds[part], option)
            for option in self.options[part]
            if float(_sums(option.memory)[end] - _sums(option.memory)[start]) <= self.limits[part]
        ]
        return min(timed, key=lambda each: each[0])


def _sums(values: Sequence[float]) -> Tensor:
    return torch.tensor([0.0, *accumulate(values)], dtype=torch.float64)


def balance(
    costs: Sequence[float] | Cost,
    num_parts: int,
    *,
    comm: float | Sequence[float] = 0.0,
    memory: float | Sequence[float] = 0.0,
    fixed: float | Sequence[float] = 0.0,
    limit: float | Sequence[float] | None = None,
    in_flight: int | Sequence[int] = 1,
    speeds: float | Sequence[float] = 1.0,
    remat: bool | Literal["auto"] = False,
) -> Balance:
    """Cut layers into contiguous, non-empty parts with the smallest bottleneck.

    The result is exact up to the rounding of sums of floats. If several cuts are equal, `balance`
    returns the cut whose first parts have the most layers. The time grows with the number of parts
    times the square of the number of layers.

    >>> print(fp.models.balance([1, 1, 1, 1, 3, 3], 5))
    [2, 1, 1, 1, 1]: bottleneck 3, lower bound 3

    Args:
        costs: the time of each layer, or a `Cost` with one number per layer. For a `Cost`, the time
            is forward plus backward, for a microbatch of mean factor.
        num_parts: the number of parts. Part s runs on device s.
        comm: the time of the border after each layer except the last: one number, or one per
            border. Both parts at a border pay it.
        memory: the residual of each layer for one microbatch: one number, or one per layer. By
            default, a `Cost` supplies its ``residual``, for its largest microbatch.
        fixed: the memory of each layer that does not depend on microbatches: parameters, gradients,
            optimizer state.
        limit: the memory of a device: one number, or one per device. None: no limit.
        in_flight: the number of microbatches whose residuals a part keeps at a time. For 1F1B it is
            ``min(M, S - s)``.
        speeds: the speed of each device. The time of a part is its work and borders divided by the
            speed. By default, a `Cost` supplies its ``speeds``.
        remat: True: each part runs its forward again in the backward, so it keeps the residuals of
            one microbatch. "auto": only parts that would otherwise exceed the limit. Needs a
            `Cost`. The kept inputs are not counted.

    Returns:
        A `Balance`, for ``fp.split(model, balance=)``.

    Raises:
        PlanError: an argument is not a valid number or has a wrong length, or no cut fits the
            limit. The message then has the smallest limit that fits.
    """
    problem = _problem(costs, num_parts, comm, memory, fixed, limit, in_flight, speeds, remat)
    ends = _best_ends(problem)
    if ends is None:
        raise PlanError(_limit_message(problem, remat))
    spans = list(pairwise(ends))
    chosen = [problem.fastest(part, *span) for part, span in enumerate(spans)]
    parts = Balance(end - start for start, end in spans)
    parts.times = tuple(time for time, _ in chosen)
    parts.bottleneck = max(parts.times)
    work, speeds = problem.options[0][0].work, problem.speeds
    bound = max(fsum(work) / fsum(speeds), max(work) / max(speeds))
    parts.bound = min(bound, parts.bottleneck)  # both are rounded
    parts.memory = tuple(
        fsum(option.memory[start:end])
        for (start, end), (_, option) in zip(spans, chosen, strict=True)
    )
    parts.remat = tuple(option.remat for _, option in chosen)
    return parts


def evenly(costs: Sequence[float], num_parts: int) -> list[int]:
    """Do `balance` for costs that may all be 0; then all layers count the same.

    >>> evenly([1, 2, 3, 4, 5, 6], 2), evenly([0, 0, 0], 2)
    ([4, 2], [2, 1])
    """
    return list(balance(costs if any(costs) else [1] * len(costs), num_parts))


def checked_sizes(sizes: Any, total: int, noun: str, num_stages: int | None = None) -> list[int]:
    """Return the number of layers of each stage as ints. Raises PlanError if they do not fit.

    ``noun`` names the divided things in messages.
    """
    try:
        counts = [index(size) for size in sizes]
    except TypeError:
        raise PlanError(
            f"sizes are how many of the {total} {noun} each stage gets; got {sizes!r}"
        ) from None
    if (
        not counts
        or min(counts) < 1
        or sum(counts) != total
        or num_stages not in (None, len(counts))
    ):
        number = "" if num_stages is None else f"{num_stages} "
        example = evenly([1] * total, min(num_stages or max(len(counts), 1), total))
        raise PlanError(
            f"the sizes are {number}positive numbers that sum to the {total} {noun}; got "
            f"{counts}, which sum to {sum(counts)}; e.g. {example}"
        )
    return counts


def _problem(
    costs: Any,
    count: int,
    comm: Any,
    memory: Any,
    fixed: Any,
    limit: Any,
    in_flight: Any,
    speeds: Any,
    remat: Any,
) -> _BalanceProblem:
    faults: list[str] = []
    remat_work: Any = 0.0
    if isinstance(costs, Cost):
        try:
            layers = costs.num_stages or 0
            costs.check_stages(layers)
        except ScheduleError:
            layers = 0
        if not layers:
            raise PlanError(
                "balance needs a Cost with one number per layer, the same count in each field; "
                "fp.models.profile measures one"
            )
        mean, largest = costs.mean_time, costs.largest_size
        speeds = costs.speeds if costs.speeds and speeds == 1.0 else speeds
        work = [mean * (costs.of(Kind.F, i) + costs.of(Kind.B, i)) for i in range(layers)]
        remat_work = [mean * costs.of(Kind.R, i) for i in range(layers)]
        if memory == 0.0:
            memory = [largest * size for size in per_stage(costs.residual, layers)]
    else:
        if not isinstance(costs, Iterable) or hasattr(costs, "named_parameters"):
            raise PlanError(
                "balance takes the time of each layer, [1.0, 2.0, ...], or the Cost that "
                f"fp.models.profile(model, example) measures; got a {type(costs).__name__}"
            )
        work = list(cast("Iterable[Any]", costs))
        layers = len(work)
        if remat is not False:
            faults.append(
                "remat needs a Cost: plain numbers do not contain the time of a forward; pass "
                "remat=False"
            )
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= layers:
        faults.append(f"num_parts is from 1 to the number of layers, {layers}; got {count!r}")
        raise PlanError(bullets("nothing to balance:", faults))

    numbers = partial(checked_numbers, faults)
    time, redo = numbers("costs", work, layers), numbers("remat", remat_work, layers)
    borders = numbers("comm", comm, layers - 1)
    residuals, constants = numbers("memory", memory, layers), numbers("fixed", fixed, layers)
    flights, rates = numbers("in_flight", in_flight, count), numbers("speeds", speeds, count)
    limits = [inf] * count if limit is None else numbers("limit", limit, count)
    if remat not in (False, True, "auto"):
        faults.append(f"remat is False, True or 'auto'; got {remat!r}")
    raise_all("nothing to balance:", faults)

    def option(light: bool, times: float) -> _PartCost:
        # With remat, a part keeps the residuals of one microbatch, however many are in flight.
        kept = min(times, 1.0) if light else times
        sizes = [size + kept * each for size, each in zip(constants, residuals, strict=True)]
        loads = [a + b for a, b in zip(time, redo, strict=True)] if light else time
        return _PartCost(light, loads, sizes)

    kinds = (False, True) if remat == "auto" else (bool(remat),)
    options = [[option(light, times) for light in kinds] for times in flights]
    return _BalanceProblem(options, rates, limits, [0.0, *borders, 0.0])


def checked_numbers(faults: list[str], name: str, value: Any, length: int) -> list[float]:
    """Return one number for each of several parts, of one for all or a list."""
    values: list[Any] = list(value) if isinstance(value, Sequence) else [value] * length
    if len(values) != length:
        faults.append(f"{name} has {len(values)} numbers, not {length}")
    bad = [
        v
        for v in values
        if isinstance(v, bool) or not isinstance(v, (int, float)) or not 0 <= v < inf
    ]
    if bad or (name in ("speeds", "limit") and 0 in values):
        faults.append(
            f"{name}: numbers {'over' if name in ('speeds', 'limit') else 'from'} 0; got "
            f"{(bad or [0])[0]!r}"
        )
    return [] if bad else [float(v) for v in values]


def _best_ends(problem: _BalanceProblem) -> list[int] | None:
    """Find the borders with the smallest bottleneck by dynamic programming. None: nothing fits."""
    layers = torch.arange(len(problem.comm))
    # [start]: the smallest bottleneck of all later parts, for the layers from ``start`` on.
    table = torch.full((len(layers),), inf, dtype=torch.float64)
    table[-1] = 0.0
    tables = [table]
    for part in reversed(range(len(problem.speeds))):
        rows = layers.split(256)  # in pieces: the whole matrix of a long chain needs much memory
        bottlenecks = [torch.maximum(problem.times(part, row), tables[0]).amin(1) for row in rows]
        tables.insert(0, torch.cat(bottlenecks))
    best = float(tables[0][0])
    if best == inf:
        return None
    ends = [0]
    for part, rest in enumerate(tables[1:]):
        reached = torch.maximum(problem.times(part, layers[ends[-1] :][:1])[0], rest)
        ends.append(int((reached <= best * _ROUNDING).nonzero()[-1]))
    return ends


def _limit_message(problem: _BalanceProblem, remat: Any) -> str:
    """The message for a limit that nothing fits, with the least limit that does."""
    limits, count = problem.limits, len(problem.limits)
    alike = len(set(limits)) == 1
    # With limits as speeds, the bottleneck is the factor by which the limits are too small.
    least = _BalanceProblem(
        [[options[-1]._replace(work=options[-1].memory)] for options in problem.options],
        [1.0] * count if alike else limits,
        [inf] * count,
        [0.0] * len(problem.comm),
    )
    ends = _best_ends(least)
    assert ends is not None
    largest = max(
        float(least.times(part, torch.tensor([start]))[0, end])
        for part, (start, end) in enumerate(pairwise(ends))
    )
    need = f"limit={largest:.17g}" if alike else f"limits {largest:.17g} times as large"
    hint = "more parts" if remat else "more parts, or remat='auto' with a Cost"
    return (
        f"no {count} parts of these layers fit the memory limit; the least that would do: {need}; "
        f"or take {hint}"
    )
