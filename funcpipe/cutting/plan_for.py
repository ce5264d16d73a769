"""Partition and schedule together: how to cut layers into stages, where to put them, in which order to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from math import inf
from operator import index, itemgetter
from time import perf_counter
from typing import Any, NamedTuple, cast

from funcpipe.core.cost import Cost, per_stage
from funcpipe.core.errors import PlanError, ScheduleError, bullets, raise_all
from funcpipe.core.result import Timeline
from funcpipe.core.schedule import Kind, Schedule
from funcpipe.lab.placement import placed, shapes_for
from funcpipe.lab.problem import Objective, limits_of
from funcpipe.lab.search import Found, search
from funcpipe.modules.balance import balance

_FINALISTS = 3
_SHARE = 0.5
"""Of the seconds, for the quick looks; the rest is for the finalists."""


class Tried(NamedTuple):
    """One of the ways that were looked at.

    Attributes:
        num_microbatches: into how many the batch is cut.
        sizes: layers of each stage.
        placement: "line", "loop" or "v".
        value: the objective; infinite where nothing fits.
        reason: the schedule's name, or why nothing fits.
    """

    num_microbatches: int
    sizes: tuple[int, ...]
    placement: str
    value: float
    reason: str


@dataclass(frozen=True)
class Choice:
    """How to run a model.

    Attributes:
        sizes: layers of each stage: ``fp.split(model, balance=choice.sizes)``.
        schedule: an ordinary one, with R and O where memory asks for them: ``fp.make_plan(stages, choice.schedule)``.
        num_microbatches: into how many the batch is cut.
        placement: "line", "loop" or "v".
        cost: of the stages.
        found: what the search says of the schedule.
        tried: all that was looked at, best first.
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
        """The schedule's simulation."""
        return self.found.timeline

    @property
    def remat(self) -> bool:
        """Is anything computed again."""
        return any(action.kind is Kind.R for order in self.schedule.orders for action in order)

    def __str__(self) -> str:
        head = (
            f"{len(self.sizes)} stages of {list(self.sizes)} layers, {self.placement}, {self.num_microbatches} "
            "microbatches"
        )
        rows = [
            f"  {one.num_microbatches:>4} microbatches  {len(one.sizes):>3} stages  {one.placement:<5} "
            f"{'-' if one.value == inf else f'{one.value:.6g}':>12}  {one.reason}"
            for one in self.tried
        ]
        return "\n".join([f"{head}: {self.found}", *rows])

    __repr__ = __str__


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
) -> Choice:
    """Choose stages, placement, number of microbatches, remat and schedule for a chain of layers.

    Every number of microbatches and of stages a device, and every placement that these allow, is cut by `balance`;
    single layers are moved over the cuts while that makes the published schedules shorter; the best few are searched.

    >>> choice = plan_for(Cost([1.0] * 8), num_devices=2, num_microbatches=4, evaluations=200)
    >>> choice.sizes, choice.placement, choice.timeline.makespan
    ((2, 2, 2, 2), 'v', 50.0)

    Args:
        cost: of each layer for one microbatch, as `profile` measures it; or a function that gives it for a number of
            microbatches: more of them are smaller. Needed where there are several numbers to choose from.
        num_devices: how many devices, D.
        num_microbatches: into how many the batch is cut, or several numbers to choose from.
        memory_limit: of a device, or of each, in the unit of `Cost.residual`; None: no limit.
        fixed: each layer's memory whatever runs: parameters, gradients, optimizer.
        stages_per_device: how many stages a device may have.
        remat: may residuals be computed again.
        offload: may residuals be moved to the host.
        objective: as in `search`.
        evaluations: schedules that are timed at most for each of the best few.
        seconds: cut the choice short after so long.
        seed: of the search.

    Raises:
        PlanError: what was given does not fit, or nothing fits into the memory: every way with its reason.
        ScheduleError: numbers that are none.
    """
    counts, shares = _counts(cost, num_devices, num_microbatches, stages_per_device)
    options: dict[str, Any] = {"objective": objective, "remat": remat, "offload": offload, "seed": seed}
    limits = limits_of(memory_limit, num_devices)
    ends = perf_counter() + seconds * _SHARE
    looks: list[_Candidate] = []
    for count, layers in counts.items():
        case = _Case(layers, count, limits, per_stage(fixed, _num_layers(layers)), options)
        for share in shares:
            if perf_counter() > ends and any(look.found for look in looks):
                break
            looks += _looks(case, share, ends)
    looks.sort(key=_rank)
    fitting = [look for look in looks if look.tried.value < inf]
    if not fitting:
        reasons = [
            f"{one.num_microbatches} microbatches, {len(one.sizes)} stages, {one.placement}: {one.reason}"
            for one in (look.tried for look in looks)
        ]
        raise PlanError(bullets("no way to run these layers fits:", reasons or ["there are fewer layers than devices"]))
    finalists: list[tuple[float, _Candidate, Found]] = []
    for look in fitting[:_FINALISTS]:
        quick = look.found
        assert quick is not None
        try:
            more = search(
                look.cost,
                num_devices=num_devices,
                num_microbatches=look.tried.num_microbatches,
                placement=look.tried.placement,
                memory_limit=look.limits,
                evaluations=evaluations,
                seconds=seconds * (1 - _SHARE) / _FINALISTS,
                **options,
            )
        except ScheduleError:  # cut short before it came to what the first look found
            more = quick
        finalists += [(_value(found, options), look, found) for found in (quick, more)]
    value, look, found = min(finalists, key=itemgetter(0))
    chosen = look.tried._replace(value=value, reason=f"{found.schedule.name}, {found.source}")
    return Choice(
        sizes=chosen.sizes,
        schedule=found.schedule,
        num_microbatches=chosen.num_microbatches,
        placement=chosen.placement,
        cost=look.cost,
        found=found,
        tried=(chosen, *(other.tried for other in looks if other is not look)),
    )


