"""Stages that run in several ways on a real GPU: the bits of the oracle on streams, in pairs and as graphs. Skipped without CUDA."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import Again, assert_same_result, device_peak, ids, leveled, poison
from torch.utils.checkpoint import checkpoint

import funcpipe as fp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("deterministic"),
]
S, M, N = 4, 4, 64


FAMILIES = [
    leveled(schedule, 4)
    for schedule in [
        fp.schedules.one_f_one_b(S, M),
        fp.schedules.zero_bubble(S, M),
        fp.schedules.remat(fp.schedules.fill_drain(S, M)),
        fp.schedules.offload(fp.schedules.one_f_one_b(S, M)),
        fp.schedules.pair(fp.schedules.interleaved(S, M, num_devices=2)),
        fp.schedules.dualpipe_v(S, 6),
    ]
]


def ready(schedule):
    """Dropout, statistics, an in-place activation: eager, checkpointed, compiled, and compiled to compute again."""
    torch.manual_seed(0)
    stages, params, state = [], [], []
    for number in range(S):
        layers = [nn.Linear(N, N), nn.BatchNorm1d(N), nn.ReLU(inplace=True), nn.Dropout(0.2)]
        eager, own, statistics = fp.from_module(nn.Sequential(*layers), name=f"part{number}")
        again, *_ = fp.from_module(Again(*layers), name=f"part{number}")
        compiled = [fp.compile_stage(eager, backend="graph", recompute=keep) for keep in (False, True)]
        stages.append(fp.levels(eager, again, *compiled))
        params.append(own)
        state.append(statistics)
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=["cuda:0"] * schedule.num_devices)
    return plan, fp.place(plan, params), fp.place(plan, state)


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(48, N, generator=g), torch.randn(48, N, generator=g)


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("schedule", FAMILIES, ids=ids)
def test_the_same_bits_as_the_oracle(schedule, executor):
    plan, params, state = ready(schedule)
    expected = fp.run_sequential(plan, params, batch(), state=state, seed=3)
    for _ in range(4):
        poison(12 * N)
        assert_same_result(expected, fp.run(plan, params, batch(), state=state, seed=3, executor=executor))


def test_draws_are_those_of_one_way():
    """Whatever the level, a microbatch drops what it dropped."""
    schedule = fp.schedules.one_f_one_b(S, M)
    plan, params, state = ready(leveled(schedule, 4))
    alone = replace(schedule, levels={})
    one = fp.make_plan(plan.stages, alone, loss=F.mse_loss, devices=plan.devices)
    expected = fp.run(one, params, batch(), state=state, seed=3)
    result = fp.run(plan, params, batch(), state=state, seed=3)
    torch.testing.assert_close(result.losses, expected.losses)
    torch.testing.assert_close(result.grads, expected.grads)


def test_graphs():
    """Ways that draw nothing are recorded, those that torch checkpoints too."""

    def layer(p, x):
        return x + torch.tanh(x @ p["a"]) @ p["b"]

    def again(p, x):
        return checkpoint(layer, p, x, use_reentrant=False, preserve_rng_state=False)

    eager = fp.stage(layer)
    ways = [eager, fp.stage(again), fp.compile_stage(eager, backend="graph", recompute=True)]
    schedule = leveled(fp.schedules.one_f_one_b(S, M), 3)
    plan = fp.make_plan([fp.levels(*ways)] * S, schedule, loss=F.mse_loss, devices=["cuda:0"] * S)
    g = torch.Generator().manual_seed(0)
    params = fp.place(plan, tuple({name: torch.randn(N, N, generator=g) / 8 for name in "ab"} for _ in range(S)))
    expected = fp.run_sequential(plan, params, batch())
    with fp.graphs(plan) as graphs:
        for _ in range(3):
            result = fp.run(plan, params, batch(), executor=graphs)
            assert result.stats.executor == "graph", result.stats.reason
            assert_same_result(expected, result)


def test_a_level_keeps_less():
    """The allocator sees what a level that computes again does not keep."""
    width, rows, count = 1024, 4096, 8

    def layer(p, x):
        for _ in range(4):
            x = torch.tanh(x @ p)
        return x

    stage = fp.levels(
        fp.stage(layer), fp.stage(lambda p, x: checkpoint(layer, p, x, use_reentrant=False), name="layer")
    )
    params = tuple(torch.randn(width, width, device="cuda:0") / width**0.5 for _ in range(2))
    x = torch.randn(rows, width, device="cuda:0")
    peaks = []
    base = fp.schedules.fill_drain(2, count)
    forwards = [action for order in base.orders for action in order if action.kind is fp.Kind.F]
    for share in (0, 1, 2):
        levels = {each: int(each.microbatch % 2 < share) for each in forwards}
        plan = fp.make_plan([stage] * 2, replace(base, levels=levels), loss=F.mse_loss, devices=["cuda:0"] * 2)
        peaks.append(device_peak(partial(fp.run, plan, params, (x, x), executor="serial")))
    none, half, every = peaks
    assert every < 0.65 * none, peaks
    assert every < half < 0.9 * none, peaks
