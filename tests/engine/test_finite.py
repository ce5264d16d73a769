"""check="finite", "used": what is named, on both executors, in F, B, the loss; and nothing where
all is well."""

from __future__ import annotations

import math
import re

import pytest
import torch
from common import EXECUTORS, assert_same_result, cpu_plan, ids, one_of_each_kind, schedules

import funcpipe as fp
from funcpipe.testing import FaultAt

S, M = 3, 4


def parts():
    return tuple(fp.stage(lambda p, x: torch.tanh(x @ p["w"]), name=f"layer{i}") for i in range(S))


def params():
    g = torch.Generator().manual_seed(0)
    return tuple({"w": torch.randn(3, 3, generator=g)} for _ in range(S))


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, generator=g), torch.randn(8, 3, generator=g)


def spoil(value: float):
    """A fault that puts a number into a tensor."""

    def put(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return put


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.one_f_one_b(S, M),
        fp.schedules.remat(fp.schedules.fill_drain(S, M)),
        fp.schedules.zero_bubble(S, M),
    ],
    ids=ids,
)
@pytest.mark.parametrize(
    ("kind", "value", "action"), [("F", math.nan, r"1F2"), ("B", math.inf, r"1[BI]2")]
)
def test_the_first_stage_and_microbatch_are_named(schedule, executor, kind, value, action):
    stages = FaultAt(1, 2, kind, error=spoil(value))(parts())
    plan = cpu_plan(stages, schedule)
    assert not fp.run(plan, params(), batch(), executor=executor).finite  # silent by default
    with pytest.raises(fp.NotFiniteError, match="NaN and|Inf among") as caught:
        fp.run(plan, params(), batch(), executor=executor, check="finite")
    where = caught.value.funcpipe
    assert (where.stage, where.microbatch) == (1, 2)
    assert isinstance(caught.value, ArithmeticError)
    assert re.fullmatch(action, where.action)
    good = cpu_plan(parts(), schedule)
    result = fp.run(good, params(), batch(), executor=executor, check="finite")
    assert result.finite
    assert_same_result(fp.run(good, params(), batch(), executor=executor), result)


@pytest.mark.parametrize("schedule", one_of_each_kind(schedules(S, M)), ids=ids)
def test_looking_changes_nothing(schedule):
    plan = cpu_plan(parts(), schedule)
    expected = fp.run_sequential(plan, params(), batch(), check=["finite", "used"])
    assert_same_result(expected, fp.run(plan, params(), batch(), check=["finite", "used"]))


def test_where_it_came_from():
    """Numbers that were bad before the stage are no fault of its operations."""
    plan = cpu_plan(parts(), fp.schedules.one_f_one_b(S, M))
    x, target = batch()
    x[5, 1] = math.nan
    with pytest.raises(
        fp.NotFiniteError,
        match=r"an argument was not finite: input has 1 NaN and 0 Inf among 6 numbers",
    ) as caught:
        fp.run(plan, params(), (x, target), check="finite")
    assert caught.value.funcpipe.microbatch == 2
    bad = params()
    bad[1]["w"][0, 0] = math.inf
    with pytest.raises(
        fp.NotFiniteError,
        match=r"an argument was not finite: params\[1\]\['w'\] has 0 NaN and 1 Inf among 9",
    ):
        fp.run(plan, bad, batch(), check="finite")


def test_the_loss_is_looked_at():
    plan = cpu_plan(parts(), fp.schedules.fill_drain(S, M), loss=lambda y, t: (y - t).sum().log())
    with pytest.raises(fp.NotFiniteError, match=r"\* loss has 1 NaN") as caught:
        fp.run(plan, params(), (batch()[0], batch()[1] + 5), check="finite")
    assert caught.value.funcpipe.stage == S - 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_unused_leaves(executor):
    plan = cpu_plan(parts(), fp.schedules.fill_drain(S, M))
    own = params()
    own[1]["spare"] = torch.ones(2)
    result = fp.run(plan, own, batch(), executor=executor)
    assert result.unused == ((1, "spare"),)
    assert not result.grads[1]["spare"].any()
    with pytest.raises(fp.PlanError, match=r"'spare' of stage 1 \('layer1'\)"):
        fp.run(plan, own, batch(), executor=executor, check="used")
    trainable = lambda name, _: "spare" not in name
    fp.run(plan, own, batch(), executor=executor, check="used", trainable=trainable)


def test_words_that_are_no_checks():
    plan = cpu_plan(parts(), fp.schedules.fill_drain(S, M))
    for bad in ("nan", ["finite", "x"], 3):
        with pytest.raises(fp.PlanError, match="check is any of"):
            fp.run(plan, params(), batch(), check=bad)


def test_vjp_checks_both_halves():
    stages = FaultAt(1, 2, "B", error=spoil(math.nan))(parts())
    plan = fp.make_plan(stages, fp.schedules.fill_drain(S, M), devices="cpu")
    result, pullback = fp.vjp(plan, params(), batch()[0], check="finite")
    with pytest.raises(fp.NotFiniteError) as caught:
        pullback(torch.ones_like(result.outputs))
    assert (caught.value.funcpipe.stage, caught.value.funcpipe.microbatch) == (1, 2)


def test_gradients_are_named_by_their_parameters():
    """Also if names sort in another order than the leaves of a tree."""

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * math.nan

    @fp.stage
    def many(p, x):
        rows = [x * w for w in p["w"]]
        return sum(rows[:2]) + Bad.apply(p["w"][2]) * x + sum(rows[3:])

    plan = cpu_plan([many], fp.schedules.zero_bubble(1, 2))
    params = ({"w": [torch.ones(()) for _ in range(11)]},)
    x = torch.ones(4, 2)
    with pytest.raises(fp.NotFiniteError) as caught:
        fp.run(plan, params, (x, x), check="finite")
    lines = str(caught.value).splitlines()
    assert "  * the gradient of params[0]['w'][2] has 1 NaN and 0 Inf among 1 numbers" in lines
    assert 1 == sum("the gradient of" in line for line in lines)
