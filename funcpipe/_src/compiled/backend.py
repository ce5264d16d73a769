"""Build programs by a compiler: from a graph, a function of its inputs.

`source` writes programs without a compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from funcpipe._src.compiled.cut import is_view
from funcpipe._src.compiled.recompute import tensors_of
from funcpipe._src.core import torch_names
from funcpipe._src.core.log import log
from funcpipe._src.core.tracing import tracing
from funcpipe._src.devices.device_graph import Recorded, Unrecordable
from funcpipe._src.devices.stream import Place
from funcpipe._src.stages.context import no_autocast

Backend: TypeAlias = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""``(graph, example inputs) -> function of the inputs``, with flat lists of tensors, as for
torch.compile."""


def cudagraphs(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """Record a program as a CUDA graph. On devices without CUDA graphs it runs unchanged, with a
    warning."""
    if all(is_view(node) for node in graph.graph.nodes if node.op == "call_function"):
        return graph.forward  # views queue no kernel, so there is nothing to record
    devices = list(dict.fromkeys(example.device for example in examples))
    recorder = Place.backend.graph(devices[0]) if len(devices) == 1 else None
    reason = f"{', '.join(map(str, devices)) or 'nothing'} has none"
    if recorder is not None:
        try:
            # The examples have arbitrary numbers, which could be invalid indices. Zero is valid.
            zeros = [example.zero_() for example in examples]
            recorded = Recorded(
                recorder, devices[0], zeros, lambda inputs: graph(*inputs), steady=True
            )
            return lambda *inputs: recorded(inputs)
        except Unrecordable as error:
            reason = str(error)
    size = len(graph.graph.nodes)
    warnings.warn(
        f'backend "cudagraphs": a program of {size} nodes cannot be a CUDA graph ({reason}) and '
        "runs without one",
        stacklevel=2,
    )
    return graph.forward


class Kernel:
    """A part of a graph, built by a backend at its first call or by `build`; a function of flat
    tensors. ``reads`` and ``outs`` are the values that the operations ``nodes`` read and return."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        reads: Sequence[fx.Node],
        outs: Sequence[fx.Node],
        module: fx.GraphModule,
        backend: Backend,
    ) -> None:
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in reads:
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        for node in nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in outs))
        self.graph, self.backend = fx.GraphModule(module, graph), backend
        self._input_likes = [node.meta["val"] for node in reads]
        self._function: Callable[..., Any] | None = None

    def build(self) -> Callable[..., Any]:
        """Let the backend build the function now."""
        with tracing:
            if self._function is None:
                # Build in the modes in which the function is called, whatever modes are on now.
                with torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
                    examples = [
                        torch.empty_strided(
                            like.shape, like.stride(), dtype=like.dtype, device=like.device
                        )
                        for like in self._input_likes
                    ]
                    self._function = self.backend(self.graph, examples)
            return self._function

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Run the function, built first if necessary."""
        return (self._function or self.build())(*inputs)


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
