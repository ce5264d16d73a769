"""The problem that a search solves: costs and limits by stage and device; and what the search may
spend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.core.progress import Teller
from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.kinds import Flow, Kind
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Schedule, action_of
from funcpipe._src.schedules.clock import CODED, edges_of

Objective: TypeAlias = Literal["makespan", "span"]

CodedAction: TypeAlias = tuple[int, int, int]
"""An action as (code, stage, microbatch), for loops that visit all of them again and again."""

CodedLanes: TypeAlias = list[list[CodedAction]]
"""The actions of each device in their order."""


class Score(NamedTuple):
    """The score of orders, smaller is better: the objective, then the sum of it over the
    devices."""

    value: float
    total: float


ROUNDING = 1e-9
"""Relative: times and memory that differ by less count as equal."""


@dataclass(frozen=True)
class Problem:
    """Find an order for these stages on these devices.

    Attributes:
        cost: times and memory.
        device_of: the device of each stage.
        num_microbatches: how many; of microbatches in slices how many slices there are of all, each
            a piece by itself.
        limits: the most memory of each device; infinite for none.
        objective: what is to be short: one isolated batch, or the longest device from its first
            start to its last end.
        remat: may residuals be computed again.
        offload: may residuals go to the host.
        num_slices: how many slices a microbatch has. They take equally long, and hold the same.
    """

    cost: Cost
    device_of: tuple[int, ...]
    num_microbatches: int
    limits: tuple[float, ...]
    objective: Objective = "makespan"
    remat: bool = False
    offload: bool = False
    num_slices: int = 1

    @property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.device_of)

    @property
    def num_actions(self) -> int:
        """How many actions each schedule has, with backwards in halves."""
        return 3 * self.num_stages * self.num_microbatches

    @property
    def num_devices(self) -> int:
        """How many devices."""
        return len(self.limits)

    @cached_property
    def computing(self) -> Problem:
        """The problem without the time for which actions wait for links; no schedule of this one
        beats its shortest.

        Let the two of each pair run one after the other in the time of both: their computing fits
        in there (`Cost.both`), nothing starts earlier, ends later or holds more. So the pairs of a
        schedule can be taken apart.
        """
        return replace(self, cost=self.cost.computing()) if self.cost.hides else self

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """The pieces in the order in which backwards visit them: microbatches up, slices of one
        down."""
        last = self.num_slices - 1
        return tuple(
            piece + last - 2 * (piece % self.num_slices) for piece in range(self.num_microbatches)
        )

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, ascending."""
        return tuple(
            tuple(stage for stage, owner in enumerate(self.device_of) if owner == device)
            for device in range(self.num_devices)
        )

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """Time of F, by stage."""
        return self._times(Kind.F)

    @cached_property
    def inward(self) -> tuple[float, ...]:
        """Time of I, by stage."""
        return self._times(Kind.I)

    @cached_property
    def weight(self) -> tuple[float, ...]:
        """Time of W, by stage."""
        return self._times(Kind.W)

    @cached_property
    def whole_backward(self) -> tuple[float, ...]:
        """Time of B, by stage."""
        return self._times(Kind.B)

    @cached_property
    def cheaper(self) -> tuple[bool, ...]:
        """Does B take less time than I and W, or less memory, by stage."""
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
        return self._times(Kind.R)

    @cached_property
    def residual(self) -> tuple[float, ...]:
        """Memory that F takes, by stage."""
        return tuple(
            size / self.num_slices for size in per_stage(self.cost.residual, self.num_stages)
        )

    @cached_property
    def rest(self) -> tuple[float, ...]:
        """Memory that I leaves for W, by stage."""
        return tuple(
            size / self.num_slices for size in per_stage(self.cost.weight_residual, self.num_stages)
        )

    @cached_property
    def waits(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Time from the end of a stage's F to the start of the next's, from that of its backward to
        the one before's.

        As if its link were free: what waits for others on it shows in the simulation.
        """
        forward, backward = [0.0] * self.num_stages, [0.0] * self.num_stages
        for edge in edges_of(self.cost, self.device_of):
            if abs(edge.source - edge.to) == 1:
                row = backward if edge.flow is Flow.BACKWARD else forward
                row[edge.source] = max(row[edge.source], edge.link / self.num_slices + edge.latency)
        return tuple(forward), tuple(backward)

    @cached_property
    def least(self) -> tuple[float, ...]:
        """The least time of a microbatch on its device, by stage."""
        rows = zip(self.forward, self.whole_backward, self.inward, self.weight, strict=True)
        return tuple(f + min(b, i + w) for f, b, i, w in rows)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The least time that each device needs for its actions."""
        return tuple(
            self.num_microbatches * sum(self.least[stage] for stage in stages)
            for stages in self.local
        )

    @cached_property
    def is_v(self) -> bool:
        """Do the stages go down the devices and back up."""
        return self.device_of == (*range(self.num_devices), *reversed(range(self.num_devices)))

    def value(self, timeline: Timeline) -> float:
        """The objective of a timeline: its makespan, or its span."""
        return timeline.makespan if self.objective == "makespan" else timeline.span

    def score(self, begins: Iterable[float], ends: Sequence[float]) -> Score:
        """The score of devices that begin and end then."""
        if self.objective == "makespan":
            return Score(max(ends), sum(ends))
        spans = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return Score(max(spans), sum(spans))

    def fits(self, peaks: Sequence[float]) -> bool:
        """Does every device stay within its memory, if it holds so much."""
        return all(
            peak <= limit * (1 + ROUNDING) for peak, limit in zip(peaks, self.limits, strict=True)
        )

    def _times(self, kind: Kind) -> tuple[float, ...]:
        return tuple(
            self.cost.of(kind, stage) / self.num_slices for stage in range(self.num_stages)
        )


def as_schedule(lanes: Iterable[Iterable[CodedAction]], name: str, num_slices: int = 1) -> Schedule:
    """Convert lanes to a schedule."""
    rows = [
        [action_of(CODED[code], stage, piece, num_slices) for code, stage, piece in lane]
        for lane in lanes
    ]
    return Schedule(tuple(map(tuple, rows)), name)


def gap_of(value: float, bound: float) -> float:
    """How much longer than a lower bound a value is, of 1; 0 where only rounding parts them."""
    gap = value / bound - 1 if bound else 0.0
    return gap if gap > ROUNDING else 0.0


def limits_of(memory_limit: Any, num_devices: int) -> tuple[float, ...]:
    """The memory limit of each device: one number, one for each, or None for none. Raises
    ScheduleError."""
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
    """What a search may spend: evaluations, which make it repeatable, and seconds, which only cut
    it short.

    Attributes:
        most: evaluations of this part.
        evaluations: how many schedules this part has timed.
        cut: whether the time ended it, or a part of it.
        told: who hears what the whole search has spent.
    """

    def __init__(self, most: int, seconds: float, told: Teller | None = None) -> None:
        self.most, self.evaluations, self.cut = most, 0, False
        self.told = told or Teller()
        self._ends = perf_counter() + seconds
        self._whole: Budget | None = None

    def part(self, share: float, *, of_seconds: float | None = None) -> Budget:
        """A budget with a share of what is left, perhaps another of the seconds; what it spends is
        spent here too."""
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
        if self._whole is not None:
            self._whole.spend()
        elif self.told.on:
            self.told.to(self.evaluations)

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self._ends - perf_counter()

    @property
    def late(self) -> bool:
        """Is the time over."""
        return perf_counter() > self._ends

    @property
    def spent(self) -> bool:
        """Are the evaluations or the seconds used up."""
        if self.evaluations >= self.most:
            return True
        if self.late:
            self._note()
        return self.late

    def _note(self) -> None:
        self.cut = True
        if self._whole is not None:
            self._whole._note()
