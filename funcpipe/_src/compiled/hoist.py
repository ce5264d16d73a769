"""Loop-invariant code motion: compute what depends on parameters and state alone once a run, not
once a microbatch."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable

from torch import Tensor, fx

from funcpipe._src.compiled.joint import Joint
from funcpipe._src.compiled.recompute import bytes_of, memory_of
from funcpipe._src.core.torch_names import OpOverload
from funcpipe._src.stages.drawing import may_draw

_SMALL = 2**20
"""Bytes that a hoisted value may have though the parameters that it is computed of have fewer."""


def hoist(joint: Joint) -> None:
    """Take values of parameters and state alone out of a microbatch's graph: they become
    placeholders of parameters.

    Casts of weights under autocast, weights that are computed (weight norm, merged adapters), views
    of parameters, small masks and positions. What others read of these would lie in memory all the
    time; so a value that is larger than the parameters that it comes from is read by none of them,
    and made again by each microbatch where it has to be.
    """
    graph = joint.module.graph
    sources: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset([node]) for node in joint.params}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            sources[node] = frozenset()
        elif _moves(node) and all(value in sources for value in inputs):
            sources[node] = frozenset[fx.Node]().union(*(sources[value] for value in inputs))
    for node in reversed([node for node in sources if node.op == "call_function"]):
        readers = _readers(node, sources)
        if not readers or _stays(node, sources[node]):
            continue
        if any(
            user in sources for user in node.users
        ):  # some need it on the way: the others make their own
            with graph.inserting_after(node):
                node.replace_all_uses_with(graph.node_copy(node), readers.__contains__)
        else:
            del sources[node]
        # Either way, what it is made of has a reader now.
    with graph.inserting_before(next(iter(graph.nodes))):
        for node in [
            node
            for node in sources
            if node.op == "call_function" and isinstance(node.meta["val"], Tensor)
        ]:
            readers = _readers(node, sources)
            if not readers:
                continue
            placeholder = graph.placeholder(f"{node.name}_")
            placeholder.meta = dict(node.meta)
            node.replace_all_uses_with(placeholder, readers.__contains__)
            joint.once.append(node)
            joint.params.append(placeholder)


def _readers(node: fx.Node, sources: Container[fx.Node]) -> set[fx.Node]:
    """The operations of a microbatch that read a value. Not the output: each caller may write into
    its own."""
    return {user for user in node.users if user not in sources and user.op != "output"}


def _stays(node: fx.Node, sources: Iterable[fx.Node]) -> bool:
    """May a value lie in memory from the first microbatch to the last. Memory of parameters does so
    anyway."""
    taken = memory_of([node])
    for storage in memory_of(sources):
        taken.pop(storage, None)
    return sum(taken.values()) <= max(_SMALL, sum(map(bytes_of, sources)))


def _moves(node: fx.Node) -> bool:
    """Does an operation give all microbatches the same result where its arguments are the same."""
    if node.op != "call_function" or "draw" in node.meta or may_draw(node.target):
        return False
    # A draw fills a fresh tensor in place.
    if any("draw" in user.meta for user in node.users):
        return False
    return node.target is operator.getitem or isinstance(node.target, OpOverload)
