"""A small model, its stages, a batch, and what plain autograd says of them."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import funcpipe as fp


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def parts(whole=None):
    """The model, its two stages, their params."""
    whole = model() if whole is None else whole
    stages, params, _ = zip(fp.from_module(whole[:2]), fp.from_module(whole[2:]), strict=True)
    return whole, stages, params


def batch(rows=8):
    return torch.randn(rows, 4), torch.randint(0, 3, (rows,))


def plan_of(stages, count=4, loss=F.cross_entropy, **options):
    return fp.make_plan(
        stages, fp.schedules.one_f_one_b(len(stages), count), loss=loss, devices="cpu", **options
    )


def setup(**options):
    """The model, its plan, the params."""
    whole, stages, params = parts()
    return whole, plan_of(stages, **options), params


def equals_plain(whole, given, result, loss=F.cross_entropy):
    """Loss and gradients are those of the model in one piece."""
    x, target = given
    expected = loss(whole(x), target)
    names, weights = zip(
        *((n, p) for n, p in whole.named_parameters() if p.requires_grad), strict=True
    )
    found = {name: gradient for tree in result.grads for name, gradient in tree.items()}
    torch.testing.assert_close(result.loss, expected.detach())
    for name, gradient in zip(names, torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(found[name], gradient)


def refused(message):
    """A context that expects a PlanError with this message."""
    return pytest.raises(fp.PlanError, match=message)


def squares(function, params, *, rows=8, x=None, **options):
    """A run of one stage that is a function, against zeros."""
    stage = fp.stage(function, name="stage")
    x = torch.ones(rows, 4) if x is None else x
    return fp.run(
        plan_of([stage], loss=F.mse_loss), (params,), (x, torch.zeros(rows, 4)), **options
    )


def row_mean(y, target):
    """A loss that needs no target."""
    return y.sum() / len(y)


def residual(p, x):
    """A stage of two matrices beside an identity."""
    return x + torch.tanh(x @ p["a"]) @ p["b"]


def residual_params(count):
    """The params of some stages like `residual`, the same in each call."""
    generator = torch.Generator().manual_seed(3)
    return tuple(
        {name: torch.randn(6, 6, generator=generator) * 0.3 for name in "ab"} for _ in range(count)
    )
