"""Who is still alive: tensors told by their memory, graphs by what they hold; no garbage collector
needed.

A weak reference to a tensor dies with its Python object, also where autograd keeps the tensor. So
memory is watched by weak references to storages, and every graph node holds a token.
"""

from __future__ import annotations

import gc
import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Token:
    """Lives as long as the graph node that holds it."""


class Watch:
    """What stages make: ``memory`` of tensors, ``graphs`` of forwards."""

    def __init__(self) -> None:
        self.memory: list[StorageWeakRef] = []
        self.graphs: list[weakref.ref] = []

    def tensor(self, made: torch.Tensor) -> torch.Tensor:
        """The tensor, from now on watched."""
        self.memory.append(StorageWeakRef(made.untyped_storage()))
        return made

    def layer(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """``x * w``; input, output, gradients and graph are watched."""
        return _Layer.apply(self.tensor(x), w, self)

    @property
    def alive(self) -> int:
        """Everything that lives."""
        return sum(not ref.expired() for ref in self.memory) + self.live_graphs

    @property
    def live_graphs(self) -> int:
        """Graphs that live."""
        return sum(ref() is not None for ref in self.graphs)


def num_tensors() -> int:
    """How many tensor objects there are, whoever made them."""
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, watch):
        ctx.watch, ctx.token = watch, Token()
        watch.graphs.append(weakref.ref(ctx.token))
        ctx.save_for_backward(x, w)
        return watch.tensor(x * w)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return ctx.watch.tensor(g * w), ctx.watch.tensor((g * x).sum(0)), None
