"""Loop-invariant code motion: compute values of parameters and state alone once per run, not per
microbatch."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable

from torch import Tensor, fx

from funcpipe._src.compiled.joint import Joint
from funcpipe._src.compiled.recompute import bytes_of, memory_of
from funcpipe._src.core.torch_names import OpOverload
from funcpipe._src.stages.drawing import may_draw

_SMALL = 2**20
"""Hoisted values up to this number of bytes may be larger than the parameters that they are
computed from."""


def hoist(joint: Joint) -> None:
    """Move values of parameters and state alone out of a microbatch's graph; placeholders replace
    them.

    Examples are casts of weights under autocast, computed weights (weight norm, merged adapters),
    views of parameters, small masks and positions. A hoisted value stays in memory for the whole
    run. So a value that is larger than its parameters is not hoisted, and each microbatch computes
    it again.
    """
    graph = joint.module.graph
    sources: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset([node]) for node in joint.params}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            sources[node] = frozenset()
        elif _moves(node) and all(value in sources for value in inputs):
            sources[node] = frozenset[fx.Node]().union(*(sources[value] for value in inputs))
    # From the last value to the first, because the decision about a value gives its inputs new
    # readers.
    for node in reversed([node for node in sources if node.op == "call_function"]):
        readers = _readers(node, sources)
        if not readers or _stays(node, sources[node]):
            continue
        # Hoisted operations also need this value. They keep it, and the microbatch's readers get a
        # copy of the operation.
        if any(user in sources for user in node.users):
            with graph.inserting_after(node):
                node.replace_all_uses_with(graph.node_copy(node), readers.__contains__)
        else:
            del sources[node]
        # In both cases the inputs of this value now have a reader in the microbatch.
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
    """The operations of a microbatch that read a value. The output does not count, because each
    caller may write into its own."""
    return {user for user in node.users if user not in sources and user.op != "output"}


def _stays(node: fx.Node, sources: Iterable[fx.Node]) -> bool:
    """Whether a value may stay in memory from the first microbatch to the last. Memory of
    parameters does so anyway."""
    taken = memory_of([node])
    for storage in memory_of(sources):
        taken.pop(storage, None)
    return sum(taken.values()) <= max(_SMALL, sum(map(bytes_of, sources)))


def _moves(node: fx.Node) -> bool:
    """Whether an operation gives the same result for all microbatches if its arguments are the
    same."""
    if node.op != "call_function" or "draw" in node.meta or may_draw(node.target):
        return False
    # The tensor that a draw fills in place must be fresh for each microbatch.
    if any("draw" in user.meta for user in node.users):
        return False
    return node.target is operator.getitem or isinstance(node.target, OpOverload)
