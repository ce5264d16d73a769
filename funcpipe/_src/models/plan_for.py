"""Choose partition and schedule together: how to cut layers, where to place stages, and in which
order to run them.

`balance` chooses a partition only, `search` a schedule only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from math import inf
from operator import add, attrgetter, index, itemgetter
from time import perf_counter
from typing import Any, NamedTuple, cast, get_args

from funcpipe._src.core.errors import PlanError, ScheduleError, bullets, raise_all
from funcpipe._src.core.progress import ProgressTo, Teller, telling
from funcpipe._src.core.shown import guarded
from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.cost_shares import one_each
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Kind, Schedule
from funcpipe._src.models.balance import balance, checked_numbers
from funcpipe._src.search.found import Found
from funcpipe._src.search.placement import placed, shapes_for
from funcpipe._src.search.problem import Objective, limits_of
from funcpipe._src.search.search import search

_FINALISTS = 3
_SHARE = 0.5
"""The share of the seconds for the short searches of all candidates. The finalists get the rest."""


class Tried(NamedTuple):
    """One combination that `plan_for` tried.

    Attributes:
        num_microbatches: the number of microbatches.
        sizes: the number of layers of each stage.
        placement: "line", "loop" or "v".
        value: the objective; infinite if the combination does not fit.
        reason: the name of the schedule, or the reason why the combination does not fit.
    """

    num_microbatches: int
    sizes: tuple[int, ...]
    placement: str
    value: float
    reason: str


@dataclass(frozen=True)
class Choice:
    """The stages, the placement and the schedule that `plan_for` chose.

    >>> choice = fp.models.plan_for(fp.Cost([1.0] * 8), num_devices=2, num_microbatches=4, evaluations=200)
    >>> len(choice.schedule.orders), choice.remat
    (2, False)

    Attributes:
        sizes: the number of layers of each stage, for ``fp.split(model, balance=choice.sizes)``.
        schedule: the schedule, for ``fp.make_plan(stages, choice.schedule)``. It contains R and O
            if memory requires them.
        num_microbatches: the number of microbatches.
        placement: "line", "loop" or "v".
        cost: the cost of the stages.
        found: the report of the search about the schedule.
        tried: all combinations that were tried, best first.
    """

    sizes: tuple[int, ...]
    schedule: Schedule
    num_microbatches: int
    placement: str
    cost: Cost
    found: Found
    tried: tuple[Tried, ...]

    @property
    def timeline(self) -> Timeline:
        """The simulation of the schedule."""
        return self.found.timeline

    @property
    def remat(self) -> bool:
        """Whether the schedule recomputes any residual."""
        return any(action.kind is Kind.R for order in self.schedule.orders for action in order)

    def _head(self) -> str:
        return (
            f"{len(self.sizes)} stages of {list(self.sizes)} layers, {self.placement}, "
            f"{self.num_microbatches} microbatches"
        )

    def __str__(self) -> str:
        rows = [
            f"  {tried.num_microbatches:>4} microbatches  {len(tried.sizes):>3} stages  "
            f"{tried.placement:<5} {'-' if tried.value == inf else f'{tried.value:.6g}':>12}  "
            f"{tried.reason}"
            for tried in self.tried
        ]
        return "\n".join([f"{self._head()}: {self.found}", *rows])

    @guarded
    def __repr__(self) -> str:
        return f"<Choice of {len(self.tried)}: {self._head()}: {self.found}>"


def plan_for(
    cost: Cost | Callable[[int], Cost],
    *,
    num_devices: int,
    num_microbatches: int | Sequence[int],
    memory_limit: float | Sequence[float] | None = None,
    fixed: float | Sequence[float] = 0.0,
    stages_per_device: int | Sequence[int] = (1, 2),
    remat: bool = True,
    offload: bool = False,
    objective: Objective = "makespan",
    evaluations: int = 3_000,
    seconds: float = 60.0,
    seed: int = 0,
    progress: ProgressTo = False,
) -> Choice:
    """Choose stages, placement, number of microbatches, remat and schedule for a chain of layers.

    `balance` cuts the layers for each number of microbatches, number of stages per device, and
    possible placement. Then single layers move across cuts as long as the published schedules
    become shorter. A search refines the schedules of the best three combinations.

    >>> choice = fp.models.plan_for(fp.Cost([1.0] * 8), num_devices=2, num_microbatches=4, evaluations=200)
    >>> choice.sizes, choice.placement, choice.timeline.makespan
    ((2, 2, 2, 2), 'v', 50.0)

    Args:
        cost: the cost of each layer for one microbatch, as `profile` measures it. Or a function
            from a number of microbatches to such a cost, because more microbatches are smaller.
            Several numbers of microbatches need the function. `Cost.microbatches` has one factor
            per microbatch, `Cost.speeds` one speed per device.
        num_devices: the number of devices, D.
        num_microbatches: the number of microbatches, or several numbers to choose from.
        memory_limit: the memory of each device, in the unit of `Cost.residual`: one number, or one
            per device. None: no limit.
        fixed: the memory of each layer that does not depend on microbatches: parameters, gradients,
            optimizer state.
        stages_per_device: the numbers of stages that a device may have.
        remat: whether residuals may be recomputed.
        offload: whether residuals may move to host memory.
        objective: the quantity to minimize, as in `search`.
        evaluations: for each of the best three combinations, the number of schedules that the
            search times at most.
        seconds: the time limit of the choice.
        seed: the seed of the search.
        progress: True shows on stderr the current combination and the best value so far. A function
            gets a `CallProgress` instead.

    Returns:
        A `Choice`.

    Raises:
        PlanError: the arguments do not fit together, or no combination fits the memory. The message
            lists each combination with its reason.
        ScheduleError: an argument is not a valid number.
    """
    options: dict[str, Any] = {
        "objective": objective,
        "remat": remat,
        "offload": offload,
        "seed": seed,
    }
    with telling("plan_for", progress, unit="ways", limit=seconds) as told:
        told.phase("costs")
        counts, shares = _counts(cost, num_devices, num_microbatches, stages_per_device)
        limits = limits_of(memory_limit, num_devices)
        faults: list[str] = []
        if objective not in get_args(Objective):
            faults.append(
                f"objective is {' or '.join(map(repr, get_args(Objective)))}; got {objective!r}"
            )
        cases = [
            _Case(
                layers,
                count,
                limits,
                tuple(checked_numbers(faults, "fixed", fixed, _num_layers(layers))),
                options,
                told,
            )
            for count, layers in counts.items()
        ]
        raise_all("plan_for cannot use these arguments:", dict.fromkeys(faults))
        return _choice(cases, shares, evaluations, seconds, told)


def _choice(
    cases: Sequence[_Case], shares: Sequence[int], evaluations: int, seconds: float, told: Teller
) -> Choice:
    """Find the best way to run the layers. Raises PlanError if none fits."""
    deadline = perf_counter() + seconds * _SHARE
    candidates: list[_Candidate] = []
    values: list[float] = [inf]
    ways = sum(len(case.shapes(share)) for case in cases for share in shares)
    told.total = ways + _FINALISTS
    told.look = lambda: (None if min(values) == inf else min(values), None)
    for case in cases:
        told.phase(f"{case.num_microbatches} microbatches", len(candidates))
        for share in shares:
            # The time limit applies only after some combination fits. Otherwise a slow start would
            # raise "no way fits".
            if perf_counter() > deadline and any(candidate.found for candidate in candidates):
                break
            for candidate in _best_candidates(case, share, deadline):
                candidates.append(candidate)
                values.append(candidate.tried.value)
                told.to(len(candidates))
    candidates.sort(key=attrgetter("rank"))
    fitting = [candidate for candidate in candidates if candidate.tried.value < inf]
    if not fitting:
        reasons = [
            (
                f"{tried.num_microbatches} microbatches, {len(tried.sizes)} stages, "
                f"{tried.placement}: {tried.reason}"
            )
            for tried in (candidate.tried for candidate in candidates)
        ]
        raise PlanError(
            bullets(
                "no way to run these layers fits:",
                reasons or ["there are fewer layers than devices"],
            )
        )
    finalists: list[tuple[float, _Candidate, Found]] = []
    for number, candidate in enumerate(fitting[:_FINALISTS]):
        told.phase(f"search {number + 1} of {len(fitting[:_FINALISTS])}", ways + number)
        first = candidate.found
        assert first is not None
        options = {**cases[0].options, "seconds": seconds * (1 - _SHARE) / _FINALISTS}
        try:
            longer = candidate.search(
                evaluations, progress=told.on and (lambda _: told.again()), **options
            )
        # The time limit can end the longer search before it finds any schedule that fits. The first
        # search found one.
        except ScheduleError:
            longer = first
        finalists += [(result.value, candidate, result) for result in (first, longer)]
        values.append(longer.value)
    value, candidate, result = min(finalists, key=itemgetter(0))
    chosen = candidate.tried._replace(
        value=value, reason=f"{result.schedule.name}, {result.source}"
    )
    return Choice(
        sizes=chosen.sizes,
        schedule=result.schedule,
        num_microbatches=chosen.num_microbatches,
        placement=chosen.placement,
        cost=candidate.cost,
        found=result,
        tried=(chosen, *(other.tried for other in candidates if other is not candidate)),
    )


class _Candidate(NamedTuple):
    """A partition on a placement, with a short search; ``over`` is the memory that it lacks."""

    tried: Tried
    cost: Cost
    limits: tuple[float, ...]
    over: float
    found: Found | None = None

    @property
    def rank(self) -> tuple[float, float]:
        """The sort key, smaller is better: the objective, then the lacking memory."""
        return self.tried.value, self.over

    def without(self, reason: str) -> _Candidate:
        """The same candidate, marked as one that does not fit."""
        return self._replace(tried=self.tried._replace(reason=reason))

    def search(self, evaluations: int, **options: Any) -> Found:
        """Search a schedule for this partition on its placement."""
        return search(
            self.cost,
            num_devices=len(self.limits),
            num_microbatches=self.tried.num_microbatches,
            placement=self.tried.placement,
            memory_limit=self.limits,
            evaluations=evaluations,
            **options,
        )


def _counts(
    cost: Any, num_devices: Any, num_microbatches: Any, stages_per_device: Any
) -> tuple[dict[int, Cost], tuple[int, ...]]:
    """Return the cost for each number of microbatches, and the numbers of stages per device."""
    faults: list[str] = []

    def numbers(name: str, value: Any) -> tuple[int, ...]:
        several = (
            isinstance(value, Sequence) and not isinstance(value, str) and name != "num_devices"
        )
        values: tuple[Any, ...] = tuple(cast("Sequence[Any]", value)) if several else (value,)
        try:
            counts = tuple(dict.fromkeys(map(index, values)))
        except TypeError:
            counts = ()
        if not counts or min(counts) < 1:
            faults.append(f"{name} must be a positive integer, or several; got {value!r}")
        return counts

    numbers("num_devices", num_devices)
    microbatches = numbers("num_microbatches", num_microbatches)
    shares = numbers("stages_per_device", stages_per_device)
    if isinstance(cost, Cost) and len(microbatches) > 1:
        faults.append(
            "for several numbers of microbatches, cost must be a function: lambda m: "
            "fp.models.profile(layers, example[: rows // m])"
        )
    elif not isinstance(cost, Cost) and (not callable(cost) or hasattr(cost, "named_parameters")):
        faults.append(
            "cost must be a Cost of the layers (fp.models.profile measures one), or a function "
            f"that returns one; got a {type(cost).__name__}"
        )
    raise_all("plan_for cannot use these arguments:", faults)
    costs = [cost if isinstance(cost, Cost) else cost(count) for count in microbatches]
    if not all(isinstance(layers, Cost) for layers in costs):
        raise PlanError(
            "the function cost must return a Cost for each number of microbatches; it returned "
            f"{costs}"
        )
    layers_of = dict(zip(microbatches, cast("list[Cost]", costs), strict=True))
    for count, layers in layers_of.items():
        # Both raise ScheduleError for factors or speeds of another count.
        layers.factors(count)
        one_each("speeds", "devices", layers.speeds, num_devices)
    return layers_of, shares


class _Case(NamedTuple):
    """The layers to cut, for one number of microbatches."""

    layers: Cost
    num_microbatches: int
    limits: tuple[float, ...]
    weights: tuple[float, ...]
    options: dict[str, Any]
    told: Teller

    def shapes(self, share: int) -> Sequence[str]:
        """The possible placements of ``share`` stages per device."""
        devices = len(self.limits)
        return shapes_for(share * devices, devices) if share * devices <= len(self.weights) else ()

    def look(self, sizes: tuple[int, ...], shape: str) -> _Candidate:
        """Do a short search for a partition on a placement."""
        self.told.again()
        cost, room = self.layers.group(sizes), list(self.limits)
        device_of = placed(shape, len(sizes), len(room))
        for stage, (begin, end) in enumerate(pairwise(accumulate(sizes, initial=0))):
            # Residuals may use only the memory that parameters leave.
            room[device_of[stage]] -= sum(self.weights[begin:end])
        candidate = _Candidate(
            Tried(self.num_microbatches, sizes, shape, inf, ""),
            cost,
            tuple(room),
            _lacking_memory(cost, device_of, room),
        )
        if min(room) <= 0:
            return candidate.without(f"the parameters alone fill device {room.index(min(room))}")
        try:
            result = candidate.search(20, **self.options)
        except ScheduleError as error:
            return candidate.without(str(error))
        tried = candidate.tried._replace(value=result.value, reason=result.schedule.name)
        return candidate._replace(tried=tried, found=result)


def _best_candidates(case: _Case, share: int, deadline: float) -> Iterator[_Candidate]:
    """Yield the best candidate of each placement, improved by moves of single layers."""
    shapes = case.shapes(share)
    for shape in shapes:
        starts = sorted({tuple(sizes) for sizes in _cuts(case, share * len(case.limits), shape)})
        # Cached, because the moves of single layers reach the same partition several times.
        look = cache(partial(case.look, shape=shape))
        best = min(map(look, starts), key=attrgetter("rank"))
        while (next_best := _better_neighbour(best, look, deadline)) is not None:
            best = next_best
        yield best


def _better_neighbour(
    best: _Candidate, look: Callable[[tuple[int, ...]], _Candidate], deadline: float
) -> _Candidate | None:
    """The first better neighbour. None: there is none, or the time is over."""
    for sizes in _neighbours(best.tried.sizes):
        if perf_counter() < deadline and look(sizes).rank < best.rank:
            return look(sizes)
    return None


def _num_layers(layers: Cost) -> int:
    if layers.num_stages is None:
        raise PlanError(
            "plan_for needs a cost with one number per layer, as fp.models.profile measures it; "
            "one number for all layers does not give their count: Cost(forward=[1.0] * 12)"
        )
    return layers.num_stages


def _cuts(case: _Case, stages: int, shape: str) -> Iterator[Sequence[int]]:
    """Partitions to start from: equal in time, equal in memory, or within the limit."""
    layers, count, limits, weights, *_ = case
    times = [
        layers.of(Kind.F, layer)
        + min(layers.of(Kind.B, layer), layers.of(Kind.I, layer) + layers.of(Kind.W, layer))
        for layer in range(len(weights))
    ]
    memory = [layers.largest_size * size for size in per_stage(layers.residual, len(weights))]
    rates = layers.speeds or (1.0,) * len(limits)
    speeds = [rates[device] for device in placed(shape, stages, len(limits))]
    yield balance(times, stages, speeds=speeds)
    if min(limits) == inf:
        return
    yield balance([*map(add, memory, weights)], stages)
    if stages > len(limits):
        return
    total = sum(weights) + count * sum(memory)  # replaces an infinite limit by a finite number
    finite = [min(limit, total) for limit in limits]
    below = range(stages, 0, -1)  # for each stage, the number of stages from it on
    options: dict[str, Any] = {"fixed": weights, "limit": finite, "speeds": speeds}
    for windows in (below, [2 * depth - 1 for depth in below], [1] * stages):
        in_flight = [min(count, window) for window in windows]
        with suppress(PlanError):
            yield balance(times, stages, memory=memory, in_flight=in_flight, **options)


def _neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The partitions in which one layer has moved to a neighbouring stage."""
    for stage, (size, next_size) in enumerate(pairwise(sizes)):
        for move in (1, -1):
            if size + move > 0 and next_size - move > 0:
                yield (*sizes[:stage], size + move, next_size - move, *sizes[stage + 2 :])


def _lacking_memory(cost: Cost, device_of: tuple[int, ...], limits: Sequence[float]) -> float:
    """The memory that all devices together lack for one microbatch at a time."""
    needed = [0.0] * len(limits)
    for stage, residual in enumerate(per_stage(cost.residual, len(device_of))):
        needed[device_of[stage]] += residual * cost.largest_size
    return sum(max(0.0, memory - limit) for memory, limit in zip(needed, limits, strict=True))
