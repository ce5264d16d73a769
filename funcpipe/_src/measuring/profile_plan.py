"""Measure the times of a running plan as a `Cost`, for other schedules of the same stages.

`profile` measures single layers instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

from funcpipe._src.core.progress import ProgressTo, telling
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.measured_cost import middle
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result, Timeline
from funcpipe._src.engine.executors import suiting
from funcpipe._src.engine.lanes import lanes
from funcpipe._src.engine.options import ExecutorLike
from funcpipe._src.engine.run import run
from funcpipe._src.measuring.row import refuse_counts
from funcpipe._src.stages.context import checked_plan
from funcpipe._src.stages.trainable import Trainable


def profile_plan(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    executor: ExecutorLike = None,
    threads_per_lane: int | None = None,
    repeats: int = 5,
    warmup: int = 2,
    progress: ProgressTo = False,
) -> Cost:
    """Measure the actions of a running plan, the host's work, and hops between devices.

    The times include effects that `profile` cannot measure for a single layer: lanes that share
    caches and memory bandwidth, memory that is new in each run, and the host's own work. With the
    cost, `simulate` predicts other schedules of the same stages, and other numbers of microbatches,
    on the same devices. Memory is not measured. Take ``residual`` from `profile`, with
    `dataclasses.replace`.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> weights, x = (torch.tensor(2.0), torch.tensor(3.0)), torch.ones(4)
    >>> plan = fp.make_plan([double, double], fp.schedules.one_f_one_b(2, 2), loss=nn.functional.mse_loss, devices="cpu")
    >>> cost = fp.models.profile_plan(plan, weights, (x, 0 * x))
    >>> fp.simulate(fp.schedules.fill_drain(2, 8), cost).makespan > 8 * max(cost.forward)
    True

    Args:
        plan: a plan of any schedule; 1F1B with a few microbatches is a good choice. For compiled
            stages, use a schedule that splits backwards (`zero_bubble`), to measure I and W.
        params, batch, state, feeds, seed, trainable, threads_per_lane: as in `run`.
        executor: as in `run`. None: where `run` would start threads, the threads are kept between
            the runs. With `ranks`, all processes make this call and get the same cost.
        repeats: the number of measured runs.
        warmup: the number of runs before the measured runs.
        progress: True shows on stderr how many runs are done. A function gets a `CallProgress`
            instead.

    Returns:
        A `Cost` in seconds with one number per stage: means over the microbatches of a run, medians
        over runs. ``comm`` is the time of a hop. For stages that run B: in eager stages I has
        the whole time and W none, as in a run. In compiled stages I and W have half of it each.

    Raises:
        PlanError: wrong ``repeats`` or ``warmup``, or as in `run`.
        BatchError, PlacementError, StageError: as in `run`.
    """
    keeps = executor is None and suiting(checked_plan("profile_plan", plan)).threaded
    refuse_counts(("repeats", repeats, 1), ("warmup", warmup, 0))
    kept: AbstractContextManager[ExecutorLike] = lanes(plan) if keeps else nullcontext(executor)
    # `ranks` joins the lanes of all processes.
    join: Callable[[Result], Timeline | None]
    join = getattr(executor, "timeline", attrgetter("timeline"))
    timelines: list[Timeline] = []
    with (
        telling("profile_plan", progress, unit="runs", total=warmup + repeats) as told,
        kept as lanes_or_other,
    ):
        told.phase("runs")
        for number in range(warmup + repeats):
            result = run(
                plan,
                params,
                batch,
                state=state,
                feeds=feeds,
                seed=seed,
                trainable=trainable,
                executor=lanes_or_other,
                threads_per_lane=threads_per_lane,
                record=True,
            )
            timeline = join(result)
            assert timeline is not None
            if number >= warmup:
                timelines.append(timeline)
            told.to(number + 1)
    return middle([timeline.cost(handover=True) for timeline in timelines])
