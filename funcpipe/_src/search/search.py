"""`search`: find a schedule for given costs and memory limits.

This file owns the phases, their order and their shares of the budget: published schedules
(`starting_points`), rules (`climb`), moves of single actions (`polish`), bounds (`windows`), proof
(`exact`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from random import Random

from funcpipe._src.core.errors import FuncpipeError, ScheduleError
from funcpipe._src.core.progress import ProgressTo, telling
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.schedules.clock import coded
from funcpipe._src.schedules.memory import residual_peak
from funcpipe._src.schedules.transforms import pair, unpair
from funcpipe._src.search.bounds import LowerBound, lower_bound
from funcpipe._src.search.climb import climb
from funcpipe._src.search.exact import MOST, solve
from funcpipe._src.search.forms import forms
from funcpipe._src.search.found import Found
from funcpipe._src.search.offload_to_fit import offload_to_fit
from funcpipe._src.search.polish import Bench, OrderedLane, polish
from funcpipe._src.search.problem import (
    ROUNDING,
    Budget,
    Objective,
    Problem,
    as_schedule,
    gap_of,
    problems_of,
)
from funcpipe._src.search.starting_points import fused, starting_points
from funcpipe._src.search.windows import sharpened
from funcpipe._src.view.simulate import simulate

_BEGINS = 0.4  # the largest share of the seconds for published schedules
_BESIDE_PROOF = ((300, 0.3), (MOST, 0.5))
"""(most actions, share): with ``exact``, rules and moves get this share of their usual time. For few
actions the solver proves more, so it gets more time."""
_STEPS = 6
"""The number of times that the distance between the bound and the best schedule is halved."""
_WRONG = 1e-6
_POLISHED = 20_000
"""The most actions of a schedule whose single actions are moved; more would take too long."""
_STEP = 100  # one step of sharpening a bound takes about as long as this number of evaluations


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

    The search simulates all published families with the given costs. It then improves list
    schedules by changing their rules, and finally moves single actions. The result includes a lower
    bound for all schedules.

    >>> found = fp.search(fp.Cost(5, 6, 4, comm=1), num_devices=3, num_microbatches=6, memory_limit=4, evaluations=500)
    >>> found.makespan, found.lower_bound, found.gap
    (102.0, 102.0, 0.0)

    Args:
        cost: times and memory. Sequences in the cost have one number per stage.
        num_devices: the number of devices, D.
        num_microbatches: the number of microbatches, M.
        num_stages: the number of stages. None: the number of the cost's sequences or of the
            placement; else D, or 2 D with ``placement="v"``.
        num_slices: the number of slices of each microbatch, along its sequence. Default: 1, not
            cut. Slices must take equally long, so give ``cost.slices`` from `balanced_slices`, or
            none if the cost has no attention.
        memory_limit: the memory limit of each device, one number or one per device, in the unit of
            `Cost.residual`. None: no limit.
        placement: "line" (neighbouring stages on each device), "loop" (stage s on device ``s mod
            D``), "v" (down the devices and back up), or the device of each stage. None: all that
            the counts allow.
        remat: whether residuals may be recomputed (R) to save memory. Default: False.
        offload: whether residuals may be moved to the host and back (O, L) to save memory. Default:
            False.
        objective: "makespan": the end of one isolated batch; "span": the longest time of a device
            from its first start to its last end, which is the time per batch if batches follow each
            other. Default: "makespan".
        exact: let OR-Tools (extra ``solve``) search for the shortest schedule in the remaining
            time, and prove a bound. With up to about 4 devices and 8 microbatches, a proof takes up
            to half a minute. Not for slices. Default: False.
        evaluations: the approximate number of schedules to simulate. The same number and seed give
            the same schedule, if the time does not end first.
        seconds: the time limit in seconds.
        seed: the seed of the random changes.
        progress: True shows the progress on stderr. A function receives a `CallProgress` about ten
            times per second. Default: False.

    Returns:
        The best schedule, with its timeline and a lower bound.

    Raises:
        PlanError: ``progress`` is not a function, True or False.
        ScheduleError: the counts, limits or costs do not fit together, or the search found no
            schedule within the limit.
    """
    if not isinstance(cost, Cost):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(
            "search takes a Cost (fp.models.profile measures one), as fp.Cost(forward=..., "
            f"backward=...); got {cost!r}"
        )
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
        budget = Budget(evaluations, seconds, told)
        return _search(Best(problems, budget), exact=exact, seed=seed).found()


