"""Pipes inside of other things: one after the other, checkpointed, compiled, in stages, in
backwards, in two threads."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn as nn
from pipe.sequentials import assert_close, data, every_checkpoint, grads, net, piped
from torch.utils.checkpoint import checkpoint as checkpointed

import funcpipe as fp


@every_checkpoint
def test_two_pipes_one_after_the_other(checkpoint):
    model = nn.Sequential(net(), nn.Linear(2, 4).double(), net())
    first, second = (piped(part, 2, checkpoint) for part in (model[0], model[2]))
    middle = copy.deepcopy(model[1])
    (second(middle(first(data())).tanh()) * first(data() + 1)).sum().backward()
    (model[2](model[1](model[0](data())).tanh()) * model[0](data() + 1)).sum().backward()
    assert_close(grads(first) + grads(middle) + grads(second), grads(model))


@pytest.mark.parametrize("reentrant", [True, False])
@every_checkpoint
def test_torch_checkpoint_around_a_pipe(checkpoint, reentrant):
    model = nn.Sequential(net(), nn.Dropout(0.0))
    pipe = piped(model, 2, checkpoint, balance=[1, 1])
    for one in (model, pipe):
        x = data().requires_grad_()
        checkpointed(
            lambda z, one=one: one(z * 2).tanh(), x, use_reentrant=reentrant
        ).sum().backward()
        one.x = x
    assert_close([pipe.x.grad, *grads(pipe)], [model.x.grad, *grads(model)])


def test_saved_tensor_hooks_around_a_pipe():
    pipe, model = piped(net()), net()
    with torch.autograd.graph.save_on_cpu():
        y = pipe(data())
    y.sum().backward()
    model(data()).sum().backward()
    assert_close(grads(pipe), grads(model))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's compiler asks outputs for it
def test_torch_compile_leaves_a_pipe_as_it_is():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pipe, self.head = piped(net()), nn.Linear(2, 2).double()

        def forward(self, x):
            return self.head(self.pipe(x * 2)) + 1

    model = Model()
    compiled = torch.compile(model, backend="eager")
    assert_close([compiled(data())], [model(data())])
    compiled(data()).sum().backward()
    assert all(grad is not None for grad in grads(model))


def test_a_pipe_in_a_stage_is_the_plain_sequential():
    inner = piped(net(), 2)
    outer = fp.Pipe(nn.Sequential(inner, nn.Tanh(), inner[0]), 2, balance=[1, 2], devices="cpu")
    model = nn.Sequential(net(), nn.Tanh())
    with pytest.raises(fp.StageError):  # 2 columns do not fit the first layer
        outer(data())
    outer = fp.Pipe(nn.Sequential(inner, nn.Tanh()), 2, balance=[1, 1], devices="cpu")
    for one in (outer, model):
        one(data()).sum().backward()
    assert_close(grads(outer), grads(model))


def test_a_pipe_in_the_loss_of_a_plan():
    critic = piped(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double().requires_grad_(False), balance=[1, 1]
    )
    stage, params, _ = fp.from_module(net())
    plan = fp.make_plan(
        [stage],
        fp.schedules.one_f_one_b(1, 2),
        loss=lambda y, t: critic(y).square().mean(),
        devices="cpu",
    )
    result = fp.run(plan, (params,), (data(), None))
    expected = critic(net()(data())).square().mean()
    assert_close([result.loss], [expected.detach()])


def test_two_threads():
    pipe, model = piped(net()), net()
    expected = [model(data() + index).detach() for index in range(2)]
    found = [[], []]
    faults = []

    def work(index):
        try:
            for _ in range(5):
                x = (data() + index).requires_grad_()
                y = pipe(x)
                torch.autograd.grad(y.sum(), x)
                found[index].append(y.detach())
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    for index in range(2):
        assert len(found[index]) == 5
        assert_close(found[index], [expected[index]] * 5)


def test_a_backward_inside_of_a_backward():
    """An outer node whose backward trains another pipe."""
    inner = piped(net())

    class Train(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                inner(data()).sum().backward()
            return grad

    outer = piped(net())
    Train.apply(outer(data())).sum().backward()
    assert_close(grads(inner), grads(outer))
