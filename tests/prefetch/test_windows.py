"""Accumulation as a fold over windows, loss scaling as state, ranks that agree, sources that
resume."""

from __future__ import annotations

import threading

import pytest
import torch
from common import cpu_plan

import funcpipe as fp
from funcpipe.batches import (
    BatchStage,
    Fold,
    LossScale,
    accumulate_grads,
    agree,
    loss_scale,
    overlap,
    select,
    to_device,
    unscale,
    update_scale,
    windows,
)

HOSTS = [True, False]


def data(count=11):
    g = torch.Generator().manual_seed(1)
    return [torch.randn(4, generator=g, dtype=torch.float64) for _ in range(count)]


# ---- windows and accumulation
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("thread", HOSTS)
def test_windows_equal_the_big_batch(size, thread):
    """B6.8: the gradient of a window is that of its batches as one; the last, shorter one counts by
    its real length."""

    def grad(w, x):
        return {"w": x * (w * x).sum()}, (w * x).sum()

    w, counts = torch.ones(4, dtype=torch.float64), []
    for window in windows(overlap(data(), [lambda x: x], thread=thread), size):
        found = accumulate_grads(lambda x: grad(w, x), window)
        counts.append(found.count)
        assert len(found.aux) == found.count == found.weight
        w = w - 0.1 * found.grads["w"]
    v = torch.ones(4, dtype=torch.float64)
    for start in range(0, 11, size):
        xs = data()[start : start + size]
        v = v - 0.1 * sum(grad(v, x)[0]["w"] for x in xs) / len(xs)
    assert torch.allclose(w, v, rtol=1e-12)
    assert sum(counts) == 11
    assert counts == [size] * (11 // size) + ([11 % size] if 11 % size else [])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_batch_counts_once_an_epoch(size):
    """A3: the seed's counters give wrong steps (N=1 drops the first batch; N>=3 steps on the last
    two of a window; the last, partial window leaks into the next epoch). Windows have no memory:
    two epochs are cut alike."""
    epochs = []
    for _ in range(2):
        cut = [list(window) for window in windows(overlap(range(10), [lambda x: x]), size)]
        assert [x for window in cut for x in window] == list(range(10))
        epochs.append(cut)
    assert epochs[0] == epochs[1]
    assert epochs[0][0] == list(range(size))


def test_windows_draw_as_they_are_used():
    drawn = []

    def source():
        for i in range(7):
            drawn.append(i)
            yield i

    found = windows(source(), 3)
    first = next(found)
    assert drawn == [0]
    assert next(first) == 0
    second = next(found)  # what is left of the first is drawn and dropped
    assert drawn == [0, 1, 2, 3]
    with pytest.raises(fp.PlanError, match="this window is over"):
        next(first)
    assert list(second) == [3, 4, 5]
    assert [list(one) for one in found] == [[6]]


def test_weights_make_padded_batches_exact():
    """Token counts: the mean over all tokens, however they are spread over batches."""
    g = torch.Generator().manual_seed(0)
    tokens = [torch.randn(n, generator=g, dtype=torch.float64) for n in (3, 1, 5, 2)]
    found = accumulate_grads(lambda x: ([x.mean()], x.sum()), tokens, weight=len)
    assert torch.allclose(found.grads[0], torch.cat(tokens).mean(), rtol=1e-14)
    assert found.weight == 11
    total = accumulate_grads(lambda x: ([x.mean()], None), tokens, weight=len, reduce="sum")
    assert torch.allclose(total.grads[0], torch.cat(tokens).sum(), rtol=1e-14)


def test_half_precision_is_summed_in_single():
    small = [torch.tensor([2.0**-11], dtype=torch.float16)] * 4096
    found = accumulate_grads(lambda x: ((x, None, 3), None), small, reduce="sum")
    assert found.grads[0].dtype == torch.float16
    assert found.grads[0].item() == 2.0
    assert found.grads[1] is None
    given = small[0]
    accumulate_grads(lambda x: (x, None), [given, given])
    assert given.item() == 2.0**-11  # not written to


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: windows([1], 0), "size of a window is a positive int; got 0"),
        (lambda: windows([1], True), "size of a window is a positive int; got True"),
        (lambda: accumulate_grads(lambda x: (x, 0), []), "the window has no batch$"),
        (
            lambda: accumulate_grads(lambda x: (x, 0), data(2), weight=lambda x: 0),
            "no batch with a weight",
        ),
        (
            lambda: accumulate_grads(lambda x: (x, 0), data(2), weight=lambda x: -1),
            "from 0; batch 0 .* has -1",
        ),
        (lambda: accumulate_grads(lambda x: (x, 0), data(2), reduce="max"), '"mean" or "sum"'),
        (
            lambda: accumulate_grads(lambda x: ([x] * x, 0), [torch.tensor(1), torch.tensor(2)]),
            "batch 1 of the window has gradients of another structure",
        ),
        (lambda: loss_scale(0.0), "a loss scale is a positive number"),
        (lambda: update_scale(loss_scale(), torch.tensor(False), growth=1.0), "growth is above 1"),
        (lambda: select(torch.tensor(True), [1], {"a": 1}), "two trees of one structure"),
    ],
)
def test_wrong_input(call, words):
    with pytest.raises(fp.PlanError, match=words):
        call()


