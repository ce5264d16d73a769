"""Split the backward of an eager stage: to its inputs (I), and to weights of heavy operations (W).

Matrix products and convolutions compute the gradients of input and weight separately. So I computes
all gradients except those of such weights, and keeps the gradients that arrive at these operations.
W begins there. Other operations are not split, because part of their work would be done twice.
torch.distributed.pipelining's ``stage_backward_input`` defers all operations, after Qi et al. 2024,
Zero Bubble, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.gradient_graph import walk_back
from funcpipe._src.stages.params import versions
from funcpipe._src.stages.saved_tensors import is_packed

_ADDED = {"Addbmm": 0, "Addmm": 0, "Addmv": 0, "Baddbmm": 0, "Convolution": 2, "Linear": 2}
_HEAVY = {
    f"{name}Backward0": _ADDED.get(name)
    for name in (*_ADDED, "Bmm", "CudnnConvolution", "Mm", "Mv")
}
"""Operations that compute each gradient separately, and only the requested gradients.

The value is the position of the operation's added term, such as the bias, or None. The gradient of
a bias is never left to W. Torch decides by the memory layout of the input whether a layer adds the
bias in its product or afterwards, and both cases must be equal.
"""

_WHOLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""Nodes that can be walked only once, and to all their leaves: reentrant checkpoints, and
``torch.compile``."""


class Waiting(NamedTuple):
    """A backward walk that I has left to W."""

    roots: Sequence[Tensor | GradientEdge]  # the graph edges or tensors where the walk begins
    gradients: Sequence[Tensor]  # the gradients at the roots
    leaves: Sequence[Tensor]  # the parameters where the walk ends
    node: Any = None  # the heavy operation at the root. None: the walk is a whole backward
    versions: Sequence[int] = ()  # the version counter of each gradient in I

    def walk(self) -> None:
        """Run the walk. Raises PlanError if its first gradients were written to meanwhile."""
        if self.node is None:
            walk_back(self.roots, self.gradients, self.leaves)
            return
        if versions(self.gradients) != self.versions:
            raise PlanError(
                "a backward in the stage (of an autograd.Function, or a hook) writes into its "
                "incoming gradient, which other operations also read; return a new tensor: grad * "
                "2, not grad.mul_(2)"
            )
        # Hooks of the stage on the operation's output have already changed the gradient in I, and
        # this walk would call them again. So replace their result by the gradient of I.
        hook = self.node.register_prehook(lambda _: tuple(self.gradients))
        try:
            walk_back(self.roots, self.gradients, self.leaves)
        finally:
            hook.remove()


class EagerWeights(NamedTuple):
    """The residual of W in an eager stage."""

    waiting: Sequence[Waiting]  # the walks of W
    replay: AbstractContextManager[Any] | None  # as in `EagerResidual`

    def walk(self) -> None:
        """Run all walks."""
        for waiting in self.waiting:
            waiting.walk()

    @property
    def nbytes(self) -> int:
        """The bytes of the kept gradients, without the tensors that autograd saved."""
        return sum(gradient.nbytes for waiting in self.waiting for gradient in waiting.gradients)


def numbers_that_wait(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], params: Sequence[Tensor]
) -> set[int]:
    """Return the numbers of the parameters that `walk_to_inputs` leaves to W."""
    if not inputs:
        return {*range(len(params))}
    heavy = _heavy_operations(roots, inputs, params)
    waiting = {id(weight) for weights in heavy.values() for weight in weights}
    return {number for number, param in enumerate(params) if id(param) in waiting}


def walk_to_inputs(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    params: Sequence[Tensor],
) -> list[Waiting]:
    """Walk back to the inputs, and to the parameters that W does not compute. Return the walks of
    W."""
    if not inputs:  # no other stage waits, so leave everything to W
        return [Waiting(roots, gradients, params)]
    heavy = _heavy_operations(roots, inputs, params)
    waiting = {id(weight) for weights in heavy.values() for weight in weights}
    arrived: list[tuple[Any, Tensor, Sequence[int]]] = []

    def keep(node: Any, gradients: Sequence[Tensor | None]) -> None:
        (gradient,) = gradients  # heavy operations have one output
        if gradient is not None:
            arrived.append((node, gradient, versions([gradient])))

    hooks = [node.register_prehook(partial(keep, node)) for node in heavy]
    targets = [*inputs, *(param for param in params if id(param) not in waiting)]
    try:
        # W walks parts of this graph again, and needs the tensors that autograd saved.
        walk_back(roots, gradients, targets, keep_graph=bool(heavy))
    finally:
        for hook in hooks:
            hook.remove()
    return [
        Waiting([GradientEdge(node, 0)], [found], heavy[node], node, count)
        for node, found, count in arrived
    ]


def _heavy_operations(
    roots: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor], params: Sequence[Tensor]
) -> dict[Any, list[Tensor]]:
    """Return the heavy operations between roots and inputs, each with the parameters that only it
    reaches."""
    nodes: list[Any] = [
        (root if isinstance(root, GradientEdge) else get_gradient_edge(root)).node for root in roots
    ]
    input_ids, param_ids = set(map(id, inputs)), set(map(id, params))
    behind: dict[Any, Sequence[tuple[Any, int]]] = {}  # by node, its next nodes in a backward
    passing: dict[Any, None] = {}  # the nodes that lead to an input
    todo: list[tuple[Any, bool]] = [(node, False) for node in nodes]
    while todo:
        node, is_known = todo.pop()
        if is_known:  # all nodes behind it have been visited
            if any(following in passing for following, _ in behind[node]):
                passing[node] = None
        elif node is not None and node not in behind:
            behind[node] = following = node.next_functions
            if following:
                todo.append((node, True))
                todo += [(each, False) for each, _ in following]
            elif id(_leaf(node)) in input_ids:
                passing[node] = None
    if any(type(node).__name__ in _WHOLE for node in behind):
        return {}
    # Every other node belongs to the heavy operation that leads to it, or to None, which is I. A
    # node that two owners reach must be walked in I, so neither operation may wait.
    branches: list[tuple[Any, Any]] = [(None, node) for node in nodes]
    for node in passing:
        name = node.name()
        # A packed node is in a torch.utils.checkpoint region, which I and W would compute twice.
        is_heavy, added = name in _HEAVY and not is_packed(node), _HEAVY.get(name)
        branches += [
            (node if is_heavy and place != added else None, following)
            for place, (following, _) in enumerate(behind[node])
        ]
    owners: dict[Any, Any] = {}
    not_alone: set[Any] = set()
    weights: dict[Any, list[Tensor]] = {}
    while branches:
        owner, node = branches.pop()
        if node is None or node in passing:
            continue
        if node in owners:
            not_alone |= {owner, owners[node]} if owners[node] is not owner else set()
            continue
        owners[node] = owner
        branches += [(owner, following) for following, _ in behind[node]]
        leaf = None if behind[node] else _leaf(node)
        if is_packed(node):
            not_alone.add(owner)
        elif leaf is not None and id(leaf) in param_ids:
            weights.setdefault(owner, []).append(leaf)
    return {
        node: found for node, found in weights.items() if node is not None and node not in not_alone
    }


def _leaf(node: Any) -> Tensor | None:
    """Return the leaf of an AccumulateGrad node, else None."""
    return getattr(node, "variable", None)
