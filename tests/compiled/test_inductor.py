"""What torch's compiler is given, and what it gives: layouts, C++ where it can be. Only the slow
tests build."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan

import funcpipe as fp
from funcpipe._src.compiled.source import lies_as
from funcpipe._src.core import torch_names


@pytest.fixture
def built(monkeypatch):
    """A compiler whose programs run their graphs as they are, on inputs of the layouts that it was
    told."""

    def build(graph, examples, options):
        def run(*inputs):
            assert all(
                lies_as(value, example) for value, example in zip(inputs, examples, strict=True)
            )
            return graph.forward(*inputs)

        return run

    monkeypatch.setattr(torch_names, "inductor", build)


@torch.library.custom_op("funcpipe_tests::by_memory", mutates_args=())
def by_memory(x: torch.Tensor) -> torch.Tensor:
    """Doubles what lies first in memory."""
    y = x.clone()
    y.as_strided((1,), (1,)).mul_(2.0)
    return y


by_memory.register_fake(lambda x: torch.empty_like(x))
by_memory.register_autograd(
    lambda ctx, g: g.clone().index_put((*[torch.tensor([0])] * 4,), 2.0 * g[0, 0, 0, 0][None])
)


class Through(nn.Module):
    """Layers with something between them."""

    def __init__(self, between, *layers):
        super().__init__()
        self.between, self.layers = between, nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x)
        return self.layers[-1](self.between(x))


class Skips(nn.Module):
    """A residual block: its input is read by a convolution and added."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.norm = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4),
        )

    def forward(self, x):
        return F.relu(x + self.norm(self.two(F.relu(self.one(x)))))


def flat(x):
    return x.view(x.size(0), -1)


def strided(x):
    return x.contiguous().as_strided((x.size(0), 4), (x[0].numel(), 3))


def scattered(x):
    z = x * 1.0
    z.as_strided((2, 4), (108, 1)).add_(1.0)
    return z


MODELS = {
    "norm": lambda: nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2)
    ),
    "skips": lambda: nn.Sequential(Skips(), Skips()),
    "view": lambda: Through(flat, nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Linear(108, 5)),
    "as_strided": lambda: Through(strided, nn.Conv2d(4, 3, 3), nn.Linear(4, 5)),
    "custom operation": lambda: Through(
        lambda x: by_memory(x), nn.Conv2d(4, 3, 3), nn.Conv2d(3, 2, 3)
    ),
    "constant": lambda: Through(
        lambda x: x + torch.tensor([1.0, -1.0, 1.0, 0.5, 2.0]),
        nn.Conv2d(4, 3, 4),
        nn.Conv2d(3, 2, 3),
    ),
    "two orders": lambda: Through(
        lambda x: torch.cat([x, x.view(x.size(0), -1, 3, 3).repeat(1, 1, 2, 2)], 1),
        nn.Conv2d(4, 3, 3),
        nn.Conv2d(15, 2, 3),
    ),
    "as_strided of a slice": lambda: Through(
        lambda x: x[:, 1].as_strided((x.size(0), 6), (108, 1), 36),
        nn.Conv2d(4, 3, 3),
        nn.Linear(6, 5),
    ),
    "written by memory": lambda: Through(scattered, nn.Conv2d(4, 3, 3), nn.Conv2d(3, 2, 3)),
    "rolled": lambda: Through(lambda x: x.roll(1, 2), nn.Conv2d(4, 3, 3), nn.ReLU()),
    "joined": lambda: Through(
        lambda x: torch.cat([x, x], 1), nn.Conv2d(4, 3, 3), nn.Conv2d(6, 2, 3)
    ),
    "padded": lambda: Through(
        lambda x: F.pad(x, (1,) * 4, mode="replicate"), nn.Conv2d(4, 3, 3), nn.Conv2d(3, 2, 3)
    ),
    "groups": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2), nn.GELU(), nn.Conv2d(8, 8, 3, groups=8)
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(4, 6, 3, stride=2), nn.GroupNorm(2, 6), nn.MaxPool2d(2)
    ),
    "shuffled": lambda: nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.PixelShuffle(2), nn.Upsample(scale_factor=2)
    ),
    "patches": lambda: Through(
        lambda x: x.flatten(2).transpose(1, 2), nn.Conv2d(4, 6, 2, stride=2), nn.LayerNorm(6)
    ),
    "one dimension": lambda: Through(
        lambda x: x, nn.Flatten(2), nn.Conv1d(4, 3, 3), nn.Conv1d(3, 2, 3)
    ),
    "three dimensions": lambda: Through(
        lambda x: x,
        nn.Unflatten(3, (2, 4)),
        nn.Conv3d(4, 3, (2, 1, 2)),
        nn.ReLU(),
        nn.Conv3d(3, 2, 2),
    ),
}


