"""Read a traced graph: the layer of a node, shared memory, writes in place, and the contents of
regions."""

from __future__ import annotations

import operator
from collections.abc import Collection, Container
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from funcpipe._src.core.torch_names import NAMELESS_LAYER, HigherOrderOperator, OpOverload, schema

_VIEWING = torch.Tag.maybe_aliasing_or_mutating


_NORMS = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}
"""They write their fourth and fifth argument if the sixth is True, but their schema does not
declare it."""


def op_of(module: nn.Module, node: fx.Node) -> Any:
    """The operation of a node, also if a module replaces it. None: not an operation of torch."""
    op = (
        getattr(_attribute(module, node.target), "op", None)
        if node.op == "call_module"
        else node.target
    )
    return op if isinstance(op, OpOverload) else None


def _arguments(op: Any, node: fx.Node) -> list[tuple[Any, fx.Node]]:
    """List (declared argument, value) for each value that an operation gets, also in lists."""
    named = {argument.name: argument for argument in schema(op).arguments}
    pairs = [
        *zip(schema(op).arguments, node.args, strict=False),
        *((named.get(k), v) for k, v in node.kwargs.items()),
    ]
    out: list[tuple[Any, fx.Node]] = []
    for argument, value in pairs:
        operands: list[fx.Node] = []
        map_arg(value, operands.append)
        out += [(argument, operand) for operand in operands if argument is not None]
    return out


def roots_of(module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """For each node, the node whose memory it may share."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        roots[node] = node
        op = op_of(module, node)
        if node.target is operator.getitem:
            roots[node] = roots[node.args[0]]
        elif op is not None:
            # The norms have the tag because they write buffers. Their result is new memory.
            viewing = _VIEWING in op.tags and op not in _NORMS
            aliased = [
                value for argument, value in _arguments(op, node) if argument.alias_info is not None
            ]
            # The tag alone does not say which input may be shared, so assume the first.
            if not aliased and viewing and node.all_input_nodes:
                aliased = [node.all_input_nodes[0]]
            if aliased and (any(r.alias_info for r in schema(op).returns) or viewing):
                roots[node] = roots[aliased[0]]
    return roots


def norms_of(module: fx.GraphModule) -> dict[fx.Node, tuple[Any, Any]]:
    """Map each batch norm in training to its arguments for running mean and variance.

    Inside a region, they are the values that the region gets, or None if computed inside.
    """
    norms: dict[fx.Node, tuple[Any, Any]] = {}
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.batch_norm.default and node.args[5] is True:
            norms[node] = node.args[3], node.args[4]
        for body, table in regions_of(module, node):
            norms |= {
                inner: (table.get(mean), table.get(var))
                for inner, (mean, var) in norms_of(body).items()
            }
    return norms


def writes_of(
    module: fx.GraphModule, apart: Container[fx.Node] = ()
) -> list[tuple[fx.Node, fx.Node]]:
    """List (node, target) for each write in place, also in regions, without the nodes ``apart``."""
    roots = roots_of(module)
    writes: list[tuple[fx.Node, fx.Node]] = []
    for node in module.graph.nodes:
        op = op_of(module, node)
        if op is not None and node not in apart:
            written = [
                value
                for argument, value in _arguments(op, node)
                if argument.alias_info and argument.alias_info.is_write
            ]
            if op in _NORMS and len(node.args) > 5 and node.args[5] is True:
                written += [value for value in node.args[3:5] if isinstance(value, fx.Node)]
            writes += [(node, roots[value]) for value in written]
        for body, table in regions_of(module, node):
            writes += [
                (node, roots[table[root]])
                for _, root in writes_of(body, apart)
                if isinstance(table.get(root), fx.Node)
            ]
    return writes


_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operations that run one function unchanged. Others choose a function by a number, so all
writes depend on the number."""


def dependents_of(
    module: fx.GraphModule, sources: Collection[fx.Node], apart: Container[fx.Node] = ()
) -> set[fx.Node]:
    """Return the nodes whose numbers depend on ``sources`` or on draws, by data or by writes."""
    roots, writes = roots_of(module), writes_of(module, apart)
    found = set(sources)

    def is_found(node: Any) -> bool:
        return isinstance(node, fx.Node) and (node in found or roots[node] in found)

    # One pass is enough, because a graph lists its nodes in the order in which they run.
    for node in module.graph.nodes:
        op = op_of(module, node)
        drawn = op is not None and torch.Tag.nondeterministic_seeded in op.tags
        if not (drawn or any(map(is_found, node.all_input_nodes))):
            continue
        written = [root for writer, root in writes if writer is node]
        if str(node.target) in _WRAPPERS:
            for body, table in regions_of(module, node):
                inner = dependents_of(
                    body, [inside for inside, outside in table.items() if is_found(outside)], apart
                )
                written = [
                    roots[table[root]]
                    for _, root in writes_of(body, apart)
                    if root in inner and root in table
                ]
        found |= {node, *written}
    return found


def regions_of(
    module: fx.GraphModule, node: fx.Node
) -> list[tuple[fx.GraphModule, dict[fx.Node, fx.Node]]]:
    """List the bodies that a higher-order operation runs, with their placeholders' values."""
    if not isinstance(node.target, HigherOrderOperator):
        return []
    flat: list[fx.Node] = []
    map_arg((node.args, node.kwargs), flat.append)
    operands = [value for value in flat if value.op != "get_attr"]
    bodies = [_attribute(module, value.target) for value in flat if value.op == "get_attr"]
    return [
        (body, dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=False)))
        for body in bodies
        if isinstance(body, fx.GraphModule)
    ]


def _attribute(module: nn.Module, path: Any) -> Any:
    value: Any = module
    for part in str(path).split("."):
        value = getattr(value, part, None)
    return value


def layer_of(node: fx.Node) -> str:
    """The path of the module whose forward made a node; ``a.b@1`` in its second call."""
    stack = _stack(node)
    if not stack:
        return ""
    key = next(reversed(stack))
    path = str(stack[key][0])
    return f"{path}@{key.rpartition('@')[2]}" if "@" in str(key) else path


def layers_of(module: fx.GraphModule, node: fx.Node) -> set[str]:
    """The paths of all modules that ran when a node was made, also with the number of the call."""
    paths: set[str] = set()
    for key, (path, _) in _stack(node).items():
        paths |= {str(path), f"{path}@{key.rpartition('@')[2]}" if "@" in str(key) else f"{path}@0"}
    for body, _ in regions_of(module, node):
        for inner in body.graph.nodes:
            paths |= layers_of(body, inner)
    return paths


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    """The modules around a node, outermost first, without the names that export invents."""
    stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return {
        key: entry for key, entry in stack.items() if not str(entry[0]).startswith(NAMELESS_LAYER)
    }


def row_bytes(sample: Any) -> int:
    """Bytes of a traced tensor for one row; of the whole tensor if the number of rows is fixed."""
    sizes = (size for size in sample.shape if isinstance(size, int))
    return prod(sizes) * sample.element_size()
