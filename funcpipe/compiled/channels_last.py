"""Convolutions on the CPU with channels last, as torch's compiler has them where it sees the whole of a model.

It looks at one program at a time and not at convolutions' backwards, so it turns round what crosses to the next one. Here
the whole of a stage is laid out before it is cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from funcpipe.compiled.joint import Joint
from funcpipe.compiled.recompute import tensors_of
from funcpipe.core.log import log
from funcpipe.core.torch_names import OpOverload

_aten = torch.ops.aten
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_READ: dict[Any, int] = {_aten.convolution.default: 2, _aten.convolution_backward.default: 3}
"""Convolutions, and how many arguments are tensors with channels, from the first."""

_ORDERED: set[Any] = {_aten.view.default, _aten.view.dtype, _aten._unsafe_view.default, _aten.as_strided.default}
"""Views by the order of memory."""


def channels_last(joint: Joint) -> Joint:
    """The same graph with convolutions that read channels last; its inputs and what it gives lie as before.

    What follows a convolution comes out so, too, and is read, kept and handed on so. A weight is turned round once a run.
    The graph is returned as it is where nothing would be gained, or where random draws fill memory in its order.
    """
    nodes = list(joint.module.graph.nodes)
    convolutions = [node for node in nodes if node.target in _READ]
    fast = all(_is_fast(tensor) for node in convolutions for tensor in tensors_of(node))
    if not convolutions or joint.draws or not fast or not torch.backends.mkldnn.is_available():
        return joint
    try:
        return _Turned(joint, nodes).joint
    except Exception as error:
        log.info("convolutions read channels first, because: %s", error)
        return joint


def _is_fast(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.bfloat16)


class _Turned:
    """A graph that is written anew, node by node."""

    def __init__(self, old: Joint, nodes: Sequence[fx.Node]) -> None:
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}  # which node has the value of an old one, from here on
        self._before: dict[fx.Node, fx.Node] = {}  # for new ones the same values as they lay in the old graph
        self._mode: Any = next(tensor for node in nodes for tensor in tensors_of(node)).fake_mode  # pyright: ignore
        given = [node for node in nodes if node.op in ("placeholder", "get_attr")]
        self._new.update((node, self._graph.node_copy(node)) for node in given)
        takes = [[self._new[node] for node in row] for row in (old.params, old.inputs, old.cotangents)]
        for node in old.cotangents:
            self._turn(node)
        for node in nodes:
            if node.op == "call_function":
                self._write(node)
        outs = [self._as_before(node) for node in old.outs]
        wanted = [[node and self._as_before(node) for node in row] for row in old.wanted]
        sums = [node and self._new[node] for node in old.sums]
        self._graph.output((outs, wanted, sums))
        module = fx.GraphModule(old.module, self._graph)
        params, inputs, cotangents = takes
        self.joint = Joint(module, params, inputs, cotangents, outs, wanted, sums, old.spec, old.roots, old.draws)

    def _write(self, node: fx.Node) -> None:
        """Write an operation anew; a convolution's arguments are turned before."""
        for argument in node.args[: _READ.get(node.target, 0)]:
            self._turn(argument)  # pyright: ignore[reportArgumentType]
        self._new[node] = self._add(node, self._as_before if _minds(node) else self._new.__getitem__)

    def _add(self, node: fx.Node, argument: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """Copy a node with what its arguments are now; its value says how it lies then."""
        arguments = {source: argument(source) for source in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: arguments[source].meta["val"])
        val = self._value(node.target, *args, **kwargs)
        new = self._graph.node_copy(node, arguments.__getitem__)
        new.meta["val"] = val
        return new

    def _value(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), self._mode:
            return target(*args, **kwargs)

    def _operation(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new operation."""
        new = self._graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        new.meta["val"] = self._value(target, *values[0], **values[1])
        return new

    def _turn(self, node: fx.Node) -> None:
        """From here on the value has its channels last."""
        new = self._new[node]
        val = new.meta["val"]
        format = _FORMATS.get(val.dim())
        if format is not None and not val.is_contiguous(memory_format=format):
            self._new[node] = turned = self._operation(_aten.clone.default, new, memory_format=format)
            if val.stride() == node.meta["val"].stride():
                self._before[turned] = new

    def _as_before(self, node: fx.Node) -> fx.Node:
        """A node with the value laid out as in the old graph."""
        new = self._new[node]
        was, now = node.meta["val"], new.meta["val"]
        if not isinstance(was, Tensor) or was.stride() == now.stride():
            return new
        if new not in self._before:
            self._before[new] = self._copy(new, was)
        return self._before[new]

    def _copy(self, new: fx.Node, was: Tensor) -> fx.Node:
        order = sorted(range(was.dim()), key=lambda dim: -was.stride(dim))  # pyright: ignore
        ordered = self._operation(_aten.permute.default, new, order)
        copied = self._operation(_aten.clone.default, ordered, memory_format=torch.contiguous_format)
        return self._operation(_aten.permute.default, copied, [order.index(dim) for dim in range(was.dim())])


def _minds(node: fx.Node) -> bool:
    """Might an operation mean something else where its arguments lie in another order."""
    if node.target is operator.getitem:
        return False
    known = isinstance(node.target, OpOverload) and node.target.namespace == "aten"
    return not known or node.target in _ORDERED