def steps(make, backend, *schedules):
    """A step with each schedule of a model whose input needs a gradient."""
    torch.manual_seed(0)
    stage, params, state = fp.from_module(make())
    x = torch.randn(8, 4, 8, 8)
    like = stage(params, x, state=state)
    batch = x, torch.randn_like(getattr(like, "y", like))
    stages = [
        fp.stage(lambda p, x: x * p),
        fp.compile_stage(stage, backend=backend) if backend else stage,
    ]
    weights = torch.ones(8, requires_grad=True), params
    plans = [cpu_plan(stages, schedule, outputs=True) for schedule in schedules]
    return [fp.run(plan, weights, batch, state=((), state), threads_per_lane=1) for plan in plans]


def assert_close(eager, ours, atol=1e-5):
    """Gradients and outputs are alike up to rounding, and lie alike in memory."""
    for a, b in zip(
        fp.leaves((eager.grads, eager.outputs)), fp.leaves((ours.grads, ours.outputs)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=atol)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_and_layouts(kind, built):
    """Numbers are eager's to rounding, and what comes out lies as eager's does."""
    schedules = fp.schedules.one_f_one_b(2, 4), fp.schedules.zero_bubble(2, 4)
    results = [steps(MODELS[kind], backend, *schedules) for backend in (None, "inductor")]
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(eager.loss, ours.loss, rtol=1e-5, atol=0)
        assert_close(eager, ours)
        for a, b in zip(fp.leaves(eager.state), fp.leaves(ours.state), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_root_without_gradient(built):
    """Of what is pruned from a backward the layouts are what they would be with all of it."""

    def middle(p, x):
        h = torch.tanh(torch.relu(x * p["s"]) * p["u"])
        return F.conv2d(h, p["w"]), h.flatten(1) * 2.0

    params = {"s": torch.rand(8), "u": torch.rand(8), "w": torch.randn(2, 4, 3, 3)}
    batch = torch.randn(4, 4, 8, 8), torch.randn(4, 72)
    results = []
    for backend in (None, "inductor"):
        stage = fp.stage(middle)
        stages = [
            fp.stage(lambda p, x: x * p),
            fp.compile_stage(stage, backend=backend) if backend else stage,
            fp.stage(lambda p, y: (y[0] * p).flatten(1)),
        ]
        plan = cpu_plan(stages, fp.schedules.zero_bubble(3, 2))
        results.append(fp.run(plan, (torch.ones(8), params, torch.ones(6)), batch))
    for a, b in zip(fp.leaves(results[0].grads), fp.leaves(results[1].grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_compiler_with_layouts_of_its_own(monkeypatch):
    """What it gives is copied into the layout that the next program was built for, and that users
    get."""

    def other(value):
        turned = value.dim() == 4 and not value.is_contiguous(memory_format=torch.channels_last)
        return value.contiguous(memory_format=torch.channels_last) if turned else value.contiguous()

    def build(graph, examples, options):
        def run(*inputs):
            assert all(
                lies_as(value, example) for value, example in zip(inputs, examples, strict=True)
            )
            return [other(value) for value in graph.forward(*inputs)]

        return run

    monkeypatch.setattr(torch_names, "inductor", build)
    schedule = fp.schedules.zero_bubble(2, 4)
    (eager,), (ours,) = (steps(MODELS["skips"], own, schedule) for own in (None, "inductor"))
    assert_close(eager, ours)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU code needs a C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", ["skips", "view", "rolled", "joined", "padded", "three dimensions", "transposed"]
)
def test_with_the_compiler(kind):
    """Its programs take what they get from each other, and give eager's numbers to rounding."""
    schedule = fp.schedules.zero_bubble(2, 2)
    (eager,), (ours,) = (steps(MODELS[kind], own, schedule) for own in (None, "inductor"))
    largest = max(float(leaf.abs().max()) for leaf in fp.leaves(eager.grads))
    assert_close(eager, ours, atol=1e-5 * largest)


def test_in_cpp_where_it_can_be(monkeypatch, caplog):
    """Without the interpreter on the CPU; what the compiler cannot put into C++ it builds with
    it."""
    asked = []

    def build(graph, examples, options):
        asked.append(options)
        if options and refuses:
            raise NotImplementedError("no such operation in C++")
        return graph.forward

    monkeypatch.setattr(torch_names, "inductor", build)
    for refuses, expected in (
        (False, [{"cpp_wrapper": True}] * 2),
        (True, [{"cpp_wrapper": True}, {}] * 2),
    ):
        asked.clear()
        with caplog.at_level(logging.INFO, "funcpipe"):
            steps(MODELS["norm"], "inductor", fp.schedules.one_f_one_b(2, 2))
        assert expected == asked
        assert refuses is ("because: no such operation in C++" in caplog.text)
