"""Find a schedule: published ones under the true costs, then a search over rules."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.core.progress import ProgressTo, telling
from funcpipe._src.data.cost import Cost
from funcpipe._src.search.best import Best, too_many
from funcpipe._src.search.climb import climb
from funcpipe._src.search.exact import MOST
from funcpipe._src.search.forms import forms
from funcpipe._src.search.found import Found
from funcpipe._src.search.problem import Budget, Objective, Problem, as_schedule
from funcpipe._src.search.problems import problems_of

_BEGINS = 0.4
"""Of the seconds, how many go into published schedules at most."""
_BESIDE_PROOF = ((300, 0.3), (MOST, 0.5))
"""What rules, and then moves, take of their time where the solver follows, by the number of
actions: of few it proves most."""
_STEPS = 6
"""How often the distance between the bound and what was found is halved."""


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

    First every published family is timed under the true costs, then list schedules whose rules are
    improved step by step, at last single actions are moved.

    >>> found = fp.search(fp.Cost(5, 6, 4, comm=1), num_devices=3, num_microbatches=6, memory_limit=4, evaluations=500)
    >>> found.makespan, found.lower_bound, found.gap
    (102.0, 102.0, 0.0)

    Args:
        cost: times and memory; its sequences have one number per stage.
        num_devices: how many devices, D.
        num_microbatches: how many microbatches, M.
        num_stages: how many stages, where the cost does not say; D by default.
        num_slices: how many slices each microbatch is cut into, along its sequence. The search
            takes them to take equally long, so ``cost.slices`` is () without attention, or of
            `balanced_slices`.
        memory_limit: of a device, or of each, in the unit of `Cost.residual`; None: no limit.
        placement: "line" (neighbouring stages on each device), "loop" (stage s on device ``s mod
            D``), "v" (down the devices and back up), or the device of each stage; None: all that
            the counts allow.
        remat: may residuals be computed again (R), where that saves waiting for memory.
        offload: may residuals be moved to the host and back (O, L), where a device holds too much.
        objective: "makespan": one isolated batch; "span": the longest device from its first start
            to its last end, the cost of one of many batches that follow each other.
        exact: at the end, let OR-Tools (extra ``solve``) look for the shortest of all and prove it,
            for what is left of the time; where everything is small (up to about 4 devices and 8
            microbatches) that takes up to half a minute. With ``remat`` and ``offload`` too; of
            whole microbatches only.
        evaluations: about how many schedules are timed; the same number and seed give the same
            schedule.
        seconds: cut the search short after so long.
        seed: of the random changes.
        progress: True shows on stderr what is tried and the best so far; or a function that is told
            a `CallProgress`.

    Raises:
        PlanError: progress is no function, True or False.
        ScheduleError: the counts, limits or costs do not fit each other, or no schedule within the
            limit was found.
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
        return _search(problems, Best(problems, budget), exact=exact, seed=seed).found()


def _search(problems: Sequence[Problem], best: Best, *, exact: bool, seed: int) -> Best:
    """Offer schedules for all these problems to ``best``, and raise the bounds."""
    budget = best.budget
    few = min(problem.num_actions for problem in problems)
    beside = next((part for most, part in _BESIDE_PROOF if exact and few <= most), 1.0)
    budget.told.look = best.look
    begins = budget.part(_BEGINS)
    best.begin(problems, begins)
    best.sharpen(steps=1)
    for number, problem in enumerate(problems):
        if best.done or budget.late:
            break
        budget.told.phase("rules")
        variants = [form for variant in best.variants(problem) for form in forms(variant)]
        for turn, (variant, lift) in enumerate(variants):
            left = (len(problems) - number) * len(variants) - turn
            rules = (
                0.9 if too_many(problem) else 0.3 if problem.cost.hides else 0.5
            )  # rules know no pairs
            part = budget.part(rules * beside / left)
            like = (
                best.schedule
                if best.problem is problem and variant.device_of == problem.device_of
                else None
            )
            for listed in climb(variant, part, Random(seed), good=best.bound, like=like):
                best.offer(
                    problem, lift(as_schedule(listed.lanes, "search", problem.num_slices)), "rules"
                )
                if best.done:
                    break
    best.polish(Random(seed), share=beside)
    best.sharpen(steps=_STEPS)
    if exact:
        best.prove(problems, seed)
    return best
