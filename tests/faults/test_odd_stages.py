"""Row 19: stages that hand on what is not theirs, keep references, change their mind, or return no
activation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from common import ids, same
from fault_nets import assert_plain, linear, rows, weights
from fault_rig import SCHEDULES, WIDTH, M, Rig, assert_invariant

import funcpipe as fp


@pytest.fixture(scope="module")
def rig():
    return Rig()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
def test_stages_that_hand_on_what_is_not_theirs(schedule, executor):
    """Row 19: the input, a parameter, a captured tensor as output, next stage in place: only its
    own copy is written."""
    table = torch.linspace(0, 1, WIDTH, dtype=torch.float64).repeat(3, 1)

    def first(p, x):
        return x, p["w"], table

    def second(p, x):
        mine, weight, shared = x
        return mine.mul_(2) @ weight.add_(1) + shared.exp_()[:1] + p["b"]

    stages = [fp.stage(first), fp.stage(second), fp.stage(lambda p, x: x.tanh_() @ p["w"])]
    params = (weights()[0], {"b": torch.ones(WIDTH, dtype=torch.float64)}, weights()[2])
    x, target = rows(7)
    given = [
        x.clone(),
        target.clone(),
        table.clone(),
        *(leaf.clone() for leaf in fp.leaves(params)),
    ]
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
    result = fp.run(plan, params, (x, target), executor=executor(plan))
    assert same(given, [x, target, table, *fp.leaves(params)])
    own = [leaf.clone().requires_grad_() for leaf in fp.leaves(params)]
    y = torch.tanh(2 * x @ (own[0] + 1) + table.exp()[:1] + own[1]) @ own[2]
    F.mse_loss(y, target).backward()
    torch.testing.assert_close(
        fp.leaves(result.grads), [leaf.grad for leaf in own], rtol=1e-10, atol=1e-12
    )


def test_a_stage_that_keeps_a_reference(rig, executor):
    """Row 19: what user code holds lives as long as user code holds it, and not longer; nobody
    writes into it."""
    kept = []

    def keeps(p, x):
        kept.append((x, x.clone()))
        return x * 1

    middle = fp.compose(rig.stages[1], fp.stage(keeps))
    plan = fp.make_plan(
        (rig.stages[0], middle, rig.stages[2]), SCHEDULES[0], loss=F.mse_loss, devices="cpu"
    )
    nested = {
        name: (tree[0], (tree[1], ()), tree[2])
        for name, tree in (("params", rig.params), ("state", rig.state))
    }
    rig.forget()
    result = fp.run(plan, **rig.given(plan, nested), executor=executor(plan))
    assert torch.equal(rig.expected.loss, result.loss)
    assert M == len(kept)
    assert all(torch.equal(x, copy) for x, copy in kept)
    del result
    kept.clear()
    assert 0 == rig.watch.alive


@pytest.mark.parametrize(
    "schedule",
    [fp.schedules.one_f_one_b(2, M), fp.schedules.remat(fp.schedules.fill_drain(2, M))],
    ids=ids,
)
def test_another_structure_in_each_microbatch(schedule, executor):
    """Row 19: legal between stages (each microbatch is its own graph), with the numbers of plain
    autograd."""

    def first(p, x):
        y = torch.tanh(x @ p["w"])
        return {"y": y, "twice": 2 * y} if x[0, 0] > 0 else [y]

    def second(p, x):
        y = x["twice"] - x["y"] if isinstance(x, dict) else x[0]
        return torch.tanh(y @ p["w"])

    plan = fp.make_plan(
        [fp.stage(first), fp.stage(second)], schedule, loss=F.mse_loss, devices="cpu"
    )
    x, target = rows(7)
    x[:, 0] = torch.tensor([1.0, 1, 1, -1, -1, 1, 1])
    assert_plain(
        fp.run(plan, weights(2), (x, target), executor=executor(plan)), weights(2), x, target
    )


def test_outputs_of_another_structure_are_named_with_both(rig, executor):
    """Row 19: outputs are joined, so they must be alike: the microbatch and both structures."""
    fn = lambda p, x: {"a": x} if x[0, 0] > 0 else (x, x)
    plan = fp.make_plan(
        [fp.stage(fn)], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu"
    )
    x = torch.tensor([[1.0], [-1.0]])
    go = lambda x=x: fp.run(plan, ((),), x, executor=executor(plan))
    go(x.abs())  # kept lanes start at the first run
    assert_invariant(
        rig,
        go,
        kind=fp.BatchError,
        words=("microbatch 1", r"\(\*, \*\)", "microbatch 0", "'a'"),
        kept=True,
    )


@pytest.mark.parametrize("value", [None, "generator", 3, "text"], ids=str)
def test_what_is_no_activation(rig, value, executor):
    """Row 19: a stage that returns a number: the stage or loss that cannot use it is named; None, a
    generator: itself."""
    make = (lambda: (i for i in range(3))) if value == "generator" else lambda: value
    middle = [fp.stage(lambda p, x: make(), name="odd"), fp.stage(linear, name="next")]
    plan = fp.make_plan(middle, fp.schedules.one_f_one_b(2, M), loss=F.mse_loss, devices="cpu")
    params = ((), weights(1)[0])
    go = lambda: fp.run(plan, params, rows(7), executor=executor(plan))
    own = value in (None, "generator")
    user = (
        {"at": "0F0", "stage": 0, "name": "odd"}
        if own
        else {"at": "1F0", "stage": 1, "name": "next"}
    )
    assert_invariant(rig, go, kind=fp.PlanError if own else TypeError, microbatch=0, **user)
    last = fp.make_plan(
        middle[::-1], fp.schedules.one_f_one_b(2, M), loss=F.mse_loss, devices="cpu"
    )
    go = lambda: fp.run(last, params[::-1], rows(7), executor=executor(plan))
    at = "1F0" if value is None else r"1F0 \(loss\)"
    assert_invariant(rig, go, kind=fp.StageError, at=at, stage=1, name="odd", microbatch=0)
