"""The optimizer's steps inside of a run: a stage's once its gradients are whole, undone where it was a step too many.

A stage is stepped before it is known whether the others' gradients are finite, what the norm of all is, and whether the run will
fail: what its parameters and the optimizer's state were is kept until then (post-validation, arXiv 2401.10241, section 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.result import Result
from funcpipe.core.torch_names import STEPPED
from funcpipe.core.tree import cow_clone, flatten, unflatten
from funcpipe.runtime.leaf_gradients import LeafGradient, by_leaf
from funcpipe.runtime.norms import norm_of
from funcpipe.runtime.optim import may_write, refuse_unheld, step
from funcpipe.runtime.prepare import Prepared

_CLIPPING = 1e-6
"""What torch's clipping adds to a norm before it divides."""


@dataclass
class _Kept:
    """What a leaf and the optimizer's state of it were before a step.

    Attributes:
        leaf: what was stepped.
        numbers: of the leaf.
        state: of the optimizer, tensors as copies; None: it had none.
    """

    leaf: Tensor
    numbers: Tensor
    state: Mapping[str, Any] | None

    @classmethod
    def of(cls, leaf: Tensor, optimizer: torch.optim.Optimizer) -> _Kept:
        """What is now."""
        state = optimizer.state.get(leaf)
        kept = None if state is None else {name: _copied(value) for name, value in state.items()}
        return cls(leaf, leaf.detach().clone(), kept)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Make it so again; tensors stay the objects that they are."""
        self.leaf.detach().copy_(self.numbers)
        if self.state is None:
            optimizer.state.pop(self.leaf, None)
            return
        now = optimizer.state[self.leaf]
        for name in [name for name in now if name not in self.state]:
            del now[name]
        for name, value in self.state.items():
            if isinstance(value, Tensor) and isinstance(now.get(name), Tensor):
                now[name].detach().copy_(value)
            else:
                now[name] = value


class Stepping:
    """The steps of one run.

    Attributes:
        stepped: the stages that were, so far.
    """

    def __init__(self, ready: Prepared) -> None:
        self.ready, self.optimizer, self.max_norm = ready, ready.options.optimizer, ready.options.max_norm
        self.stepped: set[int] = set()
        self._kept: dict[int, list[_Kept]] = {}
        trees = [tree for stage, tree in enumerate(ready.params) if stage in ready.bounds]
        if self.optimizer is not None:
            refuse_unheld(self.optimizer, [leaf for tree in trees for leaf in flatten(tree)[0]])
        tied = {stage for group in ready.ties for stage, _ in group}
        # Gradients of replicas and of ties are whole when all lanes are done; of losses that weigh late they are scaled then.
        late = ready.part.replicas > 1 or ready.plan.stages[-1].seen.late
        self._parts = {
            stage: part_of(self.optimizer, flatten(ready.params[stage])[0])
            for stage in ready.bounds
            if not late and stage not in tied and self.optimizer is not None
        }

    def step(self, stage: int) -> None:
        """Step a stage whose gradients are whole, on the lane that has it; not if others decide about these."""
        part, bound = self._parts.get(stage), self.ready.bounds[stage]
        if part is None or bound.written():  # what was written is told when the run ends
            return
        tree = self.ready.params[stage]
        entries = self._scaled(by_leaf((tree,), (unflatten(flatten(tree)[1], bound.grads()),), ()))
        self._step(stage, part, entries)

    def _scaled(self, entries: list[LeafGradient]) -> list[LeafGradient]:
        """The gradients without the loss scale."""
        scale = self.ready.shares.loss_scale
        return entries if scale == 1.0 else [replace(each, gradient=each.gradient / scale) for each in entries]

    def _step(self, stage: int, part: torch.optim.Optimizer, entries: Sequence[LeafGradient]) -> None:
        """Step what this part of the optimizer holds."""
        ids = {id(leaf) for group in part.param_groups for leaf in group["params"]}
        stepped = [entry for entry in entries if id(entry.leaf) in ids]
        if not stepped:
            return
        self._kept[stage] = [_Kept.of(entry.leaf, part) for entry in stepped]
        self.stepped.add(stage)
        try:
            for entry in stepped:
                entry.leaf.grad = cow_clone(entry.gradient) if may_write(part) else entry.gradient
            part.step()
        finally:
            for entry in stepped:
                entry.leaf.grad = None

    def settle(self, result: Result, *, late: bool) -> Result:
        """All is known: keep the steps, or undo them and make those that clipped, or late, gradients want."""
        assert result.grads is not None
        params, grads, scale = self.ready.params, result.grads, result.loss_scale
        if late:
            self.ready.plan.stages[-1].seen.late = True
        entries = self._scaled(by_leaf(params, grads, result.ties))
        norm = norm_of([(entry.stage, entry.gradient) for entry in entries if entry.counts], result.exchange)
        skips = scale != 1.0 and not bool(norm.isfinite())
        clips = self.max_norm is not None and not bool(self.max_norm / (norm + _CLIPPING) >= 1.0)
        if late or skips or clips:
            self.undo()
        if clips and not skips:
            step(self.optimizer, params, result, max_norm=self.max_norm)
        elif not skips and self.optimizer is not None:
            stages = {entry.stage for entry in entries} - self.stepped
            rest = [entry for entry in entries if entry.stage in stages]
            part = part_of(self.optimizer, [entry.leaf for entry in rest])
            if part is not None:
                self._step(-1, part, rest)
        if self.optimizer is not None and not skips:
            setattr(self.optimizer, STEPPED, True)
        self._kept.clear()
        return replace(result, norm=norm)

    def undo(self) -> None:
        """Make parameters and the optimizer's state what they were."""
        with torch.no_grad():
            for rows in self._kept.values():
                for kept in rows:
                    kept.restore(self.optimizer)
        self._kept.clear()
        self.stepped.clear()


def part_of(optimizer: torch.optim.Optimizer, leaves: Sequence[Any]) -> torch.optim.Optimizer | None:
    """The optimizer for some of its parameters, with the same state; None: it holds none of them.

    Parts of different parameters can be stepped at the same time.
    """
    ids = {id(leaf) for leaf in leaves}
    groups = [
        {**group, "params": [leaf for leaf in group["params"] if id(leaf) in ids]} for group in optimizer.param_groups
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        return None
    part: torch.optim.Optimizer = object.__new__(type(optimizer))  # `copy` takes what is saved, so no hooks
    vars(part).update(vars(optimizer))
    vars(part).pop("step", None)  # a scheduler has put one there, which steps all of it
    part.param_groups = groups
    return part


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)
