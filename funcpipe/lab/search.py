"""Find a schedule: published ones under the true costs, greedy ones, then a search over rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from random import Random
from typing import Any

from funcpipe.core.cost import Cost
from funcpipe.core.errors import FuncpipeError, ScheduleError, raise_all
from funcpipe.core.result import Timeline, shares
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.lab.bounds import LowerBound, lower_bound
from funcpipe.lab.climb import climb
from funcpipe.lab.exact import solve
from funcpipe.lab.forms import forms
from funcpipe.lab.offload_to_fit import offload_to_fit
from funcpipe.lab.placement import placed, shapes_for
from funcpipe.lab.polish import Bench, polish
from funcpipe.lab.problem import ROUNDING, Budget, Objective, Problem, as_schedule, limits_of
from funcpipe.lab.starting_points import fused, starting_points
from funcpipe.schedules.clock import coded
from funcpipe.schedules.counts import counted
from funcpipe.schedules.memory import residual_peak
from funcpipe.view.simulate import simulate

_WRONG = 1e-6
_UNEVEN = 0.01
"""By how much, of a slice, the times of slices may differ: lengths are whole numbers."""
_POLISHED = 20_000
"""The most actions of a schedule whose single actions are moved; with more that takes too long."""


@dataclass(frozen=True)
class Found:
    """A schedule that a search found.

    Attributes:
        schedule: an ordinary one: run it, draw it, write it to a file.
        timeline: its simulation under the costs of the search.
        objective: what was made short, "makespan" or "span".
        lower_bound: no schedule for these costs and limits takes less, with the stages placed in one of the ways that
            were tried.
        binds: what keeps a schedule from being shorter than the bound: the work or the memory of a device, or the way
            between devices; "a proof by the solver" where that raised it.
        source: where it comes from: a family, "greedy", "rules", "moves" or "exact".
        evaluations: how many schedules were timed.
        ended: what ended the search: "evaluations", "seconds" (then the same call may find another schedule), or
            "bound": nothing is left to find.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    lower_bound: float
    binds: str
    source: str
    evaluations: int
    ended: str

    @property
    def makespan(self) -> float:
        """End of the last action of one isolated batch."""
        return self.timeline.makespan

    @property
    def span(self) -> float:
        """The longest time of a device from its first start to its last end."""
        return self.timeline.span

    @property
    def value(self) -> float:
        """What was made short: the makespan, or the span."""
        return self.makespan if self.objective == "makespan" else self.span

    @property
    def peak(self) -> tuple[float, ...]:
        """The most memory of each device."""
        return self.timeline.peak

    @property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions that ends with the last one."""
        return self.timeline.critical_path

    @property
    def gap(self) -> float:
        """How much longer than the lower bound it is, of 1; 0: nothing shorter exists."""
        gap = self.value / self.lower_bound - 1 if self.lower_bound else 0.0
        return gap if gap > ROUNDING else 0.0

    def __str__(self) -> str:
        proof = "nothing shorter exists" if not self.gap else f"at most {self.gap:.2%} above the shortest"
        head = f"{self.schedule.name}: {self.objective} {self.value:.6g}"
        peak = f"peak {max(self.peak):.6g}"
        return (
            f"{head}, {proof}; bound by {self.binds}; {shares(self.timeline)}; {peak}; {self.evaluations} schedules "
            f"timed, ended by {self.ended}"
        )

    __repr__ = __str__


def search(
    cost: Cost,
    *,
    num_devices: int,
    num_microbatches: int,
    num_stages: int | None = None,
    num_slices: int = 1,
    memory_limit: float | Sequence[float] | None = None,
    placement: str | Sequence[int] | None = None,
    remat: bool = False,
    offload: bool = False,
    objective: Objective = "makespan",
    exact: bool = False,
    evaluations: int = 10_000,
    seconds: float = 30.0,
    seed: int = 0,
) -> Found:
    """Find a short schedule for given costs that stays within a memory limit.

    First every published family is timed under the true costs, then greedy schedules that fill waits with W (zero
    bubble, arXiv 2401.10241), then list schedules whose rules are improved step by step, at last single actions are
    moved.

    >>> found = search(Cost(5, 6, 4, comm=1), num_devices=3, num_microbatches=6, memory_limit=4, evaluations=500)
    >>> found.makespan, found.lower_bound, found.gap
    (102.0, 102.0, 0.0)

    Args:
        cost: times and memory; its sequences say how many stages there are.
        num_devices: how many devices, D.
        num_microbatches: how many microbatches, M.
        num_stages: how many stages, where the cost does not say; D by default.
        num_slices: how many slices each microbatch is cut into, along its sequence. The search takes them to take equally
            long, so ``cost.slices`` is () without attention, or of `balanced_slices`.
        memory_limit: of a device, or of each, in the unit of `Cost.residual`; None: no limit.
        placement: "line" (neighbouring stages on each device), "loop" (stage s on device ``s mod D``), "v" (down the
            devices and back up), or the device of each stage; None: all that the counts allow.
        remat: may residuals be computed again (R), where that saves waiting for memory.
        offload: may residuals be moved to the host and back (O, L), where a device holds too much.
        objective: "makespan": one isolated batch; "span": the longest device from its first start to its last end, the
            cost of one of many batches that follow each other.
        exact: at the end (of whole microbatches), let OR-Tools (extra ``solve``) look for the shortest of all and prove it, for what is left of
            the time; where everything is small (up to about 4 devices and 8 microbatches) that takes up to half a
            minute.
        evaluations: about how many schedules are timed; the same number and seed give the same schedule.
        seconds: cut the search short after so long.
        seed: of the random changes.

    Raises:
        ScheduleError: the counts, limits or costs do not fit each other, or no schedule within the limit was found.
    """
    problems = _problems(
        cost,
        num_devices,
        num_microbatches,
        num_stages,
        num_slices,
        memory_limit,
        placement,
        remat,
        offload,
        objective,
        exact,
        evaluations,
        seconds,
    )
    budget = Budget(evaluations, seconds)
    best = _Best(list(map(lower_bound, problems)), budget)
    for problem in problems:
        for source, schedule in starting_points(problem):
            best.offer(problem, schedule, source)
            if best.done or budget.late:
                break
    for number, problem in enumerate(problems):
        if best.done or budget.late:
            break
        variants = [form for variant in best.variants(problem) for form in forms(variant)]
        for turn, (variant, lift) in enumerate(variants):
            left = (len(problems) - number) * len(variants) - turn
            part = budget.part((0.45 if exact else 0.9) / left)
            like = best.schedule if best.problem is problem and variant.device_of == problem.device_of else None
            for listed in climb(variant, part, Random(seed), good=best.bound, like=like):
                best.offer(problem, lift(as_schedule(listed.lanes, "search", problem.num_slices)), "rules")
                if best.done:
                    break
    best.polish(Random(seed), share=0.5 if exact else 1.0)
    if exact:
        best.prove(problems, seed)
    return best.found(problems)


class _Best:
    """The best schedule so far, and by how much the others missed the memory limit."""

    def __init__(self, bounds: list[LowerBound], budget: Budget) -> None:
        self.bounds, self.budget = bounds, budget
        self.value = float("inf")
        self.problem: Problem | None = None
        self.schedule: Schedule | None = None
        self.timeline: Timeline | None = None
        self.source = ""
        self.cut = False
        """Whether the solver ran out of time."""
        self.least = float("inf")
        """The least memory above the limit that anything needed."""

    @property
    def bound(self) -> float:
        """The lower bound of all placements together."""
        return self.least_bound.value

    @property
    def least_bound(self) -> LowerBound:
        """The bound of the placement that could be the shortest."""
        return min(self.bounds, key=lambda bound: bound.value)

    @property
    def done(self) -> bool:
        """Is the best schedule as short as the lower bound."""
        return self.value <= self.bound * (1 + ROUNDING)

    def offer(self, problem: Problem, schedule: Schedule, source: str) -> None:
        """Time a schedule, and the variants that the problem allows; keep the best that fits."""
        self._offer(problem, schedule, source)
        joined = fused(problem, schedule)
        if joined is not None:
            self._offer(problem, joined, source)

    def _offer(self, problem: Problem, schedule: Schedule, source: str) -> None:
        timeline = self._time(problem, schedule)
        value = problem.value(timeline)
        if value >= self.value * (1 - ROUNDING):
            return
        if not problem.fits(timeline):
            excess = max(peak - limit for peak, limit in zip(timeline.peak, problem.limits, strict=True))
            self.least = min(self.least, excess)
            relieved = (
                offload_to_fit(problem, schedule, lambda candidate: self._time(problem, candidate), self.budget)
                if problem.offload
                else None
            )
            if relieved is None:
                return
            schedule, timeline = relieved, self._time(problem, relieved)
            value = problem.value(timeline)
            if value >= self.value * (1 - ROUNDING) or not problem.fits(timeline):
                return
        self.value, self.problem, self.schedule, self.timeline, self.source = value, problem, schedule, timeline, source

    def _time(self, problem: Problem, schedule: Schedule) -> Timeline:
        self.budget.spend()
        return simulate(schedule, problem.cost)

    def tight(self, problem: Problem) -> Problem:
        """The problem where only residuals count as memory: what else lies on the devices is taken off the limits."""
        limits = problem.limits
        if self.timeline is not None and self.schedule is not None and self.problem is problem and not problem.offload:
            peaks = [residual_peak(order, self.schedule, problem.cost) for order in self.schedule.orders]
            others = [max(0.0, total - peak) for total, peak in zip(self.timeline.peak, peaks, strict=True)]
            limits = tuple(limit - other for limit, other in zip(limits, others, strict=True))
        return replace(problem, limits=limits, offload=False)

    def variants(self, problem: Problem) -> list[Problem]:
        """The problems that rules are searched for: without remat too, and without limits where offload is allowed."""
        tight = self.tight(problem)
        without_remat = [replace(tight, remat=False)] if problem.remat else []
        without_limits = [replace(tight, limits=(float("inf"),) * problem.num_devices)] if problem.offload else []
        return [*without_remat, tight, *without_limits]

    def polish(self, rng: Random, share: float) -> None:
        """Spend what is left, or a share of it, on moving single actions of the best."""
        if self.schedule is None or self.problem is None or self.done or self.budget.spent:
            return
        if sum(map(len, self.schedule.orders)) > _POLISHED:
            return
        slices = self.problem.num_slices
        lanes = coded(self.schedule.orders, slices)
        bench = Bench(self.tight(self.problem))
        for better in polish(bench, lanes, rng, self.budget.part(share), good=self.bound):
            self._offer(self.problem, as_schedule(better, self.schedule.name, slices), "moves")

    def prove(self, problems: Sequence[Problem], seed: int) -> None:
        """Solve every placement that is small enough; a proof raises its bound."""
        for number, problem in enumerate(problems):
            if self.done:
                return
            hint = self.timeline if self.problem is problem else None
            if hint is not None and any(kind in (Kind.B, Kind.O) for _, _, _, (kind, *_) in hint.spans):
                hint = None
            seconds = max(1.0, self.budget.left / (len(problems) - number))
            solved = solve(problem, hint, seconds=seconds, seed=seed)
            self.cut = self.cut or (solved is not None and solved.late)
            if solved is not None and solved.orders is not None:
                self.offer(problem, Schedule(solved.orders, "search"), "exact")
                if self.problem is problem and solved.bound > self.value * (1 + _WRONG):
                    raise FuncpipeError(
                        f"internal error: the solver's bound is {solved.bound}, above {self.value}, which was found; "
                        "please report it with the cost"
                    )
                if solved.bound > self.bounds[number].value:
                    self.bounds[number] = LowerBound(min(self.value, solved.bound), "a proof by the solver")

    def found(self, problems: Sequence[Problem]) -> Found:
        """The result of the search. Raises ScheduleError."""
        if self.schedule is None or self.timeline is None:
            raise _too_little(problems, self.least, cut=self.budget.late)
        ended = (
            "bound" if self.done else "seconds" if self.budget.cut or self.budget.late or self.cut else "evaluations"
        )
        return Found(
            self.schedule,
            self.timeline,
            problems[0].objective,
            *self.least_bound,
            self.source,
            self.budget.evaluations,
            ended,
        )


def _problems(
    cost: Any,
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
    """One problem for each placement; all faults of the arguments in one message."""
    faults: list[str] = []
    if not isinstance(cost, Cost):
        raise ScheduleError(f"search takes a Cost (fp.models.profile measures one); got a {type(cost).__name__}")
    arguments: dict[str, Any] = {
        "num_devices": num_devices,
        "num_microbatches": num_microbatches,
        "num_stages": num_stages,
        "num_slices": num_slices,
        "evaluations": evaluations,
    }
    counts = counted(arguments, faults, optional="num_stages")
    if placement is not None and not isinstance(placement, (str, Sequence)):
        faults.append(f"placement is 'line', 'loop', 'v', or the device of each stage; got {placement!r}")
    if objective not in ("makespan", "span"):
        faults.append(f"objective is 'makespan' or 'span'; got {objective!r}")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        faults.append(f"seconds is a positive number; got {seconds!r}")
    slices = counts.get("num_slices", 1)
    if slices > 1 and exact:
        faults.append("exact=True proves schedules of whole microbatches; leave it or num_slices= out")
    raise_all("no such search:", faults, ScheduleError)
    times = [time for time, _ in cost.slice_shares(slices)]
    if max(times) - min(times) > _UNEVEN / slices:
        raise ScheduleError(
            f"search takes slices that take equally long, and these take {', '.join(f'{time:.3f}' for time in times)} of "
            "their microbatch; give Cost(slices=fp.schedules.balanced_slices(length, num_slices, attention=...))"
        )
    devices = counts["num_devices"]
    stages = counts.get("num_stages") or _stages_of(cost, placement, devices)
    cost.check_stages(stages)
    if stages < devices:
        raise ScheduleError(f"num_devices is at most the number of stages; got {devices} devices for {stages} stages")
    limits = limits_of(memory_limit, devices)
    shapes = shapes_for(stages, devices) if placement is None else [placement]
    pieces = counts["num_microbatches"] * slices
    return [
        Problem(cost, placed(shape, stages, devices), pieces, limits, objective, remat, offload, slices)
        for shape in shapes
    ]


def _stages_of(cost: Cost, placement: Any, devices: int) -> int:
    """How many stages the placement or the sequences of a cost speak of; else one a device, two on a V."""
    if placement is not None and not isinstance(placement, str):
        return len(placement)
    return cost.num_stages or (2 * devices if placement == "v" else devices)


def _too_little(problems: Sequence[Problem], least: float, *, cut: bool) -> ScheduleError:
    limit = min(problems[0].limits)
    ways = [word for word, on in (("remat=True", problems[0].remat), ("offload=True", problems[0].offload)) if not on]
    remedy = f", allow {' or '.join(ways)}" if ways else ""
    shortage = f"the least that was found needs {least:.6g} more" if isfinite(least) else "rules came to a standstill"
    if cut:
        shortage = f"the time was over before everything was tried (so far {shortage})"
        remedy = f", more seconds{remedy}"
    return ScheduleError(
        f"no schedule within a memory limit of {limit:g} was found: {shortage}; take more devices, smaller "
        f"microbatches{remedy}, or a higher limit"
    )
