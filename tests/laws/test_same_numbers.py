"""Law 1: the same bits for every schedule, executor, remat choice. Law 2: those of plain autograd,
to rounding."""

from itertools import pairwise

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, ids, same, schedules, snapshot

import funcpipe as fp


def linear(i, o, g):
    return {
        "w": torch.randn(o, i, generator=g, dtype=torch.float64),
        "b": torch.randn(o, generator=g, dtype=torch.float64),
    }


def net():
    """Four stages: two skips (one popped twice, one carrying ints and masks), a feed, in-place
    first ops, an unused leaf."""
    g = torch.Generator().manual_seed(1)

    @fp.stage(stash=["far", "mixed"])
    def first(p, x):
        h = torch.tanh(x @ p["w"].T + p["b"])
        return fp.Out(
            {"h": h.clone(), "ids": x.argmax(-1), "flag": True},
            stash={"far": h * 2, "mixed": (h > 0, 3, h.detach())},
        )

    @fp.stage(pop=["far"], feeds=["scale"])
    def second(p, x, *, skips, feeds):
        h = x["h"].mul_(1.5)
        return (
            F.relu(h @ p["w"].T + p["b"], inplace=True) + skips["far"] * feeds["scale"],
            x["ids"],
        )

    @fp.stage(pop=["mixed"])
    def third(p, x, *, skips):
        h, ids_ = x
        mask, factor, _ = skips["mixed"]
        return torch.where(mask, h @ p["w"].T, factor * h) + F.one_hot(ids_, 6)

    @fp.stage(pop=["far"])
    def fourth(p, x, *, skips):
        x.add_(skips["far"])
        return x @ p["w"].T + p["b"]

    stages = (first, second, third, fourth)
    params = tuple(linear(6, 6, g) for _ in stages)
    params[1]["unused"] = torch.ones(2, dtype=torch.float64)
    params[2]["steps"] = torch.tensor(3)
    return stages, params


def whole(stages, params, x, target, scale):
    """Plain autograd over the whole batch."""
    leaves = [
        {k: v.clone().requires_grad_(v.is_floating_point()) for k, v in p.items()} for p in params
    ]
    y = fp.apply(stages, leaves, x.clone(), feeds={"scale": scale}).y
    loss = F.mse_loss(y, target)
    loss.backward()
    return loss.detach(), [{k: v.grad for k, v in p.items()} for p in leaves]


@pytest.fixture(scope="module")
def data():
    g = torch.Generator().manual_seed(2)
    make = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64)
    return {rows: (make(rows, 6), make(rows, 6), make(rows, 6)) for rows in (3, 8, 10)}


@pytest.mark.parametrize("rows", [8, 10, 3])
@pytest.mark.parametrize("schedule", schedules(4, 4), ids=ids)
def test_same_bits_as_the_oracle_and_as_autograd(schedule, rows, data):
    """Even, 10 rows over 4, 3 rows over 4; both executors; nothing of the caller's is written."""
    stages, params = net()
    x, target, scale = data[rows]
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, outputs=True, devices="cpu")
    before = snapshot((params, x, target, scale))
    expected = fp.run_sequential(
        plan, params, (x, target), feeds={"scale": scale}, threads_per_lane=1
    )

    for executor in EXECUTORS:
        result = fp.run(
            plan,
            params,
            (x, target),
            feeds={"scale": scale},
            executor=executor,
            threads_per_lane=1,
            record=True,
        )
        assert_same_result(expected, result)
        for pool, most in zip(plan.program.pools, result.stats.slots, strict=True):
            assert most <= pool.slots
    assert same(before, snapshot((params, x, target, scale)))

    loss, grads = whole(stages, params, x, target, scale)
    torch.testing.assert_close(expected.loss, loss, rtol=1e-10, atol=1e-10)
    for mine, plain in zip(expected.grads, grads, strict=True):
        for key, gradient in plain.items():
            if mine[key] is None:
                assert gradient is None
            else:
                torch.testing.assert_close(
                    mine[key],
                    torch.zeros_like(mine[key]) if gradient is None else gradient,
                    rtol=1e-10,
                    atol=1e-10,
                )
    assert ((1, "unused"), (2, "b")) == expected.unused
    assert expected.grads[2]["steps"] is None


@pytest.mark.parametrize("schedule", schedules(4, 8), ids=ids)
def test_three_rows_over_eight_microbatches(schedule, data):
    """Microbatches without rows do not exist: their tasks are dropped, the numbers are those of
    three."""
    stages, params = net()
    x, target, scale = data[3]
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
    expected = fp.run_sequential(
        plan, params, (x, target), feeds={"scale": scale}, threads_per_lane=1
    )
    for executor in EXECUTORS:
        result = fp.run(
            plan,
            params,
            (x, target),
            feeds={"scale": scale},
            executor=executor,
            threads_per_lane=1,
            record=True,
        )
        assert_same_result(expected, result)
        assert 3 == result.stats.num_microbatches
        assert {0, 1, 2} == {span.action.microbatch for span in result.timeline.spans}
    loss, _ = whole(stages, params, x, target, scale)
    torch.testing.assert_close(expected.loss, loss, rtol=1e-10, atol=1e-10)


