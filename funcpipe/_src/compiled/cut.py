"""Divide a joint graph into programs: which operation belongs to F, I and W, and which values cross
between them.

`joint` traces the graph, `source` writes the code.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import fx

from funcpipe._src.compiled.joint import Joint

_aten = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """One program: straight-line code."""

    name: str  # the name of its function
    takes: Mapping[str, Sequence[fx.Node]]  # its arguments, and the values in each
    # Its result: a list of values, a list of such lists, a tuple of both. None: no result.
    gives: Any
    # Weight gradients that are added to ``S[0]``, ``S[1]``, ... None: the function has no ``S``.
    sums: Sequence[fx.Node | None] | None
    # The indices of sums to which a product of two matrices is added in one operation.
    fused: Collection[int]
    nodes: list[fx.Node]  # its operations, in order
    reads: list[fx.Node]  # the values from outside, in the order of the graph


Program = TypeVar("Program")


class CutBackward(NamedTuple, Generic[Program]):
    """The backward of a stage in one program and in two: as parts of the graph, or as functions."""

    whole: Program  # B
    inputs: Program  # I, the operations that the gradients of the inputs need
    weights: Program  # W, the other operations of the gradients of the parameters
    left: list[fx.Node]  # the values that I leaves for W


class Cut:
    """The division of a joint graph into programs.

    An operation belongs to F if an output needs it, to I if a gradient of an input needs it, and
    otherwise to W. The first program that needs an operation has it, so no value is computed twice.

    Without ``fuse``, I also adds to the sums to which I of the eager stage adds. Otherwise, if W
    come in another order than I, these sums would be added in another order than in the eager
    stage.

    Attributes:
        kept: the values that F keeps for the backward.
        forward, alone, once: F, A and C, see `Programs`.
    """

    def __init__(self, joint: Joint, *, fuse: bool) -> None:
        self.joint, self.fuse = joint, fuse
        self._forward = {*above(joint.outs), *joint.params, *joint.inputs}
        outside = self._forward | {*joint.cotangents}
        ops, left = self._inputs(joint.wanted, joint.sums)
        reads = gather(
            nodes_in([joint.wanted, [node for node in left if node in ops]]), stop=outside
        )[1]
        crossing = {*reads, *left} - {*joint.params} - {*joint.cotangents} - ops
        self.kept = [node for node in joint.module.graph.nodes if node in crossing]
        takes = {"P": joint.params, "X": joint.inputs, **({"R": []} if joint.draws else {})}
        self.forward = _part("F", takes, (joint.outs, self.kept))
        self.alone = _part("A", takes, joint.outs)
        bare = joint.params[: len(joint.params) - len(joint.once)]
        self.once = _part("C", {"P": bare}, joint.once) if joint.once else None

    def _inputs(
        self, wanted: Any, sums: Sequence[fx.Node | None]
    ) -> tuple[set[fx.Node], list[fx.Node]]:
        """Return the operations of I, and the values that W reads besides parameters."""
        ops = _whole_ops(above(nodes_in(wanted)) - self._forward)
        reads = gather(nodes_in(sums), stop={*self._forward, *self.joint.cotangents, *ops})[1]
        params = {*self.joint.params}
        return ops, [node for node in reads if node not in params]

    def backward(self, missing: frozenset[int]) -> CutBackward[Part]:
        """Cut the backward for the case that some roots (by index) have no gradient.

        Values that depend only on these gradients have none either. This equals autograd, which
        does not visit nodes without an incoming gradient and adds nothing to their sums.
        """
        joint = self.joint
        wanted, sums = joint.wanted, joint.sums
        if missing:
            replaced = _prune(
                joint.module.graph,
                joint.cotangents,
                {joint.cotangents[number] for number in missing},
            )
            wanted = [[replaced.get(node, node) for node in row] for row in wanted]  # pyright: ignore
            sums = [replaced.get(node, node) for node in sums]  # pyright: ignore
        early = set[int]() if self.fuse else joint.early(missing)
        early_sums = [node if number in early else None for number, node in enumerate(sums)]
        late_sums = [None if number in early else node for number, node in enumerate(sums)]
        left = self._inputs([wanted, early_sums], late_sums)[1]
        takes = {"P": joint.params, "K": self.kept, "G": joint.cotangents}
        weights = _part("W", {"P": joint.params, "L": left}, None, late_sums)
        fused = _products(late_sums, {*weights.nodes}) if self.fuse else []
        return CutBackward(
            _part("B", takes, wanted, sums, fused),
            _part("I", takes, (wanted, left), None if self.fuse else early_sums),
            replace(weights, fused=fused),
            left,
        )


def _part(
    name: str,
    takes: Mapping[str, Sequence[fx.Node]],
    gives: Any,
    sums: Sequence[fx.Node | None] | None = None,
    fused: Collection[int] = (),
) -> Part:
    """Make the program that returns some values and adds others to sums."""
    stop = {node for values in takes.values() for node in values}
    return Part(name, takes, gives, sums, fused, *gather(nodes_in((gives, sums)), stop=stop))


def nodes_in(values: Any) -> list[fx.Node]:
    """The nodes in nested lists."""
    nodes: list[fx.Node] = []
    fx.map_arg(values, nodes.append)  # pyright: ignore[reportArgumentType]
    return nodes


def product(node: fx.Node) -> tuple[fx.Node, fx.Node, bool]:
    """The factors of a product of two matrices, and whether the left factor is transposed."""
    left: Any
    right: Any
    left, right = node.args
    turned = left.target is _aten.t.default
    return (left.args[0] if turned else left), right, turned


def _products(sums: Sequence[fx.Node | None], nodes: set[fx.Node]) -> list[int]:
    """The indices of weight gradients that are products of two matrices and are read by one sum
    only."""
    # If something else reads the product, it must exist as a value, and not only in a sum.
    times = Counter(sums)
    return [
        number
        for number, node in enumerate(sums)
        if node in nodes
        and node.target is _aten.mm.default
        and times[node] == 1
        and nodes.isdisjoint(node.users)
    ]


def above(roots: Iterable[Any]) -> set[fx.Node]:
    """All operations and placeholders that some values need."""
    needed: set[fx.Node] = set()
    todo = [node for node in roots if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += node.all_input_nodes
    return _whole_ops(needed)


def _whole_ops(nodes: set[fx.Node]) -> set[fx.Node]:
    """The nodes, and the other items of operations with several results."""
    pieces = {
        user
        for node in nodes
        if not is_view(node)
        for user in node.users
        if user.target is operator.getitem
    }
    return nodes | pieces


def gather(roots: Sequence[fx.Node], *, stop: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the operations that compute some values from ``stop``, with views computed again,
    and the values of ``stop`` that they read."""
    inside: set[fx.Node] = set()
    reads: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node in inside or node in reads:
            continue
        # Views are computed again in each program, so only memory crosses between programs.
        if node.op != "get_attr" and node in stop and not is_view(node):
            reads.add(node)
        else:
            inside.add(node)
            todo += node.all_input_nodes
    nodes = list(roots[0].graph.nodes) if roots else []
    return [node for node in nodes if node in inside], [node for node in nodes if node in reads]


