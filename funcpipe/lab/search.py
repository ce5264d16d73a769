"""Find a schedule: published ones under the true costs, greedy ones, then a search over rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from random import Random

from funcpipe.core.cost import Cost, per_stage
from funcpipe.core.errors import FuncpipeError, ScheduleError
from funcpipe.core.progress import ProgressTo, telling
from funcpipe.core.result import Timeline, shares
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.core.shown import guarded
from funcpipe.lab.bounds import LowerBound, lower_bound
from funcpipe.lab.climb import climb
from funcpipe.lab.exact import solve
from funcpipe.lab.forms import forms
from funcpipe.lab.offload_to_fit import offload_to_fit
from funcpipe.lab.polish import Bench, Lane, polish
from funcpipe.lab.problem import ROUNDING, Budget, Objective, Problem, as_schedule, gap_of
from funcpipe.lab.problems import problems_of
from funcpipe.lab.starting_points import fused, starting_points
from funcpipe.lab.windows import sharpened
from funcpipe.schedules.clock import coded
from funcpipe.schedules.memory import residual_peak
from funcpipe.schedules.pairing import pair, unpair
from funcpipe.view.simulate import simulate

_WRONG = 1e-6
_BEGINS = 0.4
"""Of the seconds, how many go into published and greedy schedules at most."""
_POLISHED = 20_000
"""The most actions of a schedule whose single actions are moved; with more that takes too long."""
_STEPS = 6
"""How often the distance between the bound and what was found is halved."""
_STEP = 100
"""So many evaluations take about as long as one such step."""


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
        return gap_of(self.value, self.lower_bound)

    def __str__(self) -> str:
        proof = "nothing shorter exists" if not self.gap else f"at most {self.gap:.2%} above the shortest"
        head = f"{self.schedule.name}: {self.objective} {self.value:.6g}"
        peak = f"peak {max(self.peak):.6g}"
        return (
            f"{head}, {proof}; bound by {self.binds}; {shares(self.timeline)}; {peak}; {self.evaluations} schedules "
            f"timed, ended by {self.ended}"
        )

    @guarded
    def __repr__(self) -> str:
        return str(self)


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
    progress: ProgressTo = False,
) -> Found:
    """Find a short schedule for given costs that stays within a memory limit.

    First every published family is timed under the true costs, then greedy schedules that fill waits with W (zero
    bubble, arXiv 2401.10241), then list schedules whose rules are improved step by step, at last single actions are
    moved.

    >>> found = fp.search(fp.Cost(5, 6, 4, comm=1), num_devices=3, num_microbatches=6, memory_limit=4, evaluations=500)
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
        exact: at the end, let OR-Tools (extra ``solve``) look for the shortest of all and prove it, for what is left of
            the time; where everything is small (up to about 4 devices and 8 microbatches) that takes up to half a
            minute. Of whole microbatches only.
        evaluations: about how many schedules are timed; the same number and seed give the same schedule.
        seconds: cut the search short after so long.
        seed: of the random changes.
        progress: True shows on stderr what is tried and the best so far; or a function that is told a `CallProgress`.

    Raises:
        PlanError: progress is no function, True or False.
        ScheduleError: the counts, limits or costs do not fit each other, or no schedule within the limit was found.
    """
    problems = problems_of(
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
    with telling("search", progress, unit="schedules", total=evaluations, limit=seconds) as told:
        return _search(problems, cost, Budget(evaluations, seconds, told), exact=exact, seed=seed)


def _search(problems: Sequence[Problem], cost: Cost, budget: Budget, *, exact: bool, seed: int) -> Found:
    """The best schedule for any of these problems. Raises ScheduleError."""
    best = _Best(list(map(lower_bound, problems)), budget)
    budget.told.look = best.look
    begins = budget.part(_BEGINS)
    for problem in problems:
        for source, schedule in starting_points(problem):
            budget.told.phase("greedy" if source == "greedy" else "published")
            best.offer(problem, schedule, source)
            best.cut |= begins.late
            if best.done or begins.late:
                break
    best.sharpen(problems, steps=1)
    for number, problem in enumerate(problems):
        if best.done or budget.late:
            break
        budget.told.phase("rules")
        variants = [form for variant in best.variants(problem) for form in forms(variant)]
        for turn, (variant, lift) in enumerate(variants):
            left = (len(problems) - number) * len(variants) - turn
            share = 0.9 if _too_many(problem) else 0.3 if cost.hides else 0.5  # rules know no pairs
            part = budget.part(share * (0.5 if exact else 1.0) / left)
            like = best.schedule if best.problem is problem and variant.device_of == problem.device_of else None
            for listed in climb(variant, part, Random(seed), good=best.bound, like=like):
                best.offer(problem, lift(as_schedule(listed.lanes, "search", problem.num_slices)), "rules")
                if best.done:
                    break
    best.polish(Random(seed), share=0.5 if exact else 1.0)
    best.sharpen(problems, steps=_STEPS)
    if exact:
        best.prove(problems, seed)
    return best.found(problems)


class _Best:
    """The best schedule so far, and by how much the others missed the memory limit."""

    def __init__(self, bounds: list[LowerBound], budget: Budget) -> None:
        self.bounds, self.budget = bounds, budget
        self.value = inf
        self.problem: Problem | None = None
        self.schedule: Schedule | None = None
        self._timeline: Timeline | None = None
        self._benches: dict[int, Bench] = {}
        self.source = ""
        self.cut = False
        """Whether what to begin with, or the solver, ran out of time."""
        self.least = inf
        """The least memory above the limit that anything needed."""

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the best schedule; it costs much more than its times, so it is made when it is wanted."""
        if self._timeline is None and self.problem is not None and self.schedule is not None:
            self._timeline = simulate(self.schedule, self.problem.cost)
        return self._timeline

    @property
    def bound(self) -> float:
        """The lower bound of all placements together."""
        return self.least_bound.value

    @property
    def least_bound(self) -> LowerBound:
        """The bound of the placement that could be the shortest."""
        return min(self.bounds, key=lambda bound: bound.value)

    def look(self) -> tuple[float | None, float | None]:
        """The best value and its gap, where there is one."""
        return (None, None) if self.value == inf else (self.value, gap_of(self.value, self.bound))

    @property
    def done(self) -> bool:
        """Is the best schedule as short as the lower bound."""
        return self.value <= self.bound * (1 + ROUNDING)

    def offer(self, problem: Problem, schedule: Schedule, source: str) -> None:
        """Time a schedule, and the variants that the problem allows; keep the best that fits."""
        bare = unpair(schedule)
        self._offer(problem, bare, source)
        whole = fused(problem, bare)
        if whole is not None:
            self._offer(problem, whole, source)
        if problem.cost.hides:
            for order in (bare, whole):
                if order is not None and order.has_backward:
                    self._offer(problem, pair(order), source)
            if schedule.pairs:
                self._offer(problem, schedule, source)

    def _offer(self, problem: Problem, schedule: Schedule, source: str) -> None:
        self.budget.spend()
        bench = self._benches.setdefault(id(problem), Bench(problem))
        joined = [schedule.joined(order) for order in schedule.orders] if schedule.pairs else ()
        score = bench.score(coded(schedule.orders, problem.num_slices), joined)
        if score is None or score.value >= self.value * (1 - ROUNDING):
            return
        value, timeline = score.value, None
        peaks = self._peaks(problem, schedule)
        if not problem.fits(peaks):
            excess = max(peak - limit for peak, limit in zip(peaks, problem.limits, strict=True))
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
            if value >= self.value * (1 - ROUNDING) or not problem.fits(timeline.peak):
                return
        self.value, self.problem, self.source = value, problem, source
        self.schedule, self._timeline = schedule, timeline

    def _peaks(self, problem: Problem, schedule: Schedule) -> Sequence[float]:
        """The most memory of each device. Of residuals that stay it hangs on the order alone, not on times."""
        if _handed(problem) or problem.offload:
            return simulate(schedule, problem.cost).peak
        return [residual_peak(order, schedule, problem.cost) for order in schedule.orders]

    def _time(self, problem: Problem, schedule: Schedule) -> Timeline:
        self.budget.spend()
        return simulate(schedule, problem.cost)

    def tight(self, problem: Problem) -> Problem:
        """The problem where only residuals count as memory: what else lies on the devices is taken off the limits."""
        limits = problem.limits
        if self.schedule is not None and self.problem is problem and not problem.offload and _handed(problem):
            peaks = [residual_peak(order, self.schedule, problem.cost) for order in self.schedule.orders]
            totals = self._peaks(problem, self.schedule)
            others = [max(0.0, total - peak) for total, peak in zip(totals, peaks, strict=True)]
            limits = tuple(limit - other for limit, other in zip(limits, others, strict=True))
        return replace(problem, limits=limits, offload=False)

    def variants(self, problem: Problem) -> list[Problem]:
        """The problems that rules are searched for: without remat too, and without limits where offload is allowed."""
        tight = self.tight(problem)
        without_remat = [replace(tight, remat=False)] if problem.remat else []
        without_limits = [replace(tight, limits=(inf,) * problem.num_devices)] if problem.offload else []
        return [*without_remat, tight, *without_limits]

    def polish(self, rng: Random, share: float) -> None:
        """Spend what is left, or a share, on moving single actions of the best; some seconds remain for the bounds."""
        if self.schedule is None or self.problem is None or self.done or self.budget.spent:
            return
        if _too_many(self.problem):
            return
        self.budget.told.phase("moves")
        problem, name, slices = self.problem, self.schedule.name, self.problem.num_slices
        lanes: list[Lane] = []
        for order, actions in zip(self.schedule.orders, coded(self.schedule.orders, slices), strict=True):
            joined = self.schedule.joined(order)
            lanes.append(Lane(actions, frozenset((actions[at], actions[at + 1]) for at in joined)))
        bench = Bench(replace(self.tight(problem), offload=problem.offload))
        for better in polish(bench, lanes, rng, self.budget.part(share, of_seconds=0.9 * share), good=self.bound):
            moved = as_schedule((lane.actions for lane in better), name, slices)
            pairs = {(o[at], o[at + 1]) for o, lane in zip(moved.orders, better, strict=True) for at in lane.joined}
            self._offer(problem, replace(moved, pairs=frozenset(pairs)), "moves")

    def sharpen(self, problems: Sequence[Problem], *, steps: int) -> None:
        """Raise bounds of placements that could have something shorter; a search of few evaluations does so less."""
        steps = min(steps, self.budget.most // _STEP)
        for number, problem in enumerate(problems):
            bound = self.bounds[number]
            self.budget.told.phase("bounds")
            if bound.value < self.value < inf:
                computing = problem.computing
                value = sharpened(computing, bound.value, self.value, lambda: self.budget.late, steps=steps)
                if value > bound.value * (1 + ROUNDING):
                    self.bounds[number] = LowerBound(value, "the orders that memory and ways leave to the devices")

    def prove(self, problems: Sequence[Problem], seed: int) -> None:
        """Solve every placement that is small enough; a proof raises its bound."""
        for number, problem in enumerate(problems):
            if self.done:
                return
            self.budget.told.phase("proof")
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


def _too_many(problem: Problem) -> bool:
    """Are there too many actions to move single ones."""
    return 3 * problem.num_stages * problem.num_microbatches > _POLISHED


def _handed(problem: Problem) -> bool:
    """Does what stages hand to each other count as memory."""
    return bool(problem.cost.skips) or any(per_stage(problem.cost.output, problem.num_stages))


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
