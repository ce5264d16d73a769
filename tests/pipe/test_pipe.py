"""Pipe is the Sequential: same numbers, same structure, same names. Names after the list of
torchgpipe's own behaviours."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import same
from pipe.sequentials import (
    CHECKPOINTS,
    Log,
    assert_close,
    data,
    every_checkpoint,
    grads,
    net,
    piped,
)

import funcpipe as fp
from funcpipe._src.models.balance import evenly

# -- transparency
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("balance", "chunks"), [([6], 3), ([1, 5], 10), ([2, 1, 3], 3), ([1] * 6, 1)], ids=str
)
@every_checkpoint
def test_a1_loss_and_gradients_of_the_plain_model(balance, chunks, checkpoint):
    model, x, target = net(), data(), data(10, 2)
    pipe = piped(model, chunks, checkpoint, balance=balance)
    losses = [F.mse_loss(one(x), target) for one in (model, pipe)]
    for loss in losses:
        loss.backward()
    assert_close(losses[:1], losses[1:])
    assert_close(grads(model), grads(pipe))


@pytest.mark.parametrize("rows", [10, 7, 2])
def test_a1_every_checkpoint_gives_the_same_bits(rows):
    results = []
    for checkpoint in CHECKPOINTS:
        pipe, x = piped(net(), 4, checkpoint), data(rows).requires_grad_()
        y = pipe(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, *grads(pipe)))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@every_checkpoint
def test_a2_input_gradients(checkpoint):
    model, pipe = net(), piped(net(), checkpoint=checkpoint)
    a, b = (data().requires_grad_() for _ in range(2))
    model(a * 2).sum().backward()
    pipe(b * 2).sum().backward()
    assert_close([a.grad], [b.grad])


@every_checkpoint
@pytest.mark.parametrize("with_parameters", [True, False])
def test_a2_inputs_that_require_no_gradient(checkpoint, with_parameters):
    model = net() if with_parameters else nn.Sequential(nn.Tanh(), nn.ReLU())
    pipe = piped(model, checkpoint=checkpoint, balance=[2, 4] if with_parameters else [1, 1])
    y = pipe(data())
    assert y.requires_grad is with_parameters
    if with_parameters:
        y.sum().backward()
        assert all(grad is not None for grad in grads(pipe))


def test_a3_it_behaves_as_the_sequential():
    model = net()
    pipe = fp.Pipe(model, balance=[2, 4], devices="cpu")
    assert len(pipe) == 6
    assert list(pipe) == list(model)
    assert pipe[0] is model[0]
    assert pipe[-1] is model[5]
    with pytest.raises(IndexError):
        pipe[6]
    part = pipe[1:3]
    assert isinstance(part, nn.Sequential)
    assert list(part) == [model[1], model[2]]
    assert list(part.state_dict()) == ["2.weight", "2.bias"]
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert [name for name, _ in pipe.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert all(a is b for a, b in zip(pipe.parameters(), model.parameters(), strict=True))
    pipe.load_state_dict(net().state_dict())
    model.load_state_dict(pipe.state_dict())


def test_a3_views_and_options():
    pipe = piped(net(), 5, "always", deferred_batch_norm=True)
    assert (pipe.chunks, pipe.checkpoint, pipe.deferred_batch_norm) == (5, "always", True)
    assert pipe.balance == (2, 1, 3)
    assert pipe.devices == (torch.device("cpu"),) * 3
    assert [list(part._modules) for part in pipe.partitions] == [["0", "1"], ["2"], ["3", "4", "5"]]
    assert pipe.partitions[1][0] is pipe[2]
    assert "stage 1 on cpu: 2\n" in repr(pipe)
    assert "chunks=5, checkpoint='always'" in repr(pipe)


def test_a3_a_stage_alone_gives_the_same_numbers():
    pipe, x = piped(net()), data()
    y = x
    for part in pipe.partitions:
        y = part(y)
    assert_close([pipe(x)], [y])


def test_a3_layers_named_like_attributes_of_a_pipe():
    names = ("chunks", "devices", "partitions")
    model = nn.Sequential()
    model._modules.update(OrderedDict((name, nn.Linear(4, 4).double()) for name in names))
    pipe = fp.Pipe(model, 2, devices="cpu")
    assert pipe.chunks == 2
    assert [name.split(".")[0] for name in pipe.state_dict()] == [
        name for name in names for _ in range(2)
    ]
    assert pipe(data()).shape == (10, 4)


class Both(nn.Module):
    def forward(self, pair):
        a, b = pair
        return a + b, a * b


class Tree(nn.Module):
    def forward(self, x):
        return {"out": (x["a"] * 2,), "n": x["n"], "none": None, "word": x["word"]}


def test_a4_structure_is_kept():
    x, y = data(), data() + 1
    single, pair = (
        fp.Pipe(nn.Sequential(nn.Identity()), 3, devices="cpu"),
        fp.Pipe(nn.Sequential(Both(), Both()), 3, devices="cpu"),
    )
    assert torch.equal(single(x), x)
    (one,) = single((x,))
    assert torch.equal(one, x)
    assert same(pair((x, y)), Both()(Both()((x, y))))
    out = fp.Pipe(nn.Sequential(Tree()), 3, devices="cpu")(
        {"a": x, "n": torch.arange(10), "word": "w"}
    )
    assert same(out, {"out": (x * 2,), "n": torch.arange(10), "none": None, "word": "w"})


def test_a4_several_inputs_and_outputs():
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b, a * b

    model, x, y = (
        fp.models.PipeSequential(Two(), Two(), Minus()),
        data().requires_grad_(),
        data() + 1,
    )
    pipe = fp.Pipe(model, 3, balance=[1, 2], devices="cpu")
    assert same(pipe(x, y), model(x, y))
    pipe(x, y).sum().backward()
    expected = torch.autograd.grad(model(x, y).sum(), x)
    assert_close([x.grad], expected)
    with pytest.raises(fp.BatchError, match=r"takes one input.*fp\.models\.PipeSequential"):
        piped(net())(x, y)


class Minus(nn.Module):
    def forward(self, a, b):
        return a - b


def test_a5_an_empty_sequential_is_the_identity():
    pipe, x = fp.Pipe(nn.Sequential(), 3), data()
    assert pipe(x) is x
    assert (len(pipe), pipe.balance, pipe.devices) == (0, (), ())
    with pytest.raises(fp.BatchError, match="not replicated; got int"):
        pipe(42)
    with pytest.raises(fp.BatchError, match="differ in rows"):
        pipe((x, x[:3]))


# -- microbatches
# -------------------------------------------------------------------------------


class Rows(nn.Module):
    """Remembers how many rows each call had."""

    def __init__(self):
        super().__init__()
        self.seen = Log()

    def forward(self, x):
        self.seen.values.append(len(x))
        return x


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"), [(10, 4, [3, 3, 2, 2]), (7, 4, [2, 2, 2, 1]), (2, 4, [1, 1])]
)
def test_b1_b2_batches_that_do_not_divide(rows, chunks, expected):
    layer = Rows()
    fp.Pipe(nn.Sequential(layer), chunks, devices="cpu")(data(rows))
    assert layer.seen.values == expected


def test_d1_the_last_microbatch_is_the_one_that_is_kept():
    layer = Rows()
    pipe = fp.Pipe(
        nn.Sequential(nn.Linear(4, 4).double(), layer), 4, "except_last", devices=["cpu"]
    )
    y = pipe(data(5))
    assert layer.seen.values == [2, 1, 1, 1]
    y.sum().backward()
    assert layer.seen.values[4:] == [2, 1, 1]


def test_b3_unequal_rows_are_refused_before_anything_runs():
    layer = Rows()
    with pytest.raises(fp.BatchError, match=r"inputs\[0\] has 8, inputs\[1\] has 3"):
        fp.Pipe(nn.Sequential(layer), 4, devices="cpu")((data(8), data(3)))
    assert layer.seen.values == []


def test_b4_non_tensors_and_what_is_replicated():
    class Lookup(nn.Module):
        def forward(self, x):
            assert x["table"].shape == (5, 4)
            return F.linear(x["rows"], x["table"]) * x["scale"]

    table = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    y = fp.Pipe(nn.Sequential(Lookup()), 3, devices="cpu")(
        {"rows": data(), "table": fp.Replicate(table), "scale": 2}
    )
    y.sum().backward()
    expected = F.linear(data(), table) * 2
    assert_close([y, table.grad], [expected, *torch.autograd.grad(expected.sum(), table)])
    with pytest.raises(fp.BatchError, match="not replicated; got Replicate, int"):
        fp.Pipe(nn.Sequential(nn.Identity()), 3, devices="cpu")((fp.Replicate(table), 2))


def test_b4_another_axis():
    x = data().T.contiguous().requires_grad_()
    pipe = fp.Pipe(nn.Sequential(Turn(), *net()), 3, balance=[3, 4], devices="cpu", merge=0)
    pipe(fp.Axis(x, 1)).sum().backward()
    (expected,) = torch.autograd.grad(nn.Sequential(Turn(), *net())(x).sum(), x)
    assert_close([x.grad], [expected])


class Turn(nn.Module):
    def forward(self, x):
        return x.T


def test_b4_inputs_that_are_cut_already():
    pipe, x = piped(net(), 4), data().requires_grad_()
    parts = fp.Microbatches([x[:1], x[1:4], x[4:]])
    out = pipe(parts)
    assert isinstance(out, fp.Microbatches)
    assert [len(one) for one in out] == [1, 3, 6]
    sum(one.sum() for one in out).backward()
    (expected,) = torch.autograd.grad(net()(x).sum(), x)
    assert_close([torch.cat(list(out)), x.grad], [net()(x), expected])
    with pytest.raises(fp.BatchError, match="has 3 ready-made microbatches, but the plan has 2"):
        piped(net(), 2)(parts)
    with pytest.raises(fp.BatchError, match="cut as one argument"):
        fp.Pipe(fp.models.PipeSequential(Minus()), 2, devices="cpu")(parts, x)


def test_b5_no_rows_are_refused():
    with pytest.raises(fp.BatchError, match="has no rows"):
        piped(net())(data(0))


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "2"])
def test_b6_chunks_are_positive(chunks):
    with pytest.raises(fp.PlanError, match="number of chunks must be positive integer"):
        fp.Pipe(net(), chunks)


def test_b7_an_output_without_tensors_is_refused():
    class Forgot(nn.Module):
        def forward(self, x):
            pass

    model = nn.Sequential(nn.BatchNorm1d(4).double(), Forgot())
    pipe = fp.Pipe(model, 2, devices="cpu")
    with pytest.raises(fp.PlanError, match="the stage returned None: is a `return` missing"):
        pipe(data())
    assert int(model[0].num_batches_tracked) == 0


def test_outputs_without_rows_come_one_by_one():
    """A loss in the last layer."""

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    model, pipe = (
        nn.Sequential(net(), Mean()),
        piped(nn.Sequential(net(), Mean()), 5, balance=[1, 1]),
    )
    out = pipe(data())
    assert isinstance(out, fp.Microbatches)
    (sum(out) / 5).backward()
    model(data()).backward()
    assert_close(grads(model), grads(pipe))


# -- stages
# -------------------------------------------------------------------------------


def test_k1_cuts_by_the_bytes_of_parameters():
    pipe = fp.Pipe(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), devices=["cpu"] * 2
    )
    assert pipe.balance == (2, 2)
    assert evenly([1, 2, 3, 4, 5, 6], 2) == [4, 2]
    assert evenly([0, 0, 0, 0], 2) == [2, 2]  # where nothing has a size, layers count alike


# -- copies
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_copies_and_pickles(clone):
    pipe = piped(net())
    first = pipe(data())
    other = clone(pipe)
    assert same(first.detach(), other(data()).detach())
    assert (other.balance, other.chunks, other.devices) == (pipe.balance, pipe.chunks, pipe.devices)
    other(data()).sum().backward()
    assert all(grad is None for grad in grads(pipe))
    with torch.no_grad():
        other[0].weight.zero_()
    assert same(first.detach(), pipe(data()).detach())
