"""autocast, loss scales and torch's GradScaler, against the plain loop of PyTorch's notes on
AMP."""

import functools

import pytest
import torch
import torch.nn as nn
from common import same, snapshot
from plain import Pair

import funcpipe as fp


def amp_pair():
    """Large inputs, so that float16 gradients overflow at large scales."""
    pair = Pair(torch.float32)
    return pair, [(x * 4, t) for x, t in pair.batches(12)]


def plain_amp_step(pair, optimizer, scaler, batch, dtype, max_norm):
    """Autocast, scaled backward by microbatches, unscale, clip, step, update: the loop of PyTorch's
    AMP notes."""
    optimizer.zero_grad()
    x, t = batch
    start = 0
    for rows in (4, 3, 3):
        part = slice(start, start + rows)
        with torch.autocast("cpu", dtype):
            loss = pair.loss(pair.plain(x[part]), t[part]) * (rows / len(x))
        scaler.scale(loss).backward()
        start += rows
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


@pytest.fixture
def one_thread():
    """Kernels round by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
FUSED = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)


@pytest.mark.parametrize(
    ("dtype", "make", "executor"),
    [
        pytest.param(torch.float16, SGD, "serial", id="float16-sgd"),
        pytest.param(torch.float16, ADAMW, "threads", id="float16-adamw"),
        pytest.param(torch.float16, FUSED, "serial", id="float16-fused"),
        pytest.param(torch.bfloat16, ADAMW, "threads", id="bfloat16-adamw"),
        pytest.param(torch.bfloat16, FUSED, "serial", id="bfloat16-fused"),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_mixed_precision_is_the_plain_loop(dtype, make, executor):
    """autocast and a GradScaler: skips, norms, scales that grow and back off, parameters: the bits
    of a plain loop."""
    pair, batches = amp_pair()
    options = {"init_scale": 2.0**24, "growth_interval": 3, "backoff_factor": 0.125}
    my_scaler, their_scaler = (torch.amp.GradScaler("cpu", **options) for _ in range(2))
    mine, theirs = make(fp.leaves(pair.params)), make(pair.in_order())
    scales, skipped = [], []
    for x, t in batches:
        before = snapshot(pair.params)
        options = {"loss_scale": my_scaler.get_scale(), "executor": executor, "threads_per_lane": 1}
        with torch.autocast("cpu", dtype):
            result = fp.run(pair.plan, pair.params, (x, t), **options)
        norm = fp.step(mine, pair.params, result.grads, max_norm=0.7, scaler=my_scaler)
        my_scaler.update()
        expected = plain_amp_step(pair, theirs, their_scaler, (x, t), dtype, 0.7)
        skipped.append(same(before, snapshot(pair.params)))
        assert skipped[-1] == (not bool(norm.isfinite()))
        assert same(expected, norm)
        scales.append(my_scaler.get_scale())
        assert their_scaler.get_scale() == scales[-1]
        assert their_scaler.state_dict() == my_scaler.state_dict()
    if dtype == torch.float16:
        assert any(skipped)
        assert not all(skipped)
    assert any(b > a for a, b in zip(scales, scales[1:], strict=False))
    pair.assert_equal(rtol=0, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("place", [(0, "0.weight"), (1, "5.bias")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_what_is_not_finite_anywhere_skips_everything(bad, place, max_norm):
    """An optimizer for each stage, one bad number in one of them: none steps, no state is made, the
    scale backs off."""
    pair = Pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.AdamW(fp.leaves(tree), lr=0.1) for tree in pair.params]
    grads = fp.run(pair.plan, pair.params, pair.batches(1)[0], loss_scale=8.0).grads
    grads[place[0]][place[1]].view(-1)[1] = bad
    before, given = snapshot(pair.params), snapshot(grads)
    for optimizer in optimizers:
        norm = fp.step(optimizer, pair.params, grads, max_norm=max_norm, scaler=scaler)
        assert not norm.isfinite()
        assert not optimizer.state
    scaler.update()
    assert 4.0 == scaler.get_scale()
    assert same(before, snapshot(pair.params))
    assert same(given, snapshot(grads))
    assert all(leaf.grad is None for leaf in fp.leaves(pair.params))


def test_an_optimizer_for_each_stage_with_a_scaler():
    """Steps of two optimizers with one scaler and one norm are those of one optimizer over all;
    grads are not written."""
    one, two = Pair(), Pair()
    whole = torch.optim.AdamW(fp.leaves(one.params), lr=0.1)
    halves = [torch.optim.AdamW(fp.leaves(tree), lr=0.1) for tree in two.params]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2) for _ in range(2)]
    for batch in one.batches():
        grads = [
            fp.run(p.plan, p.params, batch, loss_scale=s.get_scale()).grads
            for p, s in zip((one, two), scalers, strict=True)
        ]
        given = snapshot(grads)
        norm = fp.step(whole, one.params, grads[0], max_norm=0.1, scaler=scalers[0])
        norms = [
            fp.step(half, two.params, grads[1], max_norm=0.1, scaler=scalers[1]) for half in halves
        ]
        for scaler in scalers:
            scaler.update()
        assert all(norm.equal(one) for one in norms)
        assert same(given, snapshot(grads))
    assert 2.0**43 == scalers[1].get_scale()
    assert same(snapshot(one.params), snapshot(two.params))


def test_a_disabled_scaler_does_nothing():
    """``GradScaler(enabled=False)``, as scripts have it for bfloat16: the same bits as without."""
    pairs = Pair(), Pair()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for pair, extra in zip(pairs, ({}, {"scaler": scaler}), strict=True):
        optimizer = torch.optim.AdamW(fp.leaves(pair.params[1]), lr=0.1)
        for batch in pair.batches(3):
            grads = fp.run(pair.plan, pair.params, batch, loss_scale=scaler.get_scale()).grads
            fp.step(optimizer, pair.params, grads, max_norm=0.1, **extra)
            scaler.update()
    assert same(snapshot(pairs[0].params), snapshot(pairs[1].params))
    grads[0]["0.bias"][0] = float("inf")  # not this optimizer's, and nobody looks for it
    fp.step(optimizer, pair.params, grads, scaler=scaler)
    assert all(leaf.isfinite().all() for leaf in fp.leaves(pair.params))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("fused", [False, True])
def test_one_scaler_over_several_devices(bad, fused):
    """Leaves on the CPU and on a GPU: one norm, one clipping, and one bad gradient on either skips
    both."""
    params = tuple({"w": torch.ones(2, device=device)} for device in ("cpu", "cuda"))
    grads = tuple({"w": torch.full((2,), 8.0, device=tree["w"].device)} for tree in params)
    if bad is not None:
        grads[bad]["w"][1] = float("inf")
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    norm = fp.step(
        torch.optim.SGD(fp.leaves(params), lr=1.0, fused=fused),
        params,
        grads,
        max_norm=2.0,
        scaler=scaler,
    )
    scaler.update()
    assert float(norm) == pytest.approx(4.0 if bad is None else float("inf"))
    assert (4.0 if bad is None else 2.0) == scaler.get_scale()
    for tree in params:
        torch.testing.assert_close(
            tree["w"].cpu(), torch.full((2,), 0.0 if bad is None else 1.0), rtol=0, atol=1e-5
        )


def test_a_forgotten_update_is_told():
    """A second step without ``scaler.update()``: torch's own error, and no .grad stays."""
    pair = Pair()
    optimizer, scaler = torch.optim.SGD(fp.leaves(pair.params), lr=0.1), torch.amp.GradScaler("cpu")
    grads = fp.run(pair.plan, pair.params, pair.batches(1)[0], loss_scale=scaler.get_scale()).grads
    fp.step(optimizer, pair.params, grads, scaler=scaler)
    with pytest.raises(RuntimeError, match=r"update|step\(\)"):
        fp.step(optimizer, pair.params, grads, scaler=scaler)
    assert all(leaf.grad is None for leaf in fp.leaves(pair.params))


