"""`search`: find a schedule for given costs and memory limits.

This file owns the order of the phases and their shares of the budget: published schedules
(`starting_points`), rules (`climb`), moves of single actions (`polish`), bounds (`windows`), proof
(`exact`).
"""

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
from funcpipe._src.search.problem import Budget, Objective, Problem, as_schedule, problems_of

_BEGINS = 0.4
"""The largest share of the seconds for published schedules."""
_BESIDE_PROOF = ((300, 0.3), (MOST, 0.5))
"""(most actions, share): with ``exact``, rules and moves get this share of their usual time. For few
actions the solver proves more, so it gets more time."""
_STEPS = 6
"""The number of times that the distance between the bound and the best schedule is halved."""


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
        return _search(problems, Best(problems, budget), exact=exact, seed=seed).found()


def _search(problems: Sequence[Problem], best: Best, *, exact: bool, seed: int) -> Best:
    """Offer schedules for all problems to ``best``, and raise the bounds.

    The order of the phases: published schedules, bounds, rules, moves, bounds, proof.
    """
    budget = best.budget
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
