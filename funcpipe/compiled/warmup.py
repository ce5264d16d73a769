"""Make the programs of a plan before its first step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from funcpipe.core.plan import Plan
from funcpipe.core.schedule import Kind
from funcpipe.core.stage import names_of
from funcpipe.core.tree import Tree
from funcpipe.compiled.bound import CompiledBound
from funcpipe.runtime.context import RUNNING, intra_op_threads, no_autocast_cache
from funcpipe.runtime.finish import release
from funcpipe.runtime.prepare import Prepared, prepare
from funcpipe.runtime.program import StageArgs, StageOut
from funcpipe.runtime.sequential import Loop
from funcpipe.runtime.signature import word
from funcpipe.runtime.trainable import Trainable


def warmup(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    trainable: Trainable = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> int:
    """Trace the compiled stages of a plan for a batch like this one, so that no step has to.

    The forwards of one microbatch of each shape run once, in this thread; backwards are traced and written, and do not
    run. Nothing of the caller's is touched. Safe to call while other threads run the plan.

    >>> from funcpipe.core.stage import Stage
    >>> from funcpipe.lower.plan import make_plan
    >>> from funcpipe.compiled.compile import compile
    >>> from funcpipe.schedules.families import one_f_one_b
    >>> plan = make_plan([compile(Stage(lambda w, x: x * w))], one_f_one_b(1, 2), loss=torch.nn.functional.mse_loss)
    >>> rows = torch.ones(3, 2)  # two microbatches, of two rows and of one
    >>> warmup(plan, (torch.ones(2),), (rows, rows)), warmup(plan, (torch.ones(2),), (rows, rows))
    (2, 0)

    Args:
        plan, params, batch, state, feeds, trainable: as in ``run``.
        progress: called with (done, of how many, what is next): ``lambda done, total, name: bar.update(...)``.

    Returns:
        How many sets of programs were made.

    Raises:
        TraceError: a stage cannot be compiled, and was not to fall back.
        FuncpipeError: as in ``run``, for what can be seen before a backward.
    """
    options: dict[str, Any] = {"state": state, "feeds": feeds, "trainable": trainable, "seed": 0, "check": ()}
    ready = prepare("warmup", plan, params, batch, loss_scale=1.0, threads_per_lane=None, **options)
    shapes = _one_of_each(ready)
    makers = {id(stage.program): stage.program for stage in plan.stages if stage.program is not None}.values()
    before = sum(maker.made for maker in makers)
    told = _Told(plan, len(shapes), progress)
    loop = Loop(replace(ready, bounds=[_Telling(bound, told, i) for i, bound in enumerate(ready.bounds)]))  # pyright: ignore
    token = RUNNING.set(loop.where)
    try:
        with intra_op_threads(ready.threads), no_autocast_cache(), torch.autograd.set_multithreading_enabled(False):
            for microbatch in shapes:
                loop.forward(microbatch, keep=plan.schedule.has_backward)
    finally:
        RUNNING.reset(token)
    release(ready)
    told.over()
    return sum(maker.made for maker in makers) - before


def _one_of_each(ready: Prepared) -> list[int]:
    """A microbatch of each shape."""
    cut, found = ready.batch, dict[Hashable, int]()
    for microbatch in range(cut.num_microbatches):
        rows = [cut.inputs, *cut.feeds.values(), *([cut.target] if cut.target is not None else [])]
        found.setdefault(tuple(word(leaf) for row in rows for leaf in row[microbatch].leaves), microbatch)
    return list(found.values())


class _Told:
    """Tells how far it is."""

    def __init__(self, plan: Plan, shapes: int, progress: Callable[[int, int, str], None] | None) -> None:
        self.names, self.total, self.done, self.progress = names_of(plan.stages), shapes * plan.num_stages, 0, progress
        self.kinds = {(action.kind, action.stage) for order in plan.schedule.orders for action in order}

    def next(self, stage: int) -> None:
        if self.progress is not None:
            self.progress(self.done, self.total, self.names[stage])
        self.done += 1

    def over(self) -> None:
        if self.progress is not None:
            self.progress(self.total, self.total, "")


class _Telling:
    """A stage that says when it is its turn, and has its backward written."""

    def __init__(self, inner: Any, told: _Told, index: int) -> None:
        self.inner, self.told, self.index = inner, told, index

    @property
    def phase(self) -> str:
        return self.inner.phase

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        self.told.next(self.index)
        out = self.inner.forward(args, keep=keep)
        if isinstance(self.inner, CompiledBound) and self.inner.programs is not None and self.inner.backwards:
            split, remat = ((kind, self.index) in self.told.kinds for kind in (Kind.W, Kind.R))
            self.inner.programs.build(split=split, remat=remat)
        return out
