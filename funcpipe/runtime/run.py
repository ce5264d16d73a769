"""run: a plan on a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from funcpipe.core.plan import Plan
from funcpipe.core.program import Role
from funcpipe.core.result import Result
from funcpipe.core.tree import Tree
from funcpipe.runtime.context import intra_op_threads
from funcpipe.runtime.drive import Drive
from funcpipe.runtime.finish import finish, release
from funcpipe.runtime.graphs import Graphs
from funcpipe.runtime.lanes import Lanes
from funcpipe.runtime.prepare import prepare
from funcpipe.runtime.trainable import Trainable

Executor: TypeAlias = str | Lanes | Graphs | None
"""Who does the actions of a run; see `run`."""


def run(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    loss_scale: float = 1.0,
    record: bool = False,
    executor: Executor = None,
    threads_per_lane: int | None = None,
    check: str | Sequence[str] = (),
    timeout: float | None = None,
) -> Result:
    """Run a plan on one batch: losses, gradients, new state, outputs. Nothing that you give is written to.

    The numbers are those of `run_sequential`, bit for bit, whatever the schedule, the devices, the executor, remat.

    Args:
        plan: made by `make_plan`.
        params: a tuple with one tree per stage, each on its stage's device (`place`).
        batch: ``(inputs, target)`` if the plan has a loss, else inputs: trees whose tensors are cut along axis 0 into
            at most M microbatches that differ by one row at most. Non-tensors are shared; see `Replicate`, `Axis`,
            `Microbatches`. Any device.
        state: a tuple with one tree per stage, () for stages without; None if no stage has state.
        feeds: by name, what stages declare as feeds; cut like the batch.
        seed: keys every random number; give another for each step. None: drawing raises.
        trainable: which leaves get gradients. None: those with ``requires_grad``, or every floating leaf if none has
            it. Else True or False, a function ``(name, leaf) -> bool`` (names as in `named_leaves`), or a tuple with a
            bool or a tree of bools per stage.
        loss_scale: gradients are multiplied by it (mixed precision); the loss is not.
        record: measure a timeline.
        executor: "threads" (a thread per lane), "serial" (this thread, plan order: debuggers, profilers and hooks
            work), `lanes` (threads kept between runs), `graphs` (one CUDA graph), or None: threads where two lanes are
            on the CPU and actions are not tiny. Same bits.
        threads_per_lane: intra-op threads; None: cores, or ``torch.get_num_threads()`` where that is less, divided by lanes.
        check: any of "finite" (NaN or Inf in what a stage hands on is an error that names stage and microbatch; costs a
            look at every value), "finite-op" (also finds the operation, by doing the action again), "used" (a trainable
            leaf that no backward reached is an error). See also `Result.finite`, which costs nothing during the run.
        timeout: seconds. When no lane begins an action for so long, RunTimeout says what each did last and waits for,
            with its Python stack. Code that cannot be interrupted is left behind in its thread. Python's one
            ``faulthandler.dump_traceback_later`` is taken for the length of the run.

    Raises:
        PlanError, PlacementError, BatchError: something does not fit; nothing has run.
        StageError: user code failed; also an instance of what it raised, see there.
        NotFiniteError, RunTimeout: see ``check`` and ``timeout``.
    """
    options: dict[str, Any] = {"state": state, "feeds": feeds, "seed": seed, "trainable": trainable}
    options |= {"loss_scale": loss_scale, "threads_per_lane": threads_per_lane, "check": check}
    if torch.compiler.is_compiling():  # a run is no graph: torch.compile leaves it as it is
        aside: Any = torch.compiler.disable(run)
        return aside(plan, params, batch, record=record, executor=executor, timeout=timeout, **options)
    if isinstance(executor, Graphs):
        return executor.run(run, plan, params, batch, options, record=record, timeout=timeout)

    ready = prepare("run", plan, params, batch, **options)
    return _execute(Drive(ready, executor, record=record, timeout=timeout), record=record)


def _execute(drive: Drive, *, record: bool) -> Result:
    """Run what is prepared, and fold what comes out."""
    drive.go()
    ready, execution = drive.ready, drive.execution
    reports, outputs = drive.collect(Role.REPORT), drive.collect(Role.OUTPUT)
    drive.done()
    timeline = execution.timeline() if record else None
    with intra_op_threads(ready.threads):
        result = finish(ready, reports, outputs, timeline, drive.stats(), backward=ready.plan.schedule.has_backward)
    release(ready)
    drive.settle()
    return result
