"""Values that reach a loss, or another stage, without the run: attributes, hooks and lists."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS
from torch import nn

import funcpipe as fp


class Expert(nn.Module):
    """A layer that keeps an auxiliary loss in an attribute, as fairseq's and DeepSpeed's do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.l_aux = torch.zeros(())

    def forward(self, x):
        y = self.linear(x)
        self.l_aux = y.square().mean()
        return torch.tanh(y)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Expert(), Expert()])
        self.head = nn.Linear(8, 4)
        self.classes = 4

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sequential():
    return nn.Sequential(Expert(), Expert(), nn.Linear(8, 4))


def batch():
    return torch.randn(8, 8), torch.randint(0, 4, (8,))


def plan_of(model, loss, num_stages=2):
    split = fp.split(model, num_stages)
    schedule = fp.schedules.one_f_one_b(num_stages, 4)
    return split, fp.make_plan(split, schedule, loss=loss, devices="cpu")


def by_closure(model):
    def total(modules):
        return sum(layer.l_aux for layer in modules if isinstance(layer, Expert))

    return lambda y, target: F.cross_entropy(y, target) + total(model.modules())


def by_method(model):
    class Trainer:
        def __init__(self, model):
            self.model = model

        def loss(self, y, target):
            return F.cross_entropy(y, target) + self.auxiliary()

        def auxiliary(self):
            return sum(getattr(layer, "l_aux", 0.0) for layer in self.model.modules())

    return Trainer(model).loss


def by_module(model):
    class Criterion(nn.Module):
        def __init__(self, expert):
            super().__init__()
            self.expert = expert

        def forward(self, y, target):
            return F.cross_entropy(y, target) + self.expert.l_aux

    return Criterion(next(each for each in model.modules() if isinstance(each, Expert)))


def by_argument(model):
    def loss(y, target, *, layer):
        return F.cross_entropy(y, target) + layer.l_aux

    return partial(loss, layer=next(each for each in model.modules() if isinstance(each, Expert)))


@pytest.mark.parametrize("loss", [by_closure, by_method, by_module, by_argument])
@pytest.mark.parametrize("make", [sequential, Blocks])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_loss_that_reads_what_a_forward_leaves_in_the_model(make, loss, num_stages):
    """Stages compute with copies, so the loss would read the value from before the run."""
    model = make()
    with pytest.raises(fp.PlanError, match=r"the loss reads '(layers\.)?0\.l_aux'"):
        plan_of(model, loss(model), num_stages)


