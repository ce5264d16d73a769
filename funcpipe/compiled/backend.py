"""Programs built by a compiler: a graph goes in, a function of its inputs comes out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from funcpipe.core import torch_names
from funcpipe.compiled.cut import Part, Product, gather, is_view
from funcpipe.compiled.joint import tracing
from funcpipe.compiled.source import Box
from funcpipe.runtime.eager import no_autocast
from funcpipe.runtime.recorded import Recorded, Unrecordable
from funcpipe.runtime.stream import Place

Backend: TypeAlias = Callable[[fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""``(graph, example inputs) -> function of the inputs``; inputs and outputs are tensors in a row, as for torch.compile."""


def inductor(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """torch's compiler; needs a C++ compiler for the CPU, Triton for CUDA."""
    return torch_names.inductor(graph, examples)


def cudagraphs(graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
    """Each program as a CUDA graph; on devices without them as it is, with a warning."""
    if all(is_view(node) for node in graph.graph.nodes if node.op == "call_function"):
        return graph.forward  # nothing to queue
    where = list(dict.fromkeys(one.device for one in examples))
    recorder = Place.backend.graph(where[0]) if len(where) == 1 else None
    reason = f"{', '.join(map(str, where)) or 'nothing'} has none"
    if recorder is not None:
        try:
            # Zeros: what is in the examples may be no index of anything.
            found = Recorded(
                recorder, where[0], [one.zero_() for one in examples], lambda own: graph(*own), steady=True
            )
            return lambda *given: found(given)
        except Unrecordable as error:
            reason = str(error)
    warnings.warn(f'backend "cudagraphs": a program of {len(graph.graph.nodes)} nodes is not a graph ({reason}) and runs as it is', stacklevel=2)  # fmt: skip
    return graph.forward


class Built:
    """A program that a backend made; built at its first call, or by `build`.

    Sums are added to outside of it: a product in one operation, anything else as it is.

    Attributes:
        text: the graph, as Python.
        operations: how many it has, views included.
        gives: as of `Code`.
    """

    gives: Hashable = None

    def __init__(
        self,
        name: str,
        boxes: Sequence[Box],
        part: Part,
        results: Sequence[Sequence[fx.Node | None]],
        pack: Callable[[list[list[Any]]], Any],
        *,
        module: fx.GraphModule,
        backend: Backend,
        sums: Sequence[fx.Node | None] = (),
        products: Mapping[int, Product] | None = None,
    ) -> None:
        """Make the graph of a part.

        Args:
            name: of the program.
            boxes: its arguments.
            part: what it computes.
            results: the lists that it gives.
            pack: what it returns, of these lists with tensors in them.
            module: where constants are.
            backend: see `Backend`.
            sums: weight gradients that are added into the last argument.
            products: those of them that are products.
        """
        self.name, self.boxes, self.results, self.pack, self.backend = name, boxes, results, pack, backend
        self.products = dict(products or {})
        self.added = {n: node for n, node in enumerate(sums) if node is not None and n not in self.products}
        factors = [factor for left, right, _ in self.products.values() for factor in (left, right)]
        given = [node for row in results for node in row if node is not None]
        self.outs = list(dict.fromkeys([*given, *self.added.values(), *factors]))
        inner = gather(self.outs, stop={*part.reads, *(node for box in boxes for node in box.values)})
        self.reads = inner.reads
        self.graph = _graph(inner, self.outs, module)
        self.text, self.operations = f"{name}:\n{self.graph.code}", len(inner.nodes)
        self._function: Callable[..., Any] | None = None

    def build(self) -> None:
        """Have it built."""
        with tracing:
            if self._function is None:
                # As they are called, whatever is on while they are built.
                with torch.inference_mode(mode=False), torch.no_grad(), no_autocast():
                    examples = [_example(node) for node in self.reads]
                    self._function = self.backend(self.graph, examples) if self.operations else self.graph.forward

    def call(self, *values: Any) -> Any:
        """Run it."""
        if self._function is None:
            self.build()
        assert self._function is not None
        known: dict[fx.Node, Any] = {}
        for box, value in zip(self.boxes, values, strict=False):
            known.update(zip(box.values, value, strict=True))
            if box.emptied:
                value.clear()
        inputs = [known[node] for node in self.reads]
        known.clear()
        outs = dict(zip(self.outs, self._function(*inputs), strict=True))
        del inputs
        if self.added or self.products:
            sums = values[-1]
            for number, node in self.added.items():
                sums[number].add_(outs[node])
            for number, (left, right, turned) in self.products.items():
                sums[number].addmm_(outs[left].t() if turned else outs[left], outs[right])
        return self.pack([[None if node is None else outs[node] for node in row] for row in self.results])

    def __str__(self) -> str:
        return self.text


def _graph(part: Part, outs: Sequence[fx.Node], module: fx.GraphModule) -> fx.GraphModule:
    """The part as a graph of its own: what it reads in, ``outs`` out."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in part.reads:
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in part.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in outs))
    return fx.GraphModule(module, graph)


def _example(node: fx.Node) -> Tensor:
    """A tensor like a value; its numbers are nobody's."""
    val = node.meta["val"]
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
