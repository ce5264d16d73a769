"""Pipe inside of plain autograd: what is computed again, in-place layers, what the graph holds and
frees."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn as nn
from common import same
from pipe.sequentials import Log, assert_close, data, every_checkpoint, grads, net, piped

import funcpipe as fp


class Note(nn.Module):
    """Notes each forward (with whether autograd records) and each backward."""

    def __init__(self, name=""):
        super().__init__()
        self.log, self.name = Log(), name

    def forward(self, x):
        self.log.values.append(f"{self.name}F")
        if x.requires_grad:
            x = x * 1
            x.register_hook(lambda grad: self.log.values.append(f"{self.name}B"))
        return x


# -- what is computed again
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "again"), [("always", 0), ("except_last", 1), ("never", None)]
)
@pytest.mark.parametrize("rows", [10, 3, 1])
def test_d1_d2_how_many_microbatches_are_computed_again(checkpoint, again, rows):
    note = Note()
    pipe = fp.Pipe(nn.Sequential(nn.Linear(4, 4).double(), note), 4, checkpoint, devices=["cpu"])
    count = min(rows, 4)
    pipe(data(rows)).sum().backward()
    repeated = 0 if again is None else count - again
    assert note.log.values.count("F") == count + repeated
    assert note.log.values.count("B") == count


@every_checkpoint
def test_d3_nothing_again_in_evaluation_or_without_gradients(checkpoint):
    note = Note()
    pipe = fp.Pipe(nn.Sequential(nn.Linear(4, 4).double(), note), 4, checkpoint, devices=["cpu"])
    for around in (torch.no_grad, torch.inference_mode):
        with around():
            y = pipe(data())
        assert (y.requires_grad, y.grad_fn) == (False, None)
        assert note.log.values == ["F"] * 4
        note.log.values.clear()
    pipe.eval()(data()).sum().backward()
    assert note.log.values == ["F"] * 4 + ["B"] * 4


def test_d4_each_microbatch_is_computed_again_just_before_its_backward():
    model = nn.Sequential(nn.Linear(4, 4).double(), Note("0"), nn.Linear(4, 4).double(), Note("1"))
    model[3].log = model[1].log
    pipe = fp.Pipe(model, 2, "always", devices="cpu", balance=[2, 2])
    y = pipe(data(2))
    pipe[1].log.values.clear()
    y.sum().backward()
    for stage in "01":  # each lane's own order
        assert [one for one in pipe[1].log.values if one[0] == stage] == [
            f"{stage}F",
            f"{stage}B",
        ] * 2


@every_checkpoint
def test_d5_dropout_is_the_same_when_computed_again(checkpoint):
    """Many dropouts in two stages at once: the zeros of y are the zeros of the gradient."""
    layers = [nn.Dropout(0.025) for _ in range(20)]
    pipe = fp.Pipe(nn.Sequential(*layers), 8, checkpoint, balance=[10, 10], devices="cpu")
    x = torch.ones(64, 64, dtype=torch.float64, requires_grad=True)
    y = pipe(x)
    assert 0 < int((y == 0).sum()) < y.numel()
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)


def test_d5_manual_seed_repeats_a_run_and_nothing_else_is_drawn():
    pipe, model = piped(nn.Sequential(net(), nn.Dropout(0.5)), balance=[1, 1]), net()
    found = []
    for _ in range(3):  # the first call learns who draws
        torch.manual_seed(7)
        found.append((pipe(data()).detach(), torch.rand(())))
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert not torch.equal(pipe(data()), pipe(data()))
    state = torch.get_rng_state()
    still = piped(model)
    still(data())
    still(data())
    pipe.eval()(data())
    assert torch.equal(state, torch.get_rng_state())


def test_d5_random_numbers_do_not_depend_on_the_cut():
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)
    ).double()
    found = []
    for balance in ([4], [1, 3], [2, 2], [1, 1, 1, 1]):
        torch.manual_seed(3)
        found.append(piped(model, balance=balance)(data()).detach())
    assert all(same(found[0], other) for other in found[1:])


class WithMask(nn.Module):
    """Outputs that have no gradient, in several places."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        y = self.linear(x)
        parts = {"y": y, "i": (y > 0).long(), "m": (y > 0).double(), "d": y.detach(), "b": True}
        first = self.order[0] == "y"
        return (
            tuple(parts[key] for key in self.order)
            if first
            else (y, *(parts[key] for key in self.order))
        )


