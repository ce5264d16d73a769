"""The first gradient of a parameter becomes its sum, where nothing else has its memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result

import funcpipe as fp
from funcpipe._src.stages.gradient_sums import GradientSums, may_grow

M = 4


def views(p, x):
    """Autograd gives both the same memory."""
    return x * (p["a"].view(6) + p["b"])


def handed_on(p, x):
    """The gradient of the input is that of the parameter."""
    return x + p["whole"]


def joined(p, x):
    """Each gets a part of one gradient."""
    return x @ torch.cat([p["a"].view(1, 6), p["rows"]])


def expanded(p, x):
    return x + p["a"].view(6).expand(2, 6) + p["scalar"]


def sometimes(p, x):
    """Not in every microbatch."""
    return x * p["b"] if float(x.detach().sum()) > 0 else x * p["other"]


def never(p, x):
    return x * p["b"]


def stateless(p, x):
    return x.tanh()


STAGES = [views, handed_on, joined, expanded, sometimes, never, stateless]


def params_of(function):
    g = torch.Generator().manual_seed(len(function.__name__))
    shapes = {"a": (2, 3), "b": (6,), "whole": (2, 6), "rows": (5, 6), "scalar": (), "other": (6,)}
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()
    }


def batch():
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2 * M, 6, generator=g, dtype=torch.float64) for _ in range(2))


def by_autograd(functions, params):
    """Of the plain loop."""
    leaves = [
        {name: leaf.clone().requires_grad_() for name, leaf in tree.items()} for tree in params
    ]
    for x, target in zip(*(one.chunk(M) for one in batch()), strict=True):
        for function, tree in zip(functions, leaves, strict=True):
            x = function(tree, x)
        (F.mse_loss(x, target) / M).backward()
    return [{name: leaf.grad for name, leaf in tree.items()} for tree in leaves]


@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.fill_drain(3, M),
        fp.schedules.remat(fp.schedules.one_f_one_b(3, M)),
        fp.schedules.zero_bubble(3, M),
        fp.schedules.pair(fp.schedules.interleaved(3, M, num_devices=1)),
    ],
    ids=lambda schedule: schedule.name,
)
@pytest.mark.parametrize("middle", STAGES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("last", [never, handed_on])
def test_sums_are_those_of_the_plain_loop(middle, last, schedule):
    functions = [expanded, middle, last]
    params = tuple(map(params_of, functions))
    plan = fp.make_plan(
        [fp.stage(f, name=f"{n}") for n, f in enumerate(functions)], schedule, loss=F.mse_loss
    )
    result = fp.run(plan, params, batch(), executor="threads")
    assert_same_result(fp.run_sequential(plan, params, batch()), result)
    wanted = by_autograd(functions, params)
    for mine, theirs in zip(result.grads, wanted, strict=True):
        for name, gradient in mine.items():
            torch.testing.assert_close(
                gradient, torch.zeros_like(gradient) if theirs[name] is None else theirs[name]
            )
    unused = {
        (stage, name)
        for stage, tree in enumerate(wanted)
        for name, one in tree.items()
        if one is None
    }
    assert unused == {*result.unused}
    grads = fp.leaves(result.grads)
    assert len(grads) == len({gradient.untyped_storage().data_ptr() for gradient in grads})
    assert all(gradient.untyped_storage().nbytes() == gradient.nbytes for gradient in grads)


def test_sparse_gradients_have_sparse_sums():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(12, 2)).double()
    stage, params, _ = fp.from_module(net)
    plan = fp.make_plan([stage], fp.schedules.fill_drain(1, M), loss=F.cross_entropy)
    ids, labels = torch.randint(0, 9, (8, 3)), torch.randint(0, 2, (8,))
    grads = fp.run(plan, (params,), (ids, labels)).grads[0]
    F.cross_entropy(net(ids), labels).backward()
    assert grads["0.weight"].layout is torch.sparse_coo
    torch.testing.assert_close(grads["0.weight"].to_dense(), net[0].weight.grad.to_dense())


def test_what_may_grow():
    whole = torch.zeros(2, 3)
    assert may_grow(whole)
    part = whole[0]
    assert not may_grow(part)
    assert not may_grow(whole)
    del whole, part
    long = torch.zeros(8)
    short = torch.zeros(0).set_(long)[:4]
    del long
    assert not may_grow(short)  # the rest would be kept with it
    assert not may_grow(torch.zeros(2, 2).to_sparse())
    assert not may_grow(torch._efficientzerotensor(3))


def test_sums_begin_and_grow():
    aliases = [torch.ones(2, requires_grad=True) for _ in range(2)]
    sums = GradientSums(aliases)
    assert sums.lacking == [0, 1]
    (aliases[0] * 2).sum().backward()
    sums.adopt()
    assert [1] == sums.lacking
    (aliases[0] * 3).sum().backward()
    sums.adopt()
    assert [1] == sums.untouched()
    assert [[5.0, 5.0], [0.0, 0.0]] == [one.tolist() for one in sums.all()]
    assert [1] == sums.untouched()
    (aliases[1] * 4).sum().backward()
    assert [] == sums.untouched()
    assert [4.0, 4.0] == sums.all()[1].tolist()
