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

_aten = torch.ops.aten
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_READ: dict[Any, int] = {_aten.convolution.default: 2, _aten.convolution_backward.default: 3}
"""Convolutions, and how many arguments are tensors with channels, from the first."""

_FOLLOW: set[Any] = {
    operator.getitem,
    *_READ,
    _aten._native_batch_norm_legit_functional.default,
    _aten.native_batch_norm_backward.default,
    _aten.max_pool2d_with_indices.default,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.avg_pool2d.default,
    _aten.avg_pool2d_backward.default,
    _aten.upsample_nearest2d.vec,
    _aten.upsample_nearest2d.default,
    _aten.upsample_nearest2d_backward.default,
    _aten._to_copy.default,
    _aten.hardtanh_backward.default,
    _aten.leaky_relu_backward.default,
    _aten.elu_backward.default,
    _aten.hardswish_backward.default,
    _aten.mse_loss.default,
    _aten.mse_loss_backward.default,
}
"""Operations besides pointwise ones that mean the same in any order of memory, and keep that of their argument."""


def channels_last(joint: Joint) -> Joint:
    """The same graph with convolutions that read channels last; its inputs and what it gives lie as before.

    What follows a convolution comes out so, too, and is read, kept and handed on so, until an operation may mind the order. A
    weight is turned round once a run, in which it lies in both orders. The graph is returned as it is where there is no
    convolution that is known to be faster so, and where random draws fill memory in its order.
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
        self._before: dict[fx.Node, fx.Node] = {}  # those that lie as in the old graph
        self._turned: dict[fx.Node, fx.Node] = {}  # those with channels last
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
        rest = old.spec, old.roots, old.draws, old.early
        self.joint = Joint(module, params, inputs, cotangents, outs, wanted, sums, *rest)

    def _write(self, node: fx.Node) -> None:
        """Write an operation anew; a convolution's arguments are turned before."""
        for argument in node.args[: _READ.get(node.target, 0)]:
            self._turn(argument)  # pyright: ignore[reportArgumentType]
        self._new[node] = self._add(node, self._new.__getitem__ if _follows(node) else self._as_before)

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
        if format is None or val.is_contiguous(memory_format=format):
            return
        if node not in self._turned:
            self._before.setdefault(node, new)
            self._turned[node] = self._operation(_aten.clone.default, new, memory_format=format)
        self._new[node] = self._turned[node]

    def _as_before(self, node: fx.Node) -> fx.Node:
        """From here on the value lies as in the old graph."""
        new = self._new[node]
        was, now = node.meta["val"], new.meta["val"]
        if not isinstance(was, Tensor) or was.stride() == now.stride():
            return new
        if node not in self._before:
            self._turned.setdefault(node, new)
            order = sorted(range(was.dim()), key=lambda dim: -was.stride(dim))  # pyright: ignore
            ordered = self._operation(_aten.permute.default, new, order)
            copied = self._operation(_aten.clone.default, ordered, memory_format=torch.contiguous_format)
            back = [order.index(dim) for dim in range(was.dim())]
            self._before[node] = self._operation(_aten.permute.default, copied, back)
        self._new[node] = self._before[node]
        return self._new[node]


def _follows(node: fx.Node) -> bool:
    """Does an operation take its arguments in any order of memory. All others get them as they lay."""
    return node.target in _FOLLOW or torch.Tag.pointwise in getattr(node.target, "tags", ())