def _search(best: Best, *, exact: bool, seed: int) -> Best:
    """Offer schedules for all of the problems to ``best``, and raise its bounds.

    The order of the phases: published schedules, bounds, rules, moves, bounds, proof.
    """
    problems, budget = best.problems, best.budget
    few = min(problem.num_actions for problem in problems)
    beside = next((part for most, part in _BESIDE_PROOF if exact and few <= most), 1.0)
    budget.told.look = best.look
    begins = budget.part(_BEGINS)
    best.begin(begins)
    best.sharpen(steps=1)
    for number, problem in enumerate(problems):
        if best.done or budget.late:
            break
        budget.told.phase("rules")
        variants = [form for variant in best.variants(problem) for form in forms(variant)]
        # Rules know no pairs, so with pairs the moves get more of the budget.
        rules = 0.9 if too_many(problem) else 0.3 if problem.cost.hides else 0.5
        for turn, (variant, lift) in enumerate(variants):
            left = (len(problems) - number) * len(variants) - turn
            part = budget.part(rules * beside / left)
            is_own = best.problem is problem and variant.device_of == problem.device_of
            like = best.schedule if is_own else None
            for listed in climb(variant, part, Random(seed), good=best.bound, like=like):
                schedule = as_schedule(listed.lanes, "search", problem.num_slices)
                best.offer(problem, lift(schedule), "rules")
                if best.done:
                    break
    best.polish(Random(seed), share=beside)
    best.sharpen(steps=_STEPS)
    if exact:
        best.prove(seed)
    return best