def test_results_of_runs_accumulate_from_a_window():
    """With fp.run: its results know their weights, and are added as they come."""
    stages, params, _ = zip(
        *[fp.from_module(torch.nn.Linear(4, 4).double()) for _ in range(2)], strict=True
    )
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 2))
    rows = [
        (torch.randn(n, 4, dtype=torch.float64), torch.randn(n, 4, dtype=torch.float64))
        for n in (4, 4, 3)
    ]
    whole = fp.run(plan, params, tuple(map(torch.cat, zip(*rows, strict=True))))
    for window in windows(overlap(rows, [to_device("cpu")]), 5):
        total = fp.accumulate(fp.run(plan, params, batch) for batch in window)
    assert torch.allclose(total.loss, whole.loss, rtol=1e-12)
    for a, b in zip(fp.leaves(total.grads), fp.leaves(whole.grads), strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


# ---- loss scaling
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [8.0, 2.0**126, 3.0])
def test_it_scales_as_grad_scaler_does(init):
    """Bit for bit, over skipped steps and growth, up to a scale that could not grow further."""
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=3)
    state, params = loss_scale(init), {"w": parameter.detach().clone(), "step": 0}
    skipped = 0
    for i in range(20):
        x = torch.full((5,), float("inf") if i in (4, 5, 9) else 0.1 * (i + 1) * 2.0**-100)
        optimizer.zero_grad()
        scaler.scale((parameter * x).sum()).backward()
        raw = parameter.grad.clone()
        scaler.step(optimizer)
        scaler.update()
        grads, found = unscale(state, {"w": raw, "step": None})
        skipped += int(found)
        params = select(found, params, {"w": params["w"].add(grads["w"], alpha=-0.1), "step": i})
        state = update_scale(state, found, interval=3)
        assert torch.equal(parameter.detach(), params["w"])
        assert scaler.get_scale() == state.scale.item()
        assert scaler._get_growth_tracker() == state.good_steps.item()
    assert skipped >= 3
    assert isinstance(state, LossScale)


def test_a_scaled_run_through_an_overlap():
    """The state is a part of the fold's: growth and skipped steps are seen by who asks, and go into
    checkpoints."""
    stages, params, _ = zip(*[fp.from_module(torch.nn.Linear(3, 3)) for _ in range(2)], strict=True)
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 2))
    batches = [(torch.randn(4, 3), torch.randn(4, 3)) for _ in range(6)]
    batches[2][0][0, 0] = float("inf")

    def train(state, batch):
        params, scale = state
        result = fp.run(plan, params, batch, loss_scale=float(scale.scale), threads_per_lane=1)
        grads, found = unscale(scale, result.grads)
        new = fp._src.core.tree.map_leaves(lambda p, g: p.detach() - 0.1 * g, params, grads)
        return (select(found, params, new), update_scale(scale, found, interval=2)), (
            result.loss,
            found,
        )

    run = overlap(batches, [Fold(train, (params, loss_scale(16.0)))])
    found = [bool(flag) for _, flag in run]
    assert found == [False, False, True, False, False, False]
    trained, scale = run.state
    assert scale.scale.item() == 16.0 * 2 * 0.5 * 2
    assert scale.good_steps.item() == 1
    assert all(leaf.isfinite().all() for leaf in fp.leaves(trained))


