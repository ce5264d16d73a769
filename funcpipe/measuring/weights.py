"""What the gradients of weights still need when those of the input are done: the residual of W."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.torch_names import gradient_shapes, saved_names, storage_number

Edge = Any
"""``torch.autograd.graph.GradientEdge``."""


def edge_of(tensor: Tensor) -> Edge:
    """Where the gradient of a tensor enters its graph; holds the graph, not the tensor."""
    return torch.autograd.graph.get_gradient_edge(tensor)


def for_weights(roots: Sequence[Edge], source: type, parameters: Sequence[Any]) -> int:
    """Bytes that W needs after I, if the graph were cut there.

    I goes from the outputs to the input. At each node on its way from which a branch leads to parameters, the gradient
    that arrived and what the node saved wait for W. (How the graph is cut in zero-bubble schedules, arXiv 2401.10241;
    what the node saved for its input's gradient alone is counted too.) Without an input to go to, W is the whole
    backward and what it needs is all that is kept; that is 0 here.
    ``source`` is the Function at the inputs; the memory of ``parameters`` does not count.
    """
    order = _ascending(roots)
    excluded = {storage_number(leaf.untyped_storage()) for leaf in parameters if isinstance(leaf, Tensor)}
    to_input: set[Any] = set()
    saved: dict[int, int] = {}
    gradients = 0
    for node in order:
        following = [other for other, _ in node.next_functions if other is not None]
        if node.name() == f"{source.__name__}Backward" or any(other in to_input for other in following):
            to_input.add(node)
            if node.name() != f"{source.__name__}Backward" and any(other not in to_input for other in following):
                gradients += sum(prod(meta.shape) * meta.dtype.itemsize for meta in gradient_shapes(node))
                for tensor in _saved(node):
                    storage = tensor.untyped_storage()
                    if storage_number(storage) not in excluded:
                        saved[storage_number(storage)] = storage.nbytes()
    return gradients + sum(saved.values())


def _ascending(roots: Sequence[Edge]) -> list[Any]:
    """The nodes of a graph, each after those that follow it on the way back."""
    seen: set[Any] = set()
    order: list[Any] = []
    todo: list[tuple[Any, bool]] = [(root.node, False) for root in roots]
    while todo:
        node, done = todo.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(other, False) for other, _ in node.next_functions if other is not None and other not in seen]
    return order


def _saved(node: Any) -> list[Tensor]:
    """The tensors that a node saved."""
    values = [getattr(node, name) for _, name in saved_names(type(node))]
    flat = [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]  # pyright: ignore
    return [item for item in flat if isinstance(item, Tensor) and item.layout is torch.strided]
