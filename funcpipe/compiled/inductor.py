"""Programs built by torch's compiler."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from funcpipe.compiled.recompute import tensors_of
from funcpipe.core import torch_names
from funcpipe.core.log import log

_aten = torch.ops.aten


def inductor(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """A graph as torch's compiler makes it; on the CPU its kernels are called from C++, where that can be.

    Python takes its time where they are short, and keeps the interpreter from other lanes. Where the compiler cannot write
    the C++, they are called from Python.
    """
    devices = {tensor.device.type for node in graph.graph.nodes if "val" in node.meta for tensor in tensors_of(node)}
    if devices != {"cpu"}:
        return torch_names.inductor(graph, examples, {})
    graph = _with_short_gelu(graph)
    try:
        return torch_names.inductor(graph, examples, {"cpp_wrapper": True})
    except Exception as error:
        log.info("torch's compiler calls the kernels of a program from Python, because: %s", error)
        return torch_names.inductor(graph, examples, {})


def _with_short_gelu(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph with GELU's approximation in a shorter form: the compiler's tanh takes four times as long as its exp."""
    if not any(node.target in _SHORT and node.kwargs.get("approximate") == "tanh" for node in graph.graph.nodes):
        return graph
    graph = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in graph.graph.nodes:
        if node.target in _SHORT and node.kwargs.get("approximate") == "tanh":
            node.target, node.kwargs = _SHORT[node.target], {}
    graph.recompile()
    return graph


_SCALE, _CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Tensor) -> Tensor:
    """``x (1 + tanh u) / 2``, which is ``x sigmoid(2 u)``."""
    return x * torch.sigmoid(_SCALE * (x + _CUBE * x * x * x))


def _gelu_backward(gradient: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(_SCALE * (x + _CUBE * x * x * x))
    slope = _SCALE * (1 + 3 * _CUBE * x * x)
    return gradient * (gate + x * gate * (1 - gate) * slope)  # in this order: of a large x the slope meets a 0


_SHORT: dict[Any, Callable[..., Tensor]] = {_aten.gelu.default: _gelu, _aten.gelu_backward.default: _gelu_backward}
