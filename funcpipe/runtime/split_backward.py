"""The backward of an eager stage in two halves: to its inputs (I), and to the weights of heavy operations (W).

Matrix products and convolutions compute the gradient of their input and that of their weight apart. So I walks the graph to
the inputs, and to all parameters but such weights, and keeps the gradients that arrive at these operations; W begins there.
Anything else would be done twice, so it is not put off. (torch.distributed.pipelining's ``stage_backward_input`` puts off
every operation, after Qi et al. 2024, Zero Bubble, section 3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge

from funcpipe.core.gradient_graph import walk_back
from funcpipe.runtime.saved_tensors import is_packed

_HEAVY = frozenset(
    f"{name}Backward0"
    for name in ("Addbmm", "Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "CudnnConvolution", "Linear", "Mm", "Mv")
)
"""Operations that compute each gradient by itself, and only those that are asked for."""

_WHOLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})
"""What can be walked only once, and to all its leaves: regions of the reentrant checkpoint, and of ``torch.compile``."""


class Waiting(NamedTuple):
    """A walk that waits: where it begins, with which gradients, and the leaves to which it goes."""

    roots: Sequence[Tensor | GradientEdge]
    gradients: Sequence[Tensor]
    leaves: Sequence[Tensor]


class EagerWeights(NamedTuple):
    """What W of an eager stage begins with.

    Attributes:
        waiting: its walks.
        params: the aliases to which they go, and others.
        replay: as in `EagerResidual`.
    """

    waiting: Sequence[Waiting]
    params: Sequence[Tensor]
    replay: AbstractContextManager[Any] | None

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients that it holds; what autograd saved is not counted."""
        return sum(gradient.nbytes for waiting in self.waiting for gradient in waiting.gradients)


def walk_to_inputs(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    params: Sequence[Tensor],
) -> list[Waiting]:
    """Walk back to the inputs, and to the parameters that do not wait. Returns the walks to the others."""
    if not inputs:  # nobody waits for anything
        return [Waiting(roots, gradients, params)]
    heavy = _heavy_operations([root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots], inputs)
    later = {id(weight) for weights in heavy.values() for weight in weights}
    arrived: dict[Any, Sequence[Tensor | None]] = {}
    with ExitStack() as hooks:
        for node in heavy:
            hooks.callback(node.register_prehook(_keeper(arrived, node)).remove)
        now = [*inputs, *(param for param in params if id(param) not in later)]
        walk_back(roots, gradients, now, keep_graph=bool(heavy))
    return [Waiting(*_given(node, arrived[node]), weights) for node, weights in heavy.items() if node in arrived]


def _keeper(arrived: dict[Any, Sequence[Tensor | None]], node: Any) -> Any:
    def keep(gradients: Sequence[Tensor | None]) -> None:
        arrived[node] = gradients

    return keep


def _given(node: Any, gradients: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
    there = [(GradientEdge(node, number), each) for number, each in enumerate(gradients) if each is not None]
    return [edge for edge, _ in there], [each for _, each in there]


def _heavy_operations(roots: Sequence[Any], inputs: Iterable[Tensor]) -> dict[Any, list[Tensor]]:
    """The heavy operations between these nodes and inputs, and the leaves that are reached through each of them alone."""
    ends, seen = set(map(id, inputs)), set[Any]()
    passing: dict[Any, None] = {}  # what leads to an input
    todo: list[tuple[Any, Any]] = [(root, None) for root in roots]
    while todo:
        node, followed = todo.pop()
        if followed is not None:  # all that is behind it is known
            if any(following in passing for following, _ in followed):
                passing[node] = None
        elif node is not None and node not in seen:
            seen.add(node)
            followed = node.next_functions
            if id(getattr(node, "variable", None)) in ends:
                passing[node] = None
            todo.append((node, followed))
            todo += [(following, None) for following, _ in followed]
    if any(type(node).__name__ in _WHOLE for node in seen):
        return {}
    owners: dict[Any, Any] = {}
    several: set[Any] = set()
    leaves: dict[Any, list[Tensor]] = {}
    for owner in (None, *passing):
        branch = list(roots) if owner is None else [following for following, _ in owner.next_functions]
        while branch:
            node = branch.pop()
            if node is None or node in passing:
                continue
            if node in owners:
                several |= {owner, owners[node]} if owners[node] is not owner else set()
                continue
            owners[node] = owner
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves.setdefault(owner, []).append(leaf)
            branch += [following for following, _ in node.next_functions]
    return {
        node: weights
        for node, weights in leaves.items()
        if node is not None and node not in several and node.name() in _HEAVY and not is_packed(node)
    }
