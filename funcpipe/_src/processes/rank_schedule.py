"""`RankSchedule`: a plan on ranks with the methods of torch.distributed.pipelining's schedules."""

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
    """An object with the methods of torch's pipeline schedules. `Ranks.schedule` makes it.

    Use it in training loops that are written for torch.distributed.pipelining. `step` adds
    gradients to ``.grad``, and keeps the state and the seed for the next step.

    Gradients are as in torch's schedules: the gradient of the sum of the microbatches' losses,
    divided by the number of microbatches. With ``scale_grads=False`` nothing is divided. Use that
    for a loss that returns a sum. A loss that returns ``(sum, weight)``, a loss with a method
    ``weigh``, and a plan with ``weight=`` define weights of microbatches. Then gradients are
    divided by the total weight. Sum, number and weight are over the microbatches of all replicas.

    Attributes:
        plan: the plan that a step runs.
        params: a tuple with one tree per stage, None for stages of other ranks.
        state: the state for the next step, in the same form.
        seed: the seed of all steps, or None. Step k draws with ``fold_in(seed, k)``.
        steps: the number of steps made.
        scale_grads: whether gradients are divided by the number of microbatches.
        result: the `Result` of the last step or evaluation, with the ``losses`` of all replicas.
            None before the first.
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
                "ranks.schedule needs a plan with a loss and backwards: make_plan(stages, "
                "schedule, loss=...); for forwards alone call fp.run"
            )
        if plan.schedule.num_slices > 1:
            raise PlanError(
                "torch's schedules do not cut sequences into slices, so ranks.schedule cannot "
                "weight the losses of slices; run the plan: fp.run(plan, params, batch, "
                "executor=ranks)"
            )
        if plan.weight is None and not isinstance(plan.loss, Weighing):
            plan = replace(plan, counts=ALIKE)  # torch's schedules weight all microbatches alike
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
        """Run forwards and backwards, and add the gradients to ``.grad`` of the trained leaves.

        Args:
            args: the inputs, on the rank of stage 0. Several inputs are passed as a tuple.
            target: the target, on the rank of the last stage.
            losses: a list. Its contents are replaced by the losses of this replica's microbatches.
            return_outputs: whether to return the outputs, if the plan has outputs.
            feeds: the feeds, by name.

        Returns:
            The outputs of the last stage, on its rank, for a plan with ``outputs=True``; else None.
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
        """Run the forwards, and return the outputs of the last stage on its rank, else None.

        Computes no gradients and changes no state. Arguments are as in `step`.
        """
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
        """Set ``.grad`` of all leaves to None."""
        for leaf in leaves([tree for tree in self.params if tree is not None]):
            leaf.grad = None


def _put_own(result: Result, losses: list[Tensor] | None) -> None:
    """Replace the contents of a list by the losses of this replica's microbatches."""
    if losses is not None:
        first = result.stats.first_microbatch
        losses[:] = result.losses[first : first + result.stats.num_microbatches]
