"""What F keeps for its backward: as few bytes as a cut through the forward can have, the rest is
computed again.

Keeping a value costs its bytes; computing it again is free where it is cheap (pointwise operations,
norms, softmax, views) and needs what it is computed of. The least that must be kept is a minimum
cut of that network between what cannot be computed again and what the backward reads (the idea of
torch's own partitioner: min-cut rematerialization, functorch).
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
"""Operations besides pointwise ones and views that read and write memory, and do little else."""


def recompute(joint: Joint) -> None:
    """Rewrite the graph: what the backward reads and F need not keep is computed again, just before
    it is read."""
    forward = above(joint.outs)
    needed = (
        above([*(node for row in joint.wanted for node in row), *joint.sums])
        - forward
        - {*joint.cotangents}
    )
    again = _again(forward - {*joint.params}, needed)
    copies: dict[fx.Node, fx.Node] = {}
    graph = joint.module.graph

    def copied(node: fx.Node, before: fx.Node) -> fx.Node:
        """The node's copy, made at its first use, after the copies of what it reads."""
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


def _again(values: set[fx.Node], needed: set[fx.Node]) -> set[fx.Node]:
    """What is computed again: all between the least cut and what the backward reads.

    Args:
        values: of F, besides parameters.
        needed: what the backward computes.
    """
    import networkx  # pyright: ignore[reportMissingTypeStubs, reportMissingModuleSource]  # torch needs it, too

    network: Any = networkx.DiGraph()
    network.add_nodes_from(("start", "end"))
    for node in values:
        if node.op == "get_attr":
            continue  # a constant is always there
        if not _repeats(node):
            network.add_edge("start", (node, 0))
        whole = is_view(node) or not isinstance(node.meta["val"], Tensor)
        # A view is kept as what it is of, and what gives several values as its pieces.
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
    """Is the value computed again at little cost, with the same bits."""
    if node.op != "call_function" or "draw" in node.meta:
        return False
    if node.target is operator.getitem:
        return is_view(node) or _repeats(node.args[0])  # pyright: ignore[reportArgumentType]
    if is_view(node) or node.target in _CHEAP:
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The fake tensors of a value: one, or all that an operation gives."""
    val = node.meta["val"]
    return tensors(val if isinstance(val, (tuple, list)) else (val,))  # pyright: ignore[reportUnknownArgumentType]


def bytes_of(node: fx.Node) -> int:
    """The bytes of a value: what it costs to keep it."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))


def memory_of(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """The storages that values lie in, and their bytes."""
    storages = [tensor.untyped_storage() for node in nodes for tensor in tensors_of(node)]
    return {storage_number(storage): storage.nbytes() for storage in storages}
