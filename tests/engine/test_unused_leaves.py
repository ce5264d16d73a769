"""Leaves that a batch does not use are not stepped, as in plain PyTorch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan, same
from torch import nn

import funcpipe as fp

BATCHES, ROWS, MICROBATCHES = 6, 8, 4
OPTIMIZERS = {
    "AdamW": lambda leaves: torch.optim.AdamW(leaves, lr=0.1, weight_decay=0.5),
    "SGD": lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9, weight_decay=0.5),
    "Adagrad": lambda leaves: torch.optim.Adagrad(leaves, lr=0.1, weight_decay=0.5),
    "functional": lambda leaves: fp.optim.FunctionalOptimizer(
        leaves, torch.zeros_like, lambda g, v, p, lr: (-lr * (0.9 * v + g + p), 0.9 * v + g), lr=0.1
    ),
}


class Heads(nn.Module):
    """A body with two heads, one of which the batch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x, left):
        return (self.left if left else self.right)(self.body(x).tanh())


@fp.stage
def body(params, x):
    return F.linear(x, params["weight"], params["bias"]).tanh()


@fp.stage(feeds=("left",))
def heads(params, x, feeds):
    own = params["left" if feeds["left"] else "right"]
    return F.linear(x, own["weight"], own["bias"])


def model():
    torch.manual_seed(3)
    return Heads().double()


def params_of(module):
    own = {
        name: {key: leaf.detach().clone() for key, leaf in child.named_parameters()}
        for name, child in module.named_children()
    }
    return own.pop("body"), own


def batches():
    g = torch.Generator().manual_seed(4)
    for number in range(BATCHES):
        x, t = (torch.randn(ROWS, n, generator=g, dtype=torch.float64) for n in (4, 2))
        yield (x, t), number % 3 == 0


def plan_of(*, steps=False, compiled=False):
    schedule = fp.schedules.one_f_one_b(2, MICROBATCHES)
    stages = [body, heads]
    return cpu_plan(
        [fp.compile_stage(stage) for stage in stages] if compiled else stages,
        fp.schedules.step_params(schedule) if steps else schedule,
    )


def reference(make, max_norm=None):
    """Train with plain PyTorch, where gradients of None are skipped."""
    module = model()
    optimizer = make(module.parameters())
    for (x, t), left in batches():
        optimizer.zero_grad()
        for rows, target in zip(x.chunk(MICROBATCHES), t.chunk(MICROBATCHES), strict=True):
            (F.mse_loss(module(rows, left), target) / MICROBATCHES).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return params_of(module)


def trained(way, make, max_norm=None):
    """Train with one of the ways to step."""
    params = params_of(model())
    optimizer = make(fp.leaves(params))
    plan = plan_of(steps=way == "schedule", compiled=way == "compiled")
    for batch, left in batches():
        options = {"feeds": {"left": fp.Replicate(left)}, "executor": "serial"}
        if way == "schedule":
            fp.run(plan, params, batch, optimizer=optimizer, max_norm=max_norm, **options)
        elif way == "parts":
            halves = [
                fp.run(plan, params, part, **options)
                for part in zip(*(each.chunk(2) for each in batch), strict=True)
            ]
            fp.step(optimizer, params, fp.accumulate(halves), max_norm=max_norm)
        elif way == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            result = fp.run(plan, params, batch, loss_scale=4.0, **options)
            fp.step(optimizer, params, result, scaler=scaler, max_norm=max_norm)
        else:
            scale = 4.0 if way == "scale" else 1.0
            result = fp.run(plan, params, batch, loss_scale=scale, **options)
            fp.step(optimizer, params, result, max_norm=max_norm)
    return params


