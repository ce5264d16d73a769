"""run: a plan on a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from funcpipe.core.errors import PlanError
from funcpipe.core.plan import Plan, Role
from funcpipe.core.result import Result, RunStats
from funcpipe.core.tree import Tree
from funcpipe.runtime.border import Border
from funcpipe.runtime.context import RUNNING, Context, intra_op_threads, not_carried
from funcpipe.runtime.execute import Execution, run_serial
from funcpipe.runtime.finish import finish
from funcpipe.runtime.lanes import Lanes, parallel
from funcpipe.runtime.prepare import Prepared, Trainable, prepare
from funcpipe.runtime.rng import exactly
from funcpipe.runtime.stream import Place

_SMALL = 100e-6
"""Seconds per action below which two Python threads are slower than one (the GIL changes hands at every operation)."""


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
    executor: str | Lanes | None = None,
    threads_per_lane: int | None = None,
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
            work), `lanes` (threads kept between runs), or None: threads where two lanes are on the CPU and actions
            are not tiny. Same bits.
        threads_per_lane: intra-op threads; None: cores divided by lanes.

    Raises:
        PlanError, PlacementError, BatchError: something does not fit; nothing has run.
        StageError: user code failed; also an instance of what it raised, see there.
    """
    options: dict[str, Any] = {"state": state, "feeds": feeds, "seed": seed, "trainable": trainable}
    options |= {"loss_scale": loss_scale, "threads_per_lane": threads_per_lane}

    def attempt() -> Result:
        return _execute(prepare("run", plan, params, batch, **options), executor, record=record)

    return exactly(plan, attempt)


def _execute(ready: Prepared, executor: Any, *, record: bool) -> Result:
    """Run what is prepared, and fold what comes out."""
    plan = ready.plan
    threaded, reason, crew = _choose(executor, ready)
    alone = [sum(other == device for other in ready.where) == 1 for device in ready.where]
    places = [Place(device, alone=one) for device, one in zip(ready.where, alone, strict=True)]
    execution = Execution(
        plan, ready.program, ready.bounds, places, _numbered(ready), threaded=threaded, timed=record or threaded
    )
    token = RUNNING.set(True)
    began = perf_counter()
    try:
        for place in places:
            place.fork()
        if not threaded:
            with intra_op_threads(ready.threads):
                run_serial(execution)
        elif crew is not None:
            crew.run(execution, Context(), ready.threads)
        else:
            with Lanes(len(places)) as fresh:
                fresh.run(execution, Context(), ready.threads)
    finally:
        for place in places:
            place.join()
        RUNNING.reset(token)
    seconds = perf_counter() - began
    busy = execution.busy() if execution.timed else seconds
    plan.__dict__["_mean_action"] = busy / max(1, len(ready.program.order))  # for the next choice of an executor
    name = "threads" if threaded else "serial"
    stats = RunStats(name, reason, ready.threads, ready.batch.num_microbatches, seconds, execution.most())
    reports, outputs = execution.collect(Role.REPORT), execution.collect(Role.OUTPUT)
    execution.check_empty()
    timeline = execution.timeline() if record else None
    with intra_op_threads(ready.threads):
        return finish(ready, reports, outputs, timeline, stats)


def _numbered(ready: Prepared) -> dict[int, Border]:
    """What the caller gives, by value number."""
    out: dict[int, Border] = {}
    count = ready.program.num_microbatches
    for index, (role, _, name, _) in enumerate(ready.program.wires):
        found: list[Border] | None = None
        if role is Role.INPUT:
            found = ready.batch.inputs
        elif role is Role.TARGET:
            found = ready.batch.target
        elif role is Role.FEED:
            found = ready.batch.feeds[name]
        if found is not None:
            out.update({index * count + m: border for m, border in enumerate(found)})
    return out


def _choose(executor: Any, ready: Prepared) -> tuple[bool, str, Lanes | None]:
    """Threads or not, why, and whose."""
    plan = ready.plan
    uncarried = not_carried()
    if isinstance(executor, Lanes):
        if executor.count != plan.num_devices:
            raise PlanError(
                f"these lanes are {executor.count}, the plan has {plan.num_devices}; make them with fp.lanes(plan)"
            )
        _refuse_uncarried(uncarried)
        return True, "asked for", executor
    if executor == "serial":
        return False, "asked for", None
    if executor == "threads":
        _refuse_uncarried(uncarried)
        return True, "asked for", None
    if executor is not None:
        raise PlanError(f"executor is 'threads', 'serial', fp.lanes(plan) or None; got {executor!r}")
    if uncarried:
        return False, f"threads cannot take over {', '.join(uncarried)}", None
    if not parallel(ready.where):
        return False, "fewer than two lanes compute on the CPU", None
    mean = plan.__dict__.get("_mean_action")
    if mean is not None and mean < _SMALL:
        return (
            False,
            f"actions took {mean * 1e6:.0f} us on average, and threads pay from about {_SMALL * 1e6:.0f} us",
            None,
        )
    return True, "two or more lanes compute on the CPU", None


def _refuse_uncarried(found: Sequence[str]) -> None:
    if found:
        raise PlanError(f"{', '.join(found)} cannot be taken over by other threads; use executor='serial'")
