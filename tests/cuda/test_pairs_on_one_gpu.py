"""Two actions at once on two streams of a real GPU: the same bits, and they do overlap. Skipped without CUDA."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, ids

import funcpipe as fp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("deterministic"),
]
S, M, N = 4, 6, 64
SLEEP = 20_000_000
"""Cycles: about 10 ms."""
FAMILIES = [
    fp.schedules.dualpipe_v(S, M),
    fp.schedules.pair(fp.schedules.interleaved(S, M, num_devices=2)),
    fp.schedules.pair(fp.schedules.remat(fp.schedules.interleaved(S, M, num_devices=2))),
    fp.schedules.offload(fp.schedules.dualpipe_v(S, M)),
]


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(6 * M, N, generator=g), torch.randn(6 * M, N, generator=g)


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("schedule", FAMILIES, ids=ids)
def test_the_same_bits_as_the_oracle(schedule, compiled, executor):
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(N, N), nn.BatchNorm1d(N), nn.ReLU(inplace=True), nn.Dropout(0.2)) for _ in range(S)]
    stages, params, state = zip(*(fp.from_module(one, name=str(i)) for i, one in enumerate(nets)), strict=True)
    if compiled:
        stages = [fp.compile_stage(one, backend="graph") for one in stages]
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=["cuda:0"] * schedule.num_devices)
    params, state = fp.place(plan, params), fp.place(plan, state)
    expected = fp.run_sequential(plan, params, batch(), state=state, seed=3)
    for _ in range(5):
        poison = [torch.full((N * 6,), float("nan"), device="cuda:0") for _ in range(64)]
        del poison
        assert_same_result(expected, fp.run(plan, params, batch(), state=state, seed=3, executor=executor))


spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
"""What was computed: its name, and events before and after."""


def busy(name):
    """Keep one multiprocessor busy for some 10 ms, and note when."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(SLEEP)
    end.record()
    spans.append((name, begin, end))


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        busy("F")
        return x * 2

    @staticmethod
    def backward(ctx, g):
        busy("B")
        return g * 2


@pytest.mark.parametrize("paired", [True, False])
def test_a_pair_overlaps(paired):
    """Each of two that are a pair begins before the other has ended; those that are none do not."""
    schedule = fp.schedules.pair(fp.schedules.interleaved(2, 4, num_devices=1))
    pairs = sum(len(schedule.joined(order)) for order in schedule.orders)
    assert pairs > 0
    if not paired:
        schedule = fp.schedules.unpair(schedule)
    part = fp.stage(lambda p, x: Slow.apply(x * p))
    plan = fp.make_plan([part] * 2, schedule, loss=F.mse_loss, devices="cuda:0")
    params = tuple(torch.ones((), device="cuda:0", requires_grad=True) for _ in range(2))
    x = torch.randn(8, 4, device="cuda:0")
    fp.run(plan, params, (x, x), executor="serial")
    spans.clear()
    fp.run(plan, params, (x, x), executor="serial")
    torch.cuda.synchronize()
    forwards, backwards = ([span[1:] for span in spans if span[0] == kind] for kind in "FB")
    assert len(forwards) == len(backwards) == 8
    overlapping = sum(
        first[0].elapsed_time(second[1]) > 1 and second[0].elapsed_time(first[1]) > 1
        for first in forwards
        for second in backwards
    )
    assert overlapping == (pairs if paired else 0)
