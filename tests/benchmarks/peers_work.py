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

KINDS = {"mlp": "Linear({width}) + GELU", "gpt2": "transformer block of width {width}, 64 tokens", "resnet": "residual block of {width} channels with BatchNorm, 16x16"}  # fmt: skip
TOKENS, SIDE = 64, 16


@dataclass(frozen=True)
class Work:
    """A chain of equal layers in fp32 and one batch; loss: mean squared error; wanted: every gradient.

    Attributes:
        kind: of the layers, one of `KINDS`.
        weights: of the whole model, a state dict.
        x, target: the batch.
        wanted: the gradients of each layer by plain autograd, microbatch by microbatch.
    """

    kind: str
    width: int
    depth: int
    microbatches: int
    weights: dict[str, Tensor]
    x: Tensor
    target: Tensor
    wanted: list[list[Tensor]]

    @classmethod
    def make(cls, kind: str, width: int, depth: int, rows: int, microbatches: int) -> Work:
        """Weights and data from fixed seeds."""
        torch.manual_seed(0)
        model = chain(kind, width, depth)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        shape = {"mlp": (rows, width), "gpt2": (rows, TOKENS, width), "resnet": (rows, width, SIDE, SIDE)}[kind]
        x, target = torch.randn(shape), torch.randn(shape)
        for part, wanted in zip(x.chunk(microbatches), target.chunk(microbatches), strict=True):
            (F.mse_loss(model(part), wanted) / microbatches).backward()
        return cls(kind, width, depth, microbatches, weights, x, target, [gradients(layer) for layer in model])  # pyright: ignore

    @property
    def rows_apart(self) -> bool:
        """Does the microbatch not matter: no statistics over rows."""
        return self.kind != "resnet"

    def save(self, path: Path) -> None:
        """Write it for other processes."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Work:
        """Read what `save` wrote."""
        return cls(**torch.load(path))

    def model(self) -> nn.Sequential:
        """A fresh copy of the model: one child for each layer."""
        model = chain(self.kind, self.width, self.depth)
        model.load_state_dict(self.weights)
        return model

    def error(self, found: Sequence[Tensor | None], *, layers: slice = slice(None)) -> float:
        """How far some gradients of these layers are from the wanted ones; infinite where one is missing."""
        wanted = [gradient for layer in self.wanted[layers] for gradient in layer]
        if len(found) != len(wanted) or any(gradient is None for gradient in found):
            return float("inf")
        # A bias before BatchNorm has no gradient but rounding.
        far = [((mine - its).abs().max() / its.abs().max().clamp(min=1e-6)).item() for mine, its in zip(found, wanted, strict=True)]  # fmt: skip  # pyright: ignore
        return max(far)


class Block(nn.Module):
    """Attention and two linear layers, as in GPT-2, without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows, tokens, width."""
        rows, tokens, width = x.shape
        q, k, v = (part.view(rows, tokens, 4, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Residual(nn.Module):
    """Two convolutions with BatchNorm, and the way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows, channels, height, width."""
        return F.relu(x + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


def chain(kind: str, width: int, depth: int) -> nn.Sequential:
    """Equal layers."""
    made = {"mlp": lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()), "gpt2": lambda: Block(width), "resnet": lambda: Residual(width)}  # fmt: skip
    return nn.Sequential(*[made[kind]() for _ in range(depth)])


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradient of each parameter."""
    return [parameter.grad for parameter in module.parameters()]
