"""The graph of autograd behind some values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge


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
