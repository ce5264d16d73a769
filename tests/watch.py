"""Who is still alive: tensors told by their memory, graphs by what they hold; no garbage collector needed.

A weak reference to a tensor dies with its Python object, also where autograd keeps the tensor. Tensors here lie in a
buffer whose death is seen, and graph nodes hold a token.
"""

from __future__ import annotations

import weakref

import torch


class Buffer(bytearray):
    """Memory that can be watched."""


class Token:
    """Lives as long as the graph node that holds it."""


class Watch:
    """Weak references to what stages make: ``memory`` of tensors, ``graphs`` of forwards under autograd."""

    def __init__(self) -> None:
        self.memory: list[weakref.ref] = []
        self.graphs: list[weakref.ref] = []

    def tensor(self, like: torch.Tensor) -> torch.Tensor:
        """A copy whose memory is watched."""
        buffer = Buffer(like.numel() * like.element_size())
        self.memory.append(weakref.ref(buffer))
        return torch.frombuffer(buffer, dtype=like.dtype).view(like.shape).copy_(like)

    def layer(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """``x * w``; output, gradients and graph are watched."""
        return _Layer.apply(x, w, self)

    @property
    def alive(self) -> int:
        """Everything that lives."""
        return sum(ref() is not None for ref in [*self.memory, *self.graphs])

    @property
    def live_graphs(self) -> int:
        """Graphs that live."""
        return sum(ref() is not None for ref in self.graphs)


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
