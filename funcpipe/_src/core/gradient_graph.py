"""Walk the autograd graph behind some values, and run backwards through it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from funcpipe._src.core.torch_names import run_backward

_leaf_view: Any = torch.ones((), requires_grad=True).view(())
_LeafNode: type[Any] = type(_leaf_view.grad_fn.next_functions[0][0])
"""The class of autograd nodes that accumulate into a leaf."""


def nodes_of(roots: Iterable[Any], visited: set[Any] | None = None) -> Iterator[Any]:
    """Yield each node of the graph behind some tensors, edges or nodes.

    Skips the nodes in ``visited``, and adds the yielded nodes to it.
    """
    seen: set[Any] = set() if visited is None else visited
    todo: list[Any] = [root.node if isinstance(root, GradientEdge) else root for root in roots]
    todo = [root.grad_fn if isinstance(root, Tensor) else root for root in todo]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [successor for successor, _ in node.next_functions]


def has_foreign_leaf(
    roots: Sequence[Tensor], known: Collection[int], inputs: Collection[int]
) -> bool:
    """Return whether the graph behind some tensors has a leaf whose id is in neither collection.

    Runs call this for each stage, so it stops at the first such leaf and collects nothing.
    """
    nodes: list[Any] = []
    for root in roots:
        if root.grad_fn is not None:
            nodes.append(root.grad_fn)
        elif id(root) not in known and id(root) not in inputs:
            return True
    visited = {*nodes}
    for node in nodes:  # the loop appends to the list
        for successor, _ in node.next_functions:
            if type(successor) is _LeafNode:
                leaf = id(successor.variable)
                if leaf not in known and leaf not in inputs:
                    return True
            elif successor is not None and successor not in visited:
                visited.add(successor)
                nodes.append(successor)
    return False


def leaves_behind(roots: Sequence[Tensor]) -> list[Tensor]:
    """Collect the leaves behind some tensors."""
    leaves = [root for root in roots if root.is_leaf]
    return leaves + [node.variable for node in nodes_of(roots) if type(node) is _LeafNode]


def has_reentrant_checkpoint(roots: Sequence[Tensor]) -> bool:
    """Return whether a reentrant ``torch.utils.checkpoint`` is in the graph behind some tensors."""
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_of(roots))


def walk_back(
    roots: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor],
    leaves: Sequence[Tensor],
    *,
    keep_graph: bool = False,
) -> None:
    """Do the work of ``torch.autograd.backward`` without its checks of the arguments.

    These checks (nested tensors, symbolic shapes, ...) cost as much as the backward of a small
    stage. The caller guarantees that each gradient has the shape of its root. Without ``leaves``,
    gradients go to all leaves that require them.
    """
    found = tuple(roots), tuple(gradients), keep_graph, False, tuple(leaves)
    run_backward(*found, allow_unreachable=True, accumulate_grad=True)
