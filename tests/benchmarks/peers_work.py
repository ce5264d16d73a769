"""The work of every arm: the model, the batch, the loss, and the gradients that must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LANES = 2
LIMIT = 1e-5
"""How far gradients may be from the plain ones, relative to each tensor's largest."""


@dataclass(frozen=True)
class Work:
    """A chain of Linear(width) + GELU in fp32 and one batch; loss: mean squared error; wanted: every gradient.

    Attributes:
        weights: of the whole model, a state dict.
        x, target: the batch, (rows, width) each.
        wanted: the gradients by plain autograd over the whole batch, in the order of the parameters.
    """

    width: int
    depth: int
    microbatches: int
    weights: dict[str, Tensor]
    x: Tensor
    target: Tensor
    wanted: list[Tensor]

    @classmethod
    def make(cls, width: int, depth: int, rows: int, microbatches: int) -> Work:
        """Weights and data from fixed seeds."""
        torch.manual_seed(0)
        model = chain(width, depth)
        x, target = torch.randn(rows, width), torch.randn(rows, width)
        F.mse_loss(model(x), target).backward()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return cls(width, depth, microbatches, weights, x, target, gradients(model))

    def save(self, path: Path) -> None:
        """Write it for other processes."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Work:
        """Read what `save` wrote."""
        return cls(**torch.load(path))

    def model(self) -> nn.Sequential:
        """A fresh copy of the model: one child for each layer."""
        model = chain(self.width, self.depth)
        model.load_state_dict(self.weights)
        return model

    def error(self, found: Sequence[Tensor | None], *, layers: slice = slice(None)) -> float:
        """How far some gradients of these layers are from the wanted ones; infinite where one is missing."""
        pairs = list(zip(self.wanted[::2], self.wanted[1::2], strict=True))  # the weight and the bias of each layer
        wanted = [gradient for pair in pairs[layers] for gradient in pair]
        if len(found) != len(wanted) or any(gradient is None for gradient in found):
            return float("inf")
        far = [((mine - its).abs().max() / its.abs().max()).item() for mine, its in zip(found, wanted, strict=True)]
        return max(far)


def chain(width: int, depth: int) -> nn.Sequential:
    """Layers of Linear and GELU."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradient of each parameter."""
    return [parameter.grad for parameter in module.parameters()]
