"""Compiled stages give eager's bits and read today's numbers; a check of numbers changes none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp

ORDERS = "0F0 0F1 0F2 1F0 1F1 1F2 1I0 1I1 1I2 1W2 1W1 1W0 0I2 0I0 0I1 0W1 0W2 0W0"


def bits(tree):
    return [leaf.contiguous().view(torch.int64) for leaf in fp.leaves(tree)]


def assert_same_bits(a, b):
    for x, y in zip(bits(a), bits(b), strict=True):
        assert torch.equal(x, y)


class Scaled(nn.Module):
    """A layer whose scale and bias do not wait for W in an eager stage, and whose weight does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return self.linear(x) * self.scale + x


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", [ORDERS, ORDERS.replace("1I0", "1B0").replace(" 1W0", "")])
def test_without_fuse_the_weight_backwards_may_come_in_any_order(order, recompute):
    torch.manual_seed(0)
    split = fp.split(nn.Sequential(Scaled(), Scaled()), balance=[1, 1])
    params = [{name: leaf.detach().double() for name, leaf in tree.items()} for tree in split.params]
    x, schedule = torch.randn(9, 16, dtype=torch.float64), fp.Schedule.parse(order)

    def gradients(stages):
        plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
        return fp.run(plan, params, (x, x * 2), trainable=True).grads

    exact = [fp.compile_stage(stage, fuse=False, recompute=recompute) for stage in split.stages]
    assert_same_bits(gradients(split.stages), gradients(exact))


def signs(p, x):
    return x * p["s"] + p["unused"].detach()


@pytest.mark.parametrize("check", [(), "finite"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_negative_zero_keep_their_sign(compiled, check):
    stage = fp.stage(signs)
    stage = fp.compile_stage(stage, fuse=False) if compiled else stage
    plan = fp.make_plan([stage], fp.schedules.one_f_one_b(1, 2), loss=lambda y, t: y.sum(), devices="cpu")
    params = {"s": torch.ones(1, 3, dtype=torch.float64), "unused": torch.ones(1, 3, dtype=torch.float64)}
    x = torch.full((2, 3), -0.0, dtype=torch.float64)  # a row each: a sum over rows would begin at 0
    (grads,) = fp.run(plan, (params,), (x, None), check=check).grads
    assert grads["s"].signbit().all()
    assert not grads["unused"].signbit().any()  # zeros of which no backward said anything


def test_a_check_of_numbers_leaves_the_sign_of_a_sum_that_begins_late():
    def late(p, x):
        return x * p["s"] if x[0, 0] < 0 else x * p["t"]

    plan = fp.make_plan([fp.stage(late)], fp.schedules.one_f_one_b(1, 2), loss=lambda y, t: (y * t).sum(), devices="cpu")
    params = {name: torch.ones(1, 2, dtype=torch.float64) for name in "st"}
    x = torch.tensor([[1.0, 1.0], [-1.0, -0.0]], dtype=torch.float64)
    found = [fp.run(plan, (params,), (x, torch.ones_like(x)), check=check).grads for check in ((), "finite")]
    assert found[0][0]["s"].signbit().all()
    assert_same_bits(*found)
