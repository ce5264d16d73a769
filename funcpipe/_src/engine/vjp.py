"""`vjp`: run the forwards of a plan now, and its backwards later with cotangents from the user."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from funcpipe._src.batch.joining import OutputJoin, join_input_grads
from funcpipe._src.batch.marks import Microbatches
from funcpipe._src.batch.microbatch import Batch
from funcpipe._src.core.border import Border, share
from funcpipe._src.core.errors import BatchError, FuncpipeError, PlanError
from funcpipe._src.core.shown import guarded
from funcpipe._src.core.tree import Tree, flatten, is_differentiable
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import Role, Wire
from funcpipe._src.data.result import Result
from funcpipe._src.data.schedule import Kind
from funcpipe._src.engine.execute import Execution, LaneExecutor
from funcpipe._src.engine.executors import executor_for
from funcpipe._src.engine.finish import finish, gradient_sums, gradients, refuse_writes, release
from funcpipe._src.engine.options import ExecutorLike, RunOptions
from funcpipe._src.engine.prepare import Prepared, prepare
from funcpipe._src.engine.unused import unused_keys, unused_leaves
from funcpipe._src.stages.context import (
    checked_plan,
    intra_op_threads,
    not_carried,
    refuse_transforms,
)
from funcpipe._src.stages.trainable import Trainable


def vjp(
    plan: Plan,
    params: Sequence[Tree],
    inputs: Tree,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    input_grads: bool | Tree = True,
    executor: ExecutorLike = None,
    threads_per_lane: int | None = None,
    ranges: bool = False,
    check: str | Sequence[str] = (),
    timeout: float | None = None,
) -> tuple[Result, Pullback]:
    """Run the forwards of a plan without a loss, and return a function that runs its backwards.

    This is ``jax.vjp`` for a pipeline. The function takes cotangents, which are gradients of the
    outputs. With the cotangents of a loss, the gradients are bit-identical to `run` with this loss.
    The schedule must run all forwards of a device first: `schedules.fill_drain` or
    `schedules.looped_bfs`, with or without `schedules.remat`.

    >>> stages = [fp.stage(lambda p, x: p * x), fp.stage(lambda p, x: p * x)]
    >>> plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2), devices="cpu")
    >>> result, pullback = fp.vjp(plan, (torch.tensor(3.0), torch.tensor(5.0)), torch.ones(2))
    >>> grads, input_grads = pullback(torch.ones(2))
    >>> result.outputs.tolist(), [float(grad) for grad in grads], input_grads.tolist()
    ([15.0, 15.0], [10.0, 6.0], [15.0, 15.0])

    Args:
        plan: a plan without ``loss=``, whose schedule has backwards.
        params, state, feeds, seed, trainable, threads_per_lane, ranges, check, timeout: as in
            `run`.
        inputs: the inputs of the batch, a tree with tensors ``[B, ...]``. Cut as in `run`.
        input_grads: the inputs that get gradients. True, the default: all floating-point leaves.
            False: none. Else a tree of bools with the structure of the inputs.
        executor: as in `run`, except `graphs` and `ranks`.

    Returns:
        A `Result` with ``outputs`` and ``state`` but without loss and grads, and a
        `typing.Pullback`.

    Raises:
        PlanError, PlacementError, BatchError: arguments do not fit together. No stage has run.
        StageError: user code failed. The error is also an instance of the original error's class.
    """
    options = RunOptions(
        state=state,
        feeds=feeds,
        seed=seed,
        trainable=trainable,
        threads_per_lane=threads_per_lane,
        ranges=ranges,
        check=check,
        timeout=timeout,
    )
    checked_plan("vjp", plan)
    chosen = _by_halves(executor, plan)
    ready = prepare("vjp", plan, params, inputs, options, part=chosen.part(plan), halves=True)
    for borders in (ready.batch.inputs, *ready.batch.feeds.values()):
        # Shared copies: the caller may write into the batch before R reads it again.
        borders[:] = [Border(share(border.leaves), border.spec, border.flags) for border in borders]
    if input_grads is not False:
        _want(ready.batch, input_grads)
    return _forwards(ready, Execution(ready, chosen))


def _by_halves(executor: ExecutorLike, plan: Plan) -> LaneExecutor:
    """Return the executor of both halves. Raises PlanError if it can do whole runs only."""
    chosen = executor_for(executor, plan)
    if not isinstance(chosen, LaneExecutor) or not chosen.halves:
        raise PlanError(
            "the executor of vjp is 'threads', 'serial', fp.lanes(plan) or None; fp.graphs(plan) "
            f"and fp.ranks(plan) work with fp.run only; got {chosen!r}"
        )
    return chosen


def _want(batch: Batch, input_grads: Tree) -> None:
    """Mark the input leaves whose gradients are wanted. Raises PlanError, BatchError."""
    inputs = batch.inputs
    if batch.merged and inputs and len(batch.axes) != len(inputs[0].leaves):
        raise BatchError(
            "input_grads= needs inputs that are tensors, or trees of tensors; cut objects of "
            "registered classes yourself: fp.Microbatches([...])"
        )
    for index, border in enumerate(inputs):
        tree = input_grads[index] if isinstance(input_grads, Microbatches) else input_grads
        flags = [tree] * len(border.leaves) if isinstance(tree, bool) else flatten(tree)[0]
        if len(flags) != len(border.leaves) or not all(isinstance(flag, bool) for flag in flags):
            raise PlanError(
                f"input_grads is True, False, or a tree of them like the inputs ({border.spec}); "
                f"got {tree!r}"
            )
        asked = [
            flag and is_differentiable(leaf)
            for flag, leaf in zip(flags, border.leaves, strict=True)
        ]
        inputs[index] = Border(border.leaves, border.spec, asked)


def _forwards(ready: Prepared, execution: Execution) -> tuple[Result, Pullback]:
    """Run the forwards, and return the result and the pullback."""
    execution.go(0, _middle(ready.program))
    reports, outputs = execution.collect(Role.REPORT), execution.collect(Role.OUTPUT)
    stages = [stage for (stage, _), report in reports.items() if report.side is not None]
    if stages:
        raise PlanError(
            f"stage {min(stages)} returned an auxiliary loss (Out.loss), and vjp has no loss to add "
            "it to; pass it to the last stage as a skip, return it as an output and give its "
            "cotangent, or call fp.run with a loss"
        )
    last = ready.plan.num_stages - 1
    pieces: list[Border] = [
        outputs[last, microbatch] for microbatch in range(ready.batch.num_microbatches)
    ]
    with intra_op_threads(ready.threads):
        result = finish(ready, reports, outputs, None, execution.stats(), backward=False)
    execution.settle()
    return result, Pullback(execution, OutputJoin(pieces, ready.batch, ready.plan.merge))


def _middle(program: Lowered) -> int:
    """Return the index in the plan order of the first action of the second half.

    The first half ends with the last forward and the offloads after it.
    """
    kinds = [program.calls[code // program.num_microbatches].kind for code in program.order]
    middle = 1 + max(index for index, kind in enumerate(kinds) if kind is Kind.F)
    # With these offloads, residuals leave the device before the caller computes a cotangent.
    while middle < len(kinds) and kinds[middle] is Kind.O:
        middle += 1
    return middle


class Pullback:
    """The second half of a `vjp`: a function from cotangents to gradients. Call it once.

    A pullback keeps the residuals and the parameters until you call or delete it. The call uses the
    executor of `vjp`, and the autocast and default device that were active in `vjp`.

    Attributes:
        attached: for each microbatch, whether each leaf of its outputs can have a gradient. In
            plain autograd this is ``requires_grad``.
        unused: the trainable leaves that no backward reached, as (stage, path). Empty before the
            call.
    """

    def __init__(self, execution: Execution, joined: OutputJoin) -> None:
        self._execution: Execution | None = execution
        self._joined, self.attached = joined, joined.attached
        self._lock = threading.Lock()
        self._carried = not_carried()
        self.unused: tuple[tuple[int, Any], ...] = ()

    @guarded
    def __repr__(self) -> str:
        execution = self._execution
        if execution is None:
            return "<Pullback: spent>"
        return f"<Pullback of {execution.ready.plan!r}; give it cotangents of the outputs, once>"

    def __call__(self, cotangents: Tree) -> tuple[tuple[Tree, ...], Tree]:
        """Run the backwards, and return the gradients.

        Args:
            cotangents: a tree with the structure of ``result.outputs``. Each leaf is a tensor with
                the shape and dtype of the output, on any device, or None for no gradient.

        Returns:
            ``(grads, input_grads)``. ``grads`` has one tree per stage: None for a leaf that is not
            trainable, zeros for an unused leaf. ``input_grads`` has the structure of the inputs:
            None for a leaf without gradient, or if ``input_grads=False``.

        Raises:
            BatchError: the cotangents do not fit the outputs. You can call again with others.
            PlanError: parameters were written to since the forwards, or other modes are active.
            StageError: user code failed in a backward. The pullback cannot be called again.
            FuncpipeError: the pullback was already called.
        """
        refuse_transforms("a pullback")
        execution = self._execution
        if execution is None:
            raise FuncpipeError(
                "this pullback is spent: the first call has freed its residuals; call fp.vjp again"
            )
        pieces = self._joined.cut(cotangents)
        ready = execution.ready
        refuse_writes(
            ready,
            "parameters were written to between the forward (fp.vjp, or the call of a Pipe) and its "
            "backward, which needs their old values; step the optimizer after the backward:",
        )
        if not_carried() != self._carried:
            raise PlanError(
                "other function modes, dispatch modes or saved-tensor hooks are active than at "
                "vjp; call the pullback with the same modes and hooks"
            )
        # Spent only after all checks: a refused call may be repeated. The backwards free residuals.
        with self._lock:
            if self._execution is None:
                raise FuncpipeError(
                    "this pullback is spent: another thread has called it; call fp.vjp again"
                )
            self._execution = None
        execution.give(Wire(Role.GRAD, ready.plan.num_stages - 1), pieces)
        execution.go(_middle(ready.program))
        input_grads, reductions = execution.collect(Role.INPUT_GRAD), execution.reductions()
        execution.check_empty()
        execution.hand_sums()
        with intra_op_threads(ready.threads):
            unused = unused_keys(ready, unused_leaves(ready))
            grads = gradients(ready, gradient_sums(ready, reductions))
            inputs = join_input_grads(
                ready.batch,
                [input_grads[0, microbatch].leaves for microbatch in range(len(pieces))],
            )
        self.unused = unused
        release(ready)
        execution.settle()
        return grads, inputs
