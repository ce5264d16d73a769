"""From gradients to a step: torch.optim over explicit trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import PlanError
from funcpipe.core.result import Result, RunStats
from funcpipe.core.tree import Tree, at, flatten, leaves, map_leaves, structure

Ties = Sequence[Sequence[tuple[int, Any]]]


def step(
    optimizer: torch.optim.Optimizer,
    params: Tree,
    grads: Tree,
    *,
    max_norm: float | None = None,
    ties: Ties = (),
) -> Tensor:
    """One step of an optimizer over ``leaves(params)``; every ``.grad`` is None again afterwards.

    >>> import torch
    >>> params = ({"w": torch.ones(2)},)
    >>> norm = step(torch.optim.SGD([params[0]["w"]], lr=1.0), params, ({"w": torch.tensor([3.0, 4.0])},))
    >>> float(norm), params[0]["w"].tolist()
    (5.0, [-2.0, -3.0])

    Args:
        optimizer: any torch optimizer that holds some of the leaves of ``params``.
        params: the trees that were run.
        grads: of the same structure, None where there is none (`Result.grads`).
        max_norm: clip the norm over all stages to it.
        ties: as in the plan: a tied parameter counts once in the norm.

    Returns:
        The norm before clipping, a 0-dim tensor.

    Raises:
        PlanError: params and grads differ in structure, or the optimizer holds none of the leaves with a gradient.
    """
    if structure(params) != structure(grads):
        raise PlanError(f"params and grads differ in structure: {structure(params)} and {structure(grads)}")
    norm = global_norm(grads, ties=ties)
    scale: Tensor | None = None
    if max_norm is not None:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    every = leaves(params)
    _check_optimizer(optimizer, params, grads)
    held: dict[int, int] = {}
    for leaf in every:
        leaf.grad = None  # what an earlier backward left there is not stepped
    try:
        with torch.no_grad():
            for stage, leaf, gradient in _pairs(params, grads):
                mine = gradient if scale is None else gradient * scale.to(gradient.device)
                if id(leaf) in held:
                    # One tensor at two places of a stage: its gradient is the sum. In two stages it is tied (a run
                    # refuses it otherwise), and every holder was given the whole sum already.
                    if held[id(leaf)] == stage and leaf.grad is not None:
                        leaf.grad = leaf.grad + mine
                    continue
                leaf.grad = mine
                held[id(leaf)] = stage
        optimizer.step()
    finally:
        for leaf in every:
            leaf.grad = None
    return norm


def global_norm(grads: Tree, *, ties: Ties = ()) -> Tensor:
    """The 2-norm of all gradients of all stages; tied leaves count once.

    >>> import torch
    >>> float(global_norm(({"w": torch.tensor([3.0])}, {"w": torch.tensor([4.0])})))
    5.0

    Args:
        grads: a tuple with one tree per stage, None where there is no gradient.
        ties: groups of (stage, path); the first member stands for the group.

    Returns:
        A 0-dim tensor on the device of the first gradient.
    """
    again = {id(at(grads[stage], path)) for group in ties for stage, path in list(group)[1:]}
    found = [g for g in flatten(grads)[0] if isinstance(g, Tensor) and id(g) not in again]
    if not found:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(g.detach()).to(found[0].device) for g in found]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].dtype) for n in norms]))


def accumulate(results: Sequence[Result]) -> Result:
    """Several runs over parts of one batch as one: exact, because every part counts by its weight.

    Losses and gradients are those of one run over all rows; the state is that of the last run (give each run the state
    of the one before).

    Args:
        results: of the same plan and params.

    Raises:
        PlanError: no results, or without gradients.
    """
    given = tuple(results)
    if not given or any(one.grads is None or one.weight is None for one in given):
        raise PlanError("accumulate takes one or more results of runs with backwards")
    total = sum(one.weight or 0.0 for one in given)
    parts = [(one.weight or 0.0) / total for one in given]

    def mean(*values: Any) -> Any:
        if values[0] is None:
            return None
        out = values[0] * parts[0]
        for value, part in zip(values[1:], parts[1:], strict=True):
            out = out + value * part
        return out

    with torch.no_grad():
        loss = mean(*(one.loss for one in given))
        grads = map_leaves(mean, *(one.grads for one in given))
    unused = set(given[0].unused).intersection(*(one.unused for one in given[1:]))
    first, last = given[0].stats, given[-1]
    stats = RunStats(
        first.executor,
        first.reason,
        first.threads_per_lane,
        sum(one.stats.num_microbatches for one in given),
        sum(one.stats.seconds for one in given),
        tuple(max(column) for column in zip(*(one.stats.slots for one in given), strict=False)),
    )
    return Result(
        loss,
        total,
        tuple(value for one in given for value in one.losses),
        tuple(value for one in given for value in one.aux),
        grads,
        tuple(place for place in given[0].unused if place in unused),
        last.state,
        None,
        None,
        stats,
    )


def _pairs(params: Tree, grads: Tree) -> list[tuple[int, Tensor, Tensor]]:
    """(stage, leaf, gradient) for each leaf that has one."""
    stages = isinstance(params, (tuple, list))
    rows = zip(params, grads, strict=True) if stages else [(params, grads)]
    return [
        (stage, leaf, gradient)
        for stage, (own, theirs) in enumerate(rows)
        for leaf, gradient in zip(flatten(own)[0], flatten(theirs)[0], strict=True)
        if isinstance(leaf, Tensor) and gradient is not None
    ]


def _check_optimizer(optimizer: torch.optim.Optimizer, params: Tree, grads: Tree) -> None:
    """Refuse a step that could change nothing: made over other tensors than those that were run."""
    held = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
    pairs = _pairs(params, grads)
    if pairs and not any(id(leaf) in held for _, leaf, _ in pairs):
        raise PlanError("the optimizer holds none of the leaves that have a gradient; make it after fp.place, over the very params that are run: torch.optim.AdamW(fp.leaves(params))")  # fmt: skip
