"""Random numbers without a key: numpy's, Python's, draws in backwards, and native_dropout's."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.stages.global_draws import Recomputations
from funcpipe.testing import CheckError, check_stage

X = torch.linspace(-1, 1, 32).reshape(8, 4)
ONE_F_ONE_B = S.one_f_one_b(2, 4)
SCHEDULES = [ONE_F_ONE_B, S.zero_bubble(2, 4), S.remat(ONE_F_ONE_B)]


def plan_of(function, schedule=ONE_F_ONE_B, compiled=None):
    stages = [fp.stage(function, name=f"s{number}") for number in range(2)]
    if compiled is not None:
        stages = [fp.compile_stage(stage, **compiled) for stage in stages]
    return cpu_plan(stages, schedule)


def params():
    generator = torch.Generator().manual_seed(0)
    return tuple({"w": torch.randn(4, 4, generator=generator)} for _ in range(2))


def gradients(plan, run=fp.run, **options):
    return [
        tree["w"] for tree in run(plan, params(), (X, X), trainable=True, seed=1, **options).grads
    ]


def same(first, second):
    return all(map(torch.equal, first, second))


def numpy_mask(x):
    return torch.from_numpy(np.random.rand(*x.shape) > 0.5)


DRAWS = {
    "numpy": numpy_mask,
    "numpy, as many as its state has": lambda x: torch.from_numpy(
        np.random.rand(312 * 32)[::312].reshape(8, 4) > 0.5
    )[: len(x)],
    "random": lambda x: torch.tensor([random.random() > 0.5 for _ in range(x.numel())]).reshape(
        x.shape
    ),
    "random.shuffle": lambda x: (
        torch.tensor(random.sample(range(x.numel()), x.numel())).reshape(x.shape) % 2
    ),
}


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_numpy_draws_that_a_recomputation_would_draw_anew(draw, executor):
    """With remat every run raises with the stage's number; without remat Python's order holds."""
    masked = lambda p, x: ((x @ p["w"]) * draw(x)) ** 2
    plan, kept = plan_of(masked, S.remat(ONE_F_ONE_B)), plan_of(masked)
    for _ in range(3):
        np.random.seed(0)
        random.seed(0)
        with pytest.raises(
            fp.StageError,
            match=r"stage \d computes microbatch 0 again .* numpy or of Python's random",
        ):
            gradients(plan, executor=executor)
    gradients(kept, executor=executor)


class SpecAugment(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return (self.linear(x) * numpy_mask(x)) ** 2


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_numpy_draws_in_a_pipe(mode):
    """The default mode computes again; with "never" the numbers are the model's."""
    torch.manual_seed(0)
    model = nn.Sequential(SpecAugment(), nn.Linear(4, 4))
    loss = F.mse_loss(fp.Pipe(model, 2, checkpoint=mode, devices=["cpu"] * 2)(X), X)
    with pytest.raises(fp.StageError, match=r"fp.Pipe\(checkpoint='never'\)"):
        loss.backward()
    np.random.seed(0)
    piped = F.mse_loss(fp.Pipe(model, 1, checkpoint="never", devices=["cpu"] * 2)(X), X)
    piped.backward()
    gradient = model[0].linear.weight.grad.clone()
    model.zero_grad()
    np.random.seed(0)
    F.mse_loss(model(X), X).backward()
    torch.testing.assert_close(gradient, model[0].linear.weight.grad)


def test_seeded_numpy_draws():
    """A stage that seeds the generator itself draws the same numbers again: right."""

    def masked(p, x):
        np.random.seed(5)
        return ((x @ p["w"]) * numpy_mask(x)) ** 2

    assert same(
        gradients(plan_of(masked, S.remat(ONE_F_ONE_B)), executor="serial"),
        gradients(plan_of(masked), executor="serial"),
    )


@pytest.mark.parametrize("hidden", [float("nan"), 0.0])
def test_a_data_loader_that_draws_meanwhile(hidden):
    """Another thread moves the generators in every forward. Stages that do not draw are right, with
    NaN too."""
    stop = threading.Event()

    def load():
        while not stop.is_set():
            np.random.rand(3)
            random.random()

    def function(p, x):
        y = F.dropout((x @ p["w"]).tanh(), 0.5)
        np.random.seed(int(threading.get_ident()) % 1000)  # as if the loader had drawn
        return torch.cat([y[:1] + hidden, y[1:]])

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for executor in ("serial", "threads"):
            again = gradients(plan_of(function, S.remat(ONE_F_ONE_B)), executor=executor)
            kept = gradients(plan_of(function), executor=executor)
            assert all(
                torch.equal(a.nan_to_num(), b.nan_to_num())
                for a, b in zip(again, kept, strict=True)
            )
    finally:
        stop.set()
        thread.join()


def test_generators_are_seen_to_move():
    """Each draw changes what is read, and reading changes nothing."""
    np.random.seed(0)
    random.seed(0)
    watched, seen = Recomputations(0), set()
    for draw in (
        random.random,
        np.random.rand,
        random.random,
        lambda: np.random.rand(312),
        lambda: random.seed(1),
    ):
        assert watched.positions() == watched.positions()
        seen.add(watched.positions())
        draw()
    assert len({*seen, watched.positions()}) == 6


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.randn_like(gradient)


def by_function(p, x):
    return Noisy.apply(x @ p["w"])


def by_hook(p, x):
    y = (x @ p["w"]).tanh()
    if y.requires_grad:
        y.register_hook(lambda gradient: F.dropout(gradient, 0.5))
    return y


