"""Stages of many kinds of modules, each between two others."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

import funcpipe as fp


class Block(nn.Module):
    """A transformer's block in plain torch."""

    def __init__(self, width=16, heads=2, dropout=0.0):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        )
        a = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class Twice(nn.Module):
    """A weight that is used twice, one that is not used, a view of a weight, an in-place operation
    on the input."""

    def __init__(self):
        super().__init__()
        self.w, self.unused, self.v = (nn.Parameter(torch.randn(6, 6)) for _ in range(3))

    def forward(self, x):
        x.mul_(2.0)
        return torch.tanh(x @ self.w) @ self.w + self.v.view(36)[:6]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return Square.apply(x * self.w) + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


ZOO = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)),
        (8, 6),
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6, bias=False)),
        (8, 5, 6),
    ),
    "layer norm": (
        lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.LayerNorm(6)),
        (8, 6),
    ),
    "conv, batch norm": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 3, 3, stride=2),
            nn.MaxPool2d(2),
        ),
        (8, 3, 16, 16),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.SiLU()),
        (8, 4, 12),
    ),
    "transposed conv": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(3, 4, 3), nn.Upsample(scale_factor=2), nn.AdaptiveAvgPool2d(3)
        ),
        (8, 3, 6, 6),
    ),
    "block": (Block, (8, 5, 16)),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        (8, 5, 16),
    ),
    "attention": (
        lambda: nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
        None,
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.RReLU(), nn.AlphaDropout(0.1)),
        (8, 6),
    ),
    "twice": (Twice, (8, 6)),
    "custom": (Custom, (8, 6)),
    "checkpointed": (Checkpointed, (8, 6)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), (8, 6)),
    "identity": (nn.Identity, (8, 6)),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LogSoftmax(-1), nn.PReLU()), (8, 6)),
    "flatten": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.Unflatten(1, (2, 3))),
        (8, 3, 4),
    ),
}


def pair(kind):
    """The stages of a net with one of the zoo in the middle, its parameters, state and a batch."""
    torch.manual_seed(1)
    make, shape = ZOO[kind]
    if shape is None:
        make, shape = (
            (
                lambda: nn.Sequential(
                    Block(16, 2, 0.1),
                    nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
                )
            ),
            (8, 5, 16),
        )
    made = [
        fp.from_module(m, name=f"s{i}") for i, m in enumerate((nn.Tanh(), make(), nn.Softplus()))
    ]
    stages, params, state = zip(*made, strict=True)
    x = torch.randn(*shape)
    with torch.no_grad():
        y = fp.apply(stages, params, x, state=state, train=False).y
    return stages, params, state, (x, torch.randn_like(y))
