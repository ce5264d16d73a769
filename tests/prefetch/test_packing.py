"""`fp.batches.pack`: against all ways to group, the order against other orders, and a training step
against plain torch."""

import itertools
import random

import pytest
import torch
import torch.nn as nn
from common import cpu_plan
from torch.nn.functional import mse_loss

import funcpipe as fp
from funcpipe.batches import pack


def smallest(costs, count):
    """The smallest largest sum of all ways to make so many groups."""
    ways = itertools.product(range(count), repeat=len(costs))
    return min(
        max(
            sum(cost for cost, at in zip(costs, way, strict=True) if at == group)
            for group in range(count)
        )
        for way in ways
    )


def test_groups_are_as_even_as_the_best_of_all():
    """Nearly: within 3%, and in most cases equal."""
    rng, exact = random.Random(1), 0
    for _ in range(60):
        count = rng.randint(2, 3)
        lengths = [rng.randint(1, 50) for _ in range(rng.randint(count, 9))]
        packing = pack(lengths, count, cost=float)
        best = smallest(lengths, count)
        assert best <= packing.largest <= 1.03 * best
        assert packing.bound <= best
        exact += packing.largest == best
    assert exact > 50


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_every_sample_is_in_one_group_and_the_numbers_are_those_of_the_groups(count):
    rng = random.Random(count)
    lengths = [rng.randint(1, 4096) for _ in range(30)]
    packing = pack(lengths, count, cost=lambda length: length + length * length / 1000)
    assert [*range(30)] == sorted(sample for group in packing.groups for sample in group)
    assert all(group and list(group) == sorted(group) for group in packing.groups)
    costs = [
        sum(lengths[sample] + lengths[sample] ** 2 / 1000 for sample in group)
        for group in packing.groups
    ]
    assert packing.costs == pytest.approx(costs)
    assert packing.factors == pytest.approx([cost * count / sum(costs) for cost in costs])
    tokens = [sum(lengths[sample] for sample in group) for group in packing.groups]
    assert packing.sizes == pytest.approx([size * count / sum(lengths) for size in tokens])
    assert packing.excess == pytest.approx(packing.largest / packing.bound - 1)
    assert packing == pack(lengths, count, cost=lambda length: length + length * length / 1000)


def test_attention_is_the_share_of_the_longest_sample():
    """Half of the length: a half of the linear part, a quarter of the square."""
    assert (0.75 * 0.5 + 0.25 * 0.25, 1.0) == pack([100, 50], 2, attention=0.25).costs
    assert {0.5, 1.0} == {*pack([100, 50], 2).costs}
    # Alike in tokens, but the long sample costs more than two short ones.
    even, square = pack([100, 50, 50], 2), pack([100, 50, 50], 2, attention=1.0)
    assert (1.0, 1.0) == even.costs == even.sizes
    assert {1.0, 0.5} == {*square.costs}


@pytest.mark.parametrize("samples", [8, 24])
@pytest.mark.parametrize(
    "schedule", [fp.schedules.one_f_one_b(4, 8), fp.schedules.zero_bubble(4, 8)]
)
def test_the_order_is_shorter_than_others(schedule, samples):
    """On average over random lengths: than the same groups ascending, descending, and shuffled."""
    rng, times = random.Random(0), {"pack": 0.0, "up": 0.0, "down": 0.0, "shuffled": 0.0}
    for _ in range(10):
        factors = [*pack([rng.lognormvariate(6, 1) for _ in range(samples)], 8).factors]
        orders = {
            "pack": factors,
            "up": sorted(factors),
            "down": sorted(factors)[::-1],
            "shuffled": rng.sample(factors, 8),
        }
        for name, order in orders.items():
            times[name] += fp.simulate(schedule, fp.Cost(microbatches=order)).makespan
    assert times["pack"] < min(times["up"], times["down"], times["shuffled"])


def test_a_packed_batch_trains_like_plain_torch():
    """Microbatches of unequal rows have the loss and the gradients of the whole batch, because the
    mean weighs rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(11, 4), torch.randn(11, 2)
    packing = pack([90, 10, 10, 40, 30, 20, 10, 10, 10, 80, 50], 4, attention=0.5)
    assert len({len(group) for group in packing.groups}) > 1
    split = fp.split(model, 2)
    plan = cpu_plan(split, fp.schedules.one_f_one_b(2, 4))
    cut = [fp.Microbatches([t[list(group)] for group in packing.groups]) for t in (x, y)]
    result = fp.run(plan, split.params, tuple(cut))
    loss = mse_loss(model(x), y)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    found = {}
    for grads in result.grads:
        found |= grads
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [1, 0], "num_microbatches": 1}, "the length of sample 1 must be a positive"),
        ({"lengths": [1, True], "num_microbatches": 1}, "the length of sample 1"),
        ({"lengths": torch.ones(3), "num_microbatches": 1}, r"give lengths.tolist\(\)"),
        ({"lengths": "12", "num_microbatches": 1}, "got a str"),
        ({"lengths": [1, 2], "num_microbatches": 3}, "2 samples cannot fill 3 microbatches"),
        ({"lengths": [1, 2], "num_microbatches": 0}, "num_microbatches must be a positive integer"),
        ({"lengths": [], "num_microbatches": 1}, "0 samples cannot fill 1 microbatches"),
        ({"lengths": [1], "num_microbatches": 1, "attention": 2}, "a share from 0 to 1; got 2"),
        ({"lengths": [1], "num_microbatches": 1, "cost": 3}, "cost must be a function"),
        (
            {"lengths": [1], "num_microbatches": 1, "cost": float, "attention": 0.5},
            "either cost= or attention=",
        ),
        (
            {"lengths": [1, 2], "num_microbatches": 1, "cost": lambda length: 1 - length},
            "the cost of sample 0 must be a positive number; got 0",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(fp.BatchError, match=message):
        pack(**arguments)