@every_checkpoint
@pytest.mark.parametrize("order", ["yimdb", "by"])
def test_d8_outputs_without_gradients_in_any_place(checkpoint, order):
    model = nn.Sequential(WithMask(order), WithMask(order))
    pipe = piped(model, 3, checkpoint, balance=[1, 1])
    out, expected = pipe(data()), model(data())
    for a, b in zip(out, expected, strict=True):
        assert getattr(a, "requires_grad", None) == getattr(b, "requires_grad", None)
    assert_close(
        [one for one in out if one is not True], [one for one in expected if one is not True]
    )
    loss = [
        sum(one.sum() for one in tree if getattr(one, "requires_grad", False))
        for tree in (out, expected)
    ]
    for one in loss:
        one.backward()
    assert_close(grads(pipe), grads(model))


@every_checkpoint
def test_d9_a_function_that_returns_its_input(checkpoint):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Layer(nn.Module):
        def forward(self, x):
            return Same.apply(x)

    pipe, x = (
        fp.Pipe(nn.Sequential(Layer(), Layer()), 2, checkpoint, devices="cpu"),
        data().requires_grad_(),
    )
    pipe(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4))


# -- in place
# -------------------------------------------------------------------------------


class AddOne(nn.Module):
    def forward(self, x):
        return x.add_(1)


@every_checkpoint
@pytest.mark.parametrize("balance", [[4], [1, 3], [2, 2]], ids=str)
def test_e1_e2_e4_in_place_layers_at_cuts_work_and_the_batch_stays(checkpoint, balance):
    layers = (AddOne(), AddOne(), nn.ReLU(inplace=True), nn.Linear(4, 2).double())
    x = data().requires_grad_()
    before = x.detach().clone()
    pipe = fp.Pipe(nn.Sequential(*layers), 3, checkpoint, balance=balance, devices="cpu")
    pipe(x).sum().backward()
    y = x.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(layers[3]((y + 2).relu()).sum(), y)
    assert_close([x.grad], [expected])
    assert torch.equal(x.detach(), before)
    plain = before.clone()
    pipe(plain)
    assert torch.equal(plain, before)


