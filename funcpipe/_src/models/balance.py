"""Cut a chain of layers into contiguous parts so that the slowest part is as fast as possible.

The result is exact. `plan_for` also chooses the schedule.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor, inf, lcm, nextafter
from operator import index
from typing import Any, Literal, NamedTuple, cast

from funcpipe._src.core.errors import PlanError, ScheduleError, bullets, raise_all
from funcpipe._src.core.notebook import page, shown
from funcpipe._src.core.shown import guarded
from funcpipe._src.core.table import Table
from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.schedule import Kind

Numbers = Sequence[int]


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
        rows = [
            (
                *(
                    str(part),
                    str(count),
                    f"{first}-{end - 1}" if count > 1 else str(first),
                    f"{time:.6g}",
                ),
                *(f"{memory:.6g}" if any(self.memory) else "", "yes" if remat else ""),
            )
            for part, (count, (first, end), time, memory, remat) in enumerate(columns)
        ]
        return page(
            "Balance",
            facts,
            Table(
                "Parts", ("part", "layers", "which", "time", "memory", "remat"), tuple(rows)
            ).html(),
        )


class _PartCost(NamedTuple):
    """The cost of one way to run a part on one device, as prefix sums over the layers.

    ``largest`` has the most work and the most memory of a single layer.
    """

    remat: bool
    work: Numbers
    memory: Numbers
    largest: tuple[int, int]


class _BalanceProblem(NamedTuple):
    """The problem of `balance` in integers.

    One unit of work is ``unit`` of time, one unit of memory is ``byte`` of memory.
    """

    options: Sequence[Sequence[_PartCost]]
    speeds: Sequence[Fraction]
    limits: Sequence[int | None]
    comm: Numbers
    unit: Fraction
    byte: Fraction

    def time(self, part: int, option: _PartCost, ends: tuple[int, int]) -> Fraction:
        start, end = ends
        work = option.work[end] - option.work[start] + self.comm[start] + self.comm[end]
        return work * self.unit / self.speeds[part]

    def room(self, part: int, bottleneck: Fraction | None) -> int | None:
        """The work that a part can do within a bottleneck. None: any."""
        return None if bottleneck is None else floor(bottleneck * self.speeds[part] / self.unit)


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

    The result is exact, because sums are rational numbers. The search ends when no double lies
    between a possible and an impossible bottleneck. If several cuts are equal, `balance` returns
    the cut whose first parts have the most layers.

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
    ends = _search(problem)
    if ends is None:
        raise PlanError(_limit_message(problem, remat))
    chosen = [_fastest(problem, part, ends[part : part + 2]) for part in range(num_parts)]
    parts = Balance(b - a for a, b in pairwise(ends))
    parts.times = tuple(float(time) for time, _ in chosen)
    parts.bottleneck, parts.bound = max(parts.times), float(_bound(problem))
    parts.memory = tuple(
        float((option.memory[ends[part + 1]] - option.memory[ends[part]]) * problem.byte)
        for part, (_, option) in enumerate(chosen)
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
    """Return the number of layers of each stage as ints, after a check.

    Each stage needs at least one layer, and the sizes must sum to ``total``. ``noun`` names the
    divided things in messages.

    Raises:
        PlanError: the sizes do not fit, or there are not ``num_stages`` of them.
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

    def numbers(name: str, value: Any, length: int) -> list[Fraction]:
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
        return [] if bad else [Fraction(v) for v in values]

    time, redo = numbers("costs", work, layers), numbers("remat", remat_work, layers)
    borders = numbers("comm", comm, layers - 1)
    residuals, constants = numbers("memory", memory, layers), numbers("fixed", fixed, layers)
    flights, rates = numbers("in_flight", in_flight, count), numbers("speeds", speeds, count)
    limits = [None] * count if limit is None else numbers("limit", limit, count)
    if remat not in (False, True, "auto"):
        faults.append(f"remat is False, True or 'auto'; got {remat!r}")
    raise_all("nothing to balance:", faults)

    unit, (time, redo, borders) = _to_integers(time, redo, borders)
    distinct = dict.fromkeys(flights)
    byte, (constants, residuals, *rows) = _to_integers(
        constants, residuals, *([size * times for size in residuals] for times in distinct)
    )
    rows_of = dict(zip(distinct, rows, strict=True))

    def sums(values: Any) -> list[int]:
        return list(accumulate(values, initial=0))

    def option(light: bool, times: Fraction) -> _PartCost:
        # With remat, a part keeps the residuals of one microbatch, however many are in flight.
        kept = residuals if light and times > 1 else rows_of[times]
        sizes = [a + b for a, b in zip(constants, kept, strict=True)]
        loads = [a + b for a, b in zip(time, redo, strict=True)] if light else time
        return _PartCost(light, sums(loads), sums(sizes), (max(loads), max(sizes)))

    kinds = (False, True) if remat == "auto" else (bool(remat),)
    options = {times: [option(light, times) for light in kinds] for times in rows_of}
    whole_limits = [None if most is None else floor(most / byte) for most in limits]
    return _BalanceProblem(
        [options[times] for times in flights], rates, whole_limits, [0, *borders, 0], unit, byte
    )


