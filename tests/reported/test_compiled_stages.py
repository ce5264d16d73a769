"""Compiled stages are bit-identical to eager ones and read current values; a check of numbers
changes no bit."""

import argparse
import random
import types
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S

ORDERS = "0F0 0F1 0F2 1F0 1F1 1F2 1I0 1I1 1I2 1W2 1W1 1W0 0I2 0I0 0I1 0W1 0W2 0W0"


def plan_of(stage, loss):
    return fp.make_plan([stage], S.one_f_one_b(1, 2), loss=loss, devices="cpu")


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
    params = [
        {name: leaf.detach().double() for name, leaf in tree.items()} for tree in split.params
    ]
    x, schedule = torch.randn(9, 16, dtype=torch.float64), fp.Schedule.parse(order)

    def gradients(stages):
        plan = cpu_plan(stages, schedule)
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
    plan = plan_of(stage, lambda y, t: y.sum() / len(y))
    params = {
        "s": torch.ones(1, 3, dtype=torch.float64),
        "unused": torch.ones(1, 3, dtype=torch.float64),
    }
    x = torch.full(
        (2, 3), -0.0, dtype=torch.float64
    )  # a row each: a sum over rows would begin at 0
    (grads,) = fp.run(plan, (params,), (x, None), check=check).grads
    assert grads["s"].signbit().all()
    assert not grads["unused"].signbit().any()  # zeros where no backward added anything


def test_a_check_of_numbers_leaves_the_sign_of_a_sum_that_begins_late():
    def late(p, x):
        return x * p["s"] if x[0, 0] < 0 else x * p["t"]

    plan = plan_of(fp.stage(late), lambda y, t: (y * t).sum() / len(y))
    params = {name: torch.ones(1, 2, dtype=torch.float64) for name in "st"}
    x = torch.tensor([[1.0, 1.0], [-1.0, -0.0]], dtype=torch.float64)
    found = [
        fp.run(plan, (params,), (x, torch.ones_like(x)), check=check).grads
        for check in ((), "finite")
    ]
    assert found[0][0]["s"].signbit().all()
    assert_same_bits(*found)


BETA = 1.0
options = argparse.Namespace(beta=1.0)
settings = types.ModuleType("settings")
settings.beta = 1.0
weights, by_name, array = [1.0, 1.0], {"beta": 1.0}, np.ones(3, dtype=np.float32)
generator, numpy_generator = random.Random(0), np.random.default_rng(0)


class Annealed(nn.Module):
    """A loss whose weight changes during training."""

    floor = 0.0

    def __init__(self):
        super().__init__()
        self.beta, self.part = 0.0, nn.Module()
        self.part.gain = self._private = 1.0

    def forward(self, y, t):
        return F.mse_loss(y, t) * self.part.gain * self._private + self.penalty(y)

    def penalty(self, y):
        return self.beta * y.square().mean() + self.floor


class Slots:
    __slots__ = ("beta",)


class Settings:
    beta = 1.0


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -BETA * grad


annealed, slots = Annealed(), Slots()
slots.beta = 1.0


def set_global(value):
    global BETA
    BETA = value


def mean(y, t):
    return y.square().mean()


def plain(p, x):
    return x * p


def helper(x):
    return x * BETA


def enclosing():
    beta = 1.0

    def set_beta(value):
        nonlocal beta
        beta = value

    return lambda p, x: x * p * beta, set_beta


in_a_cell, set_cell = enclosing()


def setter(owner, name):
    return partial(setattr, owner, name)


READS = {
    "an attribute of the loss": (plain, annealed, setter(annealed, "beta")),
    "a private attribute of the loss": (plain, annealed, setter(annealed, "_private")),
    "an attribute of a part of the loss": (plain, annealed, setter(annealed.part, "gain")),
    "a class attribute that the loss overrides later": (plain, annealed, setter(annealed, "floor")),
    "a global, in a helper": (lambda p, x: helper(x * p), mean, set_global),
    "a global, in a backward": (lambda p, x: Reversed.apply(x * p), mean, set_global),
    "a closure": (in_a_cell, mean, set_cell),
    "a namespace": (lambda p, x: x * p * options.beta, mean, setter(options, "beta")),
    "a module": (lambda p, x: x * p * settings.beta, mean, setter(settings, "beta")),
    "a list": (lambda p, x: x * p * weights[0], mean, partial(weights.__setitem__, 0)),
    "a dict": (lambda p, x: x * p * by_name["beta"], mean, partial(by_name.__setitem__, "beta")),
    "an array": (lambda p, x: x * p * torch.from_numpy(array), mean, partial(array.__setitem__, 0)),
    "slots": (lambda p, x: x * p * slots.beta, mean, setter(slots, "beta")),
    "a class": (lambda p, x: x * p * Settings.beta, mean, setter(Settings, "beta")),
    "keywords": (
        plain,
        partial(lambda y, t, by: y.mean() * by["beta"], by=by_name),
        partial(by_name.__setitem__, "beta"),
    ),
    "a default": (plain, lambda y, t, by=options: y.mean() * by.beta, setter(options, "beta")),
    "a tensor of a number": (lambda p, x: x * p * torch.tensor(BETA), mean, set_global),
    "a branch": (lambda p, x: x * p if BETA < 2 else x * p * p * 3, mean, set_global),
}


