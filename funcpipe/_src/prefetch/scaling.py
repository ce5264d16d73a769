"""Dynamic loss scaling as explicit state: what ``torch.amp.GradScaler`` does, in functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import Tree, is_differentiable, map_leaves, structure
from funcpipe._src.data.result import Result


class LossScale(NamedTuple):
    """The state of dynamic loss scaling: a tree of two tensors, to carry through steps and keep in
    checkpoints.

    Attributes:
        scale: what the loss is multiplied by, a 0-dim float tensor.
        good_steps: steps since the scale changed last, a 0-dim int tensor.
    """

    scale: Tensor
    good_steps: Tensor


def loss_scale(init: float = 2.0**16, *, device: torch.device | str = "cpu") -> LossScale:
    """The first state. ``fp.run(..., loss_scale=float(state.scale))`` or ``loss * state.scale``.

    >>> fp.batches.loss_scale(8.0).scale
    tensor(8.)

    Args:
        init: the first scale.
        device: of the state; that of the gradients needs no copies.

    Raises:
        PlanError: the scale is not positive.
    """
    if not 0 < init <= torch.finfo(torch.float32).max:
        raise PlanError(
            f"a loss scale is a positive number that single precision has; got {init!r}"
        )
    return LossScale(
        torch.tensor(float(init), device=device), torch.zeros((), dtype=torch.int32, device=device)
    )


def unscale(state: LossScale, grads: Tree) -> tuple[Tree, Tensor]:
    """Gradients of the loss itself, and whether any is inf or NaN. The host waits where the state
    lies elsewhere.

    >>> grads, found_inf = fp.batches.unscale(fp.batches.loss_scale(4.0), {"w": torch.tensor([8.0, 2.0])})
    >>> grads["w"].tolist(), bool(found_inf)
    ([2.0, 0.5], False)

    Args:
        state: whose scale the loss was multiplied by.
        grads: any tree; None and integers stay as they are. Not written to.

    Returns:
        The gradients over the scale (bit for bit what GradScaler makes of them), and ``found_inf``,
        a 0-dim bool tensor beside the state: for `select`, learning-rate schedules and logs.

    Raises:
        PlanError: the state is none, or the gradients are a whole result.
    """
    _check_state("unscale", state, "grads")
    if isinstance(grads, Result):
        raise PlanError(
            "unscale takes gradients alone: unscale(state, result.grads); fp.step(optimizer, "
            "params, result) unscales by itself"
        )
    with torch.no_grad():
        # GradScaler's arithmetic: the reciprocal in double precision, rounded once.
        inverse = state.scale.double().reciprocal().float()
        flags = {state.scale.device: [torch.zeros((), dtype=torch.bool, device=state.scale.device)]}

        def divide(leaf: Any) -> Any:
            if not is_differentiable(leaf):
                return leaf
            values = leaf.coalesce().values() if leaf.is_sparse else leaf
            flags.setdefault(leaf.device, []).append(torch.isfinite(values).logical_not().any())
            return (leaf * inverse.to(leaf.device)).to(leaf.dtype)

        unscaled = map_leaves(divide, grads)
        # One flag comes from each device. A copy that is not waited for would be read too early.
        found_inf = [torch.stack(found).any().to(state.scale.device) for found in flags.values()]
        return unscaled, torch.stack(found_inf).any()


def _check_state(name: str, state: Any, argument: str) -> None:
    if not isinstance(state, LossScale):
        raise PlanError(
            f"{name} takes the state first, {name}(state, {argument}), as fp.batches.loss_scale() "
            f"makes it; got a {type(state).__name__}"
        )


def update_scale(
    state: LossScale,
    found_inf: Tensor,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
) -> LossScale:
    """The state for the next step, as GradScaler's: smaller after a step that was skipped, larger
    after many good ones.

    >>> fp.batches.update_scale(fp.batches.loss_scale(4.0), torch.tensor(True)).scale
    tensor(2.)

    Args:
        state: of the step.
        found_inf: of the step, from `unscale`; with several ranks or scalers the "or" of all.
        growth: the factor after ``interval`` good steps in a row, unless the scale then were no
            finite number.
        backoff: the factor after a skipped one.
        interval: how many.

    Raises:
        PlanError: the state is none, growth is not above 1, backoff not between 0 and 1, or
            interval no whole number from 1.
    """
    _check_state("update_scale", state, "found_inf")
    if not (growth > 1 and 0 < backoff < 1 and type(interval) is int and interval > 0):
        rule = "growth is above 1, backoff between 0 and 1, interval a whole number from 1"
        raise PlanError(f"{rule}; got {growth}, {backoff}, {interval}")
    scale, steps = state
    found_inf = torch.as_tensor(found_inf)  # a Python bool will do
    with torch.no_grad():
        good = steps + 1
        grown, shrunk = ((scale.double() * factor).to(scale.dtype) for factor in (growth, backoff))
        full = good == interval
        bigger = torch.where(full & torch.isfinite(grown), grown, scale)
        zero = torch.zeros_like(steps)
        return LossScale(
            torch.where(found_inf, shrunk, bigger), torch.where(found_inf | full, zero, good)
        )


def select(condition: Tensor, old: Tree, new: Tree) -> Tree:
    """``old`` where the condition holds, else ``new``, in both trees' structure: a step that is
    taken or not, without a branch.

    >>> fp.batches.select(torch.tensor(True), {"w": torch.zeros(1)}, {"w": torch.ones(1)})
    {'w': tensor([0.])}

    Args:
        condition: a 0-dim tensor of bool, such as ``found_inf``.
        old, new: trees of one structure. Leaves that are no tensors are taken from ``new``.

    Raises:
        PlanError: the trees differ.
    """
    if structure(old) != structure(new):
        raise PlanError(
            f"select takes two trees of one structure; got {structure(old)} and {structure(new)}"
        )
    condition = torch.as_tensor(condition)  # a Python bool will do

    def chosen(old_leaf: Any, new_leaf: Any) -> Any:
        tensors = isinstance(old_leaf, Tensor) and isinstance(new_leaf, Tensor)
        return (
            torch.where(condition.to(new_leaf.device), old_leaf, new_leaf) if tensors else new_leaf
        )

    with torch.no_grad():
        return map_leaves(chosen, old, new)
