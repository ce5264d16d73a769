"""The work of every arm: the model, the batch, the loss, and the gradients that must come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

LANES = 2
LIMITS = {"unet": 1e-4}
"""How far gradients may be from the plain ones, relative to each tensor's largest; 1e-5 where
nothing else is said. Those of the U-Net are sums over 4096 pixels a row."""

KINDS = {
    "mlp": "Linear({width}) + GELU",
    "gpt2": "transformer block of width {width}, 64 tokens",
    "resnet": "residual block of {width} channels with BatchNorm, 16x16",
    "unet": (
        "half of them down and half up a U-Net of {width} channels from 64x64, a skip on each level"
    ),
}
TOKENS, SIDE, TOP = 64, 16, 64


@dataclass(frozen=True)
class Work:
    """A chain of equal layers with parameters in fp32, and one batch; loss: mean squared error;
    wanted: every gradient.

    Attributes:
        kind: of the layers, one of `KINDS`.
        weights: of the whole model, a state dict.
        x, target: the batch.
        wanted: the gradients of each layer by plain autograd, microbatch by microbatch.
        autocast: compute in bfloat16 what torch.autocast does.
    """

    kind: str
    width: int
    depth: int
    microbatches: int
    weights: dict[str, Tensor]
    x: Tensor
    target: Tensor
    wanted: list[list[Tensor]]
    autocast: bool = False

    @classmethod
    def make(
        cls,
        kind: str,
        width: int,
        depth: int,
        rows: int,
        microbatches: int,
        autocast: bool,
        *,
        reference: bool = True,
    ) -> Work:
        """Weights and data from fixed seeds; without ``reference`` nothing is wanted of them."""
        torch.manual_seed(0)
        model = chain(kind, width, depth)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        shape = {
            "mlp": (rows, width),
            "gpt2": (rows, TOKENS, width),
            "resnet": (rows, width, SIDE, SIDE),
            "unet": (rows, width, TOP, TOP),
        }[kind]
        x, target = torch.randn(shape), torch.randn(shape)
        parts = zip(x.chunk(microbatches), target.chunk(microbatches), strict=True)
        for part, wanted in parts if reference else ():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.mse_loss(model(part), wanted)
            (loss / microbatches).backward()
        return cls(
            kind,
            width,
            depth,
            microbatches,
            weights,
            x,
            target,
            [gradients(layer) for layer in model],
            autocast,
        )  # pyright: ignore

    @property
    def device(self) -> torch.device:
        """Where the batch is."""
        return self.x.device

    def to(self, device: str) -> Work:
        """The same with the batch there; `model` gives models there, too."""
        return replace(self, x=self.x.to(device), target=self.target.to(device))

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def casting(self) -> torch.autocast:
        """What a forward, or a step, runs in."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    @property
    def rows_apart(self) -> bool:
        """Does the microbatch not matter: no statistics over rows."""
        return self.kind != "resnet"

    @property
    def limit(self) -> float:
        """How far gradients may be from the wanted ones."""
        return 2e-2 if self.autocast else LIMITS.get(self.kind, 1e-5)

    @property
    def in_line(self) -> bool:
        """Does a layer get what the one before it gives, and nothing else."""
        return self.kind != "unet"

    def save(self, path: Path) -> None:
        """Write it for other processes."""
        torch.save(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> Work:
        """Read what `save` wrote."""
        return cls(**torch.load(path))

    def model(self, kit: Any = None) -> nn.Sequential:
        """A fresh copy of the model: one child for each layer.

        Args:
            kit: where ``skippable``, ``stash``, ``pop`` and ``Namespace`` are, for a model whose
                skips go by name; else a layer gets them as further arguments, and hands them on.
        """
        model = chain(self.kind, self.width, self.depth, kit)
        with torch.no_grad():
            for own, value in zip(model.state_dict().values(), self.weights.values(), strict=True):
                own.copy_(value)
        return model.to(self.device)

    def error(self, found: Sequence[Tensor | None], *, layers: slice = slice(None)) -> float:
        """How far some gradients of these layers are from the wanted ones; infinite where one is
        missing."""
        wanted = [gradient for layer in self.wanted[layers] for gradient in layer]
        if len(found) != len(wanted) or any(gradient is None for gradient in found):
            return float("inf")
        # A bias before BatchNorm has no gradient but rounding.
        far = [
            ((mine.cpu() - its).abs().max() / its.abs().max().clamp(min=1e-6)).item()
            for mine, its in zip(found, wanted, strict=True)
        ]  # pyright: ignore
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
        q, k, v = (
            part.view(rows, tokens, 4, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
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


class Down(nn.Module):
    """Two convolutions; what they give goes down half as large, and to the other side."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def made(self, x: Tensor) -> Tensor:
        """What is skipped."""
        return F.relu(self.two(F.relu(self.one(x))))

    def forward(self, x: Tensor, *skips: Tensor) -> Any:
        """The skips of the levels above behind its own."""
        skip = self.made(x)
        return F.max_pool2d(skip, 2), skip, *skips


class Up(nn.Module):
    """A convolution of what comes up, twice as large, and of the skip of this level.

    In two halves, which is the same as one over both joined. That one's gradient of the skip is a
    slice, and torch.distributed.pipelining cannot send it ("input tensor has to be contiguous").
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(width, width, 3, padding=1),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )

    def made(self, x: Tensor, skip: Tensor) -> Tensor:
        """The output."""
        return F.relu(self.one(F.interpolate(x, scale_factor=2.0)) + self.two(skip))

    def forward(self, x: Tensor, skip: Tensor, *skips: Tensor) -> Any:
        """The skips of the levels above as they are."""
        y = self.made(x, skip)
        return (y, *skips) if skips else y


class Spread(nn.Sequential):
    """A Sequential whose layers take and give several values."""

    def forward(self, *values: Tensor) -> Any:
        """Through all layers."""
        for layer in self:
            found = layer(*values)
            values = found if isinstance(found, tuple) else (found,)
        return values if len(values) > 1 else values[0]


def unet(width: int, depth: int, kit: Any) -> nn.Sequential:
    """Down and up again, the levels by a kit's skips or by arguments."""
    half = depth // 2
    if kit is None:
        return Spread(*[Down(width) for _ in range(half)], *[Up(width) for _ in range(half)])

    @kit.skippable(stash=["skip"])
    class Stashes(Down):
        def forward(self, x: Tensor) -> Any:
            skip = self.made(x)
            yield kit.stash("skip", skip)
            return F.max_pool2d(skip, 2)

    @kit.skippable(pop=["skip"])
    class Pops(Up):
        def forward(self, x: Tensor) -> Any:
            skip = yield kit.pop("skip")
            return self.made(x, skip)

    levels: Any = [kit.Namespace() for _ in range(half)]
    down, up = (
        [Stashes(width).isolate(level) for level in levels],
        [Pops(width).isolate(level) for level in reversed(levels)],
    )
    return nn.Sequential(*down, *up)


def chain(kind: str, width: int, depth: int, kit: Any = None) -> nn.Sequential:
    """Equal layers, or those of a U-Net."""
    if kind == "unet":
        return unet(width, depth, kit)
    made = {
        "mlp": lambda: nn.Sequential(nn.Linear(width, width), nn.GELU()),
        "gpt2": lambda: Block(width),
        "resnet": lambda: Residual(width),
    }
    return nn.Sequential(*[made[kind]() for _ in range(depth)])


def gradients(module: nn.Module) -> list[Tensor | None]:
    """The gradient of each parameter."""
    return [parameter.grad for parameter in module.parameters()]
