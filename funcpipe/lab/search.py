"""Find a schedule: published ones under the true costs, greedy ones, then a search over rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from random import Random

from funcpipe.core.cost import Cost
from funcpipe.core.errors import ScheduleError
from funcpipe.core.progress import ProgressTo, telling
from funcpipe.lab.best import Best, too_many
from funcpipe.lab.bounds import levels_bound
from funcpipe.lab.climb import climb
from funcpipe.lab.exact import MOST
from funcpipe.lab.forms import forms
from funcpipe.lab.found import Found
from funcpipe.lab.levels import descend, least
from funcpipe.lab.problem import Budget, Objective, Problem, as_schedule
from funcpipe.lab.problems import problems_of
from funcpipe.schedules.levels import levels_of, mixed

_BEGINS = 0.4
"""Of the seconds, how many go into published and greedy schedules at most."""
_LEVELS = 0.3
"""Likewise, into the choice of levels."""
_BESIDE_PROOF = ((300, 0.3), (MOST, 0.5))
"""What rules, and then moves, take of their time where the solver follows, by the number of actions: of few it proves most."""
_BY_STAGE = 0.3
"""Of the time for rules and moves, what goes into stages of one level each; the rest lets microbatches have others."""
_PATIENCE = 10.0
"""So many tries for each action without a gain, and moves of actions and levels begin anew, elsewhere."""
_STEPS = 6
"""How often the distance between the bound and what was found is halved."""


def search(
    cost: Cost | Sequence[Cost],
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
        cost: times and memory; its sequences say how many stages there are. Of several, which are levels (of what a stage
            keeps for its backward, and how much longer that takes), each stage gets one for each microbatch:
            `Schedule.levels`.
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
            minute. With ``remat`` and ``offload`` too; of whole microbatches and one cost only.
        evaluations: about how many schedules are timed; the same number and seed give the same schedule.
        seconds: cut the search short after so long.
        seed: of the random changes.
        progress: True shows on stderr what is tried and the best so far; or a function that is told a `CallProgress`.

    Raises:
        PlanError: progress is no function, True or False.
        ScheduleError: the counts, limits or costs do not fit each other, or no schedule within the limit was found.
    """
    levels = levels_of(cost, "search")
    if exact and not isinstance(cost, Cost):
        raise ScheduleError("exact=True proves schedules for one cost; leave it out, or give the cost of one level")

    def problems(chosen: Cost) -> list[Problem]:
        return problems_of(
            chosen,
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

    first = problems(levels[0])
    with telling("search", progress, unit="schedules", total=evaluations, limit=seconds) as told:
        budget = Budget(evaluations, seconds, told)
        if isinstance(cost, Cost):
            best = Best(first, budget)
            return _search(first, best, exact=exact, seed=seed).found()
        best = Best(problems(least(levels, first[0].num_stages)), budget)
        best.bounds = [max(bound, levels_bound(problem, levels)) for bound, problem in zip(best.bounds, best.problems)]
        chosen, sketch = _chosen(levels, first[0].num_stages, problems, best, seed)
        last = problems(mixed(levels, chosen))
        best.take(sketch, last)
        _search(last, best, exact=False, seed=seed, share=_BY_STAGE)
        best.by_microbatch(levels, best.better_levels(levels, chosen, problems), first)
        best.polish(Random(seed), share=1.0, patience=_PATIENCE)
        best.sharpen(steps=_STEPS)
        return best.found()


def _chosen(
    levels: Sequence[Cost],
    num_stages: int,
    problems: Callable[[Cost], list[Problem]],
    best: Best,
    seed: int,
) -> tuple[tuple[int, ...], Best]:
    """The level of each stage: first by what a search begins with, then by short searches, which may differ much.

    Returns:
        The levels, and the short search for them.
    """
    best.budget.told.phase("levels")
    tried: dict[tuple[int, ...], Best] = {}
    begins, part = best.budget.part(_LEVELS / 2), best.budget.part(_LEVELS)
    share = 1 / (4 * num_stages * max(1, len(levels) - 1))

    def begun(choice: tuple[int, ...]) -> tuple[float, float]:
        one = Best(best.problems, begins, best.bounds)
        one.begin(problems(mixed(levels, choice)))
        return one.value, one.least

    def searched(choice: tuple[int, ...]) -> tuple[float, float]:
        one = tried[choice] = Best(best.problems, part.part(share), best.bounds)
        _search(problems(mixed(levels, choice)), one, exact=False, seed=seed, steps=0)
        return one.value, one.least

    starts = [(level,) * num_stages for level in range(len(levels))]
    ends = [descend(start, len(levels), begun, lambda: begins.spent) for start in starts]
    chosen = min(ends, key=itemgetter(1))[0]
    chosen, _ = descend(chosen, len(levels), searched, lambda: part.spent)
    return chosen, tried[chosen]


def _search(
    problems: Sequence[Problem], best: Best, *, exact: bool, seed: int, steps: int = _STEPS, share: float = 1.0
) -> Best:
    """Offer schedules for any of these problems; in so many steps the bounds are raised.

    Rules, and then moves, take this share of what is left; where the solver follows, less.
    """
    budget = best.budget
    few = min(problem.num_actions for problem in problems)
    beside = next((part for most, part in _BESIDE_PROOF if exact and few <= most), share)
    budget.told.look = best.look
    begins = budget.part(_BEGINS)
    best.begin(problems, begins)
    best.sharpen(steps=min(1, steps))
    for number, problem in enumerate(problems):
        if best.done or budget.late:
            break
        budget.told.phase("rules")
        variants = [form for variant in best.variants(problem) for form in forms(variant)]
        for turn, (variant, lift) in enumerate(variants):
            left = (len(problems) - number) * len(variants) - turn
            rules = 0.9 if too_many(problem) else 0.3 if problem.cost.hides else 0.5  # rules know no pairs
            part = budget.part(rules * beside / left)
            like = best.schedule if best.problem is problem and variant.device_of == problem.device_of else None
            for listed in climb(variant, part, Random(seed), good=best.bound, like=like):
                best.offer(problem, lift(as_schedule(listed.lanes, "search", problem.num_slices)), "rules")
                if best.done:
                    break
    best.polish(Random(seed), share=beside)
    best.sharpen(steps=steps)
    if exact:
        best.prove(problems, seed)
    return best
