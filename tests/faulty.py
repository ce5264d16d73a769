"""Stages with exactly one kind of fault each, and what `check_stage` says of it."""

from __future__ import annotations

import functools
import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
P = {"w": torch.linspace(0.5, 1.5, 3, dtype=torch.float64)}


TABLE = torch.zeros(3, dtype=torch.float64)
CALLS = 0


class Box:
    def __init__(self, h):
        self.h = h


def plain(p, x):
    return torch.tanh(x * p["w"])


def none(p, x):
    plain(p, x)


def generator(p, x):
    return (x * p["w"] for _ in range(2))


def iterator(p, x):
    return {"h": x * p["w"], "more": iter([1])}


def boxed(p, x):
    return x * p["w"], Box(x)


def in_a_set(p, x):
    return x * p["w"], {x}


def not_finite(p, x):
    return torch.log(-torch.exp(x * p["w"]))


def gradient_not_finite(p, x):
    return torch.sqrt((x * p["w"] * 0).abs())


def detached(p, x):
    return (x * p["w"]).detach()


def no_grad(p, x):
    with torch.no_grad():
        return x * p["w"]


def cuts_x(p, x):
    return x.detach() * p["w"]


def unused(p, x):
    return x * p["w"] + p["b"].detach()


def writes_params(p, x):
    p["w"].data.mul_(1)
    p["w"].data.add_(1)
    return x * p["w"]


def writes_frozen(p, x):
    p["b"].add_(1)
    return x * p["w"]


def rebinds_params(p, x):
    p["w"] = p["w"] * 2
    return x * p["w"]


def adds_params(p, x):
    p["cache"] = 3
    return x * p["w"]


def writes_global(p, x):
    TABLE.add_(1)
    return x * p["w"]


def writes_global_same(p, x):
    TABLE.fill_(7)
    return x * p["w"]


def counts_global(p, x):
    global CALLS
    CALLS += 1
    return x * p["w"]


def has_default(p, x, seen=[]):  # noqa: B006
    seen.append(1)
    return x * p["w"]


def closure():
    buffer = torch.zeros(3, dtype=torch.float64)

    def writes(p, x):
        buffer.copy_(x[0].detach())
        return x * p["w"]

    return writes


def counter():
    count = 0

    def counts(p, x):
        nonlocal count
        count += 1
        return x * p["w"]

    return counts


def inner():
    cache = {"n": 0}

    def bump():
        cache["n"] += 1

    def calls(p, x):
        bump()
        return x * p["w"]

    return calls


def module_in_closure():
    norm = nn.BatchNorm1d(3, affine=False, dtype=torch.float64)
    return lambda p, x: norm(x * p["w"])


def parameters_in_closure():
    layer = nn.Linear(3, 3, dtype=torch.float64)
    return lambda p, x: layer(x) * p["w"]


class Callable:
    def __init__(self):
        self.calls = 0

    def __call__(self, p, x):
        self.calls += 1
        return x * p["w"]

    def method(self, p, x):
        return self(p, x)


def partly():
    return functools.partial(lambda seen, p, x: (seen.append(1), x * p["w"])[1], [])


def in_place(p, x):
    return x.mul_(2) * p["w"]


def in_place_data(p, x):
    x.data.add_(1)
    return x * p["w"]


def keeps(what):
    kept = SimpleNamespace()  # of the standard library, so it is not looked into

    def fn(p, x):
        y = x * p["w"]
        if what == "all":
            kept.all = [*getattr(kept, "all", ()), y.detach()]
        else:
            kept.last = x if what == "x" else y
        return y

    return fn


def keeps_a_table():
    kept = SimpleNamespace(table=None)

    def fn(p, x):
        if kept.table is None:
            kept.table = torch.ones(3, dtype=torch.float64)
        return x * p["w"] * kept.table, kept.table

    return fn


def own_generator(p, x):
    return x * p["w"] + torch.rand(3, generator=torch.Generator(), dtype=torch.float64)


def seeds(p, x):
    torch.manual_seed(0)
    return x * p["w"]


def python_random(p, x):
    return x * p["w"] + random.random()


def sets_grad_mode(p, x):
    y = x * p["w"]
    torch.set_grad_enabled(False)
    return y


def sets_dtype(p, x):
    torch.set_default_dtype(torch.float64)
    return x * p["w"]


def clock(p, x):
    return x * p["w"] + time.perf_counter_ns()


def other_gradient():
    ticks = itertools.count(1)

    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * next(ticks)

    return lambda p, x: Odd.apply(x) * p["w"]


