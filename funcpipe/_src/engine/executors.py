"""The executors "serial" and "threads", and the choice of an executor for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice

import torch

from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.plan import Plan
from funcpipe._src.devices.devices import plan_devices
from funcpipe._src.engine.execute import Execution, LaneExecutor
from funcpipe._src.engine.failures import raise_located
from funcpipe._src.engine.lanes import Lanes, refuse_uncarried, uncarried
from funcpipe._src.engine.options import Executor, ExecutorLike
from funcpipe._src.engine.switches import SwitchWatch
from funcpipe._src.engine.watchdog import Watchdog
from funcpipe._src.stages.context import RUNNING, checked_plan, intra_op_threads


class Serial(LaneExecutor):
    """Runs all actions on the calling thread, in plan order."""

    threaded = False

    def check(self, plan: Plan) -> None:
        """Accept every plan."""

    def walk(self, executions: Sequence[Execution]) -> None:
        """Run the actions in ``execution.part`` of each execution in turn. The thread does not wait
        for devices in between."""
        first = executions[0]
        timeout = first.ready.options.timeout
        with (
            nullcontext() if timeout is None else Watchdog(executions, timeout),
            intra_op_threads(first.ready.threads),
            first.context.computing(),
            first.catching(),
            SwitchWatch(alone=True) as switches,
        ):
            for execution in executions:
                lanes = execution.lanes
                # `walk` in execute.py resets the variable.
                RUNNING.set(
                    lambda execution=execution: execution.where(execution.lanes[execution.turn])
                )
                try:
                    for number, lane in enumerate(lanes):
                        execution.turn = number
                        execution.begin(lane)
                    for number in islice(execution.ready.program.lane_order, *execution.part):
                        execution.turn = number
                        lane = lanes[number]
                        if lane.place.asynchronous:
                            with lane.place.active():
                                lane.advance()
                        else:
                            lane.advance()
                        if switches.touched or torch.is_grad_enabled() is not switches.grad:
                            switches.check()
                    for number, lane in enumerate(lanes):
                        execution.turn = number
                        execution.end(lane)
                # Caught within the context managers, which write to exceptions that pass through.
                except BaseException as error:
                    raise_located([((0, 0), execution.failure(lanes[execution.turn], error))])


class Threads(LaneExecutor):
    """Runs each lane on a new thread, which ends with the run. `Lanes` keeps its threads."""

    threaded = True

    def check(self, plan: Plan) -> None:
        """Raise PlanError if a mode is active that other threads cannot inherit."""
        refuse_uncarried(plan)

    def walk(self, executions: Sequence[Execution]) -> None:
        """Run ``execution.part`` of each execution."""
        with Lanes(len(executions[0].lanes)) as fresh:
            fresh.walk(executions)


_NAMED: dict[str, LaneExecutor] = {"serial": Serial(), "threads": Threads()}


def executor_for(executor: ExecutorLike, plan: Plan) -> Executor:
    """Return the executor for the argument ``executor=``. Raises PlanError if it is not one."""
    if executor is None:
        return suiting(checked_plan("run", plan))
    if isinstance(executor, str):
        if executor in _NAMED:
            return _NAMED[executor]
    elif not isinstance(executor, type) and isinstance(executor, Executor):
        return executor
    raise PlanError(
        "executor is 'threads', 'serial', fp.lanes(plan), None, or, for fp.run only, "
        f"fp.graphs(plan) or fp.ranks(plan); got {executor!r}"
    )


def suiting(plan: Plan) -> LaneExecutor:
    """Choose threads if at least two lanes are on the CPU and threads can inherit all modes."""
    obstacles = uncarried(plan)
    if obstacles:
        return Serial(f"threads cannot take over {', '.join(obstacles)}")
    if sum(device.type == "cpu" for device in plan_devices(plan)) < 2:
        return Serial("fewer than two lanes compute on the CPU")
    return Threads("two or more lanes compute on the CPU")
