"""Measured times: what is called and kept apart, by a clock that only stages move; nothing of the
caller's is touched."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from common import snapshot
from torch import nn

import funcpipe as fp
from funcpipe._src.measuring import profile as room
from funcpipe._src.measuring.memory import memory
from funcpipe._src.measuring.profile import profile


class Hand:
    """A clock that shows what was put on it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch):
    clock = Hand()
    monkeypatch.setattr(room, "perf_counter", clock)
    return clock


def slow(hand: Hand, forward: float, inputs: float, weights: float, late: float = 0.0):
    """A stage ``w * x`` whose parts take given times, the first of its forwards ``late`` more."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, x):
            nonlocal late
            hand.now += forward + late
            late = 0.0
            ctx.save_for_backward(w, x)
            return w * x

        @staticmethod
        def backward(ctx, grad):
            w, x = ctx.saved_tensors
            hand.now += inputs * ctx.needs_input_grad[1] + weights * ctx.needs_input_grad[0]
            return (grad * x if ctx.needs_input_grad[0] else None), (
                grad * w if ctx.needs_input_grad[1] else None
            )

    return fp.stage(lambda w, x: Times.apply(w, x), name="slow")


def test_forward_backward_input_weight(hand):
    """Each part is what the layer spends on it: I all of it where nothing can wait, W where nobody
    waits for I."""
    stages = [slow(hand, 2, 3, 5), slow(hand, 7, 11, 13)]
    w = torch.ones(4)
    cost = profile(stages, torch.ones(3, 4), params=(w, w), comm=0.5)
    assert ((2, 7), (0, 24), (5, 0), (5, 24)) == (
        cost.forward,
        cost.backward_input,
        cost.backward_weight,
        cost.backward,
    )
    assert (0.5, None) == (cost.comm, cost.remat)
    assert (96, 96) == cost.residual  # of a stage: what it gets and gives


def test_frozen_layers_have_no_weights_to_wait_for(hand):
    """B of a frozen layer is its I."""
    w = torch.ones(4)
    cost = profile(
        [slow(hand, 1, 2, 4), slow(hand, 1, 2, 4)],
        torch.ones(3, 4),
        params=(w, w),
        trainable=lambda name, leaf: name.startswith("0"),
    )
    assert ((0, 2), (4, 0)) == (cost.backward_input, cost.backward_weight)


def test_warmup_is_dropped_and_medians_taken(hand):
    """A slow first call does not count; with no warmup one slow sweep of three does not either."""
    w = torch.ones(4)
    for options in ({"warmup": 1, "repeats": 1}, {"warmup": 0, "repeats": 3}):
        assert (2,) == profile(
            [slow(hand, 2, 3, 5, late=100)], torch.ones(3, 4), params=(w,), **options
        ).forward
    assert (102,) == profile(
        [slow(hand, 2, 3, 5, late=100)], torch.ones(3, 4), params=(w,), warmup=0, repeats=1
    ).forward


def test_evaluation_has_forwards_alone(hand):
    """train=False: B, I and W are nothing."""
    w = torch.ones(4)
    cost = profile([slow(hand, 2, 3, 5)], torch.ones(3, 4), params=(w,), train=False)
    assert ((2,), (0,), (0,), (0,)) == (
        cost.forward,
        cost.backward,
        cost.backward_input,
        cost.backward_weight,
    )


class Pair(nn.Module):
    def forward(self, x):
        return x, x * 2


class Add(nn.Module):
    def forward(self, x):
        return x[0] + x[1]


def test_nothing_is_touched():
    """The module, its gradients, mode, buffers, the example, generators, threads; in-place layers
    work, also the first."""
    layers = [
        nn.ReLU(inplace=True),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.5),
        Pair(),
        Add(),
        nn.ReLU(inplace=True),
    ]
    model = nn.Sequential(*layers).eval()
    model[2].train()
    model[1].weight.grad = torch.ones(6, 6)
    x = torch.randn(4, 6)
    before = snapshot((dict(model.state_dict()), x, torch.get_rng_state()))
    modes, threads = [layer.training for layer in model.modules()], torch.get_num_threads()
    cost = profile(model, x, repeats=1, threads_per_lane=1)
    assert len(layers) == len(cost.forward)
    after = snapshot((dict(model.state_dict()), x, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert (modes, threads) == (
        [layer.training for layer in model.modules()],
        torch.get_num_threads(),
    )
    assert torch.equal(model[1].weight.grad, torch.ones(6, 6))
    assert model[1].bias.grad is None


def test_cost_of_layers_goes_on():
    """One number per layer; I and W make up B; residuals are those of `memory`; stages are made of
    it and simulated."""
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 9))
    x = torch.randint(9, (4, 3))
    cost = profile(model, x, repeats=2)
    cost.check_stages(4)
    assert 0 < cost.backward_weight[0]
    assert cost.backward_input[2] == cost.backward[2]  # of Tanh nothing waits
    assert 0 == cost.backward_weight[2]
    assert 0 < min(cost.backward_input[3], cost.backward_weight[3])
    rows = memory(model, x)
    assert tuple(layer.activations for layer in rows) == cost.residual
    # The tokens and what arrives there (4 x 3 x 8 numbers); its input and what arrives (4 x 3 x 9):
    # inputs too, as alone.
    assert (96 + 384, 384 + 384, 0, 384 + 432) == cost.weight_residual
    assert tuple(layer.weight_residual for layer in rows) == cost.weight_residual
    assert fp.simulate(fp.schedules.one_f_one_b(4, 8), cost).makespan > 0
    stages = profile(fp.split(model, balance=[3, 1]), x, repeats=1)
    assert tuple(layer.activations for layer in rows.group([3, 1])) == stages.residual
    assert fp.Cost().residual == profile(model, x, repeats=1, measure_memory=False).residual


def test_stages_with_skips_feeds_and_state():
    """Whatever stages declare, they get."""

    @fp.stage(stash=["early"])
    def first(params, x):
        return fp.Out(x * params, stash={"early": x})

    @fp.stage(pop=["early"], feeds=["mask"], state=True)
    def second(params, x, *, skips, feeds, state):
        return (x + skips["early"]) * params * feeds["mask"] + state

    w = torch.ones(6)
    given = {"params": (w, w), "state": ((), torch.zeros(6)), "feeds": {"mask": torch.ones(4, 1)}}
    assert 2 == len(profile([first, second], torch.zeros(4, 6), **given, repeats=1).forward)
    with pytest.raises(fp.PlanError, match=r"add feeds=\{'mask': ...\}"):
        profile([first, second], torch.zeros(4, 6), params=(w, w), state=((), w))
    with pytest.raises(fp.PlanError, match="has state; add state="):
        profile([first, second], torch.zeros(4, 6), params=(w, w))


def test_refusals():
    """What is wrong, where, and what would be right."""
    x = torch.zeros(3, 4)
    with pytest.raises(fp.StageError, match="mat1 and mat2") as found:
        profile(nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 2)), x)
    assert "it got x: float32 [3, 8]" in found.value.__notes__
    assert (1, "1") == (found.value.funcpipe.stage, found.value.funcpipe.name)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(fp.PlanError, match=r"layer '0' is on the meta device.*fp\.models\.memory"):
        profile(model, x)
    right = nn.Sequential(nn.Linear(4, 4))
    for options, said in (
        ({"repeats": 0}, "repeats is an int from 1"),
        ({"warmup": -1}, "warmup"),
        ({"threads_per_lane": 10**6}, "cores"),
        ({"params": ()}, "own parameters"),
    ):
        with pytest.raises(fp.PlanError, match=said):
            profile(right, x, **options)
    if not torch.cuda.is_available():
        with pytest.raises(fp.PlacementError, match="torch does not see this device"):
            profile(right, x, device="cuda")


def test_lanes_that_compute_at_once():
    """Each lane goes through all layers in a thread of its own; two are busy at a time, never at
    the same layer."""
    inside: list[str] = []
    meanwhile: set[frozenset[str]] = set()
    threads: set[int] = set()
    gate = threading.Lock()

    def layer(name: str):
        def call(w, x):
            with gate:
                assert name not in inside
                inside.append(name)
                threads.add(threading.get_ident())
            time.sleep(0.002)
            with gate:
                meanwhile.add(frozenset(inside))
                inside.remove(name)
            return w * x

        return fp.stage(call, name=name)

    w = torch.ones(4)
    before = threading.active_count(), os.sched_getaffinity(0), torch.get_num_threads()
    cost = profile(
        [layer("a"), layer("b"), layer("c")], torch.ones(3, 4), params=(w, w, w), lanes=2, repeats=6
    )
    assert len(cost.forward) == 3
    assert min(cost.forward) >= 0.002
    assert len(threads - {threading.get_ident()}) == 2
    assert any(len(names) == 2 for names in meanwhile)
    assert before == (threading.active_count(), os.sched_getaffinity(0), torch.get_num_threads())


def test_lanes_carry_the_callers_context_and_their_failure():
    """Autocast holds in the threads; what fails there is raised here, with its layer."""
    seen: list[torch.dtype] = []

    def product(w, x):
        y = x @ w
        seen.append(y.dtype)
        return y.float()

    w, x = torch.ones(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        profile(
            [fp.stage(product), fp.stage(product)],
            x,
            params=(w, w),
            lanes=2,
            repeats=1,
            measure_memory=False,
        )
    assert set(seen) == {torch.bfloat16}
    with pytest.raises(fp.StageError, match="'second'"):
        profile(
            [fp.stage(product), fp.stage(lambda w, x: x.no_such, name="second")],
            x,
            params=(w, w),
            lanes=2,
        )


@pytest.mark.parametrize(
    ("lanes", "message"),
    [
        (0, "lanes is an int from 1"),
        (True, "lanes is an int from 1"),
        (3, "there are 2 layers.*lanes=2 or fewer"),
    ],
)
def test_numbers_of_lanes_that_cannot_be(lanes, message):
    with pytest.raises(fp.PlanError, match=message):
        profile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4), lanes=lanes)


def test_lanes_are_the_cpus():
    with pytest.raises(fp.PlanError, match="leave lanes= out"):
        room._check_lanes(2, [object.__new__(Fake), object.__new__(Fake)], torch.device("cuda"))


class Fake:
    """As much of a layer as a count of them looks at."""

    @property
    def stage(self):
        return self