def test_accumulation_with_a_scaler():
    """Parts of one batch as runs, scaled, folded one by one: the steps of one run over the whole
    batch."""
    whole, parts = Pair(), Pair()
    steps = [torch.optim.AdamW(fp.leaves(pair.params), lr=0.05) for pair in (whole, parts)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) for _ in range(2)]
    for x, t in whole.batches():
        result = fp.run(whole.plan, whole.params, (x, t), loss_scale=scalers[0].get_scale())
        fp.step(steps[0], whole.params, result.grads, max_norm=0.2, scaler=scalers[0])
        total = None
        for part in (slice(0, 5), slice(5, 9), slice(9, 10)):
            one = fp.run(
                parts.plan, parts.params, (x[part], t[part]), loss_scale=scalers[1].get_scale()
            )
            total = one if total is None else fp.accumulate([total, one])
        torch.testing.assert_close(total.loss, result.loss, rtol=1e-12, atol=0)
        assert (10.0, scalers[1].get_scale()) == (total.weight, total.loss_scale)
        fp.step(steps[1], parts.params, total.grads, max_norm=0.2, scaler=scalers[1])
        for scaler in scalers:
            scaler.update()
    assert 128.0 == scalers[1].get_scale()
    for a, b in zip(fp.leaves(whole.params), fp.leaves(parts.params), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