@every_checkpoint
def test_e3_two_uses_of_one_input(checkpoint):
    class Twice(nn.Module):
        def forward(self, x):
            y = x * 1
            x.add_(1)
            return y + x

    x = torch.zeros(4, 1, requires_grad=True)
    fp.Pipe(nn.Sequential(Twice()), 2, checkpoint, devices="cpu")(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_e4_outputs_are_the_callers():
    pipe, x = piped(net()), data()
    y = pipe(x)
    expected = torch.autograd.grad(pipe(x).sum() * 2, list(pipe.parameters()))
    y.mul_(2).sum().backward()
    assert_close(grads(pipe), expected)


# -- the graph
# -------------------------------------------------------------------------------


@every_checkpoint
def test_autograd_grad_for_some_parameters(checkpoint):
    model, pipe = net(), piped(net(), checkpoint=checkpoint)
    some = [0, 3]
    expected = torch.autograd.grad(model(data()).sum(), [list(model.parameters())[i] for i in some])
    found = torch.autograd.grad(pipe(data()).sum(), [list(pipe.parameters())[i] for i in some])
    assert_close(expected, found)
    assert grads(pipe) == [None] * 8


def test_a_backward_runs_once():
    pipe = piped(net())
    y = pipe(data())
    y.sum().backward(retain_graph=True)
    with pytest.raises(fp.FuncpipeError, match="has already run.*call the pipe again"):
        y.sum().backward()
    pipe(data()).sum().backward()


def test_there_is_no_graph_of_gradients():
    pipe = piped(net())
    y = pipe(data())
    with pytest.raises(
        fp.FuncpipeError, match=r"create_graph=True is not possible; .* nn\.Sequential\(\*pipe\)"
    ):
        torch.autograd.grad(y.sum(), list(pipe.parameters()), create_graph=True)
    y.sum().backward()  # nothing was lost
    with pytest.raises(fp.FuncpipeError, match=r"torch\.func"):
        torch.func.grad(lambda x: pipe(x).sum())(data())


@every_checkpoint
def test_a_dropped_output_frees_everything(checkpoint):
    pipe = piped(net(), checkpoint=checkpoint)
    pipe(data())
    gc.collect()
    gc.disable()
    try:
        y = pipe(data())
        held = [weakref.ref(y.grad_fn.pullback), weakref.ref(y.grad_fn.pullback._execution)]
        del y
        assert [one() for one in held] == [None, None]
        y = pipe(data())
        held = weakref.ref(y.grad_fn.pullback._execution)
        y.sum().backward()
        assert held() is None
    finally:
        gc.enable()


def test_parameters_written_between_the_halves_are_noticed():
    pipe = piped(net())
    y = pipe(data())
    with torch.no_grad():
        pipe[0].weight.add_(1)
    with pytest.raises(fp.PlanError, match="parameters were written to"):
        y.sum().backward()


def test_frozen_and_unused_parameters_have_no_gradient():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.used = (
                nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(2)
            )

        def forward(self, x):
            return x * self.used

    pipe = piped(nn.Sequential(Spare(), *net()), balance=[3, 4])
    pipe[1].weight.requires_grad_(False)
    pipe(data()).sum().backward()
    assert pipe[0].spare.grad is None
    assert pipe[1].weight.grad is None
    assert pipe[1].bias.grad is not None
    pipe[1].weight.requires_grad_()
    pipe.zero_grad()
    pipe(data()).sum().backward()
    assert pipe[1].weight.grad is not None
    pipe.requires_grad_(False)
    assert not pipe(data()).requires_grad


def test_only_what_is_asked_for_is_computed():
    """A float input that requires no gradient stays without one inside of the stages; `vjp` takes a
    tree of bools."""
    seen = []

    class Mix(nn.Module):
        def forward(self, x):
            seen.append((x["a"].requires_grad, x["b"].requires_grad))
            return x["a"] * x["b"]

    a, b = data().requires_grad_(), data()
    fp.Pipe(nn.Sequential(Mix()), 1, devices="cpu")({"a": a, "b": b}).sum().backward()
    assert seen == [(True, False)]
    assert torch.equal(a.grad, b)
    stage = fp.stage(lambda p, x: x["a"] * x["b"])
    plan = fp.make_plan([stage], fp.schedules.fill_drain(1, 2), devices="cpu")
    _, pullback = fp.vjp(plan, ((),), {"a": a, "b": b}, input_grads={"a": True, "b": False})
    assert pullback.attached == ((True,), (True,))
    back = pullback(torch.ones_like(b))[1]
    assert torch.equal(back["a"], b)
    assert back["b"] is None
    with pytest.raises(fp.PlanError, match="input_grads is True, False, or a tree"):
        fp.vjp(plan, ((),), {"a": a, "b": b}, input_grads=["a"])


def test_functional_call():
    pipe, model = piped(net()), net()
    factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    sums = []
    for one in (pipe, model):
        scaled = {name: param * factor for name, param in one.named_parameters()}
        y = torch.func.functional_call(one, scaled, (data(),))
        sums.append(torch.autograd.grad(y.sum(), [factor, *one.parameters()]))
    assert_close(*sums)