class _Candidate(NamedTuple):
    """A partition on a placement, and how it does with what is quickly found; ``over``: how much memory it lacks."""

    tried: Tried
    cost: Cost
    limits: tuple[float, ...]
    over: float
    found: Found | None = None

    def without(self, reason: str) -> _Candidate:
        """The same, for which nothing fits."""
        return self._replace(tried=self.tried._replace(reason=reason))


def _rank(look: _Candidate) -> tuple[float, float]:
    """Small is good: the objective, and where nothing fits the memory that is lacking."""
    return look.tried.value, look.over


def _counts(
    cost: Any, num_devices: Any, num_microbatches: Any, stages_per_device: Any
) -> tuple[dict[int, Cost], tuple[int, ...]]:
    """The layers' cost by number of microbatches, and the numbers of stages a device."""
    faults: list[str] = []

    def numbers(name: str, value: Any) -> tuple[int, ...]:
        several = isinstance(value, Sequence) and not isinstance(value, str) and name != "num_devices"
        given: tuple[Any, ...] = tuple(cast("Sequence[Any]", value)) if several else (value,)
        try:
            found = tuple(dict.fromkeys(map(index, given)))
        except TypeError:
            found = ()
        if not found or min(found) < 1:
            faults.append(f"{name} is a positive whole number, or several; got {value!r}")
        return found

    numbers("num_devices", num_devices)
    microbatches, shares = (
        numbers("num_microbatches", num_microbatches),
        numbers("stages_per_device", stages_per_device),
    )
    if isinstance(cost, Cost) and len(microbatches) > 1:
        faults.append(
            "with several numbers of microbatches cost is a function of them: lambda m: fp.models.profile(layers, "
            "example[: "
            "rows // m])"
        )
    elif not isinstance(cost, Cost) and (not callable(cost) or hasattr(cost, "named_parameters")):
        faults.append(
            "cost is a Cost of the layers (fp.models.profile measures one), or a function that gives it; got a "
            f"{type(cost).__name__}"
        )
    raise_all("no such choice:", faults)
    made = [cost if isinstance(cost, Cost) else cost(count) for count in microbatches]
    if not all(isinstance(one, Cost) for one in made):
        raise PlanError(f"cost is a function that gives a Cost for a number of microbatches; it gave {made}")
    return dict(zip(microbatches, cast("list[Cost]", made), strict=True)), shares