class Best:
    """The best schedule so far, the lower bounds, and the least excess over the memory limit.

    Attributes:
        problems: the problems, one per placement.
        budget: the budget of the search.
        bounds: the lower bound of each problem.
        value: the objective of the best schedule; infinite without one.
        problem, schedule, source: the best schedule, its problem and its origin.
    """

    def __init__(self, problems: Sequence[Problem], budget: Budget) -> None:
        self.problems, self.budget = problems, budget
        self.bounds = [*map(lower_bound, problems)]
        self.value = inf
        self.problem: Problem | None = None
        self.schedule: Schedule | None = None
        self.source = ""
        self._benches = {id(problem): Bench(problem) for problem in problems}
        self.cut = False  # whether the published schedules, or the solver, ran out of time
        self.least = inf  # the least memory above the limit that a schedule needed

    @property
    def bound(self) -> float:
        """The lower bound over all placements."""
        return self.least_bound.value

    @property
    def least_bound(self) -> LowerBound:
        """The smallest of the placements' bounds."""
        return min(self.bounds, key=lambda bound: bound.value)

    def look(self) -> tuple[float | None, float | None]:
        """Return the best value and its gap for progress reports; None without a schedule."""
        return (None, None) if self.value == inf else (self.value, gap_of(self.value, self.bound))

    @property
    def done(self) -> bool:
        """Whether the best schedule is as short as the lower bound."""
        return self.value <= self.bound * (1 + ROUNDING)

    def begin(self, budget: Budget) -> None:
        """Offer the published schedules."""
        self.budget.told.phase("published")
        for problem in self.problems:
            for source, schedule in starting_points(problem):
                self.offer(problem, schedule, source)
                self.cut |= budget.late
                if self.done or budget.late:
                    break

    def offer(self, problem: Problem, schedule: Schedule, source: str) -> None:
        """Time a schedule, and the variants that the problem allows; keep the best that fits."""
        bare = unpair(schedule)
        orders = [order for order in (bare, fused(problem, bare)) if order is not None]
        for order in orders:
            self._offer(problem, order, source)
        if problem.cost.hides:
            for order in orders:
                if order.has_backward:
                    self._offer(problem, pair(order), source)
            if schedule.pairs:
                self._offer(problem, schedule, source)

    def _offer(self, problem: Problem, schedule: Schedule, source: str) -> None:
        self.budget.spend()
        joined = [schedule.joined(order) for order in schedule.orders] if schedule.pairs else ()
        lanes = coded(schedule.orders, problem.num_slices)
        score = self._benches[id(problem)].score(lanes, joined)
        # Scores are much cheaper than simulations, so most candidates end here.
        if score is None or score.value >= self.value * (1 - ROUNDING):
            return
        value = score.value
        peaks = self._peaks(problem, schedule)
        if not problem.fits(peaks):
            excess = max(peak - limit for peak, limit in zip(peaks, problem.limits, strict=True))
            self.least = min(self.least, excess)
            if not problem.offload:
                return
            time = partial(self._time, problem)
            relieved = offload_to_fit(problem, schedule, time, self.budget)
            if relieved is None:
                return
            schedule, timeline = relieved, self._time(problem, relieved)
            value = problem.value(timeline)
            if value >= self.value * (1 - ROUNDING) or not problem.fits(timeline.peak):
                return
        self.value, self.problem, self.schedule, self.source = value, problem, schedule, source

    def _peaks(self, problem: Problem, schedule: Schedule) -> Sequence[float]:
        """Return the most memory of each device."""
        if problem.hands_over_memory or problem.offload:
            return simulate(schedule, problem.cost).peak
        # Otherwise memory depends on the order alone, so no simulation is needed.
        return [residual_peak(order, schedule, problem.cost) for order in schedule.orders]

    def _time(self, problem: Problem, schedule: Schedule) -> Timeline:
        self.budget.spend()
        return simulate(schedule, problem.cost)

    def tight(self, problem: Problem) -> Problem:
        """Return a problem in which only residuals count as memory.

        The other memory of the best schedule, for skips and outputs, is subtracted from the limits.
        """
        limits = problem.limits
        if (
            self.schedule is not None
            and self.problem is problem
            and not problem.offload
            and problem.hands_over_memory
        ):
            peaks = [
                residual_peak(order, self.schedule, problem.cost) for order in self.schedule.orders
            ]
            totals = self._peaks(problem, self.schedule)
            others = [max(0.0, total - peak) for total, peak in zip(totals, peaks, strict=True)]
            limits = tuple(limit - other for limit, other in zip(limits, others, strict=True))
        return replace(problem, limits=limits, offload=False)

    def variants(self, problem: Problem) -> list[Problem]:
        """The problems that rules are searched for: without remat too, and without limits where
        offload is allowed."""
        tight = self.tight(problem)
        variants = [tight]
        if problem.remat:
            variants.insert(0, replace(tight, remat=False))
        if problem.offload:
            variants.append(replace(tight, limits=(inf,) * problem.num_devices))
        return variants

    def polish(self, rng: Random, share: float) -> None:
        """Move single actions of the best schedule, for a share of the remaining budget; the bounds
        get the rest."""
        problem, schedule = self.problem, self.schedule
        if problem is None or schedule is None or too_many(problem) or self.done:
            return
        self.budget.told.phase("moves")
        part = self.budget.part(share, of_seconds=0.9 * share)
        lanes: list[OrderedLane] = []
        coded_orders = coded(schedule.orders, problem.num_slices)
        for order, actions in zip(schedule.orders, coded_orders, strict=True):
            pairs = {(actions[at], actions[at + 1]) for at in schedule.joined(order)}
            lanes.append(OrderedLane(actions, frozenset(pairs)))
        bench = Bench(replace(self.tight(problem), offload=problem.offload))
        for better in polish(bench, lanes, rng, part, good=self.bound):
            actions = (lane.actions for lane in better)
            moved = as_schedule(actions, schedule.name, problem.num_slices)
            joined = [
                (order[at], order[at + 1])
                for order, lane in zip(moved.orders, better, strict=True)
                for at in lane.joined
            ]
            self._offer(problem, replace(moved, pairs=frozenset(joined)), "moves")

    def sharpen(self, *, steps: int) -> None:
        """Raise the bounds of placements that could have a shorter schedule.

        A search with few evaluations takes fewer steps.
        """
        steps = min(steps, self.budget.most // _STEP)
        for number, problem in enumerate(self.problems):
            bound = self.bounds[number]
            self.budget.told.phase("bounds")
            if bound.value < self.value < inf:
                computing = problem.computing
                value = sharpened(
                    computing, bound.value, self.value, lambda: self.budget.late, steps=steps
                )
                if value > bound.value * (1 + ROUNDING):
                    self.bounds[number] = LowerBound(
                        value, "the memory and the paths of microbatches, on all devices"
                    )

    def prove(self, seed: int) -> None:
        """Solve each placement that is small enough for the solver. A proof raises its bound."""
        for number, problem in enumerate(self.problems):
            if self.done:
                return
            self.budget.told.phase("proof")
            hint = (
                simulate(self.schedule, problem.cost)
                if self.schedule is not None and self.problem is problem
                else None
            )
            seconds = self.budget.left / (len(self.problems) - number)
            for solved in solve(problem, hint, seconds=seconds, seed=seed):
                self.cut = self.cut or solved.late
                if solved.orders is not None:
                    self.offer(problem, Schedule(solved.orders, "search"), "exact")
                # The solver's bound must not exceed a schedule that exists: its model would be
                # wrong, and so would all proofs.
                if self.problem is problem and solved.bound > self.value * (1 + _WRONG):
                    raise FuncpipeError(
                        f"internal error: the solver's bound is {solved.bound}, above "
                        f"{self.value}, which was found; please report it with the cost"
                    )
                if solved.bound > self.bounds[number].value:
                    self.bounds[number] = LowerBound(
                        min(self.value, solved.bound), "a proof by the solver"
                    )
                if self.done:
                    return

    def found(self) -> Found:
        """Return the result of the search. Raises ScheduleError if no schedule was found."""
        if self.schedule is None or self.problem is None:
            raise _too_little(self.problems, self.least, cut=self.budget.late)
        late = self.budget.cut or self.budget.late or self.cut
        ended = "bound" if self.done else "seconds" if late else "evaluations"
        return Found(
            self.schedule,
            simulate(self.schedule, self.problem.cost),
            self.problem.objective,
            *self.least_bound,
            self.source,
            self.budget.evaluations,
            ended,
        )


def too_many(problem: Problem) -> bool:
    """Return whether a problem has too many actions to move single actions."""
    return problem.num_actions > _POLISHED


def _too_little(problems: Sequence[Problem], least: float, *, cut: bool) -> ScheduleError:
    problem = problems[0]
    allowed = {"remat=True": problem.remat, "offload=True": problem.offload}
    ways = " or ".join(word for word, on in allowed.items() if not on)
    remedy = f", allow {ways}" if ways else ""
    shortage = "the rules deadlocked"
    if isfinite(least):
        shortage = f"the least that was found needs {least:.6g} more"
    if cut:
        shortage = f"the time was over before all phases had run (so far {shortage})"
        remedy = f", more seconds{remedy}"
    return ScheduleError(
        f"no schedule within a memory limit of {min(problem.limits):g} was found: {shortage}; "
        f"take more devices, smaller microbatches{remedy}, or a higher limit"
    )
