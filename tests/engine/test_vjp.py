"""vjp: the halves of a run equal the run, for every schedule that has halves; dropped, it leaves
nothing."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, cpu_plan, ids, one_of_each_kind, same, schedules, snapshot
from watch import Watch

import funcpipe as fp

sys.path.insert(0, str(Path(__file__).parent.parent / "laws"))
from test_same_numbers import net

S, M = 4, 4


def halved(schedule: fp.Schedule) -> bool:
    """Does every device run its forwards first, whatever moves meanwhile."""
    orders = [
        "".join(a.kind.value for a in order if a.kind.value not in "OLU")
        for order in schedule.orders
    ]
    return all("F" not in order.lstrip("F") for order in orders)


HALVED = [one for one in schedules(S, M) if halved(one)]
MIXED = [one for one in schedules(S, M) if not halved(one)]


def dot(y, c):
    """The loss whose cotangents are ``c``; of one microbatch, so it undoes the share of the
    microbatch."""
    return (y * c).sum(), 1.0


def with_loss(stages, schedule, params, x, c, **options):
    """What ``run`` gives for the same cotangents: the sum over microbatches of y * c."""
    plan = cpu_plan(stages, schedule, loss=dot, weight=lambda c: 1.0, outputs=True)
    count = min(len(x), schedule.num_microbatches)
    return fp.run_sequential(plan, params, (x, c), loss_scale=count, threads_per_lane=1, **options)


def test_there_are_both_kinds():
    assert len(HALVED) >= 9
    assert {"1F1B", "ZB-H1"} <= {one.name for one in MIXED}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("schedule", HALVED, ids=ids)
@pytest.mark.parametrize("rows", [8, 3], ids=lambda rows: f"{rows}rows")
def test_same_bits_as_a_run(schedule, executor, rows):
    """Outputs and gradients are those of a run whose loss has these cotangents."""
    stages, params = net()
    g = torch.Generator().manual_seed(2)
    x, c = (torch.randn(rows, 6, generator=g, dtype=torch.float64) for _ in range(2))
    scale = torch.rand(rows, 1, generator=g, dtype=torch.float64)
    expected = with_loss(stages, schedule, params, x, c, feeds={"scale": scale})
    plan = fp.make_plan(stages, schedule, devices="cpu")
    before = snapshot((params, x, c, scale))
    result, pullback = fp.vjp(
        plan, params, x, feeds={"scale": scale}, executor=executor, threads_per_lane=1
    )
    grads, input_grads = pullback(c)
    assert same(expected.outputs, result.outputs)
    assert same(expected.grads, grads)
    assert expected.unused == pullback.unused
    assert same(before, snapshot((params, x, c, scale)))
    leaf = x.clone().requires_grad_()
    fp.apply(stages, params, leaf, feeds={"scale": scale}).y.backward(c)
    assert torch.allclose(leaf.grad, input_grads, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("remat", [False, True])
def test_modules_with_state_and_dropout(executor, remat):
    """Batch norm's state is committed by the forwards; dropout draws the same in R, however much
    later it runs."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)) for _ in range(2)]
    stages, params, state = zip(
        *(fp.from_module(part.double(), name=str(i)) for i, part in enumerate(parts)), strict=True
    )
    schedule = fp.schedules.fill_drain(2, 4)
    schedule = fp.schedules.remat(schedule) if remat else schedule
    x, c = torch.randn(2, 10, 6, dtype=torch.float64)
    expected = with_loss(stages, schedule, params, x, c, state=state, seed=7)
    plan = fp.make_plan(stages, schedule, devices="cpu")
    result, pullback = fp.vjp(
        plan, params, x, state=state, seed=7, executor=executor, threads_per_lane=1
    )
    assert same(expected.state, result.state)
    assert result.grads is None
    assert result.loss is None
    torch.rand(5)  # the global generator moves between the halves
    grads, _ = pullback(c)
    assert same(expected.grads, grads)


@pytest.mark.parametrize("schedule", one_of_each_kind(MIXED), ids=ids)
def test_a_schedule_without_halves_is_refused(schedule):
    stages, params = net()
    plan = fp.make_plan(stages, schedule, devices="cpu")
    with pytest.raises(fp.PlanError, match=r"device \d runs \dF\d after \d[BIR]\d"):
        fp.vjp(
            plan, params, torch.ones(4, 6, dtype=torch.float64), feeds={"scale": torch.ones(4, 1)}
        )


