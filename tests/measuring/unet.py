"""The U-Net of torchgpipe's memory benchmark, written from its description, and what that benchmark
published.

Every layer is a layer of one flat Sequential: depth 5; a block is B times (3x3 convolution without
bias, dropout of channels, instance norm without weights, leaky ReLU out of place); an encoder block
is followed by a max pool, a decoder block preceded by an upsampling and the concatenation with the
encoder's output. An encoder of level i has C * 2**i channels; the bottleneck C * 2**5 inside and
half of that at its end; a decoder of level i has C * 2**(i - 1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

import funcpipe as fp
from funcpipe._src.models.skippable import Namespace, pop, skippable, stash

DEPTH = 5


@skippable(stash=["skip"])
class Keep(nn.Module):
    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Join(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return torch.cat((x, skip), dim=1)


def block(given: int, inside: int, taken: int, convs: int) -> list[nn.Module]:
    widths = [given, *[inside] * (convs - 1), taken]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.Dropout2d(0.1)]
        layers += [nn.InstanceNorm2d(after), nn.LeakyReLU(0.01)]
    return layers


def unet(convs: int, channels: int) -> nn.Sequential:
    """The flat Sequential of 44 B + 21 layers, on torch's current default device."""
    spaces = [Namespace(f"level{level}") for level in range(DEPTH)]
    layers: list[nn.Module] = []
    before = 3
    for level, space in enumerate(spaces):
        width = channels * 2**level
        layers += [*block(before, width, width, convs), Keep().isolate(space), nn.MaxPool2d(2)]
        before = width
    layers += block(before, 2 * before, before, convs)
    for level, space in reversed(list(enumerate(spaces))):
        width = channels * 2**level // 2
        layers += [
            nn.Upsample(scale_factor=2),
            Join().isolate(space),
            *block(4 * width, width, width, convs),
        ]
    return nn.Sequential(*layers, nn.Conv2d(channels // 2, 1, 1, bias=False))


class Published(NamedTuple):
    """A row of the published table, and how it was run (batches of 32 images of 192 x 192, plain
    SGD).

    Attributes:
        convs, channels: B and C.
        parameters: how many, in millions, to one place.
        total: GiB that torch 1.3 had reserved on all devices: parameters, gradients, activations.
        balance: layers of each stage.
        chunks: microbatches.
    """

    convs: int
    channels: int
    parameters: float
    total: float
    balance: tuple[int, ...]
    chunks: int


def except_last(num_stages: int, chunks: int) -> fp.Schedule:
    """What torchgpipe runs: all forwards, then backwards from the last microbatch on, each but that
    one after remat."""
    last = chunks - 1
    forwards = [(fp.Kind.F, m) for m in range(chunks)]
    backwards = [(kind, m) for m in range(last, -1, -1) for kind in (fp.Kind.R, fp.Kind.B)]
    order = [one for one in (*forwards, *backwards) if one != (fp.Kind.R, last)]
    return fp.Schedule(
        tuple(tuple(fp.Action(kind, s, m) for kind, m in order) for s in range(num_stages))
    )


PUBLISHED = {
    "baseline": Published(6, 72, 362.2, 20.3, (285,), 1),
    "pipeline-1": Published(11, 128, 2213.8, 20.5, (505,), 32),
    "pipeline-2": Published(24, 128, 4993.9, 43.4, (526, 551), 32),
    "pipeline-4": Published(24, 160, 7802.9, 79.1, (472, 54, 36, 515), 32),
    "pipeline-8": Published(48, 160, 15822.2, 154.1, (800, 140, 62, 36, 36, 36, 36, 987), 128),
}
