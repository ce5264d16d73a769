"""A plan on ranks with the face of torch.distributed.pipelining's schedules, for loops that are written for these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import PlanError
from funcpipe.core.plan import Plan
from funcpipe.core.result import Result
from funcpipe.core.tree import Tree, leaves
from funcpipe.lower.plan import make_plan
from funcpipe.runtime.leaf_gradients import by_leaf
from funcpipe.runtime.options import Executor
from funcpipe.runtime.rng import fold_in
from funcpipe.runtime.run import run
from funcpipe.runtime.sparse_gradients import add_gradient


class RankSchedule:
    """What torch's training loops call a schedule: `step` adds to ``.grad``, and keeps state and seeds by itself.

    Attributes:
        plan: what a step runs.
        params: one tree per stage, None for stages of other ranks.
        state: of the next step, likewise.
        steps: how many were made.
        result: of the last step or evaluation.
    """

    def __init__(
        self, plan: Plan, executor: Executor, params: Sequence[Tree], state: Sequence[Tree] | None, seed: int | None
    ) -> None:
        if plan.loss is None or not plan.schedule.has_backward:
            raise PlanError(
                "a schedule that steps is of a plan with a loss and backwards; make_plan(stages, schedule, loss=...), and "
                "fp.run for forwards alone"
            )
        self.plan, self.params, self.state, self.seed = plan, params, state, seed
        self.steps = 0
        self.result: Result | None = None
        self._executor = executor
        kept: dict[str, Any] = {"weight": plan.weight, "merge": plan.merge, "devices": plan.devices}
        forwards = plan.schedule.forwards()
        self._forwards = make_plan(plan.stages, forwards, loss=plan.loss, outputs=True, **kept)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        **feeds: Any,
    ) -> Any:
        """One step: forwards, losses, backwards; gradients are added to ``.grad`` of the leaves that are trained.

        Args:
            args: the inputs, on the rank of stage 0; several are handed on as a tuple.
            target: on the rank of the last stage.
            losses: gets the loss of each microbatch, in place of what is in it.
            return_outputs: of a plan that has outputs.
            feeds: by name.

        Returns:
            The outputs of the last stage, on its rank, where the plan has any; else None.
        """
        seed = None if self.seed is None else fold_in(self.seed, self.steps)
        result = self._run(self.plan, args, target, feeds, seed)
        self.state, self.steps = result.state, self.steps + 1
        with torch.no_grad():
            for leaf, gradient in [
                (entry.leaf, entry.gradient) for entry in by_leaf(self.params, result.grads, result.ties)
            ]:
                leaf.grad = gradient if leaf.grad is None else add_gradient(leaf.grad, gradient)
        if losses is not None:
            losses[:] = result.losses
        return result.outputs if return_outputs else None

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **feeds: Any) -> Any:
        """The outputs of the last stage, on its rank, and losses; nothing is trained, no state changes."""
        result = self._run(self._forwards, args, target, feeds, None)
        if losses is not None:
            losses[:] = result.losses
        return result.outputs

    def _run(self, plan: Plan, args: tuple[Any, ...], target: Any, feeds: dict[str, Any], seed: int | None) -> Result:
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