def by_native_dropout(p, x):
    y = (x @ p["w"]).tanh()
    if y.requires_grad:
        y.register_hook(lambda gradient: torch.native_dropout(gradient, 0.5, True)[0])
    return y


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize(
    "function", [by_function, by_hook, by_native_dropout], ids=lambda f: f.__name__
)
def test_draws_in_a_backward(function, schedule):
    """Every run of every executor raises, with a seed and without; the caller's generator does not
    move."""
    before = torch.get_rng_state()
    plans = [plan_of(function, schedule), plan_of(function, schedule, {"fallback": True})]
    for plan in plans:
        for run, options in (
            (fp.run, {"executor": "serial"}),
            (fp.run, {"executor": "threads"}),
            (fp.run_sequential, {}),
        ):
            for seed in (None, 1):
                with pytest.raises(
                    fp.StageError, match=r"in its backward[\s\S]*of stage 1 \('s1'\)"
                ) as caught:
                    run(plan, params(), (X, X), trainable=True, seed=seed, **options)
                assert isinstance(caught.value, fp.DrawError)
    assert torch.equal(before, torch.get_rng_state())


def test_draws_in_a_backward_of_a_pipe():
    class Layer(nn.Linear):
        def forward(self, x):
            return Noisy.apply(super().forward(x))

    loss = fp.Pipe(nn.Sequential(Layer(4, 4), Layer(4, 4)), 2, devices=["cpu"] * 2)(X).sum()
    with pytest.raises(fp.StageError, match="in its backward"):
        loss.backward()


def test_check_stage_names_draws_in_a_backward():
    with pytest.raises(CheckError, match="in its backward"):
        check_stage(fp.stage(by_function), params()[0], X)


def test_draws_of_a_checkpoint_region_and_of_an_inner_gradient():
    """Repeated forwards in a backward, and backwards inside a forward, have keys and are right."""

    def repeated(p, x):
        return checkpoint(lambda v: F.dropout(torch.tanh(v @ p["w"]), 0.5), x, use_reentrant=False)

    def inner(p, x):
        y = x @ p["w"]
        with torch.enable_grad():
            z = y.detach().requires_grad_()
            (noise,) = torch.autograd.grad(Noisy.apply(z).sum(), z)
        return y + noise

    for function in (repeated, inner):
        wanted = gradients(plan_of(function), fp.run_sequential)
        for schedule in SCHEDULES:
            for executor in ("serial", "threads"):
                assert same(gradients(plan_of(function, schedule), executor=executor), wanted)


def by_name(p, x):
    return torch.native_dropout(x @ p["w"], 0.3, True)[0]


@pytest.mark.parametrize(
    "compiled", [None, {"fuse": False}, {}], ids=["eager", "unfused", "compiled"]
)
def test_native_dropout_while_another_thread_draws(compiled):
    """It has its key, and the other thread gets its own numbers."""
    wanted, draws, stop = (
        gradients(plan_of(by_name, compiled=compiled), fp.run_sequential),
        [],
        threading.Event(),
    )

    def draw():
        while not stop.is_set() and len(draws) < 200_000:
            draws.append(torch.rand(2))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        thread = threading.Thread(target=draw)
        thread.start()
        try:
            for schedule in SCHEDULES * 2:
                assert same(gradients(plan_of(by_name, schedule, compiled)), wanted)
        finally:
            stop.set()
            thread.join()
        torch.manual_seed(11)
        assert all(torch.equal(each, torch.rand(2)) for each in draws)


def test_native_dropout_is_torchs():
    """Mask, scale, gradient and their types equal torch's for the same mask; compiled it is
    bit-identical."""
    x = torch.rand(64, 64) + 1
    for p, train in ((0.3, True), (0.0, True), (1.0, True), (0.3, None), (0.3, False)):

        def function(w, x, p=p, on=train):
            y, mask = torch.native_dropout(x * w, p, on)
            return {"y": y, "mask": mask}

        drawn = fp.apply([fp.stage(function, name="s")], (torch.ones(()),), x, seed=3)
        y, mask = drawn.y["y"], drawn.y["mask"]
        like = torch.native_dropout(x, p, train)
        assert (y.dtype, mask.dtype, y.shape, mask.shape) == (
            like[0].dtype,
            like[1].dtype,
            x.shape,
            x.shape,
        )
        assert torch.equal(
            y, torch.where(mask, x * (1 / (1 - p) if p < 1 and train is not False else 1.0), 0.0)
        )
        kept = 1 - p if train is not False else 1.0
        assert abs(float(mask.float().mean()) - kept) < 0.05
    assert same(gradients(plan_of(by_name)), gradients(plan_of(by_name, compiled={"fuse": False})))


HANGS = """
import gc
import torch
import funcpipe as fp

class Cycle:
    pass

def reads_the_generator(p, x):
    for _ in range(300):
        cycle = Cycle()
        cycle.itself, cycle.tensor = cycle, torch.ones(1)
        del cycle
        torch.set_rng_state(torch.get_rng_state())  # as torch.utils.checkpoint does
    return x * p

schedule = fp.schedules.one_f_one_b(2, 4)
stages = [fp.stage(reads_the_generator)] * 2
plan = fp.make_plan(stages, schedule, loss=torch.nn.functional.mse_loss, devices="cpu")
x = torch.ones(4, 1)
gc.set_threshold(1)
for _ in range(5):
    fp.run(plan, (torch.ones(1), torch.ones(1)), (x, x), executor="threads")
"""


def test_lanes_that_read_the_state_of_the_generator_do_not_wait_for_each_other():
    """Torch holds the generator's mutex while it makes a Python object. A garbage collection there
    gives up the GIL, so another lane could take the GIL and wait for the mutex."""
    command = [sys.executable, "-c", HANGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (0, "") == (done.returncode, done.stderr)