def _to_integers(*rows: Sequence[Fraction]) -> tuple[Fraction, list[list[int]]]:
    """Turn rational numbers into integer multiples of one common unit."""
    # Integers keep sums exact. With floats, two equal bottlenecks could compare as different.
    scale = lcm(*(number.denominator for row in rows for number in row))
    return Fraction(1, scale), [[int(number * scale) for number in row] for row in rows]


def _bound(problem: _BalanceProblem) -> Fraction:
    work = problem.options[0][0].work
    largest = max(b - a for a, b in pairwise(work))
    return max(
        work[-1] * problem.unit / sum(problem.speeds), largest * problem.unit / max(problem.speeds)
    )


def _fastest(problem: _BalanceProblem, part: int, ends: Any) -> tuple[Fraction, _PartCost]:
    limit = problem.limits[part]
    options = [
        option
        for option in problem.options[part]
        if limit is None or option.memory[ends[1]] - option.memory[ends[0]] <= limit
    ]
    return min(
        ((problem.time(part, option, ends), option) for option in options),
        key=lambda timed: timed[0],
    )


def _search(problem: _BalanceProblem) -> list[int] | None:
    """Find the borders with the smallest bottleneck, by bisection.

    Invariant: no borders reach ``low``, and ``ends`` reach ``high``.
    """
    ends = _fill(problem, None)
    if ends is None:
        return None
    bound = _bound(problem)
    # Just below the lower bound, because the bound itself may be reachable.
    low = nextafter(float(bound), -inf)
    while True:
        high = float(
            max(_fastest(problem, s, ends[s : s + 2])[0] for s in range(len(problem.speeds)))
        )
        better = None
        while better is None:
            middle = low + (high - low) / 2
            # No double lies between them, so ``high`` is the smallest bottleneck. Fill once more
            # with it, so that the first parts get the most layers.
            if not low < middle < high:
                return _fill(problem, Fraction(high)) or ends
            better = _fill(problem, Fraction(middle))
            low = middle if better is None else low
        ends = better


def _fill(problem: _BalanceProblem, bottleneck: Fraction | None) -> list[int] | None:
    """Find borders of parts that each take at most ``bottleneck``; early parts as long as
    possible. None: impossible."""
    count, last = len(problem.speeds), len(problem.comm) - 1
    # Without border costs, and if each layer fits alone, a part that ends later is never worse. So
    # the greedy choice is right. Otherwise a longer part can end at an expensive border, and the
    # tables of `_covered` are needed.
    free = not any(problem.comm) and _each_layer_fits(problem, bottleneck)
    covered = None if free else _covered(problem, bottleneck)
    if covered is not None and not covered[0][0]:
        return None
    ends = [0]
    for part in range(count):
        start, furthest = ends[-1], last - (count - 1 - part)  # each later part needs a layer
        end = max(
            _furthest(problem, part, option, (start, furthest), bottleneck)
            for option in problem.options[part]
        )
        if covered is not None:
            while not (covered[part + 1][end] and _fits(problem, part, (start, end), bottleneck)):
                end -= 1
        ends.append(end)
    return ends if ends[-1] == last else None


