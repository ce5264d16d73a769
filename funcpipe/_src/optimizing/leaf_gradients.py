"""Pair the leaves of parameters with their gradients, each leaf once, also with ties."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.sparse_gradients import added
from funcpipe._src.core.tree import Tree, at, flatten, leaves, locations, paths
from funcpipe._src.data.exchange import entire, numbers, open_pipelines
from funcpipe._src.data.result import Result
from funcpipe._src.stages.explain import described
from funcpipe._src.stages.trainable import key_of

Ties = Sequence[Sequence[tuple[int, Any]]]


@dataclass
class LeafGradient:
    """A leaf of the parameters with its gradient."""

    leaf: Tensor  # the parameter tensor
    gradient: Tensor  # the sum of the gradients over all places of the leaf
    stage: int  # the first stage with the leaf
    sums: set[int]  # the gradients that the sum already contains, see `_tied`
    # Whether the gradient counts in the norm. False for further copies of a tied parameter.
    counts: bool
    reached: bool  # whether a backward reached the leaf. Otherwise the gradient is zeros

    @property
    def needs_step(self) -> bool:
        """Whether the optimizer must step the leaf.

        As in torch, a leaf without a gradient keeps its value and its optimizer state. But a caller
        may have added to the zeros of the run.
        """
        return self.reached or bool(entire(numbers(self.gradient).any()))


def apart(params: Tree, grads: Tree) -> list[str]:
    """List the differences between params and grads, a line for each leaf."""
    paths = [dict.fromkeys(locations(tree, "")) for tree in (params, grads)]
    lines = [
        f"params{place} has no gradient: grads have no leaf there"
        for place in paths[0]
        if place not in paths[1]
    ]
    lines += [
        f"grads{place} belongs to no leaf of params" for place in paths[1] if place not in paths[0]
    ]
    kinds = [type(tree).__name__ for tree in (params, grads)]
    return lines[:8] or [
        f"params is a {kinds[0]}, grads a {kinds[1]}, with the same leaves in other containers"
    ]


def refuse_one_rank(name: str, grads: Tree, params: Tree = None) -> None:
    """Raise PlanError for the gradients of one rank, whose norm would leave out other ranks.

    A function may have None as its parameters, so None is refused only while ranks are open.
    """
    trees = grads if params is None else params
    if not open_pipelines or not (isinstance(grads, tuple) and isinstance(trees, (tuple, list))):
        return
    missing = [
        stage
        for stage, (tree, gradients) in enumerate(zip(trees, grads, strict=False))
        if tree is None and gradients is None
    ]
    if missing:
        raise PlanError(
            f"grads has None for stages {missing}, which other ranks have, so the norm would be "
            f"of this rank alone; give the result of the run: {name}. For gradients that you "
            "changed, give dataclasses.replace(result, grads=grads)"
        )


def misfits(params: Tree, grads: Tree) -> list[str]:
    """List the gradients that torch would refuse in ``.grad`` of their leaves, a line for each."""
    pairs = zip(flatten(params)[0], flatten(grads)[0], strict=True)
    wrong = {number: pair for number, pair in enumerate(pairs) if not _fits(*pair)}
    places = locations(params, "") if wrong else []
    return [
        (
            f"grads{places[number]} is {described(gradient)}, params{places[number]} is "
            f"{described(leaf)}"
        )
        for number, (leaf, gradient) in wrong.items()
    ]


def _fits(leaf: Any, gradient: Any) -> bool:
    """Return whether a gradient can be the ``.grad`` of a leaf. None always fits."""
    if gradient is None or not isinstance(leaf, Tensor):
        return True
    if (
        not isinstance(gradient, Tensor)
        or gradient.shape != leaf.shape
        or gradient.device != leaf.device
    ):
        return False
    return gradient.dtype == leaf.dtype or getattr(leaf, "grad_dtype", leaf.dtype) in (
        gradient.dtype,
        None,
    )


def taken_by(
    optimizer: torch.optim.Optimizer, entries: Sequence[LeafGradient]
) -> Sequence[LeafGradient]:
    """Return the entries that an optimizer can take. Raises PlanError for dense gradients in
    SparseAdam."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        return entries
    # A dense gradient of zeros belongs to an unused leaf, which needs no step.
    taken = [entry for entry in entries if entry.gradient.is_sparse or entry.gradient.any()]
    wrong = [tuple(entry.leaf.shape) for entry in taken if not entry.gradient.is_sparse]
    if wrong:
        raise PlanError(
            f"SparseAdam takes sparse gradients, but the gradients of leaves of shapes {wrong} are "
            "dense; only tables of nn.Embedding(sparse=True) that no other layer uses have sparse "
            "gradients, in stages that are not compiled, and without replicas; give the other "
            "leaves to another optimizer"
        )
    return taken


