"""The problem of a search: costs and limits by stage and device, and the budget of the search.

`problems_of` checks the arguments of a search, and turns them into problems, one per placement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.core.progress import Teller
from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.kinds import Flow, Kind
from funcpipe._src.data.placed_cost import placed_cost
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Schedule, action_of
from funcpipe._src.schedules.clock import CODED, edges_of, shares_column
from funcpipe._src.schedules.counts import counted
from funcpipe._src.search.placement import placed, shapes_for

Objective: TypeAlias = Literal["makespan", "span"]

CodedAction: TypeAlias = tuple[int, int, int]
"""An action as (code, stage, microbatch), for fast loops over all actions."""

CodedLanes: TypeAlias = list[list[CodedAction]]  # the actions of each device in their order


class Score(NamedTuple):
    """The score of orders: the objective, then its sum over the devices. Smaller is better."""

    value: float
    total: float


ROUNDING = 1e-9
"""Relative tolerance: times and amounts of memory that differ by less count as equal."""


@dataclass(frozen=True)
class Problem:
    """The problem to find a short order for given stages on given devices.

    Times and memory by stage are those of the smallest microbatch. They bound all microbatches from
    below; `growth` has the factors of the others.
    """

    cost: Cost  # times and memory
    device_of: tuple[int, ...]  # the device of each stage
    num_microbatches: int  # the number of microbatches, or of pieces if microbatches are cut
    limits: tuple[float, ...]  # the memory limit of each device; infinite for no limit
    objective: Objective = "makespan"  # the quantity to minimize, "makespan" or "span"
    remat: bool = False  # whether residuals may be recomputed
    offload: bool = False  # whether residuals may move to the host
    # The number of slices per microbatch. All slices of a microbatch have equal times and memory.
    num_slices: int = 1

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.device_of)

    @property
    def num_actions(self) -> int:
        """The number of actions of a schedule with split backwards."""
        return 3 * self.num_stages * self.num_microbatches

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.limits)

    @cached_property
    def computing(self) -> Problem:
        """The problem without link times: its shortest schedule bounds this problem from below.

        Proof: take a schedule with pairs, and run the actions of each pair one after the other
        within the time of the pair. Their computing times fit (`Cost.both`), and no other action
        changes. So a schedule without pairs and link times is at least as short.
        """
        return replace(self, cost=self.cost.computing()) if self.cost.hides else self

    @property
    def hands_over_memory(self) -> bool:
        """Whether values between stages count as memory."""
        return bool(self.cost.skips) or any(per_stage(self.cost.output, self.num_stages))

    @cached_property
    def smallest(self) -> tuple[float, float]:
        """The smallest factor of a microbatch for its time, and the smallest for its memory."""
        times, sizes = zip(*self._factors, strict=True)
        return min(times), min(sizes)

    @cached_property
    def growth(self) -> tuple[tuple[float, float], ...]:
        """By piece, the time and the memory as multiples of those of the smallest microbatch."""
        time, size = self.smallest
        return tuple((times / time, sizes / size) for times, sizes in self._factors)

    @property
    def unequal(self) -> bool:
        """Whether microbatches have factors."""
        return bool(self.cost.microbatches or self.cost.microbatch_sizes)

    @cached_property
    def total(self) -> float:
        """The time of all pieces, as a multiple of the smallest."""
        return sum(time for time, _ in self.growth)

    @cached_property
    def longest(self) -> float:
        """The largest time of a piece, as a multiple of the smallest."""
        return max(time for time, _ in self.growth)

    @cached_property
    def largest(self) -> float:
        """The largest memory of a piece, as a multiple of the smallest."""
        return max(size for _, size in self.growth)

    @cached_property
    def _factors(self) -> list[tuple[float, float]]:
        shares = self.cost.factors(self.num_microbatches // self.num_slices)
        return [share for share in shares for _ in range(self.num_slices)]

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """The pieces in the order of backwards: ascending microbatches, descending slices."""
        last = self.num_slices - 1
        return tuple(
            piece + last - 2 * (piece % self.num_slices) for piece in range(self.num_microbatches)
        )

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, in ascending order."""
        return tuple(
            tuple(stage for stage, owner in enumerate(self.device_of) if owner == device)
            for device in range(self.num_devices)
        )

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """Time of F, by stage."""
        return self.times(Kind.F)

    @cached_property
    def inward(self) -> tuple[float, ...]:
        """Time of I, by stage."""
        return self.times(Kind.I)

    @cached_property
    def weight(self) -> tuple[float, ...]:
        """Time of W, by stage."""
        return self.times(Kind.W)

    @cached_property
    def whole_backward(self) -> tuple[float, ...]:
        """Time of B, by stage."""
        return self.times(Kind.B)

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """The least time from the start of a backward to its input gradient, by stage."""
        return tuple(map(min, self.inward, self.whole_backward))

    @cached_property
    def cheaper(self) -> tuple[bool, ...]:
        """By stage, whether B takes less time or less memory than I and W."""
        rows = zip(
            self.whole_backward, self.inward, self.weight, self.residual, self.rest, strict=True
        )
        return tuple(
            whole < (inward + weight) * (1 - ROUNDING) or rest > residual
            for whole, inward, weight, residual, rest in rows
        )

    @cached_property
    def again(self) -> tuple[float, ...]:
        """Time of R, by stage."""
        return self.times(Kind.R)

    @cached_property
    def residual(self) -> tuple[float, ...]:
        """Memory that F takes, by stage."""
        return tuple(self.piece(size, 1) for size in per_stage(self.cost.residual, self.num_stages))

    @cached_property
    def rest(self) -> tuple[float, ...]:
        """Memory that I leaves for W, by stage."""
        return tuple(
            self.piece(size, 1) for size in per_stage(self.cost.weight_residual, self.num_stages)
        )

    @cached_property
    def waits(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The transfer times by stage: from its F to the next stage's F, and from its backward to
        the previous stage's backward.

        Assumes free links. Waiting for other values on a link is left to the simulation.
        """
        forward, backward = [0.0] * self.num_stages, [0.0] * self.num_stages
        for edge in edges_of(self.cost, self.device_of):
            if abs(edge.source - edge.to) == 1:
                row = backward if edge.flow is Flow.BACKWARD else forward
                link = self.piece(edge.link, 1)
                row[edge.source] = max(row[edge.source], link + edge.latency)
        return tuple(forward), tuple(backward)

    @cached_property
    def least(self) -> tuple[float, ...]:
        """The least computing time of a microbatch, by stage."""
        rows = zip(self.forward, self.whole_backward, self.inward, self.weight, strict=True)
        return tuple(f + min(b, i + w) for f, b, i, w in rows)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The least computing time of each device."""
        return tuple(
            self.total * sum(self.least[stage] for stage in stages) for stages in self.local
        )

    @cached_property
    def is_v(self) -> bool:
        """Whether the stages go down the devices and back up."""
        return self.device_of == (*range(self.num_devices), *reversed(range(self.num_devices)))

    def value(self, timeline: Timeline) -> float:
        """Return the objective of a timeline: its makespan or its span."""
        return timeline.makespan if self.objective == "makespan" else timeline.span

    def score(self, begins: Iterable[float], ends: Sequence[float]) -> Score:
        """Return the score for the begins and ends of all devices."""
        if self.objective == "makespan":
            return Score(max(ends), sum(ends))
        spans = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return Score(max(spans), sum(spans))

    def fits(self, peaks: Sequence[float]) -> bool:
        """Return whether the peaks are within the memory limits of all devices."""
        return all(
            peak <= limit * (1 + ROUNDING) for peak, limit in zip(peaks, self.limits, strict=True)
        )

    def times(self, kind: Kind) -> tuple[float, ...]:
        """Return the time of a kind by stage, for a piece of the smallest microbatch."""
        column = shares_column(kind) or 0
        return tuple(self.piece(self.cost.of(kind, s), column) for s in range(self.num_stages))

    def piece(self, value: float, column: int) -> float:
        """Return a value for a piece of the smallest microbatch. Column 0 is time, 1 is memory."""
        return value / self.num_slices * self.smallest[column]


def as_schedule(lanes: Iterable[Iterable[CodedAction]], name: str, num_slices: int = 1) -> Schedule:
    """Convert lanes to a schedule."""
    rows = [
        [action_of(CODED[code], stage, piece, num_slices) for code, stage, piece in lane]
        for lane in lanes
    ]
    return Schedule(tuple(map(tuple, rows)), name)


def gap_of(value: float, bound: float) -> float:
    """Return the share by which a value exceeds a lower bound; 0 if only by rounding."""
    gap = value / bound - 1 if bound else 0.0
    return gap if gap > ROUNDING else 0.0


def limits_of(memory_limit: Any, num_devices: int) -> tuple[float, ...]:
    """Return the memory limit of each device, from one number, one per device, or None for none.

    Raises ScheduleError for anything else.
    """
    if memory_limit is None:
        return (float("inf"),) * num_devices
    many = isinstance(memory_limit, Sequence) and not isinstance(memory_limit, str)
    limits: tuple[Any, ...] = (
        tuple(cast("Sequence[Any]", memory_limit)) if many else (memory_limit,) * num_devices
    )
    if len(limits) != num_devices or not all(
        isinstance(limit, (int, float)) and limit > 0 for limit in limits
    ):
        raise ScheduleError(
            f"memory_limit is a positive number, or one for each of {num_devices} devices; got "
            f"{memory_limit!r}"
        )
    return tuple(map(float, limits))


class Budget:
    """The evaluations and seconds that a search, or a part of it, may spend.

    The phases are divided by evaluations, so that a search is repeatable. Seconds only end it
    early.

    Attributes:
        most: the evaluations of this part.
        evaluations: the number of schedules that this part has simulated.
        cut: whether the time limit ended this part, or a part of it.
        told: the listener for the progress of the whole search.
    """

    def __init__(self, most: int, seconds: float, told: Teller | None = None) -> None:
        self.most, self.evaluations, self.cut = most, 0, False
        self.told = told or Teller()
        self._ends = perf_counter() + seconds
        self._whole: Budget | None = None

    def part(self, share: float, *, of_seconds: float | None = None) -> Budget:
        """Return a budget with a share of the remaining evaluations and seconds.

        Its evaluations count in this budget too. ``of_seconds``: another share of the seconds.
        """
        left = self._ends - perf_counter()
        part = Budget(
            int(share * (self.most - self.evaluations)),
            (share if of_seconds is None else of_seconds) * left,
        )
        part._whole = self
        return part

    def spend(self) -> None:
        """Count one evaluation."""
        self.evaluations += 1
        # Only the budget of the whole search reports progress.
        if self._whole is not None:
            self._whole.spend()
        elif self.told.on:
            self.told.to(self.evaluations)

    @property
    def left(self) -> float:
        """The remaining seconds."""
        return self._ends - perf_counter()

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return perf_counter() > self._ends

    @property
    def spent(self) -> bool:
        """Whether the evaluations or the seconds are used up."""
        if self.evaluations >= self.most:
            return True
        if self.late:
            self._note()
        return self.late

    def _note(self) -> None:
        self.cut = True
        if self._whole is not None:
            self._whole._note()


_UNEVEN = 0.03
"""The largest difference between times of slices, as a share of a slice. Lengths are whole numbers,
so times cannot be exactly equal."""


def problems_of(
    cost: Cost,
    num_devices: Any,
    num_microbatches: Any,
    num_stages: Any,
    num_slices: Any,
    memory_limit: Any,
    placement: Any,
    remat: bool,
    offload: bool,
    objective: Any,
    exact: bool,
    evaluations: Any,
    seconds: Any,
) -> list[Problem]:
    """Return one problem per placement. Raises ScheduleError with all faults of the arguments."""
    faults: list[str] = []
    arguments: dict[str, Any] = {
        "num_devices": num_devices,
        "num_microbatches": num_microbatches,
        "num_stages": num_stages,
        "num_slices": num_slices,
        "evaluations": evaluations,
    }
    counts = counted(arguments, faults, optional="num_stages")
    if placement is not None and not isinstance(placement, (str, Sequence)):
        faults.append(
            f"placement is 'line', 'loop', 'v', or the device of each stage; got {placement!r}"
        )
    if objective not in ("makespan", "span"):
        faults.append(f"objective is 'makespan' or 'span'; got {objective!r}")
    flags: dict[str, Any] = {"remat": remat, "offload": offload, "exact": exact}
    faults += [
        f"{name} is True or False; got {flag!r}"
        for name, flag in flags.items()
        if not isinstance(flag, bool)
    ]
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        faults.append(f"seconds is a positive number; got {seconds!r}")
    slices = counts.get("num_slices", 1)
    unproven = {
        "of whole microbatches; leave it or num_slices= out": slices > 1,
        "in which nothing overlaps; leave it out, or forward_link and backward_link": cost.hides,
        "of equal microbatches; leave it out, or microbatches and microbatch_sizes of the cost": (
            cost.microbatches or cost.microbatch_sizes
        ),
    }
    faults += [
        f"exact=True proves schedules {words}"
        for words, asked in unproven.items()
        if exact and asked
    ]
    raise_all("no such search:", faults, ScheduleError)
    cost.factors(counts["num_microbatches"])  # raises ScheduleError for another count
    times = [time for time, _ in cost.slice_shares(slices)]
    if max(times) - min(times) > _UNEVEN / slices:
        raise ScheduleError(
            "search needs slices that take equally long, but these take "
            f"{', '.join(f'{time:.3f}' for time in times)} of their microbatch; give "
            "Cost(slices=fp.schedules.balanced_slices(length, num_slices, attention=...)), with a "
            "length so large that rounding to whole numbers does not matter (its unit is free)"
        )
    devices = counts["num_devices"]
    stages = counts.get("num_stages") or _stages_of(cost, placement, devices)
    cost.check_stages(stages)
    if stages < devices:
        raise ScheduleError(
            f"num_devices must be at most the number of stages; got {devices} devices for {stages} "
            "stages"
        )
    limits = limits_of(memory_limit, devices)
    shapes = shapes_for(stages, devices) if placement is None else [placement]
    pieces = counts["num_microbatches"] * slices
    problem = Problem(cost, (), pieces, limits, objective, remat, offload, slices)
    placements = [placed(shape, stages, devices) for shape in shapes]
    return [
        replace(problem, cost=placed_cost(cost, device_of, devices), device_of=device_of)
        for device_of in placements
    ]


def _stages_of(cost: Cost, placement: Any, devices: int) -> int:
    """Return the number of stages of the placement or the cost; else one per device, two on a V."""
    if placement is not None and not isinstance(placement, str):
        return len(placement)
    return cost.num_stages or (2 * devices if placement == "v" else devices)