def changes_structure():
    ticks = itertools.count()
    return lambda p, x: (x * p["w"],) * (1 + next(ticks) % 2)


def changes_dtype():
    ticks = itertools.count()
    return lambda p, x: (x * p["w"]).to(torch.float32 if next(ticks) % 2 else torch.float64)


def structure_by_rows(p, x):
    return x * p["w"] if len(x) == 4 else (x * p["w"],)


def fixed_rows(p, x):
    return (x * p["w"]).reshape(4, 3)


def mixes_rows(p, x):
    return (x - x.mean(0)) * p["w"]


def raises(p, x):
    raise ValueError("no such layer")


def raises_backward(p, x):
    y = x * p["w"]
    y.register_hook(lambda g: 1 / 0)
    return y


def bad(name, fn, text, **options):
    return pytest.param(
        name, fn, text, options, id=f"{name}-{getattr(fn, '__name__', type(fn).__name__)}"
    )


TWO = {**P, "b": torch.ones(3, dtype=torch.float64)}
FROZEN = {"w": P["w"].clone().requires_grad_(), "b": torch.ones(3, dtype=torch.float64)}
BAD = [
    bad("output", none, "returns None"),
    bad("output", generator, "y is a generator"),
    bad("output", iterator, "y['more'] is a list_iterator"),
    bad("output", boxed, "y[1] is a Box, which hides tensors"),
    bad("output", in_a_set, "y[1] is a set, which hides tensors"),
    bad("finite", not_finite, "y is not finite"),
    bad("gradient", gradient_not_finite, "the gradient of params['w'] is not finite"),
    bad("gradient", gradient_not_finite, "the gradient of x is not finite"),
    bad("gradient", detached, "returns no tensor that requires a gradient"),
    bad("gradient", no_grad, "returns no tensor that requires a gradient"),
    bad("gradient", cuts_x, "no gradient reaches x"),
    bad("unused", unused, "no gradient reaches params['b']", params=TWO),
    bad("unused", plain, "no gradient reaches params['b']", params=TWO),
    bad("params", writes_params, "writes into params['w']"),
    bad("params", writes_frozen, "writes into params['b']", params=FROZEN),
    bad("params", rebinds_params, "writes into params['w']"),
    bad("params", adds_params, "writes into params;"),
    bad("captured", writes_global, "changes TABLE"),
    bad("captured", writes_global_same, "changes TABLE"),
    bad("captured", counts_global, "changes CALLS"),
    bad("captured", has_default, "changes len(a default of has_default)"),
    bad("captured", closure(), "changes buffer"),
    bad("captured", counter(), "changes count"),
    bad("captured", inner(), "changes cache['n']"),
    bad("captured", module_in_closure(), "changes norm.running_mean"),
    bad("captured", parameters_in_closure(), "closes over layer.weight, which requires a gradient"),
    bad("captured", Callable(), "changes calls"),
    bad("captured", Callable().method, "changes self.calls"),
    bad("captured", partly(), "changes len([0])"),
    bad("in-place", in_place, "writes into x:"),
    bad("in-place", in_place_data, "writes into x:"),
    bad("kept", keeps("x"), "keeps its input"),
    bad("kept", keeps("y"), "keeps its input"),
    bad("kept", keeps("all"), "keeps its input"),
    bad("random", own_generator, "draws with its own generator"),
    bad("random", seeds, "the global generator of torch"),
    bad("random", python_random, "the global generator of random"),
    bad("settings", sets_grad_mode, "changes the grad mode from True to False"),
    bad("settings", sets_dtype, "changes the default dtype from torch.float32 to torch.float64"),
    bad(
        "deterministic",
        clock,
        "gives another y at the second call, as remat makes it: 12 of 12 numbers differ",
    ),
    bad("deterministic", clock, "gives another y in a second run"),
    bad("deterministic", other_gradient(), "gives another gradient of x at the second backward"),
    bad("structure", changes_structure(), "y for another microbatch is a tuple of"),
    bad(
        "structure",
        changes_dtype(),
        "y for another microbatch is float32 [4, 3], before it was float64 [4, 3]",
    ),
    bad(
        "structure",
        structure_by_rows,
        "y for 3 rows is a tuple of (float64 [3, 3]), for 4 rows it was float64 [4, 3]",
    ),
    bad("rows", fixed_rows, "with 3 of 4 rows it raises RuntimeError"),
    bad(
        "rows", mixes_rows, "without the last row the others give another y", independent_rows=True
    ),
    bad("raises", raises, "raises ValueError: no such layer"),
    bad("raises", raises_backward, "in its backward raises ZeroDivisionError"),
]
