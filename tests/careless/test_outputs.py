"""How outputs are joined over microbatches is said, never guessed from sizes."""

import pytest
import torch
import torch.nn as nn
from common import EXECUTORS

import funcpipe as fp


def plan_of(fn, merge=None, count=3):
    return fp.make_plan(
        [fp.stage(fn)],
        fp.schedules.fill_drain(1, count, backward=False),
        merge=merge,
        devices="cpu",
    )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("rows", [7, 3, 9])
def test_each_rule(executor, rows):
    """Over uneven microbatches: what one call over the whole batch gives."""
    x = torch.randn(rows, 4)
    fn = lambda x: {
        "y": x,
        "t": x.T,
        "m": x.mean(0),
        "s": x.sum(0),
        "e": x.sum(0),
        "n": len(x),
        "k": "word",
    }
    rules = {"y": 0, "t": -1, "m": "mean", "s": "sum", "e": "each", "n": None, "k": None}
    out = fp.run(plan_of(lambda p, x: fn(x), rules), ((),), x, executor=executor).outputs
    assert torch.equal(out["y"], x)
    assert torch.equal(out["t"], x.T)
    torch.testing.assert_close(out["m"], x.mean(0))
    torch.testing.assert_close(out["s"], x.sum(0))
    torch.testing.assert_close(sum(out["e"]), x.sum(0))
    assert sum(out["n"]) == rows if isinstance(out["n"], fp.Microbatches) else out["n"] * 3 == rows
    assert out["k"] == "word"


def test_a_rule_holds_for_all_below():
    x = torch.randn(6, 4)
    tree = lambda p, x: ({"a": x.T, "b": [x.T]}, x)
    (first, second) = fp.run(plan_of(tree, ({"a": 1, "b": 1}, 0)), ((),), x).outputs
    assert torch.equal(first["a"], x.T)
    assert torch.equal(first["b"][0], x.T)
    assert torch.equal(second, x)
    inside = fp.run(plan_of(tree, (1, 0)), ((),), x).outputs
    assert torch.equal(inside[0]["a"], x.T)


@pytest.mark.parametrize("rows", [6, 7])
def test_statistics_that_are_as_long_as_rows_are_not_taken_for_rows_by_chance(rows):
    """[2, 4] beside microbatches of 2 rows were joined, beside 3 rows they were not: now a rule
    decides."""
    x = torch.randn(rows, 4)
    stats = lambda p, x: torch.stack([x.mean(0), x.var(0)])
    out = fp.run(plan_of(stats, "each"), ((),), x).outputs
    assert isinstance(out, fp.Microbatches)
    assert [tuple(one.shape) for one in out] == [(2, 4)] * 3


def test_what_does_not_fit_its_rule_is_refused_with_every_place():
    x = torch.randn(7, 4)
    with pytest.raises(
        fp.BatchError,
        match=r"outputs has shapes .* axis 0 does not have the rows of the microbatches \(3, 2, 2\).*merge=",
    ):
        fp.run(plan_of(lambda p, x: x.T), ((),), x)
    with pytest.raises(
        fp.BatchError, match=r"outputs\[0\] has shapes.*no mean(.|\n)*outputs\[1\].*no axis 2"
    ):
        fp.run(plan_of(lambda p, x: (x, x), ("mean", 2)), ((),), x)
    with pytest.raises(fp.BatchError, match="which have no mean"):
        fp.run(plan_of(lambda p, x: x.long().sum(0), "mean"), ((),), x)
    with pytest.raises(fp.BatchError, match="merge= has another structure than the outputs"):
        fp.run(plan_of(lambda p, x: x, {"a": 0}), ((),), x)
    for bad in ("max", 1.5, True, {"a": "b"}):
        with pytest.raises(fp.PlanError, match=r"merge= is an axis, 'mean', 'sum' or 'each'"):
            plan_of(lambda p, x: x, bad)


def test_inputs_cut_along_another_axis_need_a_rule_before_anything_runs():
    """Square microbatches were joined along axis 0, wrongly and in silence."""
    calls = []

    def turned(p, x):
        calls.append(x.shape)
        return x * 2

    x = torch.arange(8.0).reshape(2, 4)
    with pytest.raises(
        fp.BatchError,
        match=r"cut along axis 1, so the plan must say along which axis to join .*merge=1",
    ):
        fp.run(plan_of(turned, count=2), ((),), fp.Axis(x, 1))
    assert not calls
    assert torch.equal(fp.run(plan_of(turned, 1, 2), ((),), fp.Axis(x, 1)).outputs, x * 2)


@pytest.mark.parametrize("rule", [1, "mean", "sum", "each"])
def test_cotangents_go_the_way_back(rule):
    """Gradients of plain autograd over the joined output."""
    x, w = torch.randn(5, 3), torch.randn(3, requires_grad=True)
    fn = (lambda p, x: (x * p).T) if rule == 1 else (lambda p, x: (x * p).square().sum(0))
    plan = fp.make_plan([fp.stage(fn)], fp.schedules.fill_drain(1, 2), merge=rule, devices="cpu")
    result, pullback = fp.vjp(plan, (w.detach(),), x)
    parts = [fn(w, part) for part in x.split([3, 2])]
    if rule == "each":
        cotangent = fp.Microbatches([torch.randn_like(one) for one in result.outputs])
        torch.autograd.backward(parts, list(cotangent))
    else:
        whole = {
            1: lambda: torch.cat(parts, 1),
            "sum": lambda: sum(parts),
            "mean": lambda: parts[0] * 0.6 + parts[1] * 0.4,
        }
        cotangent = torch.randn_like(result.outputs)
        whole[rule]().backward(cotangent)
    torch.testing.assert_close(pullback(cotangent)[0][0], w.grad)
    if rule != "each":
        with pytest.raises(fp.BatchError, match="cotangents is"):
            fp.vjp(plan, (w.detach(),), x)[1](torch.ones(9))


def test_a_pipe_has_rules_too():
    class Turned(nn.Module):
        def forward(self, x):
            return x.T, x.sum(0)

    layers, x = nn.Sequential(nn.Linear(3, 3), Turned()), torch.randn(5, 3)
    pipe = fp.Pipe(layers, 2, devices="cpu", merge=(1, "sum"))
    turned, total = pipe(x)
    (turned.square().sum() + total.square().sum()).backward()
    grads = [one.grad.clone() for one in pipe.parameters()]
    pipe.zero_grad()
    y = pipe[0](x)
    (y.T.square().sum() + y.sum(0).square().sum()).backward()
    for one, other in zip(grads, (p.grad for p in pipe.parameters()), strict=True):
        torch.testing.assert_close(one, other)