def leaf_numbers(params: Tree, unused: Sequence[tuple[int, Any]]) -> set[tuple[int, int]]:
    """Return leaves that are given as (stage, path) as (stage, leaf number)."""
    if not isinstance(params, (tuple, list)):  # the caller has merged the trees of all stages
        return set()
    number_of: dict[tuple[int, Any], int] = {}
    for stage in {stage for stage, _ in unused} & {*range(len(params))}:
        keys = map(key_of, paths(params[stage]))
        number_of |= {(stage, key): number for number, key in enumerate(keys)}
    return {(leaf[0], number_of[leaf]) for leaf in unused if leaf in number_of}


def of_result(params: Tree, result: Result) -> list[LeafGradient]:
    """Return the leaves with a gradient in a result, each once."""
    return by_leaf(params, result.grads, result.ties, leaf_numbers(params, result.unused))


def by_leaf(
    params: Tree, grads: Tree, ties: Ties, unused: Collection[tuple[int, int]] = ()
) -> list[LeafGradient]:
    """Return the leaves with a gradient, each once.

    If a tensor appears twice in one stage, its gradients are added here. If it appears in two
    stages, it is tied, and each place already has the sum over all places. ``unused`` has the
    leaves that no backward reached, as (stage, leaf number).
    """
    sums, counted = _tied(grads, ties)
    entries: dict[int, LeafGradient] = {}
    per_stage = isinstance(params, (tuple, list))
    for stage, (tree, grad_tree) in enumerate(
        zip(params, grads, strict=True) if per_stage else [(params, grads)]
    ):
        pairs = zip(flatten(tree)[0], flatten(grad_tree)[0], strict=True)
        for number, (leaf, gradient) in enumerate(pairs):
            if not isinstance(leaf, Tensor) or gradient is None:
                continue
            reached = (stage, number) not in unused
            key = sums.get(id(gradient), id(gradient))
            entry = entries.get(id(leaf))
            if entry is None:
                entry = LeafGradient(leaf, gradient, stage, {key}, key not in counted, reached)
                entries[id(leaf)] = entry
            elif entry.stage == stage and key not in entry.sums:
                entry.gradient = added(entry.gradient, gradient)
                entry.sums.add(key)
            entry.reached |= reached
            counted.add(key)
    return list(entries.values())


def distinct(grads: Tree, ties: Ties) -> list[tuple[int, Tensor]]:
    """List the gradients of this process that count in the norm, with their stages."""
    sums, elsewhere = _tied(grads, ties)
    distinct: dict[int, tuple[int, Tensor]] = {}
    for stage, tree in enumerate(grads if isinstance(grads, (tuple, list)) else [grads]):
        for gradient in leaves(tree):
            key = sums.get(id(gradient), id(gradient))
            if key not in elsewhere:
                distinct.setdefault(key, (stage, gradient))
    return [*distinct.values()]


def _tied(grads: Tree, ties: Ties) -> tuple[dict[int, int], set[int]]:
    """Map the id of each tied gradient to one id for its tie. Tied gradients are the same sum.

    The second value has the ids of the ties that another process counts in the norm. A tie counts
    once, in the process of its first stage.
    """
    sums: dict[int, int] = {}
    elsewhere: set[int] = set()
    for group in ties:
        here: list[tuple[int, Any]] = []
        for stage, path in group:
            try:
                if grads[stage] is not None:  # else the stage is in another process
                    here.append((stage, at(grads[stage], path)))
            except (KeyError, IndexError, TypeError, AttributeError):
                raise PlanError(
                    f"ties name {path!r} of stage {stage}, where grads have no leaf; give the "
                    "ties of the plan: ties=plan.ties"
                ) from None
        if here:
            key = id(here[0][1])
            sums.update((id(gradient), key) for _, gradient in here)
            if min(stage for stage, _ in here) > min(stage for stage, _ in group):
                elsewhere.add(key)
    return sums, elsewhere
