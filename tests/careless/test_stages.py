"""Careless stages: what they close over, what they write to, what they forget to return."""

import gc
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS

import funcpipe as fp

RUNS = [fp.run_sequential, *(lambda *a, e=e, **k: fp.run(*a, executor=e, **k) for e in EXECUTORS)]


def plan_of(*stages, count=2, schedule=None):
    schedule = schedule or fp.schedules.one_f_one_b(len(stages), count)
    return fp.make_plan(stages, schedule, loss=lambda y, t: F.mse_loss(y, t), devices="cpu")


def batch(rows=4):
    return torch.randn(rows, 2), torch.randn(rows, 2)


SCALE = nn.Parameter(torch.ones(2))


def _closures():
    net, weight = nn.Linear(2, 2), torch.randn(2, 2, requires_grad=True)
    both = {"layers": [net]}

    class Holder:
        def __init__(self):
            self.net = net

        def __call__(self, p, x):
            return self.net(x)

        def method(self, p, x):
            return self.net(x)

    def default(p, x, inner=net):
        return inner(x)

    return {
        "module": (lambda p, x: net(x), "net.weight"),
        "tensor": (lambda p, x: x @ weight, "weight: float32"),
        "container": (lambda p, x: both["layers"][0](x), r"both\['layers'\]\[0\].weight"),
        "global": (lambda p, x: x * SCALE, "SCALE"),
        "object": (Holder(), "net.weight"),
        "method": (Holder().method, "net.weight"),
        "default": (default, "a default of default.weight"),
        "graph": (lambda p, x, w=weight * 2: x @ w, "a tensor: float32"),
    }


@pytest.mark.parametrize("name", _closures())
@pytest.mark.parametrize(("run", "place"), [(RUNS[0], 0), (RUNS[-1], 1)])
def test_a_stage_that_closes_over_what_requires_a_gradient_is_refused(name, run, place):
    """Before any gradient is used: with the names under which the function finds them, stage and
    microbatch."""
    fn, match = _closures()[name]
    stages = [fp.stage(lambda p, x: x * p, name="own")] * 2
    stages[place] = fp.stage(fn, name="closes")
    plan = plan_of(*stages, count=3)
    params = [torch.ones(2), torch.ones(2)]
    params[place] = ()
    params = tuple(params)
    with pytest.raises(fp.StageError, match=rf"not in its params(.|\n)*{match}") as caught:
        run(plan, params, batch(6))
    assert isinstance(caught.value, fp.PlanError)
    assert caught.value.funcpipe.stage == place


def test_it_is_refused_in_a_compiled_stage_too():
    net = nn.Linear(2, 2)
    plan = plan_of(fp.compile_stage(fp.stage(lambda p, x: net(x) * p)))
    with pytest.raises(fp.FuncpipeError, match=r"net|closed over"):
        fp.run(plan, (torch.ones(2),), batch())


def test_constants_frozen_modules_and_leaves_of_its_own_are_no_fault():
    """What requires no gradient is a constant; what the stage differentiates by itself is its own
    in every call."""
    frozen, table = nn.Linear(2, 2).requires_grad_(False), torch.randn(2)

    def forces(p, x):
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad((at * p).square().sum(), at, create_graph=True)
        return frozen(x) * p + force + table

    plan = plan_of(fp.stage(forces), count=3)
    x, y = batch(6)
    for _ in range(3):
        result = fp.run(plan, (torch.ones(2),), (x, y))
    leaf = torch.ones(2, requires_grad=True)
    F.mse_loss(forces(leaf, x), y).backward()
    torch.testing.assert_close(result.grads[0], leaf.grad)


def test_functional_calls_of_a_module_that_is_closed_over_are_fine():
    net = nn.Linear(2, 2)
    stage = fp.stage(lambda p, x: torch.func.functional_call(net, p, (x,)))
    result = fp.run(plan_of(stage), (dict(net.named_parameters()),), batch())
    assert result.grads[0]["weight"].abs().sum() > 0


def test_nothing_is_kept_of_what_was_refused():
    net = nn.Linear(2, 2)
    ref = weakref.ref(net.weight)
    with pytest.raises(fp.StageError):
        fp.run(plan_of(fp.stage(lambda p, x, own=net: own(x))), ((),), batch())
    del net
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("run", RUNS)
def test_writes_behind_torch_s_back_are_refused_and_change_nothing(run):
    """``.data`` bumps no version; the caller's tensor keeps its numbers all the same."""

    def writes(p, x):
        p["w"].data.mul_(2)
        return x * p["w"]

    params = ({"w": torch.ones(2)},)
    for _ in range(2):
        with pytest.raises(
            fp.PlanError, match=r"wrote into its parameters(.|\n)*params\[0\]\['w'\]"
        ):
            run(plan_of(fp.stage(writes)), params, batch())
        assert torch.equal(params[0]["w"], torch.ones(2))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("grow", [False, True])
def test_putting_other_values_into_params_is_refused(run, grow):
    """Not as autograd's "backward a second time"."""

    def rebinds(p, x):
        p["cache" if grow else "w"] = p["w"] * 2
        return x * p["w"]

    params = ({"w": torch.ones(2)},)
    with pytest.raises(
        fp.StageError, match=r"puts other values into its params \((params\['w'\]|its keys changed)"
    ):
        run(plan_of(fp.stage(rebinds)), params, batch())
    assert list(params[0]) == ["w"]


@pytest.mark.parametrize("run", RUNS)
def test_a_stage_that_returns_nothing_is_named_itself(run):
    stages = [
        fp.stage(lambda p, x: x * p),
        fp.stage(lambda p, x: None, name="forgot"),
        fp.stage(lambda p, x: x * p),
    ]
    with pytest.raises(fp.StageError, match="returned None: is a `return` missing") as caught:
        run(plan_of(*stages), tuple(torch.ones(2) for _ in range(3)), batch())
    assert caught.value.funcpipe.stage == 1


@pytest.mark.parametrize("run", RUNS)
def test_hooks_on_parameters_are_refused(run):
    """They would never be called."""
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        weight = nn.Parameter(torch.ones(2))
        handle = getattr(weight, register)(lambda *_: None)
        plan = plan_of(fp.stage(lambda p, x: x * p["w"]))
        with pytest.raises(
            fp.PlanError, match=r"params\[0\]\['w'\] has hooks on its gradient.*result.grads\[0\]"
        ):
            run(plan, ({"w": weight},), batch())
        assert run(plan, ({"w": weight},), batch(), trainable=False).grads[0]["w"] is None
        handle.remove()
        run(plan, ({"w": weight},), batch())
