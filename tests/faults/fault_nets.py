"""Stages without state or draws, rows independent of each other; and the same numbers by plain
autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fault_rig import WIDTH, S

import funcpipe as fp


def linear(p, x):
    return torch.tanh(x @ p["w"])


def function_plan(schedule, loss=F.mse_loss, count=S, fn=linear, **options):
    """Stages without state or draws, rows independent of each other."""
    return fp.make_plan(
        [fp.stage(fn, name=f"s{i}") for i in range(count)],
        schedule,
        loss=loss,
        devices="cpu",
        **options,
    )


def weights(count=S):
    g = torch.Generator().manual_seed(0)
    return tuple(
        {"w": torch.randn(WIDTH, WIDTH, generator=g, dtype=torch.float64)} for _ in range(count)
    )


def rows(count):
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, count, WIDTH, generator=g, dtype=torch.float64))


def plain(params, x, target):
    """Loss and gradients of plain autograd over the whole batch."""
    own = [{"w": p["w"].detach().clone().requires_grad_()} for p in params]
    for p in own:
        x = linear(p, x)
    loss = F.mse_loss(x, target)
    loss.backward()
    return loss.detach(), [p["w"].grad for p in own]


def assert_plain(result, params, x, target):
    loss, grads = plain(params, x, target)
    torch.testing.assert_close(result.loss, loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fp.leaves(result.grads), grads, rtol=1e-10, atol=1e-12)