class _Case(NamedTuple):
    """Layers and a number of microbatches, to be cut."""

    layers: Cost
    num_microbatches: int
    limits: tuple[float, ...]
    weights: tuple[float, ...]
    options: dict[str, Any]

    def look(self, sizes: tuple[int, ...], shape: str) -> _Candidate:
        """What is quickly found for a partition on a placement."""
        cost, room = self.layers.group(sizes), list(self.limits)
        home = placed(shape, len(sizes), len(room))
        for stage, (begin, end) in enumerate(pairwise([0, *accumulate(sizes)])):
            room[home[stage]] -= sum(self.weights[begin:end])
        nothing = _Candidate(
            Tried(self.num_microbatches, sizes, shape, inf, ""), cost, tuple(room), _over(cost, home, room)
        )
        if min(room) <= 0:
            return nothing.without(f"device {room.index(min(room))} has no room beside parameters")
        try:
            found = search(
                cost,
                num_devices=len(room),
                num_microbatches=self.num_microbatches,
                placement=shape,
                memory_limit=room,
                evaluations=20,
                **self.options,
            )
        except ScheduleError as error:
            return nothing.without(str(error))
        tried = nothing.tried._replace(value=_value(found, self.options), reason=found.schedule.name)
        return nothing._replace(tried=tried, found=found)


def _looks(case: _Case, share: int, ends: float) -> Iterator[_Candidate]:
    """Every placement of ``share * devices`` stages, its cuts improved while single layers can be moved to advantage."""
    stages = share * len(case.limits)
    if stages > len(case.weights):
        return
    starts = sorted({tuple(sizes) for sizes in _cuts(case, stages)})
    for shape in shapes_for(stages, len(case.limits)):
        look = cache(partial(case.look, shape=shape))
        best = min(map(look, starts), key=_rank)
        while (better := _better(best, look, ends)) is not None:
            best = better
        yield best


def _better(best: _Candidate, look: Callable[[tuple[int, ...]], _Candidate], ends: float) -> _Candidate | None:
    """The first neighbour that is better, if there is one and it is found in time."""
    for sizes in _neighbours(best.tried.sizes):
        if perf_counter() < ends and _rank(look(sizes)) < _rank(best):
            return look(sizes)
    return None


def _value(found: Found, options: dict[str, Any]) -> float:
    return found.makespan if options["objective"] == "makespan" else found.span


def _num_layers(layers: Cost) -> int:
    if layers.num_stages is None:
        raise PlanError(
            "cost has a number for each layer, as fp.models.profile gives it; with one for all, nobody knows how many "
            "layers there are: Cost(forward=[1.0] * 12)"
        )
    return layers.num_stages


def _cuts(case: _Case, stages: int) -> Iterator[Sequence[int]]:
    """Partitions to begin with: equal in time, and where memory is short with what each stage holds counted."""
    layers, count, limits, weights, _ = case
    times = [
        layers.of(Kind.F, at) + min(layers.of(Kind.B, at), layers.of(Kind.I, at) + layers.of(Kind.W, at))
        for at in range(len(weights))
    ]
    memory = per_stage(layers.residual, len(weights))
    yield balance(times, stages)
    if min(limits) == inf:
        return
    yield balance([one + more for one, more in zip(memory, weights, strict=True)], stages)
    if stages > len(limits):
        return
    all_of_it = sum(weights) + count * sum(memory)  # as good as no limit, and a number
    finite = [min(limit, all_of_it) for limit in limits]
    for most in (lambda stage: stages - stage, lambda stage: 2 * (stages - stage) - 1, lambda stage: 1):
        in_flight = [min(count, most(stage)) for stage in range(stages)]
        try:
            yield balance(times, stages, memory=memory, fixed=weights, limit=finite, in_flight=in_flight)
        except PlanError:
            continue


def _neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The same with one layer moved to the next stage or the one before."""
    for at, (one, other) in enumerate(pairwise(sizes)):
        for move in (1, -1):
            if one + move > 0 and other - move > 0:
                yield (*sizes[:at], one + move, other - move, *sizes[at + 2 :])


def _over(cost: Cost, home: tuple[int, ...], limits: Sequence[float]) -> float:
    """What the devices lack together for one microbatch at a time."""
    needs = [0.0] * len(limits)
    for stage, residual in enumerate(per_stage(cost.residual, len(home))):
        needs[home[stage]] += residual
    return sum(max(0.0, need - limit) for need, limit in zip(needs, limits, strict=True))
