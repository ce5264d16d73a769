"""Several batches at once: each lane does the program of one after that of the other, and waits for
nobody in between.

A lane begins a batch as soon as it has stepped its stages for the one before, and committed their
state, while others still compute for that (arXiv 2401.10241, section 4). Whether all those steps
were right is known when the lanes are done with all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from funcpipe._src.optimizing.stepping import Settings, Stepping
from funcpipe._src.optimizing.undo import Undo


@dataclass(frozen=True)
class Batches:
    """What lanes do together.

    Attributes:
        plan, params: what is run.
        each: the batches, with the options of a run of each.
        ahead: lets a scheduler go on to the end of all; what the groups of the optimizer are
            stepped with in each. None: what they have.
        first: the place of the first among those that the user gave.
    """

    plan: Plan
    params: Sequence[Tree]
    each: Sequence[tuple[Any, RunOptions]]
    ahead: Callable[[], Sequence[Settings] | None]
    first: int


def run_together(
    executor: LaneExecutor, options: RunOptions, given: Callable[[], Batches]
) -> tuple[Result, ...] | None:
    """The results of all batches; all processes come to the same.

    Args:
        executor: whose lanes have threads.
        options: of all.
        given: called when other processes hear of its errors.

    Returns:
        Nothing, (), where lanes cannot step every stage and go on; None where they did and it had
        to be undone: gradients are clipped, say. Then the optimizer, and what it holds, is as it
        was, as it is after an error.
    """
    undo = Undo(options.optimizer)
    try:
        with executor.running(options) as running:
            results = _run(executor, given(), undo, running)
        if results is None:
            undo.restore()
    except BaseException:
        undo.restore()
        raise
    finally:
        undo.close()
    return results


def _run(
    executor: LaneExecutor, given: Batches, undo: Undo, running: RunOptions
) -> tuple[Result, ...] | None:
    plan, part = given.plan, executor.part(given.plan)
    shared = part.replicas > 1 and any(commits(plan, stage) for stage in range(plan.num_stages))
    if plan.ties or shared:
        return ()
    steppings = [Stepping(ready, undo, spends=True) for ready in _prepared(given, part, running)]
    if not steppings or not all(part.exchange("steps on lanes", all(map(_can_go_on, steppings)))):
        return ()
    for stepping, settings in zip(steppings, given.ahead() or (), strict=False):
        stepping.settings = settings
    executions: list[Execution] = []
    for number, stepping in enumerate(steppings, given.first):
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


def _prepared(given: Batches, part: PlanPart, running: RunOptions) -> list[Prepared]:
    """The batches checked, cut and bound."""
    counts = part.exchange("number of batches", len(given.each))
    if len({*counts}) > 1:
        said = "; ".join(
            f"{name} was given {count}" for name, count in zip(part.names, counts, strict=True)
        )
        raise RanksError(f"run_batches takes as many batches on every rank: {said}")
    readies: list[Prepared] = []
    for number, (batch, options) in enumerate(given.each, given.first):
        with _noted(number):
            timed = replace(
                options, timeout=running.timeout, takes_faulthandler=running.takes_faulthandler
            )
            readies.append(
                prepare("run_batches", given.plan, given.params, batch, timed, part=part)
            )
    return readies


@contextmanager
def _noted(number: int) -> Generator[None]:
    """Inside, an error is told to be of this batch."""
    try:
        yield
    except BaseException as error:
        add_note(error, in_batch(number))
        raise


def _can_go_on(stepping: Stepping) -> bool:
    """Can the lanes of this process step all their stages, and go on with them.

    A stage that runs for the first time has copies of its parameters, which show whether it writes
    into them.
    """
    ready = stepping.ready
    stages, train = ready.plan.stages, ready.plan.train
    return stepping.whole and all(train in stages[stage].seen.kept for stage in ready.bounds)