def test_a_loss_that_reads_running_statistics():
    """Training puts new statistics into the result, not into the model."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def loss(y, target):
        return F.cross_entropy(y, target) + model[1].running_mean.square().sum()

    with pytest.raises(fp.PlanError, match=r"the loss reads '1\.running_mean' of the model"):
        plan_of(model, loss)


def test_a_loss_may_read_settings_of_the_model():
    model = Blocks()

    def loss(y, target):
        return F.cross_entropy(y.view(-1, model.classes), target)

    x, target = batch()
    split, plan = plan_of(model, loss)
    result = fp.run(plan, split.params, (x, target))
    torch.testing.assert_close(result.loss, loss(model(x), target).detach())


def hooked():
    """A model whose first layer gives its output to a list, and a loss that takes it."""
    kept = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].register_forward_hook(lambda _module, _args, out: kept.append(out))
    return model, kept


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_hook_that_gives_a_value_to_the_loss_of_another_stage(executor):
    """The loss is right, but its gradient would not reach the stage of the value."""
    model, kept = hooked()

    def loss(y, target):
        return F.cross_entropy(y, target) + kept.pop(0).square().mean()

    split, plan = plan_of(model, loss)
    with pytest.raises(fp.PlanError, match=r"stage 1 or its loss computes with a value of stage 0"):
        fp.run(plan, split.params, batch(), executor=executor)


def test_a_hook_that_gives_a_value_to_the_loss_of_its_own_stage():
    model, kept = hooked()

    def loss(y, target):
        return F.cross_entropy(y, target) + kept.pop().square().mean()

    x, target = batch()
    loss(model(x), target).backward()
    split, plan = plan_of(model, loss, 1)
    (grads,) = fp.run(plan, split.params, (x, target), executor="serial").grads
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_a_stage_that_keeps_a_value_for_another_stage():
    """A value that passes without gradients is free to; one with a graph is refused."""
    kept = []

    def first(p, x):
        y = x * p
        kept.append(y)
        return y

    def second(p, x):
        return x * p + kept.pop(0)

    def detached(p, x):
        return x * p + kept.pop(0).detach()

    def train(last):
        kept.clear()
        stages, schedule = [fp.stage(first), fp.stage(last)], fp.schedules.fill_drain(2, 2)
        plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
        given = (torch.ones(4, 3), torch.zeros(4, 3))
        return fp.run(plan, (torch.ones(3), torch.ones(3)), given, executor="serial")

    with pytest.raises(fp.PlanError, match="stage 1 or its loss computes with a value of stage 0"):
        train(second)
    assert train(detached).loss == 4


class Body(nn.Module):
    """Hands on a hidden state, and a view of it, such as the token of a class."""

    def __init__(self, view):
        super().__init__()
        self.linear, self.view = nn.Linear(4, 4), view

    def forward(self, x):
        h = self.linear(x)
        return h, self.view(h)


class Head(nn.Module):
    def __init__(self, *, inplace):
        super().__init__()
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, both):
        h, view = both
        return self.act(h).sum(1, keepdim=True) + view.sum()


VIEWS = {
    "itself": lambda h: h,
    "column": lambda h: h[:, :1],
    "row": lambda h: h[0],
    "transposed": lambda h: h.T,
    "flat": lambda h: h.view(-1),
}


@pytest.mark.parametrize(
    ("view", "compiled"), [*((view, False) for view in VIEWS), ("column", True)]
)
def test_a_write_into_memory_that_a_stage_hands_on_twice(view, compiled):
    """In the uncut model the view would change, too."""
    model = nn.Sequential(Body(VIEWS[view]), Head(inplace=True))
    split = fp.split(model, 2)
    stages = [fp.compile_stage(each) for each in split.stages] if compiled else split.stages
    schedule = fp.schedules.one_f_one_b(2, 2)
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
    with pytest.raises(fp.PlanError, match="whose memory the stage before, or the batch, handed"):
        fp.run(plan, split.params, (torch.randn(6, 4), torch.randn(6, 1)))
    reading = fp.split(nn.Sequential(model[0], Head(inplace=False)), 2)
    plan = fp.make_plan(reading, schedule, loss=F.mse_loss, devices="cpu")
    fp.run(plan, reading.params, (torch.randn(6, 4), torch.randn(6, 1)))


def test_parts_of_one_memory_may_be_written_apart():
    """Chunks have no number in common."""

    def chunks(p, x):
        return (x * p).chunk(2, 1)

    def writing(p, x):
        a, b = x
        return a.mul_(p) + b

    stages, params = [fp.stage(chunks), fp.stage(writing)], (torch.ones(4), torch.tensor(2.0))
    plan = fp.make_plan(
        stages, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu", outputs=True
    )
    x = torch.randn(6, 4)
    found = fp.run(plan, params, (x, torch.zeros(6, 2))).outputs
    torch.testing.assert_close(found, 2 * x[:, :2] + x[:, 2:])


def test_a_write_into_a_tensor_that_the_batch_has_twice():
    def doubled(p, x):
        a, b = x
        return (a.mul_(2) + b) @ p

    plan = fp.make_plan(
        [fp.stage(doubled)], fp.schedules.one_f_one_b(1, 3), loss=F.mse_loss, devices="cpu"
    )
    x, target = torch.randn(2, 12, 4)
    with pytest.raises(fp.PlanError, match="whose memory the stage before, or the batch, handed"):
        fp.run(plan, (torch.eye(4),), ((x, x), target))
    fp.run(plan, (torch.eye(4),), ((x, x.clone()), target))


@pytest.mark.parametrize("alias", [lambda w: w.detach(), lambda w: w.T], ids=["detached", "T"])
def test_a_weight_of_two_stages_behind_another_tensor(alias):
    """Each of the two tensors would get a part of the gradient alone."""
    weight, ids = torch.randn(8, 8), torch.arange(8)
    stages = [
        fp.stage(lambda p, i: F.embedding(i, p["e"])),
        fp.stage(lambda p, x: x @ p["h"]),
    ]
    plan = fp.make_plan(stages, fp.schedules.one_f_one_b(2, 2), loss=F.cross_entropy, devices="cpu")
    params = {"e": weight}, {"h": alias(weight)}
    with pytest.raises(fp.PlanError, match=r"at 'h' are two tensors in one memory.* ties=\["):
        fp.run(plan, params, (ids, ids))
    fp.run(plan, params, (ids, ids), trainable=({"e": True}, {"h": False}))
    flat = torch.randn(128)  # parts of one buffer are parameters of their own
    params = {"e": flat[:64].view(8, 8)}, {"h": flat[64:].view(8, 8)}
    fp.run(plan, params, (ids, ids))


class Aliased(nn.Module):
    """Reads its weight through a buffer in the same memory."""

    def __init__(self, change):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", change(self.linear.weight.detach()))

    def forward(self, x):
        return self.linear(x) + x @ self.seen.T


@pytest.mark.parametrize(
    "make",
    [
        lambda model: fp.from_module(model),
        lambda model: fp.split(nn.Sequential(model, nn.Linear(4, 4)), 2),
        lambda model: fp.split(nn.Sequential(model, nn.Linear(4, 4)), 2, example=torch.ones(2, 4)),
    ],
    ids=["from_module", "split", "traced"],
)
def test_a_buffer_in_the_memory_of_a_parameter(make):
    """The buffer of a stage is a copy, which would keep the old numbers after a step."""
    with pytest.raises(fp.PlanError, match="'(0.)?seen' shares memory with the parameter"):
        make(Aliased(lambda weight: weight))
    with pytest.raises(fp.PlanError, match="'(0.)?seen' shares memory with the parameter"):
        make(Aliased(lambda weight: weight[1:].T))
    make(Aliased(torch.clone))
