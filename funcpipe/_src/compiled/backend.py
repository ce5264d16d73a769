"""Programs built by a compiler: a graph goes in, a function of its inputs comes out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from funcpipe._src.compiled.cut import is_view
from funcpipe._src.core.tracing import tracing
from funcpipe._src.devices.device_graph import Recorded, Unrecordable
from funcpipe._src.devices.stream import Place
from funcpipe._src.stages.context import no_autocast

Backend: TypeAlias = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""``(graph, example inputs) -> function of the inputs``; inputs and outputs are tensors in a row
(torch.compile)."""


def cudagraphs(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """Each program as a CUDA graph; on devices without them as it is, with a warning."""
    if all(is_view(node) for node in graph.graph.nodes if node.op == "call_function"):
        return graph.forward  # nothing to queue
    devices = list(dict.fromkeys(example.device for example in examples))
    recorder = Place.backend.graph(devices[0]) if len(devices) == 1 else None
    reason = f"{', '.join(map(str, devices)) or 'nothing'} has none"
    if recorder is not None:
        try:
            zeros = [
                example.zero_() for example in examples
            ]  # what is in the examples may be no index of anything
            recorded = Recorded(
                recorder, devices[0], zeros, lambda inputs: graph(*inputs), steady=True
            )
            return lambda *inputs: recorded(inputs)
        except Unrecordable as error:
            reason = str(error)
    size = len(graph.graph.nodes)
    warnings.warn(
        f'backend "cudagraphs": a program of {size} nodes is not a graph ({reason}) and runs as it '
        "is",
        stacklevel=2,
    )
    return graph.forward


class Kernel:
    """What a backend makes of a part of a graph, at its first call or by `build`: tensors in a row
    in, a row out.

    Args:
        nodes, reads, outs: the operations, the values that they read, and those that they give.
        module: where constants are.
        backend: see `Backend`.

    Attributes:
        graph: of the part; the backend gets it.
    """

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
        self._likes = [node.meta["val"] for node in reads]
        self._gives = [node.meta["val"] for node in outs]
        self._odd: list[int] | None = None
        self._function: Callable[..., Any] | None = None

    def build(self) -> Callable[..., Any]:
        """Have the backend build it now."""
        with tracing:
            if self._function is None:
                # As it is called, whatever is on while it is built.
                with torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
                    examples = [
                        torch.empty_strided(
                            like.shape, like.stride(), dtype=like.dtype, device=like.device
                        )
                        for like in self._likes
                    ]
                    self._function = self.backend(self.graph, examples)
            return self._function

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Run it, built first if it is not; what it lays out in another way than was traced is
        copied."""
        outs = (self._function or self.build())(*inputs)
        if self._odd is None:
            self._odd = [
                number for number, out in enumerate(outs) if not lies_as(out, self._gives[number])
            ]
        if self._odd:
            outs = list(outs)
            for number in self._odd:
                outs[number] = laid_out(outs[number], self._gives[number].stride())
        return outs


def lies_as(value: Any, traced: Any) -> bool:
    """Has a value the layout that it was traced with, as far as that matters."""
    if not isinstance(value, Tensor) or not value.numel():
        return True
    rows = zip(value.shape, value.stride(), traced.stride(), strict=True)
    return all(stride == expected for size, stride, expected in rows if size > 1)


def laid_out(value: Tensor, stride: Sequence[int]) -> Tensor:
    """A copy with these strides."""
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(
        value
    )
