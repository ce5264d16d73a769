"""Residuals that wait in host memory, with the real allocator and real streams. Skipped without
CUDA.

The order of copies and computations is proven without a GPU in tests/streams.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, device_peak, ids, poison

import funcpipe as fp
from funcpipe._src.devices.stream import StreamBackend
from funcpipe._src.schedules.transforms import offload
from funcpipe._src.stages.residual import EagerResidual

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("deterministic"),
]
S, M, N = 4, 4, 64
SLEEP = 20_000_000
"""Cycles: about 10 ms."""
FAMILIES = [
    fp.schedules.one_f_one_b(S, M),
    fp.schedules.interleaved(S, M, num_devices=2),
    fp.schedules.zero_bubble(S, M),
    fp.schedules.fill_drain(S, M),
]


def ready(schedule):
    """Dropout, batch norm, in-place operations, views."""
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(N, N), nn.BatchNorm1d(N), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for _ in range(S)
    ]
    stages, params, state = zip(
        *(fp.from_module(one, name=str(i)) for i, one in enumerate(nets)), strict=True
    )
    plan = fp.make_plan(
        stages, schedule, loss=F.mse_loss, devices=["cuda:0"] * schedule.num_devices
    )
    return plan, fp.place(plan, params), {"state": fp.place(plan, state), "seed": 3}


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(16, N, generator=g), torch.randn(16, N, generator=g)


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("schedule", FAMILIES, ids=ids)
def test_the_same_bits_as_the_oracle(schedule, executor):
    plan, params, options = ready(offload(schedule))
    expected = fp.run_sequential(plan, params, batch(), **options)
    for _ in range(5):
        poison(4 * N)
        assert_same_result(expected, fp.run(plan, params, batch(), executor=executor, **options))


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("out", [True, False], ids=["out", "back"])
def test_slow_copies(out, executor, monkeypatch):
    """Whoever does not wait for a copy reads what is not there yet, or overwrites what is still
    being read."""
    plan, params, options = ready(offload(fp.schedules.one_f_one_b(S, M), ahead=0))
    expected = fp.run_sequential(plan, params, batch(), **options)
    real = StreamBackend.fill

    def fill(self, target, source):
        if source.is_cuda is out:
            torch.cuda._sleep(SLEEP)
        real(self, target, source)

    monkeypatch.setattr(StreamBackend, "fill", fill)
    for _ in range(5):
        poison(4 * N)
        assert_same_result(expected, fp.run(plan, params, batch(), executor=executor, **options))


def test_memory_is_page_locked_and_the_lane_goes_on(monkeypatch):
    """O comes back before its copy has ended, and the lane's stream does not wait for it either."""
    blocked: list[bool] = []
    pinned: list[bool] = []
    move, real = EagerResidual.move, StreamBackend.fill

    def fill(self, target, source):
        if source.is_cuda:
            pinned.append(target.is_pinned())
            torch.cuda._sleep(SLEEP)
        real(self, target, source)

    def moved(self, to, **rest):
        found = move(self, to, **rest)
        if to.out and not blocked:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
            blocked.append(to._last.query())
        return found

    monkeypatch.setattr(StreamBackend, "fill", fill)
    monkeypatch.setattr(EagerResidual, "move", moved)
    plan, params, options = ready(offload(fp.schedules.fill_drain(S, M)))
    fp.run(plan, params, batch(), executor="serial", **options)
    assert [False] == blocked
    assert pinned
    assert all(pinned)


def test_the_peak_is_lower():
    """Of fill-drain with many microbatches most residuals are away; the allocator says so."""
    width, rows, count = 1024, 4096, 16
    part = fp.stage(lambda p, x: torch.tanh(torch.tanh(torch.tanh(x @ p))), name="part")
    params = tuple(torch.randn(width, width, device="cuda:0") / width**0.5 for _ in range(2))
    x = torch.randn(rows, width, device="cuda:0")
    peaks = {}
    for schedule in (fp.schedules.fill_drain(2, count), offload(fp.schedules.fill_drain(2, count))):
        plan = fp.make_plan([part] * 2, schedule, loss=F.mse_loss, devices=["cuda:0"] * 2)
        peaks[schedule.name] = device_peak(partial(fp.run, plan, params, (x, x), executor="serial"))
    kept, away = peaks.values()
    assert away < 0.6 * kept, peaks


def test_nothing_leaks():
    plan, params, options = ready(offload(fp.schedules.one_f_one_b(S, M)))
    data = tuple(t.cuda() for t in batch())
    for _ in range(3):
        fp.run(plan, params, data, **options)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(30):
        fp.run(plan, params, data, **options)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


def test_a_run_that_fails_on_its_way_leaves_a_clean_next_one(monkeypatch):
    plan, params, options = ready(offload(fp.schedules.fill_drain(S, M)))
    expected = fp.run_sequential(plan, params, batch(), **options)
    move = EagerResidual.move

    def fails(self, to, **rest):
        found = move(self, to, **rest)
        if not to.out and self.microbatch == 1:
            raise OSError("planted")
        return found

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(EagerResidual, "move", fails)
            with pytest.raises(OSError, match="planted"):
                fp.run(plan, params, batch(), **options)
        poison(4 * N)
        assert_same_result(expected, fp.run(plan, params, batch(), **options))
