"""Trace the compiled stages of a plan before its first step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from funcpipe._src.compiled.bound import CompiledBound
from funcpipe._src.core.cache_key import leaf_key
from funcpipe._src.core.progress import ProgressTo, telling
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.schedule import Kind
from funcpipe._src.data.stage import names_of
from funcpipe._src.engine.finish import release
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.prepare import Prepared, prepare
from funcpipe._src.engine.sequential import Loop
from funcpipe._src.stages.context import RUNNING, CallerContext, intra_op_threads
from funcpipe._src.stages.trainable import Trainable


def warmup(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    trainable: Trainable = None,
    progress: ProgressTo = False,
) -> int:
    """Trace the compiled stages of a plan for a batch like this, so that no step has to trace.

    The forwards of one microbatch of each shape run once, in this thread. Backwards are traced and
    written, but do not run. Parameters, state and the batch do not change. You can call `warmup`
    while other threads run the plan.

    >>> layer = fp.compile_stage(fp.Stage(lambda w, x: x * w))
    >>> plan = fp.make_plan([layer], fp.schedules.one_f_one_b(1, 2), loss=torch.nn.functional.mse_loss)
    >>> rows = torch.ones(3, 2)  # two microbatches, of two rows and of one
    >>> fp.warmup(plan, (torch.ones(2),), (rows, rows)), fp.warmup(plan, (torch.ones(2),), (rows, rows))
    (2, 0)

    Args:
        plan, params, batch, state, feeds, trainable: as in `run`.
        progress: True shows on stderr the next stage. A function gets a `CallProgress` instead.

    Returns:
        The number of new traces, 0 if all programs exist.

    Raises:
        TraceError: a stage cannot be compiled, and has no fallback.
        FuncpipeError: as in `run`, for faults that show before a backward.
    """
    # Any seed: stages that draw need one, and warmup returns no numbers.
    options = RunOptions(state=state, feeds=feeds, trainable=trainable, seed=0)
    ready = prepare("warmup", plan, params, batch, options)
    shapes = _one_of_each(ready)
    makers = {
        id(part.program): part.program for part in plan.stages if part.program is not None
    }.values()
    before = sum(maker.made for maker in makers)
    kinds = {(action.kind, action.stage) for order in plan.schedule.orders for action in order}
    names, total, loop = names_of(plan.stages), len(shapes) * plan.num_stages, Loop(ready)

    token = RUNNING.set(loop.where)
    try:
        with (
            telling("warmup", progress, unit="stages", total=total) as told,
            intra_op_threads(ready.threads),
            CallerContext().computing(),
        ):
            ready.gather_all()
            told.phase(names[0], 0)
            calls = (
                stage for m in shapes for stage in loop.forward(m, keep=plan.schedule.has_backward)
            )
            for done, stage in enumerate(calls, start=1):
                bound = ready.bounds[stage]
                if isinstance(bound, CompiledBound):
                    bound.build(split=(Kind.W, stage) in kinds, remat=(Kind.R, stage) in kinds)
                if done < total:
                    told.phase(names[done % plan.num_stages], done)
                else:
                    told.to(done)
    finally:
        RUNNING.reset(token)
        release(ready)
    return sum(maker.made for maker in makers) - before


def _one_of_each(ready: Prepared) -> list[int]:
    """A microbatch of each shape; with slices, the numbers of its pieces."""
    batch = ready.batch
    rows = [
        batch.inputs,
        *batch.feeds.values(),
        *([batch.target] if batch.target is not None else []),
    ]
    slices = batch.num_pieces // batch.num_microbatches
    seen: set[Hashable] = set()
    chosen: list[int] = []
    for microbatch in range(batch.num_microbatches):
        pieces = range(microbatch * slices, (microbatch + 1) * slices)
        key = tuple(
            leaf_key(leaf) for piece in pieces for row in rows for leaf in row[piece].leaves
        )
        if key not in seen:
            seen.add(key)
            chosen += pieces
    return chosen
