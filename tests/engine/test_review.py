"""What a stranger's review found: each was wrong once."""

import gc
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan

import funcpipe as fp

SCALE = fp.stage(lambda p, x: x * p["w"], name="scale")
PARAMS = ({"w": torch.ones(3)},)
BATCH = torch.ones(4, 3), torch.ones(4, 3)


def plan_of(*stages, **options):
    return cpu_plan(stages, fp.schedules.one_f_one_b(len(stages), 2), **options)


def test_an_auxiliary_loss_of_weight_0_counts_nothing_in_a_composition():
    """As it does where the stages stand alone."""

    def part(weight):
        return fp.stage(
            lambda p, x: fp.Out(x * p, loss=((x * p).sum(), weight)), name=f"aux{weight}"
        )

    x = torch.ones(4, 2), torch.zeros(4, 2)
    parts, ones = (part(0.0), part(1.0)), (torch.ones(()), torch.ones(()))
    apart = fp.run(plan_of(*parts), ones, x).loss
    together = fp.run(plan_of(fp.compose(*parts)), (ones,), x).loss
    assert torch.isfinite(together)
    assert torch.equal(apart, together)


def test_arrays_are_not_given_whole_to_every_microbatch():
    """An array has rows, but only tensors are cut: refused with the mend."""
    array = torch.zeros(4, 3).numpy()
    with pytest.raises(fp.BatchError, match=r"inputs is a ndarray.*torch.from_numpy\(inputs\)"):
        fp.run(plan_of(SCALE), PARAMS, (array, torch.zeros(4, 3)))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_from_the_loss_are_checked(weight):
    """A (loss, something else) pair is not silently a (sum, weight)."""
    with pytest.raises(fp.BatchError, match="not finite numbers from 0"):
        fp.run(plan_of(SCALE, loss=lambda y, t: (y.sum(), weight)), PARAMS, BATCH)


def test_what_a_forward_keeps_on_its_module_dies_with_the_run():
    """An attention map cached on self, graph and all, goes when the result goes."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.map = nn.Linear(3, 3), None

        def forward(self, x):
            self.map = self.layer(x)
            seen.append(weakref.ref(self.map))
            return self.map * 2

    seen = []
    stage, params, _ = fp.from_module(Keeps())
    fp.run(plan_of(stage), (params,), BATCH)
    gc.collect()
    assert [None, None] == [ref() for ref in seen]


def test_parts_of_a_composition_write_to_nobody():
    """In place in one part, a skip past it: composed, applied and apart are one number."""
    a = fp.stage(lambda p, x: (lambda h: fp.Out(h, stash={"e": h}))(x * p), stash=["e"], name="a")
    b = fp.stage(lambda p, x: x.mul_(2) * p, name="b")
    c = fp.stage(lambda p, x, *, skips: x + skips["e"] * p, pop=["e"], name="c")
    params = tuple(torch.tensor(value, requires_grad=True) for value in (1.5, 2.0, 3.0))
    x, target = torch.randn(4, 3), torch.randn(4, 3)
    apart = fp.run(plan_of(a, b, c), params, (x, target))
    together = fp.run(plan_of(fp.compose(a, b, c)), (params,), (x, target))
    assert torch.equal(apart.loss, together.loss)
    assert all(map(torch.equal, fp.leaves(apart.grads), fp.leaves(together.grads)))
    before = x.clone()
    torch.testing.assert_close(F.mse_loss(fp.apply((a, b, c), params, x).y, target), apart.loss)
    assert torch.equal(before, x)

    def loss(p):
        return F.mse_loss(fp.apply((a, b, c), p, x).y, target)

    grads = torch.func.grad(loss)(tuple(p.detach() for p in params))
    for plain, mine in zip(grads, apart.grads, strict=True):
        torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fp.stage(torch.nn.Linear(2, 2)), r"Linear is a module.*fp\.from_module"),
        (lambda: fp.stage(3), "a stage is made of a function"),
        (
            lambda: fp.schedules.remat(
                fp.make_plan([fp.stage(lambda p, x: x)], fp.schedules.fill_drain(1, 1))
            ),
            r"fp\.schedules\.remat\(plan\.schedule\)",
        ),
        (
            lambda: fp.schedules.remat(fp.schedules.fill_drain(1, 1), keep="0F0"),
            "keep must be a function",
        ),
        (
            lambda: fp.make_plan(
                [fp.stage(lambda p, x: x)], fp.schedules.fill_drain(1, 1), loss=torch.nn.MSELoss
            ),
            r"loss=MSELoss\(\)",
        ),
        (
            lambda: fp.make_plan([fp.stage(lambda p, x: x)], fp.schedules.fill_drain(3, 1)),
            "1 is given; make the schedule for as many",
        ),
    ],
)
def test_wrong_kinds_of_things_name_the_right_call(call, words):
    with pytest.raises(fp.FuncpipeError, match=words):
        call()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"loss_scale": "a"}, "loss_scale is a number above 0"),
        ({"loss_scale": 0}, "loss_scale is a number above 0"),
        ({"feeds": torch.ones(2)}, "feeds is a dict"),
        ({"seed": 1.5}, "seed is an int"),
        ({"threads_per_lane": 0}, "threads_per_lane is a positive int"),
        ({"threads_per_lane": 1.5}, "threads_per_lane is a positive int"),
        ({"threads_per_lane": "2"}, "threads_per_lane is a positive int"),
    ],
)
def test_options_of_the_wrong_kind(option, words):
    """Refused before anything runs."""
    with pytest.raises(fp.PlanError, match=words):
        fp.run(plan_of(SCALE), PARAMS, BATCH, **option)


def test_numpys_integers_are_seeds():
    import numpy as np

    drops = fp.stage(lambda p, x: torch.dropout(x * p["w"], 0.5, True), name="d")
    batch = torch.ones(64, 3), torch.ones(64, 3)
    first, second = (
        fp.run(plan_of(drops), PARAMS, batch, seed=seed).loss for seed in (7, np.int64(7))
    )
    assert torch.equal(first, second)
