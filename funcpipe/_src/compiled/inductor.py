"""Build programs by torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from funcpipe._src.compiled.recompute import tensors_of
from funcpipe._src.core import torch_names
from funcpipe._src.core.log import log


def inductor(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """Build a graph by torch's compiler. On the CPU, its kernels are called from C++ where
    possible.

    Calls from Python take long compared with short kernels, and they hold the GIL, which other
    lanes need. If the compiler cannot write the C++, the kernels are called from Python.
    """
    devices = {
        tensor.device.type
        for node in graph.graph.nodes
        if "val" in node.meta
        for tensor in tensors_of(node)
    }
    if devices != {"cpu"}:
        return torch_names.inductor(graph, examples, {})
    try:
        return torch_names.inductor(graph, examples, {"cpp_wrapper": True})
    except Exception as error:
        log.info("torch's compiler calls the kernels of a program from Python, because: %s", error)
        return torch_names.inductor(graph, examples, {})
