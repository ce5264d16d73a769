"""Clean a traced graph: remove operations that only autograd needs, and divide operations that
compute several gradients."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from funcpipe._src.core.torch_names import lazy_clone_operation

_aten = torch.ops.aten

_NOTHING: set[Any] = {
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh_copy.default,
    lazy_clone_operation,  # a functional graph has no writes in place, so no copy is needed
}
"""Operations that return their argument unchanged."""


def tidy(module: fx.GraphModule) -> None:
    """Clean a graph in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node):
            continue
        if node.target in _NOTHING:
            node.replace_all_uses_with(first)
        elif node.target is _aten.t.default and first.target is _aten.t.default:
            node.replace_all_uses_with(first.args[0])  # pyright: ignore[reportArgumentType]
        elif node.target is _aten.convolution_backward.default:
            _divide_convolution(graph, node)
        elif node.target is _aten.view.default:
            _flatten(graph, node, first)
    graph.eliminate_dead_code()


def _divide_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Divide a convolution's backward into two calls.

    The gradients of input and weights come from separate kernels, and belong to I and W.
    """
    *arguments, mask = node.args
    inputs, *weights = mask  # pyright: ignore
    if not (inputs and any(weights)):  # pyright: ignore[reportUnknownArgumentType]
        return
    halves: list[fx.Node] = []
    with graph.inserting_before(node):
        for flags in ([True, False, False], [False, *weights]):
            half = graph.call_function(_aten.convolution_backward.default, (*arguments, flags))
            half.meta = dict(node.meta)
            halves.append(half)
    for user in list(node.users):
        assert user.target is operator.getitem
        user.args = (halves[0 if user.args[1] == 0 else 1], user.args[1])


def _flatten(graph: fx.Graph, node: fx.Node, total: fx.Node) -> None:
    """Replace a sum that keeps its dimensions and a view without them by a sum that drops them."""
    if total.target is not _aten.sum.dim_IntList or len(total.users) > 1 or total.kwargs:
        return
    x, dims, *keeps = total.args
    if keeps != [True] or not dims:  # no dimensions: all of them
        return
    shape = total.meta["val"].shape
    dropped = {dim % len(shape) for dim in dims}  # pyright: ignore
    if list(node.args[1]) != [size for dim, size in enumerate(shape) if dim not in dropped]:  # pyright: ignore
        return
    with graph.inserting_before(node):
        plain = graph.create_node(
            "call_function", _aten.sum.dim_IntList, (x, dims), name=total.name
        )
    plain.meta = dict(node.meta)
    node.replace_all_uses_with(plain)
