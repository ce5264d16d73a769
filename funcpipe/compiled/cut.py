"""Which operation of a joint graph belongs to F, which to I, which to W, and what crosses between them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from funcpipe.compiled.joint import Joint

_aten = torch.ops.aten

_VIEWS: set[Any] = {
    getattr(getattr(_aten, packet), overload)
    for packet, overload in (
        ("t", "default"), ("view", "default"), ("_unsafe_view", "default"), ("transpose", "int"), ("permute", "default"),
        ("unsqueeze", "default"), ("squeeze", "dim"), ("squeeze", "dims"), ("squeeze", "default"), ("expand", "default"),
        ("slice", "Tensor"), ("select", "int"), ("split", "Tensor"), ("split_with_sizes", "default"),
        ("unbind", "int"), ("diagonal", "default"), ("as_strided", "default"),
    )
}  # fmt: skip
"""Operations that cost nothing: each program makes its own, so that what crosses is what the view is of."""


@dataclass(frozen=True)
class Part:
    """One program: straight-line code.

    Attributes:
        nodes: its operations, in order.
        reads: the values that it gets from outside, in the order of the graph.
    """

    nodes: list[fx.Node]
    reads: list[fx.Node]


class Product(NamedTuple):
    """A weight gradient that is a product.

    Attributes:
        left, right: what it is of.
        turned: is it of the left one's transpose.
    """

    left: fx.Node
    right: fx.Node
    turned: bool


@dataclass(frozen=True)
class Backward:
    """The backward in one piece and in two.

    Attributes:
        whole: B, all of it.
        inputs: I, what the gradients of the inputs need.
        weights: W, the rest of what the gradients of the parameters need.
        operands: W without its products, but with what they are of.
        left: what I leaves for W.
        wanted: gradients of input leaves, one list for the input and one for each skip.
        sums: gradients of the trainable leaves.
        products: those of them that are products of two matrices and serve nothing else, by their numbers.
        columns: the numbers of those that are sums over the rows of a matrix with few of them, and serve nothing else.
    """

    whole: Part
    inputs: Part
    weights: Part
    operands: Part
    left: list[fx.Node]
    wanted: list[list[fx.Node | None]]
    sums: list[fx.Node | None]
    products: dict[int, Product]
    columns: list[int]


class Cut:
    """The cut of a joint graph.

    An operation belongs to F if an output needs it, to I if a gradient of an input does, else to W; the first that needs
    it has it, so nothing is computed twice.

    Attributes:
        joint: the graph.
        forward: F where a backward follows.
        alone: F where none does.
        kept: what F keeps for the backward.
        backward: the rest.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        given = [*joint.params, *joint.inputs]
        free = {*joint.params}
        self._f = above(joint.outs)
        self.backward, crossing = self._backward(joint.wanted, joint.sums)
        self.kept = [node for node in crossing if node not in free]
        self.forward = gather([*joint.outs, *self.kept], stop={*given})
        self.alone = gather(joint.outs, stop={*given})

    def without(self, missing: frozenset[int]) -> Backward:
        """The backward where some roots (by number) have no gradient: what depends on these alone has none either.

        As in autograd, which does not go where no gradient comes from, and adds nothing to what has none.
        """
        if not missing:
            return self.backward
        joint = self.joint
        gone = _prune(joint.module.graph, joint.cotangents, {joint.cotangents[number] for number in missing})
        wanted = [[None if node is None else gone.get(node, node) for node in row] for row in joint.wanted]
        return self._backward(wanted, [None if node is None else gone.get(node, node) for node in joint.sums])[0]

    def _backward(
        self, wanted: list[list[fx.Node | None]], sums: list[fx.Node | None]
    ) -> tuple[Backward, list[fx.Node]]:
        """The three programs, and what they read of F."""
        joint = self.joint
        params, cotangents = {*joint.params}, {*joint.cotangents}
        ends = [node for row in wanted for node in row if node is not None]
        targets = [node for node in sums if node is not None]
        forward = {*self._f, *params, *joint.inputs}
        inputs_own = _whole_ops(above(ends) - forward)
        outside = {*forward, *cotangents, *inputs_own}
        weights = gather(targets, stop=outside)
        products, columns = _products(sums, {*weights.nodes}), _columns(sums, {*weights.nodes})
        rest = [node for number, node in enumerate(sums) if node is not None and number not in products]
        factors = [factor for left, right, _ in products.values() for factor in (left, right)]
        operands = gather([*rest, *factors], stop=outside)
        left = [node for node in weights.reads if node not in params]
        made = [node for node in left if node in inputs_own]
        inputs = gather([*ends, *made], stop={*forward, *cotangents})
        whole = gather([*ends, *targets], stop={*forward, *cotangents})
        crossing = {*inputs.reads, *weights.reads, *whole.reads} - cotangents - {*inputs.nodes}
        order = [node for node in joint.module.graph.nodes if node in crossing]
        return Backward(whole, inputs, weights, operands, left, wanted, sums, products, columns), order


