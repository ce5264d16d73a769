"""AmoebaNet-D as GPipe and torchgpipe measured it, written from the genotype, and what torchgpipe
published.

A cell gets the outputs of the two before it, brings both to its width by 1x1 convolutions, and
joins them by five pairs of operations, each pair added to a new state; some states are
concatenated. A stem, two reducing cells, then three rows of L/3 normal cells with a reducing one
(half the size, twice the width) between them, then the classifier. Widths start at D/4. The
genotype is that of the TensorFlow implementation (states 0, 3, 4, 6 of a normal cell are its
output), in which, as in torchgpipe, "max_pool_3x3" is an average pool: that changes no count of
parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


def unit(
    given: int, taken: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1
) -> list[nn.Module]:
    """ReLU, convolution, batch norm."""
    padding = tuple(k // 2 for k in kernel) if isinstance(kernel, tuple) else kernel // 2
    return [
        nn.ReLU(),
        nn.Conv2d(given, taken, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(taken),
    ]


class Halve(nn.Module):
    """Half the size, without losing every other pixel: two convolutions of stride 2, one shifted by
    a pixel."""

    def __init__(self, given: int, taken: int) -> None:
        super().__init__()
        self.left = nn.Conv2d(given, taken // 2, 1, 2, bias=False)
        self.right = nn.Conv2d(given, taken // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(taken)

    def forward(self, x):
        x = x.relu()
        shifted = nn.functional.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        return self.norm(torch.cat((self.left(x), self.right(shifted)), dim=1))


def operation(name: str, width: int, stride: int) -> nn.Module:
    quarter = width // 4
    match name:
        case "same":
            return nn.Identity() if stride == 1 else Halve(width, width)
        case "pool 3":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "pool 2":
            return nn.MaxPool2d(2, stride)
        case "1x1":
            return nn.Sequential(*unit(width, width, stride=stride))
        case "3x3":
            inside = unit(quarter, quarter, 3, stride=stride)
            return nn.Sequential(*unit(width, quarter), *inside, *unit(quarter, width))
        case _:  # 1x7, then 7x1
            rows = unit(quarter, quarter, (1, 7))
            columns = unit(quarter, quarter, (7, 1))
            return nn.Sequential(*unit(width, quarter), *rows, *columns, *unit(quarter, width))


NORMAL = [
    "1 1x1",
    "1 pool 3",
    "1 same",
    "0 7x7",
    "0 1x1",
    "0 7x7",
    "2 pool 3",
    "2 same",
    "1 pool 3",
    "5 1x1",
]
REDUCING = [
    "0 pool 2",
    "0 pool 3",
    "2 same",
    "1 3x3",
    "2 7x7",
    "2 pool 3",
    "3 same",
    "1 pool 2",
    "2 pool 3",
    "3 1x1",
]


class Cell(nn.Module):
    def __init__(self, older: int, newer: int, width: int, *, reduces: bool, halves: bool) -> None:
        super().__init__()
        self.genes = [(int(gene[0]), gene[2:]) for gene in (REDUCING if reduces else NORMAL)]
        self.taken = (4, 5, 6) if reduces else (0, 3, 4, 6)
        self.newer = nn.Sequential(*unit(newer, width))
        self.older = (
            Halve(older, width)
            if halves
            else nn.Sequential(*unit(older, width))
            if older != width
            else nn.Identity()
        )
        # Of a reducing cell only the states 0 and 1 have the full size.
        steps = [2 if reduces and state < 2 else 1 for state, _ in self.genes]
        self.operations = nn.ModuleList(
            operation(name, width, step) for (_, name), step in zip(self.genes, steps, strict=True)
        )

    def forward(self, x):
        newer, older = x if isinstance(x, tuple) else (x, x)
        states = [self.newer(newer), self.older(older)]
        done = [(call, state) for call, (state, _) in zip(self.operations, self.genes, strict=True)]
        for (left, one), (right, two) in zip(done[::2], done[1::2], strict=True):
            states.append(left(states[one]) + right(states[two]))
        return torch.cat([states[number] for number in self.taken], dim=1), newer


class First(nn.Module):
    """The output of the last cell alone."""

    def forward(self, x):
        return x[0]


def amoebanet(num_layers: int, filters: int) -> nn.Sequential:
    """The Sequential of L + 6 layers, on torch's current default device."""
    width = filters // 4
    stem = nn.Sequential(nn.ReLU(), nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width))
    layers: list[nn.Module] = [stem]
    older = newer = width
    halves = False
    row = [False] * (num_layers // 3)
    for reduces in (True, True, *row, True, *row, True, *row):
        width *= 2 if reduces else 1
        layers.append(Cell(older, newer, width, reduces=reduces, halves=halves))
        older, newer, halves = newer, width * len(layers[-1].taken), reduces
    return nn.Sequential(
        *layers, nn.Sequential(First(), nn.AvgPool2d(7), nn.Flatten(), nn.Linear(newer, 1000))
    )


class Published(NamedTuple):
    """A column of the published table, and how it was run (batches of 128 images of 224 x 224 in
    128 microbatches, RMSprop).

    Attributes:
        num_layers, filters: L and D.
        parameters: how many, in millions, to one place.
        model: GiB of parameters, gradients and RMSprop's one average.
        activations: what torch 1.3 had reserved at its peak besides, in GiB on all devices
            together.
        balance: layers of each stage.
    """

    num_layers: int
    filters: int
    parameters: float
    model: float
    activations: float
    balance: tuple[int, ...]


PUBLISHED = {
    "pipeline-1": Published(18, 416, 319.0, 3.57, 0.91, (24,)),
    "pipeline-2": Published(18, 544, 542.7, 6.07, 3.39, (16, 8)),
    "pipeline-4": Published(36, 544, 1055.8, 11.80, 6.91, (16, 12, 7, 7)),
    "pipeline-8": Published(72, 512, 1844.9, 20.62, 10.83, (23, 16, 11, 6, 6, 5, 5, 6)),
}
