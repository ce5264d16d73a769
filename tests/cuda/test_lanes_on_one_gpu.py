"""Lanes as streams of one real GPU: the same bits, no race, no memory given out too early. Skipped
without CUDA.

The order itself is proven without a GPU in tests/streams; here the real allocator and the real
streams have their say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import Again, assert_same_result, device_peak, ids, poison, same, schedules

import funcpipe as fp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("deterministic"),
]
S, M = 4, 4
SLEEP = 20_000_000
"""Cycles: about 10 ms."""


def net(slow: int | None = None, width: int = 64):
    """Skips, values handed on unchanged, an in-place operation; stage ``slow`` keeps its stream
    busy first."""

    def busy(index):
        if slow == index:
            torch.cuda._sleep(SLEEP)

    @fp.stage(stash=["far"])
    def first(p, x):
        busy(0)
        h = torch.tanh(x @ p["w"])
        return fp.Out((h, x), stash={"far": h * 2})

    @fp.stage(pop=["far"])
    def second(p, x, *, skips):
        busy(1)
        h, x0 = x
        return F.relu(h.mul_(1.5) @ p["w"] + skips["far"]), x0

    @fp.stage
    def third(p, x):
        busy(2)
        h, x0 = x
        return h @ p["w"] + x0

    @fp.stage(pop=["far"])
    def fourth(p, x, *, skips):
        busy(3)
        return x.add_(skips["far"]) @ p["w"]

    g = torch.Generator().manual_seed(0)
    params = tuple({"w": torch.randn(width, width, generator=g) / width**0.5} for _ in range(S))
    return (first, second, third, fourth), params


def batch(rows: int = 16, width: int = 64):
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=g), torch.randn(rows, width, generator=g)


def ready(schedule, *, slow=None, devices=None, width=64, **options):
    stages, params = net(slow, width)
    devices = devices or ["cuda:0"] * schedule.num_devices
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices, **options)
    return plan, fp.place(plan, params)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("slow", [None, 0, 3])
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_steps_in_runs_are_those_after_them(executor, slow, fused):
    """Whichever stage keeps its stream busy; and those of batches that follow each other without a
    pause."""
    schedule = fp.schedules.one_f_one_b(S, M)
    plain, wanted = ready(schedule, slow=slow)
    stepping, params = ready(fp.schedules.step_params(schedule), slow=slow)
    theirs, mine = (
        torch.optim.AdamW(fp.leaves(own), lr=0.05, fused=fused) for own in (wanted, params)
    )
    norms = []
    for number in range(6):
        norms.append(fp.step(theirs, wanted, fp.run(plain, wanted, batch(), executor=executor)))
        if number < 3:
            result = fp.run(stepping, params, batch(), optimizer=mine, executor=executor)
            poison(16 * 64)
            assert same(norms[-1], result.norm)
            assert same(wanted, params)
    results = fp.run_batches(stepping, params, [batch()] * 3, optimizer=mine, executor=executor)
    poison(16 * 64)
    torch.testing.assert_close(
        [result.norm.cpu() for result in results], [norm.cpu() for norm in norms[3:]]
    )
    assert same(wanted, params)


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("schedule", schedules(S, M), ids=ids)
def test_the_same_bits_as_the_oracle(schedule, executor):
    plan, params = ready(schedule, outputs=True)
    expected = fp.run_sequential(plan, params, batch())
    for _ in range(3):
        assert_same_result(expected, fp.run(plan, params, batch(), executor=executor))


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("slow", range(S))
@pytest.mark.parametrize(
    "devices", [["cuda:0"] * S, ["cuda:0", "cpu"] * 2, ["cpu", "cuda:0"] * 2], ids=str
)
def test_slow_producers(devices, slow, executor):
    """Whoever reads too early reads what is not there yet; poison shows who reads what was given
    away."""
    schedule = fp.schedules.one_f_one_b(S, M)
    plan, params = ready(schedule, devices=devices)
    expected = fp.run_sequential(plan, params, batch())
    slowed, _ = ready(schedule, slow=slow, devices=devices)
    for _ in range(10):
        poison(16 * 64)
        result = fp.run(slowed, params, batch(), executor=executor)
        poison(16 * 64)
        assert_same_result(expected, result)


def test_the_caller_may_go_on_at_once():
    """Inputs made, and results used and dropped, on the caller's stream without any
    synchronisation."""
    plan, params = ready(fp.schedules.one_f_one_b(S, M), slow=3, outputs=True)
    x, target = (t.cuda() for t in batch())
    expected = fp.run_sequential(plan, params, (x * 2, target))
    wanted = expected.outputs.sum(), expected.loss * 3
    for _ in range(20):
        torch.cuda._sleep(SLEEP)
        result = fp.run(plan, params, (x * 2, target))
        got = result.outputs.sum(), result.loss * 3
        del result
        poison(16 * 64)
        assert same(wanted, got)


def test_on_a_stream_of_the_caller():
    plan, params = ready(fp.schedules.one_f_one_b(S, M))
    expected = fp.run_sequential(plan, params, batch())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        x, target = (t.cuda(non_blocking=True) for t in batch())
        result = fp.run(plan, params, (x, target))
    stream.synchronize()
    assert_same_result(expected, result)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_inside_of_an_outer_backward(executor):
    """As a module would use vjp: the engine calls the pullback on its own thread of the device. It
    must not lock up."""
    stages, params = net()
    plan = fp.make_plan(
        stages, fp.schedules.remat(fp.schedules.fill_drain(S, M)), devices=["cuda:0"] * S
    )
    placed = tuple({"w": p["w"].cuda().requires_grad_()} for p in params)

    class Pipe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *weights):
            own = tuple({"w": w} for w in weights)
            result, ctx.pullback = fp.vjp(plan, own, x, executor=executor, timeout=60)
            return result.outputs

        @staticmethod
        def backward(ctx, g):
            grads, back = ctx.pullback(g)
            return back, *(own["w"] for own in grads)

    x = batch()[0].cuda().requires_grad_()
    for _ in range(5):
        y = Pipe.apply(x * 2, *(p["w"] for p in placed))
        (y * y).sum().backward()
    got = [x.grad / 5, *(p["w"].grad / 5 for p in placed)]
    leaf = x.detach().clone().requires_grad_()
    own = tuple({"w": p["w"].detach().clone().requires_grad_()} for p in placed)
    fp.apply(stages, own, leaf * 2).y.square().sum().backward()
    for a, b in zip(got, [leaf.grad, *(p["w"].grad for p in own)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_modules_with_batch_norm_and_dropout():
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for _ in range(S)
    ]
    stages, params, state = zip(
        *(fp.from_module(one, name=str(i)) for i, one in enumerate(nets)), strict=True
    )
    plan = fp.make_plan(
        stages,
        fp.schedules.remat(fp.schedules.one_f_one_b(S, M)),
        loss=F.mse_loss,
        devices=["cuda:0"] * S,
    )
    params, state = fp.place(plan, params), fp.place(plan, state)
    expected = fp.run_sequential(plan, params, batch(), state=state, seed=3)
    for executor in ("serial", "threads"):
        assert_same_result(
            expected, fp.run(plan, params, batch(), state=state, seed=3, executor=executor)
        )


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_layers_that_are_computed_again_drop_what_they_dropped(executor):
    """The generator is the device's: what one lane computes again must not set it while another
    lane draws."""

    nets = [
        nn.Sequential(
            *(Again(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Dropout(0.5)) for _ in range(4))
        )
        for _ in range(S)
    ]
    stages, params, state = zip(
        *(fp.from_module(one, name=str(i)) for i, one in enumerate(nets)), strict=True
    )
    plan = fp.make_plan(
        stages, fp.schedules.one_f_one_b(S, 8), loss=F.mse_loss, devices=["cuda:0"] * S
    )
    params, state = fp.place(plan, params), fp.place(plan, state)
    before = torch.cuda.get_rng_state()
    expected = fp.run_sequential(plan, params, batch(32), state=state, seed=3)
    for _ in range(10):
        assert_same_result(
            expected, fp.run(plan, params, batch(32), state=state, seed=3, executor=executor)
        )
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_peak_memory_is_the_schedules():
    """1F1B holds at most S - s microbatches at stage s, fill-drain all of them; the allocator says
    so."""
    width, rows, count = 1024, 4096, 16
    part = fp.stage(lambda p, x: torch.tanh(torch.tanh(torch.tanh(x @ p))), name="part")
    params = tuple(torch.randn(width, width, device="cuda:0") / width**0.5 for _ in range(S))
    x = torch.randn(rows, width, device="cuda:0")
    peaks = {}
    for schedule in (
        fp.schedules.fill_drain(S, count),
        fp.schedules.one_f_one_b(S, count),
        fp.schedules.remat(fp.schedules.one_f_one_b(S, count)),
    ):
        plan = fp.make_plan([part] * S, schedule, loss=F.mse_loss, devices=["cuda:0"] * S)
        peaks[schedule.name] = device_peak(partial(fp.run, plan, params, (x, x), executor="serial"))
    fill, steady, rematted = peaks.values()
    held = sum(min(count, S - s) for s in range(S)) / (S * count)
    assert steady < (held + 0.25) * fill, peaks
    assert rematted < steady, peaks


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_measured_run_has_the_times_of_the_device(executor):
    """Not those of the host, which queues all of it in less than one action takes."""
    schedule = fp.schedules.one_f_one_b(S, M)
    plan, params = ready(schedule, slow=2)
    fp.run(plan, params, batch(), executor=executor)
    timeline = fp.run(plan, params, batch(), executor=executor, record=True).timeline
    slow = [span for span in timeline.spans if str(span.action).startswith("2F")]
    rest = [span for span in timeline.spans if span not in slow]
    assert M == len(slow)
    assert min(span.end - span.start for span in slow) > 0.005
    assert sum(span.end - span.start < 0.004 for span in rest) > 0.8 * len(rest)
    assert timeline.makespan > M * 0.005
    for lane, order in enumerate(schedule.orders):
        assert [*order] == [span.action for span in timeline.spans if span.device == lane]


def test_nothing_leaks():
    plan, params = ready(fp.schedules.one_f_one_b(S, M))
    data = tuple(t.cuda() for t in batch())
    for _ in range(3):
        fp.run(plan, params, data)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(50):
        fp.run(plan, params, data)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_out_of_memory_says_what_to_do():
    part = fp.stage(lambda p, x: x * p + torch.empty(1 << 50, device="cuda:0").sum(), name="huge")
    plan = fp.make_plan([part], fp.schedules.fill_drain(1, 2), loss=F.mse_loss, devices="cuda:0")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fp.run(plan, (torch.ones(4, device="cuda:0"),), (torch.ones(2, 4), torch.ones(2, 4)))
    assert any(
        "GiB are free" in note and "fp.schedules.remat" in note for note in caught.value.__notes__
    )


def in_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "import torch, torch.nn.functional as F, funcpipe as fp\n" + textwrap.dedent(code)
    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=env,
    )


def test_torchs_own_sanitizer_finds_no_race():
    """TORCH_CUDA_SANITIZER watches every kernel's reads and writes over all streams; it must see a
    planted race."""
    run = """
    part = fp.stage(lambda p, x: torch.tanh(x @ p), name="part")
    plan = fp.make_plan([part] * 4, fp.schedules.one_f_one_b(4, 4), loss=F.mse_loss, devices=["cuda:0"] * 4)
    params = tuple(torch.eye(8, device="cuda:0") for _ in range(4))
    x = torch.randn(8, 8)
    for _ in range(3):
        fp.run(plan, params, (x, x), executor="serial")
    torch.cuda.synchronize()
    print("CLEAN")
    """
    done = in_process(run, TORCH_CUDA_SANITIZER="1")
    assert "CLEAN" in done.stdout, done.stderr[-3000:]
    assert "data race" not in done.stderr.lower(), done.stderr[-3000:]
    planted = """
    from funcpipe._src.devices.stream import Place
    Place.wait = lambda self, event: None
    """
    raced = in_process(planted + run, TORCH_CUDA_SANITIZER="1")
    assert "CLEAN" not in raced.stdout or "data race" in raced.stderr.lower()


def test_a_device_assert_ends_this_run():
    """An index out of range is an error of this run, not of the next; the process' CUDA context is
    lost."""
    done = in_process("""
    part = fp.stage(lambda p, x: (p[x.long() + 100].sum(-1, keepdim=True), print())[0], name="index")
    plan = fp.make_plan([part], fp.schedules.fill_drain(1, 2), loss=F.mse_loss, devices="cuda:0")
    try:
        result = fp.run(plan, (torch.ones(4, 4, device="cuda:0"),), (torch.zeros(2, 1), torch.zeros(2, 1, 1)))
        float(result.loss)
    except Exception as error:
        print("RAISED", type(error).__name__)
    """)
    assert "RAISED" in done.stdout, done.stderr[-2000:]
