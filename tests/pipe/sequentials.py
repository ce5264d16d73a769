"""A Sequential, a pipe over a copy of it, a batch, and what both are compared by."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import funcpipe as fp

CHECKPOINTS = ("always", "except_last", "never")
every_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS)


def net():
    torch.manual_seed(0)
    layers = (
        nn.Linear(4, 8),
        nn.Tanh(),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 2),
    )
    return nn.Sequential(*layers).double()


def piped(model, chunks=3, checkpoint="except_last", *, balance=(2, 1, 3), **options):
    """A pipe over a copy of the model."""
    return fp.Pipe(
        copy.deepcopy(model), chunks, checkpoint, balance=balance, devices="cpu", **options
    )


def data(rows=10, width=4):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def grads(module):
    return [param.grad for param in module.parameters()]


def assert_close(a, b):
    """Tensor by tensor; None equals None."""
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


class Log:
    """Values that copies of a module share."""

    def __init__(self):
        self.values = []

    def __deepcopy__(self, memo):
        return self