def _prune(
    graph: fx.Graph, cotangents: Sequence[fx.Node], missing: set[fx.Node]
) -> dict[fx.Node, fx.Node | None]:
    """Map each gradient to its replacement if some cotangents are missing; None for no gradient.
    Adds operations to the graph."""
    instead: dict[fx.Node, fx.Node | None] = dict.fromkeys(missing)
    flowing = {*cotangents}
    for node in list(graph.nodes):
        if node.op != "call_function" or flowing.isdisjoint(node.all_input_nodes):
            continue
        flowing.add(node)
        inputs = [source for source in node.all_input_nodes if source in flowing]
        dead = [source for source in inputs if instead.get(source, source) is None]
        # No gradient at all: autograd does not visit such a node. Zeros instead would give 0 * inf
        # = nan, and would make an unused parameter look used.
        if len(dead) == len(inputs):
            instead[node] = None
        # A sum with one missing term is the other term, without an addition of zeros.
        elif dead and node.target is _aten.add.Tensor and not node.kwargs and len(inputs) == 2:
            other = next(source for source in inputs if source not in dead)
            instead[node] = instead.get(other, other)
        # Other operations are copied, with zeros in place of the missing gradients.
        elif any(source in instead for source in inputs):
            with graph.inserting_before(node):
                zeros = {source: _zeros(graph, source) for source in dead}
                copies = {**instead, **zeros}
                instead[node] = graph.node_copy(
                    node, lambda arg, copies=copies: copies.get(arg, arg)
                )
            flowing.add(instead[node])  # pyright: ignore[reportArgumentType]
    return instead


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    val = like.meta["val"]
    node = graph.call_function(
        _aten.zeros.default, (list(val.shape),), {"dtype": val.dtype, "device": val.device}
    )
    node.meta["val"] = val
    return node


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view, or an item of a view with several results.

    The base of a view crosses between programs, and each program makes its own view.
    """
    target: Any = node.args[0].target if node.target is operator.getitem else node.target  # pyright: ignore
    return target is _aten._unsafe_view.default or getattr(target, "is_view", False)