@pytest.mark.parametrize("max_norm", [None, 0.2])
@pytest.mark.parametrize(
    ("way", "name"),
    [
        *(("step", name) for name in OPTIMIZERS),
        *((way, "AdamW") for way in ("compiled", "parts", "scale", "scaler")),
        *(("schedule", name) for name in ("AdamW", "functional")),
    ],
)
def test_a_head_that_a_batch_does_not_use_keeps_its_values(way, name, max_norm):
    want = reference(OPTIMIZERS[name], max_norm)
    got = trained(way, OPTIMIZERS[name], max_norm)
    for one, other in zip(fp.leaves(want), fp.leaves(got), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_steps_of_several_batches_leave_unused_leaves():
    def half(params, x):
        return x * params["used"]

    plan = cpu_plan([fp.stage(half)] * 2, fp.schedules.step_params(fp.schedules.one_f_one_b(2, 2)))
    start = tuple({"used": torch.ones(3), "unused": torch.ones(3)} for _ in range(2))
    optimizer = torch.optim.AdamW(fp.leaves(start), lr=0.1, weight_decay=0.5)
    x = torch.randn(4, 3)
    for _ in range(2):  # the second call runs its batches together
        list(fp.run_batches(plan, start, [(x, x + 1)] * 3, optimizer=optimizer))
    for params in start:
        assert torch.equal(torch.ones(3), params["unused"])
        assert not torch.equal(torch.ones(3), params["used"])
        assert params["unused"] not in optimizer.state


def result_of(fn, params):
    plan = cpu_plan([fp.stage(fn)], fp.schedules.fill_drain(1, 1), loss=lambda y, t: y.mean())
    return fp.run(plan, params, (torch.ones(2, 1), None))


def test_a_gradient_that_the_caller_changed_is_stepped():
    params = ({"a": torch.ones(1), "b": torch.ones(1)},)
    result = result_of(lambda p, x: x * p["a"], params)
    assert ((0, "b"),) == result.unused
    penalty = ({"a": result.grads[0]["a"], "b": 2 * params[0]["b"]},)
    fp.step(torch.optim.SGD(fp.leaves(params), lr=0.1), params, replace(result, grads=penalty))
    torch.testing.assert_close(params[0]["b"], torch.tensor([0.8]))
    result.grads[0]["b"].add_(1.0)
    fp.step(torch.optim.SGD(fp.leaves(params), lr=0.1), params, result)
    torch.testing.assert_close(params[0]["b"], torch.tensor([0.7]))


def test_zeros_of_a_bare_tree_are_stepped():
    params = ({"a": torch.ones(1), "b": torch.ones(1)},)
    result = result_of(lambda p, x: x * p["a"], params)
    optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1, weight_decay=1.0)
    fp.step(optimizer, params, result.grads)
    torch.testing.assert_close(params[0]["b"], torch.tensor([0.9]))
    fp.step(optimizer, params, ({**result.grads[0], "b": None},))
    torch.testing.assert_close(params[0]["b"], torch.tensor([0.9]))


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_of_unused_leaves_alone_does_nothing(scaled):
    params = ({"a": torch.ones(1), "b": torch.ones(1)},)
    result = result_of(lambda p, x: x * p["a"], params)
    optimizer = torch.optim.AdamW([params[0]["b"]], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if scaled else None
    fp.step(optimizer, params, result, scaler=scaler)
    assert torch.equal(torch.ones(1), params[0]["b"])
    assert not optimizer.state


def test_a_tied_leaf_is_unused_only_if_all_its_stages_leave_it():
    """Each member of the tie gets the sum, so each must step."""

    def other(params, x):
        return x + params["b"]

    start = torch.ones(1)
    params = ({"w": start.clone(), "v": start.clone()}, {"w": start.clone(), "v": start.clone()})
    params[1]["b"] = torch.zeros(1)
    plan = cpu_plan(
        [fp.stage(lambda p, x: x * p["w"]), fp.stage(other)],
        fp.schedules.fill_drain(2, 2),
        loss=lambda y, t: y.mean(),
        ties=[((0, "w"), (1, "w")), ((0, "v"), (1, "v"))],
    )
    result = fp.run(plan, params, (torch.ones(4, 1), None))
    assert {(0, "v"), (1, "v")} == {*result.unused}
    fp.step(torch.optim.AdamW(fp.leaves(params), lr=0.1, weight_decay=0.5), params, result)
    assert same(params[0], {name: params[1][name] for name in "wv"})
    assert not torch.equal(start, params[0]["w"])
    assert torch.equal(start, params[0]["v"])