def test_all_schedules_agree_with_each_other(data):
    """Every shipped family ascends, so the results are one, whatever the devices."""
    stages, params = net()
    x, target, scale = data[10]
    results = []
    for schedule in schedules(4, 4):
        assert schedule.is_ascending
        plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
        results.append(
            fp.run(
                plan,
                params,
                (x, target),
                feeds={"scale": scale},
                executor="serial",
                threads_per_lane=1,
            )
        )
    for result in results[1:]:
        assert same(results[0].grads, result.grads)
        assert same(results[0].loss, result.loss)


def test_descending_backwards_follow_the_schedule():
    """A schedule that does not ascend sums in its own order; the oracle follows it."""
    stages, params = net()
    schedule = fp.Schedule.parse("""
        0F0 0F1 0F2 1F0 1F1 1F2 1B2 0B2 1B1 0B1 1B0 0B0
        2F0 3F0 2F1 3F1 2F2 3F2 3B2 2B2 3B1 2B1 3B0 2B0
    """)
    assert not schedule.is_ascending
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
    x, target, scale = (torch.randn(7, 6, dtype=torch.float64) for _ in range(3))
    expected = fp.run_sequential(plan, params, (x, target), feeds={"scale": scale})
    for executor in EXECUTORS:
        assert_same_result(
            expected, fp.run(plan, params, (x, target), feeds={"scale": scale}, executor=executor)
        )


def unet(cuts):
    """A small convolutional net with BatchNorm and dropout, cut at some layers; names stay the
    model's own."""
    torch.manual_seed(3)
    layers = []
    for width in (1, 4, 4, 4):
        layers += [
            nn.Conv2d(width, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Dropout(0.3),
            nn.ReLU(inplace=True),
        ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 25, 3))
    bounds = [0, *cuts, len(model)]
    parts = [
        fp.from_module(model[a:b], name=f"part{i}") for i, (a, b) in enumerate(pairwise(bounds))
    ]
    stages, params, state = zip(*parts, strict=True)
    return stages, params, state


def flat(trees):
    return {key: value for tree in trees for key, value in (tree or {}).items()}


@pytest.mark.parametrize("rows", [pytest.param(12, marks=pytest.mark.slow), 10])
@pytest.mark.parametrize("cuts", [(9,), (6, 11), (3, 6, 9, 14)], ids=len)
def test_batch_norm_and_dropout_do_not_see_the_cuts(cuts, rows):
    """Loss, gradients and state have the same bits with stages cut at 0, 1, 2 and 4 places, in
    every schedule."""
    x, target = torch.randn(rows, 1, 5, 5), torch.randint(0, 3, (rows,))
    stages, params, state = unet(())
    plan = fp.make_plan(stages, fp.schedules.fill_drain(1, 4), loss=F.cross_entropy, devices="cpu")
    whole_ = fp.run(plan, params, (x, target), state=state, seed=5, threads_per_lane=1)
    stages, params, state = unet(cuts)
    for schedule in schedules(len(stages), 4):
        plan = fp.make_plan(stages, schedule, loss=F.cross_entropy, devices="cpu")
        expected = fp.run_sequential(
            plan, params, (x, target), state=state, seed=5, threads_per_lane=1
        )
        for executor in EXECUTORS:
            result = fp.run(
                plan,
                params,
                (x, target),
                state=state,
                seed=5,
                executor=executor,
                threads_per_lane=1,
            )
            assert_same_result(expected, result)
        assert same(whole_.loss, result.loss)
        assert same(flat(whole_.state), flat(result.state))
        if schedule.is_ascending:  # else sums are added in another order
            assert same(flat(whole_.grads), flat(result.grads))
        else:
            torch.testing.assert_close(flat(whole_.grads), flat(result.grads))


@pytest.mark.parametrize("schedule", schedules(4, 4, backward=False), ids=ids)
def test_evaluation(schedule, data):
    """Forward-only plans give merged outputs and the loss; state stays the same objects."""
    stages, params = net()
    x, target, scale = data[10]
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
    expected = fp.run_sequential(plan, params, (x, target), feeds={"scale": scale})
    for executor in EXECUTORS:
        with torch.no_grad():
            result = fp.run(plan, params, (x, target), feeds={"scale": scale}, executor=executor)
        assert_same_result(expected, result)
    assert result.grads is None
    y = fp.apply(stages, params, x.clone(), feeds={"scale": scale}).y
    torch.testing.assert_close(result.outputs, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(result.loss, F.mse_loss(y, target), rtol=1e-12, atol=1e-12)