def _products(sums: Sequence[fx.Node | None], own: set[fx.Node]) -> dict[int, Product]:
    """The weight gradients that are products and serve nothing but one sum."""
    found: dict[int, Product] = {}
    for number, node in _single(sums, own, _aten.mm.default):
        left: Any
        left, right = node.args
        turned = left.target is _aten.t.default
        found[number] = Product(left.args[0] if turned else left, right, turned)  # pyright: ignore[reportArgumentType]
    return found


_FEW = 512
"""Rows that a product with ones may add: torch's sum adds in pairs, and of many rows that is closer."""


def _columns(sums: Sequence[fx.Node | None], own: set[fx.Node]) -> list[int]:
    """The weight gradients that are sums over a few rows and serve nothing but one sum.

    On the CPU only: elsewhere the ones would have to be there before streams that know nothing of each other.
    """
    found: list[int] = []
    for number, node in _single(sums, own, _aten.sum.dim_IntList):
        rows: Any = node.args[0]
        val = rows.meta["val"]
        plain = node.args[1:] == ([0],) and not node.kwargs and val.dtype in (torch.float32, torch.float64)
        if plain and val.device.type == "cpu" and val.dim() == 2 and 0 < len(val) <= _FEW:
            found.append(number)
    return found


def _single(sums: Sequence[fx.Node | None], own: set[fx.Node], target: Any) -> Iterator[tuple[int, fx.Node]]:
    """The weight gradients that this operation makes and only one sum reads, with their numbers."""
    for number, node in enumerate(sums):
        if node is None or node not in own or node.target is not target or list(sums).count(node) > 1:
            continue
        if own.isdisjoint(node.users):
            yield number, node


def above(roots: Iterable[Any]) -> set[fx.Node]:
    """All operations and placeholders that some values need."""
    seen: set[fx.Node] = set()
    todo = [node for node in roots if isinstance(node, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
    return _whole_ops(seen)


def _whole_ops(nodes: set[fx.Node]) -> set[fx.Node]:
    """Also the other pieces of operations that give several values."""
    pieces = {user for node in nodes if not is_view(node) for user in node.users if user.target is operator.getitem}
    return nodes | pieces


def gather(roots: Sequence[fx.Node], *, stop: set[fx.Node]) -> Part:
    """The program that computes some values, reading those in ``stop`` from outside, but for views of them."""
    own: set[fx.Node] = set()
    reads: set[fx.Node] = set()
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node in own or node in reads:
            continue
        if node.op != "get_attr" and node in stop and not is_view(node):
            reads.add(node)
        else:
            own.add(node)
            todo += node.all_input_nodes
    if not roots:
        return Part([], [])
    nodes = roots[0].graph.nodes
    return Part([n for n in nodes if n in own], [n for n in nodes if n in reads])


def _prune(graph: fx.Graph, cotangents: Sequence[fx.Node], missing: set[fx.Node]) -> dict[fx.Node, fx.Node | None]:
    """What stands for each value when some cotangents are missing: None for none. New operations join the graph."""
    instead: dict[fx.Node, fx.Node | None] = dict.fromkeys(missing)
    flowing = {*cotangents}
    for node in list(graph.nodes):
        if node.op != "call_function" or flowing.isdisjoint(node.all_input_nodes):
            continue
        flowing.add(node)
        came = [one for one in node.all_input_nodes if one in flowing]
        dead = [one for one in came if instead.get(one, one) is None]
        if len(dead) == len(came):
            instead[node] = None
        elif dead and node.target is _aten.add.Tensor and not node.kwargs and len(came) == 2:
            other = next(one for one in came if one not in dead)
            instead[node] = instead.get(other, other)
        elif any(one in instead for one in came):
            with graph.inserting_before(node):
                zeros = {one: _zeros(graph, one) for one in dead}
                instead[node] = graph.node_copy(node, lambda one: zeros.get(one) or instead.get(one, one))  # noqa: B023  # pyright: ignore
            flowing.add(instead[node])  # pyright: ignore[reportArgumentType]
    return instead


def _zeros(graph: fx.Graph, like: fx.Node) -> fx.Node:
    val = like.meta["val"]
    node = graph.call_function(_aten.zeros.default, (list(val.shape),), {"dtype": val.dtype, "device": val.device})
    node.meta["val"] = val
    return node


def is_view(node: fx.Node) -> bool:
    """Is it a view, or a piece of one that has several."""
    if node.target is operator.getitem:
        return node.args[0].target in _VIEWS  # pyright: ignore
    return node.target in _VIEWS