@pytest.mark.parametrize("name", READS)
def test_a_compiled_stage_reads_today_s_numbers(name):
    fn, loss, put = READS[name]
    params, x = (torch.full((3,), 2.0),), torch.randn(4, 3)
    stage = fp.stage(fn)
    made = [stage, fp.compile_stage(stage)]
    plans = [plan_of(one, loss) for one in made]
    for value in (1.0, 4.0, 1.0):
        put(value)
        eager, compiled = [fp.run(plan, params, (x, x + 1)) for plan in plans]
        torch.testing.assert_close(compiled.loss, eager.loss)
        torch.testing.assert_close(compiled.grads, eager.grads)
    assert 2 == made[1].program.made  # the first run's numbers again


def of_torch(name, act):
    """A module that seems to be torch's own."""
    module = types.ModuleType(f"torch.{name}")
    module.act = act
    return module


ACT = None
VALUES_OF_ACT = {
    "classes": ((nn.Tanh, nn.ReLU), lambda p, x: ACT()(x * p)),
    "functions": ((torch.tanh, F.relu), lambda p, x: ACT(x * p)),
    "modules": (
        (of_torch("one", torch.tanh), of_torch("two", torch.relu)),
        lambda p, x: ACT.act(x * p),
    ),
}


@pytest.mark.parametrize("kind", VALUES_OF_ACT)
def test_a_name_gets_another_class_function_or_module_of_torch(kind):
    global ACT
    values, fn = VALUES_OF_ACT[kind]
    stage = fp.compile_stage(fp.stage(fn))
    x = torch.randn(4, 3)
    ACT = values[0]
    plan = plan_of(stage, mean)
    for value in (*values, values[0]):
        ACT = value
        expected = mean(fn(torch.full((3,), 2.0), x), None)
        torch.testing.assert_close(
            fp.run(plan, (torch.full((3,), 2.0),), (x, x), trainable=True).loss, expected
        )
    assert 2 == stage.program.made


def test_a_step_that_changes_nothing_traces_nothing():
    annealed.count = 0
    stage = fp.compile_stage(fp.stage(plain))
    plan = plan_of(stage, annealed)
    for step in range(3):
        annealed.count, annealed.part.gain = (
            step,
            float(str(step * 0 + 1)),
        )  # an unread attribute, and an equal number
        fp.run(plan, (torch.ones(3),), (torch.ones(4, 3), torch.ones(4, 3)))
    assert 1 == stage.program.made


def test_a_number_that_changes_each_step_is_named_once():
    stage = fp.compile_stage(fp.stage(plain))
    plan = plan_of(stage, annealed)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(6):
            annealed.beta = step / 8
            fp.run(plan, (torch.ones(3),), (torch.ones(4, 3), torch.ones(4, 3)))
    assert 1 == len(heard)
    assert "loss.beta was 0.0, 0.125, 0.25, 0.375" in str(heard[0].message)


def log(p, x):
    calls.append(1)
    return x * p


calls = []


def test_a_list_that_a_stage_fills_is_no_number():
    stage = fp.compile_stage(fp.stage(log))
    plan = plan_of(stage, mean)
    for _ in range(3):
        calls.append(2)
        fp.run(plan, (torch.ones(3),), (torch.ones(4, 3), None))
    assert 1 == stage.program.made


def count(p, x):
    weights[1] += 1
    return x * p


DRAWS = {
    "random in a branch": lambda p, x: x * p if random.random() < 0.5 else x * p * 2,
    "numpy in a branch": lambda p, x: x * p if np.random.rand() < 0.5 else x * p * 2,
    "a mask of numpy": lambda p, x: x * p * torch.from_numpy(np.random.rand(*x.shape) > 0.5),
    "a tensor of drawn numbers": lambda p, x: (
        x * p * torch.tensor(random.sample([1.0, 2.0, 3.0], 3))
    ),
    "an own generator": lambda p, x: x * p if generator.random() < 0.5 else x * p * 2,
    "an own generator of numpy": lambda p, x: (
        x * p if numpy_generator.random() < 0.5 else x * p * 2
    ),
    "a counter": count,
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("in_loss", [False, True])
def test_draws_that_are_not_torch_s_are_refused(name, in_loss):
    fn = DRAWS[name]
    stage = fp.compile_stage(fp.stage(plain if in_loss else fn, name="drawing"))
    loss = (lambda y, t: fn(1.0, y).mean()) if in_loss else mean
    plan = plan_of(stage, loss)
    with pytest.raises(
        fp.TraceError,
        match="'drawing' cannot be compiled: it does something else in its second call",
    ):
        fp.run(plan, (torch.ones(3),), (torch.ones(4, 3), None))


def test_draws_of_another_thread_are_no_draws_of_the_stage(monkeypatch):
    """A loader draws in another thread while a stage is traced."""
    states = iter(range(100))
    monkeypatch.setattr(
        "funcpipe._src.compiled.python_values._global_states",
        lambda: {"numpy.random": str(next(states))},
    )
    stage = fp.compile_stage(fp.stage(plain))
    plan = plan_of(stage, mean)
    fp.run(plan, (torch.ones(3),), (torch.ones(4, 3), None))
