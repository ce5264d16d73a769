"""Dynamic loss scaling as pure functions of an explicit state, like ``torch.amp.GradScaler``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import Tree, is_differentiable, map_leaves, structure
from funcpipe._src.data.result import Result


class LossScale(NamedTuple):
    """The state of dynamic loss scaling: a tree of two tensors, which you can save in checkpoints.

    Attributes:
        scale: the factor of the loss, a 0-dim float tensor.
        good_steps: the number of steps since the last change of the scale, a 0-dim int tensor.
    """

    scale: Tensor
    good_steps: Tensor


def loss_scale(init: float = 2.0**16, *, device: torch.device | str = "cpu") -> LossScale:
    """Make the first state of dynamic loss scaling.

    Use the scale as ``fp.run(..., loss_scale=float(state.scale))``, or as ``loss * state.scale``.

    >>> fp.batches.loss_scale(8.0).scale
    tensor(8.)

    Args:
        init: the first scale, 65536 by default as in GradScaler.
        device: the device of the state, "cpu" by default. The device of the gradients avoids
            copies.

    Returns:
        A `LossScale`.

    Raises:
        PlanError: ``init`` is not positive, or too large for single precision.
    """
    if not 0 < init <= torch.finfo(torch.float32).max:
        raise PlanError(f"a loss scale is a positive number within single precision; got {init!r}")
    return LossScale(
        torch.tensor(float(init), device=device), torch.zeros((), dtype=torch.int32, device=device)
    )


def unscale(state: LossScale, grads: Tree) -> tuple[Tree, Tensor]:
    """Divide gradients by the loss scale, and find out whether any is inf or NaN.

    If the state and the gradients are on different devices, the host waits for a copy.

    >>> grads, found_inf = fp.batches.unscale(fp.batches.loss_scale(4.0), {"w": torch.tensor([8.0, 2.0])})
    >>> grads["w"].tolist(), bool(found_inf)
    ([2.0, 0.5], False)

    Args:
        state: the `LossScale` whose scale multiplied the loss.
        grads: a tree of gradients, which `unscale` does not write to. None and integers stay
            unchanged.

    Returns:
        ``(grads, found_inf)``. The gradients are bit-identical to GradScaler's. ``found_inf`` is a
        0-dim bool tensor on the state's device, for `select`, learning rate schedules and logs.

    Raises:
        PlanError: ``state`` is not a `LossScale`, or ``grads`` is a `Result`.
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
        # One flag per device. The copy is blocking: an unfinished copy would be read too early.
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
    """Compute the state for the next step, as GradScaler does.

    The scale shrinks after a skipped step, and grows after ``interval`` good steps in a row.

    >>> fp.batches.update_scale(fp.batches.loss_scale(4.0), torch.tensor(True)).scale
    tensor(2.)

    Args:
        state: the `LossScale` of this step.
        found_inf: the flag of this step, from `unscale`. With several ranks, the "or" of all flags.
        growth: the factor after ``interval`` good steps, 2 by default. The scale does not grow to
            infinity.
        backoff: the factor after a skipped step, 0.5 by default.
        interval: the number of good steps before the scale grows, 2000 by default.

    Returns:
        The next `LossScale`.

    Raises:
        PlanError: ``state`` is not a `LossScale`, ``growth`` is not above 1, ``backoff`` is not
            between 0 and 1, or ``interval`` is not a positive int.
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
    """Return ``old`` if the condition is true, else ``new``, without a branch in Python.

    Use `select` to skip a step with ``found_inf``: the host does not wait for the flag.

    >>> fp.batches.select(torch.tensor(True), {"w": torch.zeros(1)}, {"w": torch.ones(1)})
    {'w': tensor([0.])}

    Args:
        condition: a 0-dim bool tensor, such as ``found_inf``.
        old, new: trees with the same structure.

    Returns:
        A tree with the same structure. Leaves that are not tensors are taken from ``new``.

    Raises:
        PlanError: the trees differ in structure.
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
