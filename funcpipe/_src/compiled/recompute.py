"""Keep as few bytes as possible between F and its backward, and compute the other values again.

To keep a value costs its bytes. To compute it again is free if the operation is cheap (pointwise
operations, norms, softmax, views), but needs the inputs of the operation. The smallest set of kept
values is a minimum cut. Its source side has the values that cannot be computed again, its sink side
the values that the backward reads. This is the idea of torch's own partitioner (min-cut
rematerialization, functorch).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from funcpipe._src.compiled.cut import above, is_view
from funcpipe._src.compiled.joint import Joint, tensors
from funcpipe._src.core.torch_names import storage_number

_aten = torch.ops.aten

_CHEAP: set[Any] = {
    _aten._to_copy.default,
    _aten.clone.default,
    _aten._softmax.default,
    _aten._log_softmax.default,
    _aten.native_layer_norm.default,
    _aten.cat.default,
    _aten.stack.default,
    _aten.full_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.arange.default,
    _aten.full.default,
    _aten.scalar_tensor.default,
    _aten.constant_pad_nd.default,
}
"""Operations besides pointwise operations and views that only read and write memory, with little
arithmetic."""


def recompute(joint: Joint) -> None:
    """Rewrite the graph: values that the backward reads and F need not keep are computed again,
    just before their use."""
    forward = above(joint.outs)
    needed = (
        above([*(node for row in joint.wanted for node in row), *joint.sums])
        - forward
        - {*joint.cotangents}
    )
    again = _recomputed(forward - {*joint.params}, needed)
    copies: dict[fx.Node, fx.Node] = {}
    graph = joint.module.graph

    def copied(node: fx.Node, before: fx.Node) -> fx.Node:
        """Return the node's copy, made at its first use, after the copies of its inputs."""
        waiting = [node]
        while waiting:
            last = waiting[-1]
            sources = [
                source
                for source in last.all_input_nodes
                if source in again and source not in copies
            ]
            if last in copies or not sources:
                waiting.pop()
                if last not in copies:
                    with graph.inserting_before(before):
                        copies[last] = graph.node_copy(last, lambda arg: copies.get(arg, arg))
            else:
                waiting.append(sources[0])
        return copies[node]

    for node in [node for node in graph.nodes if node in needed]:
        for source in node.all_input_nodes:
            if source in again:
                node.replace_input_with(source, copied(source, node))


def _recomputed(values: set[fx.Node], needed: set[fx.Node]) -> set[fx.Node]:
    """The values to compute again: all between the minimum cut and the backward.

    Args:
        values: the values of F, without parameters.
        needed: the values that the backward computes.
    """
    import networkx  # pyright: ignore[reportMissingTypeStubs, reportMissingModuleSource]  # torch needs it, too

    network: Any = networkx.DiGraph()
    network.add_nodes_from(("start", "end"))
    for node in values:
        if node.op == "get_attr":
            continue  # constants are always available
        if not _repeats(node):
            # Not repeatable: the value must be kept, or a value computed from it.
            network.add_edge("start", (node, 0))
        whole = is_view(node) or not isinstance(node.meta["val"], Tensor)
        # A value is an edge whose capacity is its size: to cut the edge is to keep the value. An
        # edge without a capacity is never cut.
        # A view shares the memory of its base, and a tuple consists of its items. So the cut never
        # goes through these nodes.
        network.add_edge(
            (node, 0),
            (node, 1),
            **({} if whole and _repeats(node) else {"capacity": bytes_of(node)}),
        )
        for user in node.users:
            if user in values and _repeats(user):
                network.add_edge((node, 1), (user, 0))
            elif user in needed:
                network.add_edge((node, 1), "end")
    _, (kept, _) = networkx.minimum_cut(network, "start", "end")
    return {node for node in values if _repeats(node) and (node, 0) not in kept}


def _repeats(node: fx.Node) -> bool:
    """Whether a value can be computed again at little cost, bit-identical."""
    if node.op != "call_function" or "draw" in node.meta:
        return False
    if node.target is operator.getitem:
        return is_view(node) or _repeats(node.args[0])  # pyright: ignore[reportArgumentType]
    if is_view(node) or node.target in _CHEAP:
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors of a value: one, or all results of an operation."""
    val = node.meta["val"]
    return tensors(val if isinstance(val, (tuple, list)) else (val,))  # pyright: ignore[reportUnknownArgumentType]


def bytes_of(node: fx.Node) -> int:
    """The bytes of a value: the cost of keeping it."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))


def memory_of(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """The storages of some values, and their bytes."""
    storages = [tensor.untyped_storage() for node in nodes for tensor in tensors_of(node)]
    return {storage_number(storage): storage.nbytes() for storage in storages}