def plan_of(stages, *, remat=False, **options):
    """A plan that runs the forwards of two microbatches first."""
    schedule = fp.schedules.fill_drain(len(stages), 2)
    schedule = fp.schedules.remat(schedule) if remat else schedule
    return fp.make_plan(stages, schedule, devices="cpu", **options)


def linear_plan(**options):
    return plan_of([fp.stage(lambda p, x: torch.tanh(x @ p), name="part")] * 2, **options)


PARAMS = (torch.eye(3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64))
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)


def test_plans_that_have_no_pullback():
    with pytest.raises(fp.PlanError, match=r"fp\.run"):
        fp.vjp(linear_plan(loss=F.mse_loss), PARAMS, X)
    forward = fp.make_plan(
        linear_plan().stages, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu"
    )
    with pytest.raises(fp.PlanError, match="needs a schedule with backwards"):
        fp.vjp(forward, PARAMS, X)
    with torch.inference_mode(), pytest.raises(fp.PlanError, match="inference_mode"):
        fp.vjp(linear_plan(), PARAMS, X)
    with pytest.raises(fp.FuncpipeError, match=r"fp\.apply"):
        torch.func.grad(lambda x: fp.vjp(linear_plan(), PARAMS, x)[0].outputs.sum())(X)


def test_an_auxiliary_loss_is_refused():
    part = fp.stage(lambda p, x: fp.Out(x * p, loss=((x * p).sum(), 1.0)), name="moe")
    plan = plan_of([part])
    with pytest.raises(fp.PlanError, match=r"stage 0 returned an auxiliary loss"):
        fp.vjp(plan, (torch.ones(3, dtype=torch.float64),), X)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (
            torch.ones(4, 2, dtype=torch.float64),
            r"cotangents is torch.float64 \(4, 2\); the output is torch.float64 \(4, 3\)",
        ),
        (torch.ones(4, 3), r"torch.float32 \(4, 3\); the output is torch.float64"),
        ((torch.ones(4, 3, dtype=torch.float64),), "have the structure"),
        (1.0, "is a float; give a tensor"),
    ],
)
def test_bad_cotangents_are_refused_and_nothing_is_lost(bad, words):
    _, pullback = fp.vjp(linear_plan(), PARAMS, X)
    with pytest.raises(fp.BatchError, match=words):
        pullback(bad)
    grads, _ = pullback(torch.ones(4, 3, dtype=torch.float64))
    assert grads[0].abs().sum() > 0


def test_once():
    _, pullback = fp.vjp(linear_plan(), PARAMS, X)
    pullback(torch.ones_like(X))
    with pytest.raises(fp.FuncpipeError, match="spent"):
        pullback(torch.ones_like(X))


def test_parameters_that_moved_are_noticed():
    params = tuple(p.clone() for p in PARAMS)
    _, pullback = fp.vjp(linear_plan(), params, X)
    params[1].add_(1)
    with pytest.raises(
        fp.PlanError, match=r"between the forward \(fp.vjp, or the call of a Pipe\) and its"
    ):
        pullback(torch.ones_like(X))


def test_trees_of_outputs_and_inputs():
    """Ints, None cotangents, leaves without rows, shared and turned inputs."""

    @fp.stage
    def first(p, x):
        return {"h": x["a"].T * p * x["table"], "n": x["n"]}

    @fp.stage
    def second(p, x):
        return x["h"] * p, x["n"], x["h"].sum()

    plan = plan_of([first, second])
    params = (torch.tensor(2.0), torch.tensor(3.0))
    inputs = {
        "a": fp.Axis(torch.arange(6.0).reshape(3, 2), 1),
        "table": fp.Replicate(torch.ones(3)),
        "n": torch.arange(2),
        "unused": torch.ones(2),
    }
    result, pullback = fp.vjp(plan, params, inputs)
    _, n, total = result.outputs
    assert n.tolist() == [0, 1]
    assert isinstance(total, fp.Microbatches)
    with pytest.raises(
        fp.BatchError, match=r"cotangents\[1\] belongs to an output that has no gradient"
    ):
        pullback((torch.ones(2, 3), torch.ones(2), None))
    with pytest.raises(
        fp.BatchError, match=r"cotangents\[2\] belongs to an output that comes as Microbatches"
    ):
        pullback((torch.ones(2, 3), None, torch.ones(())))
    grads, back = pullback(
        (torch.ones(2, 3), None, fp.Microbatches([torch.tensor(1.0), torch.tensor(10.0)]))
    )
    a = inputs["a"].value
    factor = (
        torch.tensor([[1.0 * 3 + 1], [1.0 * 3 + 10]]) * 2
    )  # d/dh is 3 + the cotangent of the sum
    assert torch.equal(back["a"], factor.T.expand(3, 2))
    assert torch.equal(back["table"], (a.T * factor).sum(0))
    assert back["n"] is None
    assert torch.equal(back["unused"], torch.zeros(2))
    assert float(grads[1]) == float((a * 2).sum())


