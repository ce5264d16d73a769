"""The backward of an eager stage in two halves: to its inputs (I), and to the weights of heavy
operations (W).

Matrix products and convolutions compute the gradient of their input and that of their weight apart.
So I walks the graph to the inputs, and to all parameters but such weights, and keeps the gradients
that arrive at these operations; W begins there. Anything else would be done twice, so it is not put
off. (torch.distributed.pipelining's ``stage_backward_input`` puts off every operation, after Qi et
al. 2024, Zero Bubble, section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence, Set
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
"""Operations that compute each gradient by itself, and only those that are asked for.

Each with the place of what it adds, None for nothing. A bias does not wait, so that it is all the
same whether a layer adds it in its product or after it, which torch decides by how the input lies
in memory.
"""

_WHOLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""What can be walked only once, and to all its leaves: regions of the reentrant checkpoint, and of
``torch.compile``."""


class Waiting(NamedTuple):
    """A walk that waits.

    Attributes:
        roots: where it begins.
        gradients: with which gradients.
        leaves: to which it goes.
        node: the heavy operation with which it begins; None: it is a whole backward.
        versions: how often each gradient had been written to.
    """

    roots: Sequence[Tensor | GradientEdge]
    gradients: Sequence[Tensor]
    leaves: Sequence[Tensor]
    node: Any = None
    versions: Sequence[int] = ()

    def walk(self) -> None:
        """Do it. Raises PlanError where the gradients that it begins with have been written to."""
        if self.node is None:
            walk_back(self.roots, self.gradients, self.leaves)
            return
        if versions(self.gradients) != self.versions:
            raise PlanError(
                "a backward in the stage (of an autograd.Function, or a hook) writes into the "
                "gradient that it gets, which others get as well; return a new one: grad * 2, not "
                "grad.mul_(2)"
            )
        # Hooks that the stage has put on what the operation gave were called in I, and are here
        # once more.
        again = self.node.register_prehook(lambda _: tuple(self.gradients))
        try:
            walk_back(self.roots, self.gradients, self.leaves)
        finally:
            again.remove()


class EagerWeights(NamedTuple):
    """What W of an eager stage begins with.

    Attributes:
        waiting: its walks.
        replay: as in `EagerResidual`.
    """

    waiting: Sequence[Waiting]
    replay: AbstractContextManager[Any] | None

    def walk(self) -> None:
        """Make all its walks."""
        for waiting in self.waiting:
            waiting.walk()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that it holds; what autograd saved is not counted."""
        return sum(gradient.nbytes for waiting in self.waiting for gradient in waiting.gradients)


def numbers_that_wait(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], params: Sequence[Tensor]
) -> set[int]:
    """Return the numbers of the parameters that `walk_to_inputs` leaves to W."""
    if not inputs:
        return {*range(len(params))}
    nodes = [get_gradient_edge(root).node for root in roots]
    heavy = _heavy_operations(nodes, set(map(id, inputs)), set(map(id, params)))
    later = {id(weight) for weights in heavy.values() for weight in weights}
    return {number for number, param in enumerate(params) if id(param) in later}


def walk_to_inputs(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    params: Sequence[Tensor],
) -> list[Waiting]:
    """Walk back to the inputs, and to the parameters that do not wait. Returns the walks to the
    others."""
    if not inputs:  # nobody waits for anything
        return [Waiting(roots, gradients, params)]
    nodes = [
        (root if isinstance(root, GradientEdge) else get_gradient_edge(root)).node for root in roots
    ]
    heavy = _heavy_operations(nodes, set(map(id, inputs)), set(map(id, params)))
    later = {id(weight) for weights in heavy.values() for weight in weights}
    arrived: list[tuple[Any, Tensor, Sequence[int]]] = []

    def keep(node: Any, gradients: Sequence[Tensor | None]) -> None:
        (gradient,) = gradients  # these operations give one value
        if gradient is not None:
            arrived.append((node, gradient, versions([gradient])))

    hooks = [node.register_prehook(partial(keep, node)) for node in heavy]
    now = [*inputs, *(param for param in params if id(param) not in later)]
    try:
        walk_back(roots, gradients, now, keep_graph=bool(heavy))
    finally:
        for hook in hooks:
            hook.remove()
    return [
        Waiting([GradientEdge(node, 0)], [found], heavy[node], node, count)
        for node, found, count in arrived
    ]


def _heavy_operations(
    roots: Sequence[Any], inputs: Set[int], params: Set[int]
) -> dict[Any, list[Tensor]]:
    """The heavy operations between these nodes and inputs (ids), and the parameters that are
    reached through each alone."""
    behind: dict[
        Any, Sequence[tuple[Any, int]]
    ] = {}  # every node, and what follows it on the way back
    passing: dict[Any, None] = {}  # what leads to an input
    todo: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while todo:
        node, is_known = todo.pop()
        if is_known:  # all that is behind it has been seen
            if any(following in passing for following, _ in behind[node]):
                passing[node] = None
        elif node is not None and node not in behind:
            behind[node] = following = node.next_functions
            if following:
                todo.append((node, True))
                todo += [(each, False) for each, _ in following]
            elif id(_leaf(node)) in inputs:
                passing[node] = None
    if any(type(node).__name__ in _WHOLE for node in behind):
        return {}
    # Every other node belongs to the heavy operation that leads to it, or to None: what I does.
    branches: list[tuple[Any, Any]] = [(None, root) for root in roots]
    for node in passing:
        name = node.name()
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
        elif leaf is not None and id(leaf) in params:
            weights.setdefault(owner, []).append(leaf)
    return {
        node: found for node, found in weights.items() if node is not None and node not in not_alone
    }


def _leaf(node: Any) -> Tensor | None:
    """The leaf whose gradient a last node adds to."""
    return getattr(node, "variable", None)
