"""The graph of autograd behind some values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from funcpipe.core.torch_names import run_backward


def nodes_of(roots: Iterable[Any], visited: set[Any] | None = None) -> Iterator[Any]:
    """Every node of the graph behind some tensors, edges or nodes, once; ``visited`` are left out, and get the rest."""
    seen: set[Any] = set() if visited is None else visited
    todo: list[Any] = [
        root.node if isinstance(root, GradientEdge) else root.grad_fn if isinstance(root, Tensor) else root
        for root in roots
    ]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [successor for successor, _ in node.next_functions]


def leaves_behind(roots: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Collect the leaves behind some tensors, and report whether a reentrant checkpoint is in the graph."""
    leaves: list[Tensor] = []
    todo: list[Any] = []
    reentrant = False
    for root in roots:
        if root.grad_fn is None:
            leaves.append(root)
        else:
            todo.append(root.grad_fn)
    visited = {*todo}
    while todo:
        node = todo.pop()
        successors = node.next_functions
        if successors:
            for successor, _ in successors:
                if successor is not None and successor not in visited:
                    visited.add(successor)
                    todo.append(successor)
            if type(node).__name__ == "CheckpointFunctionBackward":
                reentrant = True
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
    return leaves, reentrant


def walk_back(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    keep_graph: bool = False,
) -> None:
    """``torch.autograd.backward`` from its second half on: gradients have the shapes of their roots here.

    The first half looks at every pair for nested tensors, symbolic shapes and more, and costs as much as the backward
    of a small stage. Without ``leaves`` it goes to all that require a gradient.
    """
    found = tuple(roots), tuple(gradients), keep_graph, False, tuple(leaves)
    run_backward(*found, allow_unreachable=True, accumulate_grad=True)