def test_inputs_that_are_cut_already():
    plan = linear_plan()
    result, pullback = fp.vjp(plan, PARAMS, fp.Microbatches([X[:1], X[1:]]))
    ones = [torch.ones_like(one) for one in result.outputs]
    with pytest.raises(fp.BatchError, match=r"fp\.Microbatches of 2"):
        pullback(ones)
    with pytest.raises(fp.BatchError, match="leaf 0 of microbatch 1"):
        pullback(fp.Microbatches([ones[0], ones[0]]))
    grads, back = pullback(fp.Microbatches(ones))
    _, other = fp.vjp(plan, PARAMS, X)
    _, whole = other(torch.ones_like(X))
    assert torch.allclose(torch.cat(list(back)), whole)
    assert grads[0] is not None


def test_without_gradients_of_the_inputs():
    _, pullback = fp.vjp(linear_plan(), PARAMS, X, input_grads=False)
    grads, back = pullback(torch.ones_like(X))
    assert back is None
    _, other = fp.vjp(linear_plan(), PARAMS, X)
    assert same(grads, other(torch.ones_like(X))[0])


def test_no_cotangent_at_all_gives_zeros():
    _, pullback = fp.vjp(linear_plan(), PARAMS, X)
    grads, back = pullback(None)
    assert torch.equal(back, torch.zeros_like(X))
    assert pullback.unused == ((0, ()), (1, ()))
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_inside_of_an_outer_backward(executor):
    """As a module would use it: both halves in an autograd Function, under no_grad and on the
    engine's own terms."""
    plan = linear_plan(remat=True)

    class Pipe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *params):
            result, ctx.pullback = fp.vjp(plan, params, x, executor=executor)
            return result.outputs

        @staticmethod
        def backward(ctx, g):
            grads, back = ctx.pullback(g)
            return back, *grads

    before = torch.full((3,), 0.5, dtype=torch.float64, requires_grad=True)
    after = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    params = tuple(p.clone().requires_grad_() for p in PARAMS)
    (Pipe.apply(X * before, *params) * after).sum().backward()
    got = [before.grad, after.grad, *(p.grad for p in params)]
    before2, after2, *params2 = (
        t.detach().clone().requires_grad_() for t in (before, after, *params)
    )
    (fp.apply(plan.stages, params2, X * before2).y * after2).sum().backward()
    for a, b in zip(got, [before2.grad, after2.grad, *(p.grad for p in params2)], strict=True):
        assert torch.allclose(a, b, rtol=1e-10)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_was_switched_on_holds_in_the_second_half(executor):
    """R runs under the autocast of the forwards, though the pullback is called outside of it."""
    part = fp.stage(lambda p, x: torch.tanh(F.linear(x, p)), name="part")
    plan = plan_of([part] * 2, remat=True)
    params, x = (torch.rand(3, 3), torch.rand(3, 3)), torch.rand(4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        result, pullback = fp.vjp(plan, params, x, executor=executor)
        _, inside = fp.vjp(plan, params, x, executor=executor)
        assert result.outputs.dtype is torch.bfloat16
        expected = inside(torch.ones_like(result.outputs))
    assert same(expected, pullback(torch.ones_like(result.outputs)))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_dropped_it_frees_everything(executor):
    """No cycle keeps residuals alive: without any garbage collection they die with the pullback."""
    watch = Watch()
    part = fp.stage(lambda p, x: watch.layer(x, p), name="part")
    plan = plan_of([part] * 2)
    params = (torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    gc.collect()
    gc.disable()
    try:
        result, pullback = fp.vjp(plan, params, X.clone(), executor=executor)
        assert watch.live_graphs == 4
        del result, pullback
        assert watch.alive == 0
        result, pullback = fp.vjp(plan, params, X.clone(), executor=executor)
        back = pullback(torch.ones_like(X))
        del result, back
        assert watch.alive == 0  # spent, it holds nothing
    finally:
        gc.enable()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failing_backward_spends_it(executor):
    class Boom(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise KeyError("boom")

    parts = [
        fp.stage(lambda p, x: Boom.apply(x * p), name="bad"),
        fp.stage(lambda p, x: x * p, name="good"),
    ]
    plan = plan_of(parts)
    _, pullback = fp.vjp(plan, (torch.ones(3), torch.ones(3)), X.float(), executor=executor)
    with pytest.raises(KeyError, match="boom") as caught:
        pullback(torch.ones(4, 3))
    assert (caught.value.funcpipe.stage, caught.value.funcpipe.action[:2]) == (0, "0B")
    with pytest.raises(fp.FuncpipeError, match="spent"):
        pullback(torch.ones(4, 3))


def test_kept_lanes_may_close_between_the_halves():
    plan = linear_plan()
    with fp.lanes(plan) as lanes:
        _, pullback = fp.vjp(plan, PARAMS, X, executor=lanes)
    _, other = fp.vjp(plan, PARAMS, X, executor="serial")
    assert same(pullback(torch.ones_like(X)), other(torch.ones_like(X)))


def test_ties_are_summed():
    plan = linear_plan(ties=[((0, ()), (1, ()))])
    w = PARAMS[1].clone()
    _, pullback = fp.vjp(plan, (w, w), X)
    grads, _ = pullback(torch.ones_like(X))
    leaf = w.clone().requires_grad_()
    fp.apply(plan.stages, (leaf, leaf), X).y.sum().backward()
    assert torch.allclose(grads[0], leaf.grad)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("remat", [False, True])
def test_a_batch_that_is_used_again_for_the_next(executor, remat):
    """A loader that fills the same buffers: what R reads is what F read."""
    part = fp.stage(lambda p, x, *, feeds: x * p * feeds["m"], name="part", feeds=["m"])
    plan = plan_of([part] * 2, remat=remat)
    params = (torch.tensor(2.0), torch.tensor(3.0))
    x, m = torch.arange(1.0, 5.0), torch.full((4,), 2.0)
    _, pullback = fp.vjp(plan, params, x.clone(), feeds={"m": m.clone()}, executor=executor)
    expected = pullback(torch.ones(4))
    _, pullback = fp.vjp(plan, params, x, feeds={"m": m}, executor=executor)
    x.zero_()
    m.zero_()
    assert same(expected, pullback(torch.ones(4)))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("remat", [False, True])
def test_what_is_on_at_the_pullback_alone_changes_nothing(remat, executor):
    part = fp.stage(lambda p, x: torch.tanh(F.linear(x, p) + torch.ones(3)), name="part")
    plan = plan_of([part] * 2, remat=remat)
    params, x, c = (torch.rand(3, 3), torch.rand(3, 3)), torch.rand(4, 3), torch.ones(4, 3)
    expected = fp.vjp(plan, params, x, executor=executor)[1](c)
    for around in (
        torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode(),
        torch.no_grad(),
        torch.device("meta"),
    ):
        _, pullback = fp.vjp(plan, params, x, executor=executor)
        with around:
            got = pullback(c)
        assert same(expected, got)


def test_hooks_that_came_in_between_are_refused():
    _, pullback = fp.vjp(linear_plan(), PARAMS, X, executor="serial")
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0, lambda t: t)
    with hooks, pytest.raises(fp.PlanError, match="saved-tensor hooks are active than at vjp"):
        pullback(torch.ones_like(X))
    assert pullback(torch.ones_like(X))[0][0].any()


def test_outputs_that_are_not_joined_are_copies():
    result, pullback = fp.vjp(linear_plan(), PARAMS, fp.Microbatches([X[:1], X[1:]]))
    _, other = fp.vjp(linear_plan(), PARAMS, fp.Microbatches([X[:1], X[1:]]))
    ones = fp.Microbatches([torch.ones_like(one) for one in result.outputs])
    result.outputs[0].zero_()
    assert same(other(ones)[0], pullback(ones)[0])
