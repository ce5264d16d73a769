"""Give the carry of an earlier run to the first slices of a run, and collect the carry of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from funcpipe._src.core.border import Border, given
from funcpipe._src.core.errors import BatchError, PlanError
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Carry


def given_carry(
    plan: Plan, carry: Any, rows: tuple[int, ...], here: Collection[int]
) -> dict[int, list[Border]]:
    """Return by stage the carry for each piece, of which the program reads the first slices.

    Args:
        plan, carry: as given to the run.
        rows: the rows of each microbatch.
        here: the stages of this process.

    Raises:
        PlanError: the plan takes no carry, or the carry is not of its stages.
        BatchError: the carry is of other microbatches.
    """
    if not plan.carry:
        if carry is None:
            return {}
        raise PlanError(
            "the plan takes no carry; make a plan without backwards for it: "
            "fp.make_plan(stages, schedule.forwards(), carry=True)"
        )
    stages = [stage for stage in here if plan.stages[stage].carry]
    first: dict[int, tuple[Any, ...]] = dict.fromkeys(stages, (None,) * len(rows))
    if carry is not None:
        if not isinstance(carry, Carry):
            raise PlanError(
                "carry= is result.carry of the run before, or None for the first part of a "
                f"sequence; got a {type(carry).__name__}"
            )
        names = tuple(stage.name for stage in plan.stages)
        if carry.stages != names or len(carry.trees) != len(names):
            raise PlanError(
                f"the carry is of the stages {', '.join(carry.stages)}, and the plan has "
                f"{', '.join(names)}; give the carry of a plan of the same stages"
            )
        if carry.rows != rows:
            raise BatchError(
                f"the carry is of microbatches of {[*carry.rows]} rows, and this batch is cut "
                f"into {[*rows]}; continue with the same rows and number of microbatches, or "
                "begin anew without carry="
            )
        first = {stage: carry.trees[stage] or () for stage in stages}
        odd = [stage for stage, row in first.items() if len(row) != len(rows)]
        if odd:
            raise PlanError(
                f"the carry has no tree for each microbatch of stages {odd}, which are here; each "
                "rank gives the carry that its own run returned"
            )
    slices = plan.schedule.num_slices
    return {
        stage: [border for tree in row for border in [given(tree)] * slices]
        for stage, row in first.items()
    }


def returned_carry(
    plan: Plan, rows: tuple[int, ...], here: Collection[int], last: Mapping[tuple[int, int], Border]
) -> Carry | None:
    """Return the carry for the next run, from the carries of the last slices."""
    if not plan.carry:
        return None
    slices = plan.schedule.num_slices
    ends = range(slices - 1, slices * len(rows), slices)
    trees = [
        tuple([last[stage, piece].tree() for piece in ends])
        if stage in here and each.carry
        else None
        for stage, each in enumerate(plan.stages)
    ]
    return Carry(tuple(stage.name for stage in plan.stages), rows, tuple(trees))
