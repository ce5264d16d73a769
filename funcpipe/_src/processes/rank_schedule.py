"""A plan on ranks with the face of torch.distributed.pipelining's schedules, for loops that are
written for these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.sparse_gradients import add_gradient
from funcpipe._src.core.tree import Tree, leaves
from funcpipe._src.data.losses import ALIKE, Weighing
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.engine.options import Executor
from funcpipe._src.engine.run import run
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.optimizing.leaf_gradients import by_leaf
from funcpipe._src.stages.rng import fold_in


class RankSchedule:
    """What torch's training loops call a schedule: `step` adds to ``.grad``, and keeps state and
    seeds by itself.

    Gradients are as in torch's schedules: the gradient of the sum of the microbatches' losses. With
    ``scale_grads`` they are divided by the number of microbatches, so unequal microbatches count
    alike. For a loss that returns a sum, set ``scale_grads=False``. A loss that returns ``(sum,
    weight)``, a loss with a method ``weigh``, and a plan with ``weight=`` define the weights of
    microbatches. Their gradients are divided by the total weight, or by nothing without
    ``scale_grads``. Sum, number and weight are over the microbatches of all replicas.

    Attributes:
        plan: what a step runs.
        params: one tree per stage, None for stages of other ranks.
        state: of the next step, likewise.
        steps: how many were made.
        scale_grads: whether gradients are divided by the number of microbatches.
        result: the result of the last step or evaluation, with the ``losses`` of all replicas.
    """

    def __init__(
        self,
        plan: Plan,
        executor: Executor,
        params: Sequence[Tree],
        state: Sequence[Tree] | None,
        seed: int | None,
        *,
        scale_grads: bool = True,
    ) -> None:
        if plan.loss is None or not plan.schedule.has_backward:
            raise PlanError(
                "a schedule that steps is of a plan with a loss and backwards; make_plan(stages, "
                "schedule, loss=...), and fp.run for forwards alone"
            )
        if plan.schedule.num_slices > 1:
            raise PlanError(
                "torch's schedules do not cut sequences into slices, so ranks.schedule has no "
                "meaning for the loss of one; run the plan: fp.run(plan, params, batch, "
                "executor=ranks)"
            )
        if plan.weight is None and not isinstance(plan.loss, Weighing):
            plan = replace(plan, counts=ALIKE)  # torch's schedules do not look at the kind of loss
        self.plan, self.params, self.state, self.seed = plan, params, state, seed
        self.scale_grads, self.steps = scale_grads, 0
        self.result: Result | None = None
        self._executor = executor
        kept: dict[str, Any] = {"weight": plan.weight, "merge": plan.merge, "devices": plan.devices}
        forwards = plan.schedule.forwards()
        looking = make_plan(plan.stages, forwards, loss=plan.loss, outputs=True, **kept)
        self._forwards = replace(looking, counts=plan.counts)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **feeds: Any,
    ) -> Any:
        """One step: forwards, losses, backwards; gradients are added to ``.grad`` of the leaves
        that are trained.

        Args:
            args: the inputs, on the rank of stage 0; several are handed on as a tuple.
            target: on the rank of the last stage.
            losses: a list whose contents are replaced by the losses of this replica's microbatches.
            return_outputs: of a plan that has outputs.
            feeds: by name.

        Returns:
            The outputs of the last stage, on its rank, where the plan has any; else None.
        """
        seed = None if self.seed is None else fold_in(self.seed, self.steps)
        result = self._run(self.plan, args, target, feeds, seed)
        self.state, self.steps = result.state, self.steps + 1
        factor = 1.0 if self.scale_grads or result.weight is None else result.weight
        with torch.no_grad():
            for leaf, gradient in [
                (entry.leaf, entry.gradient)
                for entry in by_leaf(self.params, result.grads, result.ties)
            ]:
                gradient = gradient if factor == 1.0 else gradient * factor
                leaf.grad = gradient if leaf.grad is None else add_gradient(leaf.grad, gradient)
        _put_own(result, losses)
        return result.outputs if return_outputs else None

    def eval(
        self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **feeds: Any
    ) -> Any:
        """The outputs of the last stage, on its rank, and losses; nothing is trained, no state
        changes."""
        result = self._run(self._forwards, args, target, feeds, None)
        _put_own(result, losses)
        return result.outputs

    def _run(
        self,
        plan: Plan,
        args: tuple[Any, ...],
        target: Any,
        feeds: dict[str, Any],
        seed: int | None,
    ) -> Result:
        inputs = args[0] if len(args) == 1 else args or None
        options: dict[str, Any] = {
            "state": self.state,
            "feeds": feeds or None,
            "seed": seed,
            "executor": self._executor,
        }
        self.result = run(plan, self.params, (inputs, target), **options)
        return self.result

    def zero_grad(self) -> None:
        """Forget the gradients of all leaves."""
        for leaf in leaves([tree for tree in self.params if tree is not None]):
            leaf.grad = None


def _put_own(result: Result, losses: list[Tensor] | None) -> None:
    """Replace the contents of a list by the losses of this replica's microbatches."""
    if losses is not None:
        first = result.stats.first_microbatch
        losses[:] = result.losses[first : first + result.stats.num_microbatches]
