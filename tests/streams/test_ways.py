"""Stages of several kinds, layers that are computed again, draws: in order on streams that overlap,
and the bits."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import Again, assert_same_result, ids

import funcpipe as fp

S, M = 4, 4


@functools.cache
def of_each_kind():
    """Batch norm, an in-place activation, dropout; eager, checkpointed, compiled, and compiled to
    compute again. All runs use the same: none writes into parameters or state."""
    torch.manual_seed(0)
    made = []
    for number in range(S):
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.2)]
        eager, params, state = fp.from_module(nn.Sequential(*layers), name=f"part{number}")
        again, *_ = fp.from_module(Again(*layers), name=f"part{number}")
        compiled = [
            fp.compile_stage(eager, backend="graph", recompute=keep) for keep in (False, True)
        ]
        made.append(((eager, again, *compiled), params, state))
    return tuple(zip(*made, strict=True))


@pytest.mark.parametrize(
    ("devices", "executor"),
    [(["cpu:0", "cpu:0"], "serial"), (["cpu:0", "cpu:1"], "threads")],
    ids=["one device", "two devices"],
)
@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.pair(fp.schedules.interleaved(S, M, num_devices=2)),
        fp.schedules.dualpipe_v(S, M),
        fp.schedules.offload(fp.schedules.one_f_one_b(S, M, num_devices=2)),
    ],
    ids=ids,
)
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (1,)], ids=["each kind", "checkpointed"])
def test_they_are_in_order(chosen, schedule, devices, executor, backend):
    """Whichever stream a forward was on, its backward finds what it drew."""
    kinds, params, state = of_each_kind()
    stages = [own[chosen[number % len(chosen)]] for number, own in enumerate(kinds)]
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(8, 4, generator=generator) for _ in "xy")
    options = {"state": state, "seed": 1, "threads_per_lane": 1}
    plain = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
    expected = fp.run_sequential(plain, params, batch, **options)
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices)
    recorder = backend()
    for stage, tree in enumerate(zip(params, state, strict=True)):
        recorder.put(tree, torch.device(devices[schedule.device_of[stage]]))
    with recorder.watching() if executor == "serial" else nullcontext():
        result = fp.run(plan, params, batch, executor=executor, **options)
    assert [] == recorder.finish()
    assert_same_result(expected, result)
