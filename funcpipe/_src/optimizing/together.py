"""Run several batches together: each lane runs one batch after the other, without waiting.

A lane begins a batch as soon as it has stepped its stages for the batch before and committed their
state. Other lanes may still compute then (arXiv 2401.10241, section 4). Whether the steps were
right is known when all lanes are done. `run_batches` decides what to do if they were not.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from funcpipe._src.core.errors import RanksError
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.engine.execute import Execution, LaneExecutor, walk
from funcpipe._src.engine.failures import add_note, in_batch
from funcpipe._src.engine.finish import commits
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.part import PlanPart
from funcpipe._src.engine.prepare import Prepared, prepare
from funcpipe._src.optimizing.rates import Rates
from funcpipe._src.optimizing.stepping import Stepping
from funcpipe._src.optimizing.undo import Undo


def run_together(
    executor: LaneExecutor,
    plan: Plan,
    params: Sequence[Tree],
    batches: Sequence[tuple[Any, RunOptions]],
    first: int,
    undo: Undo,
    rates: Rates,
) -> tuple[Result, ...] | None:
    """Run batches together, and return their results. All processes return the same kind of value.

    Args:
        executor: the executor, within its context `running`.
        plan, params: the plan and the parameters.
        batches: the batches, each with its options.
        first: the number of the first batch among all batches of the user.
        undo: keeps copies before the steps. The caller restores them.
        rates: steps the scheduler for all batches in advance. The caller restores it.

    Returns:
        The results. () if lanes cannot step every stage and continue; nothing has run then. None if
        the steps must be undone, for example because gradients are clipped.
    """
    part = executor.part(plan)
    shared = part.replicas > 1 and any(commits(plan, stage) for stage in range(plan.num_stages))
    if plan.ties or shared:
        return ()
    readies = _prepared(plan, params, batches, first, part)
    steppings = [Stepping(ready, undo, spends=True) for ready in readies]
    if not steppings or not all(part.exchange("steps on lanes", all(map(_can_go_on, steppings)))):
        return ()
    for stepping, settings in zip(steppings, rates.ahead(len(batches)) or (), strict=False):
        stepping.settings = settings
    executions: list[Execution] = []
    for number, stepping in enumerate(steppings, first):
        before = executions[-1] if executions else None
        executions.append(Execution(stepping.ready, executor, stepping, number, before))
    for execution in executions:
        execution.aim()
    walk(executions)
    results: list[Result] = []
    for execution, stepping in zip(executions, steppings, strict=True):
        result = execution.result()
        settled = stepping.settled(result, part.exchange("steps made", stepping.steps))
        if settled is None:
            return None
        results.append(settled)
    steppings[-1].done()
    return tuple(results)


def _prepared(
    plan: Plan,
    params: Sequence[Tree],
    batches: Sequence[tuple[Any, RunOptions]],
    first: int,
    part: PlanPart,
) -> list[Prepared]:
    """Prepare all batches: check, cut and bind."""
    counts = part.exchange("number of batches", len(batches))
    if len({*counts}) > 1:
        amounts = "; ".join(
            f"{name} got {count}" for name, count in zip(part.names, counts, strict=True)
        )
        raise RanksError(
            f"run_batches needs the same number of batches on every rank: {amounts}; give None "
            "for a batch that a rank does not read"
        )
    readies: list[Prepared] = []
    for number, (batch, options) in enumerate(batches, first):
        with _noted(number):
            readies.append(prepare("run_batches", plan, params, batch, options, part=part))
    return readies


@contextmanager
def _noted(number: int) -> Generator[None]:
    """Return a context that adds a note with the batch's number to errors."""
    try:
        yield
    except BaseException as error:
        add_note(error, in_batch(number))
        raise


def _can_go_on(stepping: Stepping) -> bool:
    """Return whether the lanes of this process can step all their stages and continue.

    A stage that runs for the first time keeps copies of its parameters, to find out whether it
    writes to them. The copies would be wrong after a step, so it cannot continue.
    """
    ready = stepping.ready
    stages, train = ready.plan.stages, ready.plan.train
    return stepping.whole and all(train in stages[stage].seen.kept for stage in ready.bounds)