def _furthest(
    problem: _BalanceProblem,
    part: int,
    option: _PartCost,
    span: tuple[int, int],
    bottleneck: Fraction | None,
) -> int:
    """The last layer at which a part can end, if its last border costs nothing."""
    start, end = span
    for sums, room in (
        (option.work, problem.room(part, bottleneck)),
        (option.memory, problem.limits[part]),
    ):
        if room is not None:
            end = min(end, bisect_right(sums, sums[start] + room, lo=start, hi=span[1] + 1) - 1)
    return end


def _fits(
    problem: _BalanceProblem, part: int, span: tuple[int, int], bottleneck: Fraction | None
) -> bool:
    start, end = span
    room, limit = problem.room(part, bottleneck), problem.limits[part]
    return end > start and any(
        (
            room is None
            or option.work[end] - option.work[start] + problem.comm[start] + problem.comm[end]
            <= room
        )
        and (limit is None or option.memory[end] - option.memory[start] <= limit)
        for option in problem.options[part]
    )


def _covered(problem: _BalanceProblem, bottleneck: Fraction | None) -> list[list[bool]]:
    """``[part][start]``: whether this part and the later parts can take all layers from ``start``
    on.

    The tables are built from the last part back. For each start, the ends that memory allows are a
    window that only moves down. The cheapest end of the window is at the front of a queue.
    """
    last = len(problem.comm) - 1
    tables = [[end == last for end in range(last + 1)]]
    for part in reversed(range(len(problem.speeds))):
        room, limit = problem.room(part, bottleneck), problem.limits[part]
        covers = [False] * (last + 1)
        for option in problem.options[part]:
            window: deque[int] = deque()
            load = [work + border for work, border in zip(option.work, problem.comm, strict=True)]
            for start in reversed(range(last)):
                if tables[-1][start + 1]:
                    # An end that is further away and not cheaper is never chosen again. So loads in
                    # the queue increase from front to back.
                    while window and load[window[-1]] >= load[start + 1]:
                        window.pop()
                    window.append(start + 1)
                while (
                    window
                    and limit is not None
                    and option.memory[window[0]] - option.memory[start] > limit
                ):
                    window.popleft()
                if window and (
                    room is None
                    or load[window[0]] - option.work[start] + problem.comm[start] <= room
                ):
                    covers[start] = True
        tables.append(covers)
    return tables[::-1]


def _each_layer_fits(problem: _BalanceProblem, bottleneck: Fraction | None) -> bool:
    """Whether each layer alone fits on each device."""
    rooms = [problem.room(part, bottleneck) for part in range(len(problem.speeds))]
    return all(
        any(
            (room is None or option.largest[0] <= room)
            and (limit is None or option.largest[1] <= limit)
            for option in options
        )
        for options, room, limit in zip(problem.options, rooms, problem.limits, strict=True)
    )


def _limit_message(problem: _BalanceProblem, remat: Any) -> str:
    """The message for a limit that nothing fits.

    The same search finds the smallest limit: it balances memory instead of time, with limits as
    speeds.
    """
    # With limits as speeds, the bottleneck is the factor by which the limits are too small.
    limits = [Fraction(limit or 1) * problem.byte for limit in problem.limits]
    options = [
        [
            option._replace(work=option.memory, largest=option.largest[::-1])
            for option in options[-1:]
        ]
        for options in problem.options
    ]
    free = [0] * len(problem.comm)
    least = problem._replace(
        options=options, speeds=limits, limits=[None] * len(limits), comm=free, unit=problem.byte
    )
    ends = _search(least)
    assert ends is not None
    factor = max(_fastest(least, s, ends[s : s + 2])[0] for s in range(len(limits)))
    need = (
        f"limit={float(factor * limits[0]):.17g}"
        if len(set(limits)) == 1
        else f"limits {float(factor):.17g} times as large"
    )
    hint = "more parts" if remat else "more parts, or remat='auto' with a Cost"
    return (
        f"no {len(limits)} parts of these layers fit the memory limit; the least that would do: "
        f"{need}; or take {hint}"
    )
