"""Programs built by torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from funcpipe._src.compiled.recompute import tensors_of
from funcpipe._src.core import torch_names
from funcpipe._src.core.log import log


def inductor(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """A graph as torch's compiler makes it; on the CPU its kernels are called from C++, where that
    can be.

    Python takes its time where they are short, and keeps the interpreter from other lanes. Where
    the compiler cannot write the C++, they are called from Python.
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
