"""What is measured on a real GPU: times of the device, bytes that it keeps, and schedules simulated
with them. Skipped without CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
SLEEP = 20_000_000
"""Cycles: about 10 ms."""


class Slow(torch.autograd.Function):
    """Forward some 10 ms of the device, backward some 20."""

    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(SLEEP)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        torch.cuda._sleep(2 * SLEEP)
        return g * 2


def parts(count):
    return [fp.stage(lambda p, x: Slow.apply(x * p), name="slow")] * count


def test_profile_waits_for_the_device():
    """And brings what lies elsewhere there; the bytes are those of the CPU."""
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256))
    x = torch.randn(64, 512)
    here, there = (fp.models.profile(model, x, device=device) for device in ("cpu", "cuda:0"))
    assert here.residual == there.residual
    assert all(0 < seconds < 0.1 for seconds in (*there.forward, *there.backward))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    weight = torch.ones((), device="cuda:0")
    slow = fp.models.profile(parts(1), x, params=(weight,), device="cuda:0", repeats=3, warmup=1)
    assert 0.005 < slow.forward[0] < 0.03
    assert 1.6 < slow.backward[0] / slow.forward[0] < 2.4


def test_what_computes_again_keeps_less():
    """And its backward takes longer."""

    def layer(p, x):
        for _ in range(6):
            x = torch.tanh(x @ p)
        return x

    def again(p, x):
        return torch.utils.checkpoint.checkpoint(layer, p, x, use_reentrant=False)

    ways = [fp.stage(layer), fp.stage(again, name="layer")]
    params = (torch.randn(2048, 2048, device="cuda:0") / 2048**0.5,)
    x = torch.randn(4096, 2048, device="cuda:0", requires_grad=True)
    most, least = (fp.models.profile([stage], x, params=params, device="cuda:0") for stage in ways)
    assert least.residual[0] < 0.5 * most.residual[0]
    assert least.backward[0] > 1.1 * most.backward[0]


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_plan_is_profiled_and_another_simulated(executor):
    """Lanes of one device run next to each other here: sleeping takes one multiprocessor each."""
    plan = fp.make_plan(
        parts(3), fp.schedules.one_f_one_b(3, 4), loss=F.mse_loss, devices=["cuda:0"] * 3
    )
    params = tuple(torch.ones((), device="cuda:0", requires_grad=True) for _ in range(3))
    x = torch.randn(16, 4, device="cuda:0")
    cost = fp.models.profile_plan(plan, params, (x, x), executor=executor, repeats=3, warmup=1)
    assert all(0.005 < seconds < 0.03 for seconds in cost.forward)
    for schedule in (fp.schedules.fill_drain(3, 8), fp.schedules.one_f_one_b(3, 8)):
        other = fp.make_plan(plan.stages, schedule, loss=F.mse_loss, devices=plan.devices)
        fp.run(other, params, (x, x), executor=executor)
        timeline = fp.run(other, params, (x, x), executor=executor, record=True).timeline
        assert 0.85 < fp.simulate(schedule, cost).makespan / timeline.makespan < 1.15


def test_memory_is_what_the_allocator_says():
    """Of all layers together: what lives until the backward, and the input."""
    width, rows = 1024, 2048
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4))
    ).cuda()
    x = torch.randn(rows, width, device="cuda:0")
    found = fp.models.memory(model, x, device="cuda:0")
    model(x).sum().backward()  # what the libraries keep once
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = model(x)
    held = torch.cuda.memory_allocated() - before
    del y
    assert sum(layer.activations for layer in found) == held + x.nbytes, found