# ---- ranks
# -------------------------------------------------------------------------------


class Meet:
    """A collective of threads: do all have one."""

    def __init__(self, size):
        self.barrier, self.flags = threading.Barrier(size, timeout=20), [False] * size

    def all_have(self, rank, mine):
        self.flags[rank] = mine
        self.barrier.wait()
        found = all(self.flags)
        self.barrier.wait()
        return found


def ranks(counts, pad):
    """What each rank gets, every rank in a thread."""
    meet, out = Meet(len(counts)), [[] for _ in counts]

    def train(rank):
        source = agree(range(counts[rank]), lambda mine: meet.all_have(rank, mine), pad=pad)
        out[rank].extend(overlap(source, [lambda x: x]))

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(counts))]
    for one in threads:
        one.start()
    for one in threads:
        one.join(20)
    return out


@pytest.mark.parametrize("counts", [(3, 3), (5, 2), (0, 4), (1, 6, 3)])
def test_ranks_stop_together(counts):
    """Of unequal counts torchrec's ranks wait for ever in their collectives."""
    assert ranks(counts, None) == [list(range(min(counts)))] * len(counts)
    padded = ranks(counts, lambda last: ("pad", last))
    assert {len(one) for one in padded} == {max(counts)}
    for count, one in zip(counts, padded, strict=True):
        assert one[:count] == list(range(count))
        assert one[count:] == [("pad", count - 1 if count else None)] * (max(counts) - count)


# ---- resume
# -------------------------------------------------------------------------------


class Loader:
    """A stateful loader: its position is its state, handed out as the live object."""

    def __init__(self, count, at=0):
        self.count, self.state = count, {"at": at}

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["at"] == self.count:
            raise StopIteration
        self.state["at"] += 1
        return self.state["at"] - 1

    def state_dict(self):
        return self.state


@pytest.mark.parametrize("thread", HOSTS)
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_training_goes_on_where_it_stopped(thread, depth, stop):
    """B6.10: the place to go on from is that of the first batch that is not handed out, not of the
    last drawn."""

    def build(loader, index, total):
        stages = [
            BatchStage(lambda x, *, index: (x, index), indexed=True),
            Fold(lambda s, x: (s + x[0], x), total),
        ]
        return overlap(
            loader,
            stages,
            depth=depth,
            thread=thread,
            start_index=index,
            snapshot=loader.state_dict,
        )

    whole = build(Loader(7), 0, 0)
    want = list(whole)
    first = build(Loader(7), 0, 0)
    got = [next(first) for _ in range(stop)]
    saved = {"source": first.source_state, "index": first.index, "state": first.state}
    first.close()
    assert saved["source"] == {"at": stop}
    again = build(Loader(7, **saved["source"]), saved["index"], saved["state"])
    got += list(again)
    assert got == want
    assert again.state == whole.state == sum(range(7))
    assert again.source_state == {"at": 7}
    with pytest.raises(fp.FuncpipeError, match="snapshot=loader.state_dict"):
        overlap([], []).source_state  # noqa: B018


@pytest.mark.parametrize("thread", HOSTS)
def test_a_failed_batch_can_be_tried_again(thread):
    """Nothing is lost by an error: the snapshot is that of the batch that failed."""

    def fails(x):
        if x == 3 and not tried:
            tried.append(x)
            raise OSError("once")
        return x

    tried = []
    loader, got, index = Loader(8), [], 0
    while True:
        run = overlap(loader, [fails], thread=thread, start_index=index, snapshot=loader.state_dict)
        try:
            for result in run:
                got.append(result)
            break
        except OSError as error:
            failed = error.funcpipe.batch
            loader, index = Loader(8, **run.source_state), run.index
    assert [failed] == tried == [3]
    assert got == list(range(8))
