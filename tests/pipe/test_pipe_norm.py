"""Batch norm in a Pipe: the plain updates microbatch by microbatch, or one exact update per batch;
and frozen layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from pipe.sequentials import every_checkpoint

import funcpipe as fp


def net(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BatchNorm1d(4, **options), nn.Linear(4, 6), nn.BatchNorm1d(6, **options), nn.ReLU()
    ).double()


def piped(model, chunks=4, checkpoint="except_last", **options):
    return fp.Pipe(
        copy.deepcopy(model), chunks, checkpoint, balance=[2, 2], devices="cpu", **options
    )


def data(rows=20, shift=0.0):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64) * 2 + shift


def statistics(module):
    return dict(module.named_buffers())


def assert_close(a, b, **options):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **({"rtol": 1e-10, "atol": 1e-12} | options))


class WholeBatch(nn.Module):
    """What deferred statistics are: each layer's own update, once, on all inputs that it saw."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, parts):
        for layer in self.model:
            if isinstance(layer, nn.BatchNorm1d):
                weights = (None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
                out = [F.batch_norm(part, *weights) for part in parts]
                with torch.no_grad():
                    layer(torch.cat(parts))
                parts = out
            else:
                parts = [layer(part) for part in parts]
        return torch.cat(parts)


def pieces(x, chunks):
    return list(x.tensor_split(min(chunks, len(x))))


@every_checkpoint
@pytest.mark.parametrize("momentum", [0.1, None])
def test_g1_g3_g7_deferred_statistics_are_those_of_the_whole_batch(checkpoint, momentum):
    model = net(momentum=momentum)
    pipe = piped(model, checkpoint=checkpoint, deferred_batch_norm=True)
    whole = WholeBatch(model)
    for rows in (20, 10, 18, 9):  # G9: batches that do not divide
        x = data(rows, shift=1e4)
        pipe(x).sum().backward()
        whole(pieces(x, 4))
        assert_close(statistics(model), statistics(pipe))


@every_checkpoint
@pytest.mark.parametrize("momentum", [0.1, None])
def test_plain_statistics_are_updated_microbatch_by_microbatch(checkpoint, momentum):
    model = net(momentum=momentum)
    pipe = piped(model, checkpoint=checkpoint)
    for rows in (20, 10, 18, 9):
        for part in pieces(data(rows), 4):
            model(part)
        pipe(data(rows)).sum().backward()
        assert_close(statistics(model), statistics(pipe))
    assert int(pipe[0].num_batches_tracked) == 16


@every_checkpoint
@pytest.mark.parametrize("deferred", [False, True])
def test_g2_gradients_are_those_of_microbatches(checkpoint, deferred):
    model, x = net(), data()
    pipe = piped(model, checkpoint=checkpoint, deferred_batch_norm=deferred)
    pipe(x).square().sum().backward()
    torch.cat([model(part) for part in pieces(x, 4)]).square().sum().backward()
    assert_close(
        *[{name: param.grad for name, param in one.named_parameters()} for one in (model, pipe)]
    )


@pytest.mark.parametrize("deferred", [False, True])
def test_g4_evaluation(deferred):
    pipe = piped(net(), deferred_batch_norm=deferred)
    pipe(data())
    model = net()
    model.load_state_dict(pipe.state_dict())
    before = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
    torch.testing.assert_close(
        pipe.eval()(data(10)), model.eval()(data(10)), rtol=1e-10, atol=1e-12
    )
    assert_close(before, statistics(pipe), rtol=0, atol=0)


@pytest.mark.parametrize("deferred", [False, True])
def test_g5_five_steps(deferred):
    model = net()
    pipe = piped(model, deferred_batch_norm=deferred)
    whole = (
        WholeBatch(model) if deferred else lambda parts: torch.cat([model(part) for part in parts])
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (pipe, model)]
    for step in range(5):
        for one, optimizer in zip((pipe, lambda x: whole(pieces(x, 4))), optimizers, strict=True):
            optimizer.zero_grad()
            one(data(18 + step)).square().mean().backward()
            optimizer.step()
    assert_close(model.state_dict(), pipe.state_dict())


@pytest.mark.parametrize("deferred", [False, True])
def test_g6_statistics_stay_the_same_tensors_without_a_graph(deferred):
    pipe = piped(net(), deferred_batch_norm=deferred)
    before = {name: (id(buffer), buffer.data_ptr()) for name, buffer in pipe.named_buffers()}
    y = pipe(data())
    after = statistics(pipe)
    assert {name: id(buffer) for name, buffer in after.items()} == {
        name: one for name, (one, _) in before.items()
    }
    assert not any(buffer.requires_grad for buffer in after.values())
    y.sum().backward()
    assert int(pipe[0].num_batches_tracked) == (1 if deferred else 4)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_g7_training_without_gradients_counts_too(around):
    pipe, other = piped(net()), piped(net())
    with around():
        pipe(data())
    other(data())
    assert_close(statistics(pipe), statistics(other))
    pipe(data()).sum().backward()


def test_g8_layers_that_track_nothing():
    model, x = net(track_running_stats=False), data()
    pipe = piped(model)
    assert list(pipe.named_buffers()) == []
    torch.testing.assert_close(
        pipe(x), torch.cat([model(part) for part in pieces(x, 4)]), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("deferred", [False, True])
def test_g9_a_call_that_raises_changes_nothing(deferred):
    class Bad(nn.Module):
        def forward(self, x):
            if x[0, 0] > 1e6:
                raise ValueError("bad row")
            return x

    pipe = fp.Pipe(
        nn.Sequential(*net(), Bad()), 4, balance=[2, 3], devices="cpu", deferred_batch_norm=deferred
    )
    pipe(data())
    before = {name: buffer.clone() for name, buffer in pipe.named_buffers()}
    with torch.no_grad():
        pipe[2].bias[0] = 1e7
    with pytest.raises(ValueError, match="bad row"):
        pipe(data())
    assert_close(before, statistics(pipe), rtol=0, atol=0)
    with torch.no_grad():
        pipe[2].bias[0] = 0
    pipe(data())
    assert int(pipe[0].num_batches_tracked) == (2 if deferred else 8)


def test_one_value_per_channel_names_the_layer():
    with pytest.raises(fp.BatchError, match=r"layer '0'.*more than one value per channel"):
        piped(net(), 4)(data(4))


def test_one_layer_in_two_places_is_refused():
    layer = nn.BatchNorm1d(4)
    with pytest.raises(fp.PlanError, match="batch norm layer at 0 and 2"):
        fp.Pipe(nn.Sequential(layer, nn.ReLU(), layer), 2, devices="cpu")


# -- layers that change between calls
# -------------------------------------------------------------------------------


def test_frozen_layers_are_honoured_at_any_time():
    model = nn.Sequential(*net(), nn.Dropout(0.5))
    pipe = fp.Pipe(model, 2, balance=[2, 3], devices="cpu")
    counts = lambda: [int(model[i].num_batches_tracked) for i in (0, 2)]
    pipe(data())
    model[0].eval()
    pipe(data())
    assert counts() == [2, 4]
    pipe.eval()
    torch.testing.assert_close(pipe(data()), model(data()), rtol=1e-10, atol=1e-12)
    model[4].train()  # dropout in evaluation
    assert not torch.equal(pipe(data()), pipe(data()))
    assert counts() == [2, 4]
    pipe.train()
    model[4].eval()
    pipe(data())
    assert counts() == [4, 6]
    assert torch.equal(pipe.eval()(data()), pipe(data()))


def test_layers_may_be_changed_replaced_tied_and_hooked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).double()
    pipe = fp.Pipe(model, 2, balance=[1, 2], devices="cpu")
    assert int((pipe(data()) == 0).sum()) == 0
    model[1].p = 0.0
    with torch.no_grad():
        torch.testing.assert_close(pipe(data()), model(data()), rtol=1e-10, atol=1e-12)
        setattr(pipe, "2", nn.Linear(4, 3).double())
        assert pipe(data()).shape == (20, 3)
        pipe.get_submodule("2").weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
        pipe[2].bias.zero_()
        assert not pipe(data()).any()
        pipe[2].register_forward_hook(lambda module, args, out: out + 1)
        assert bool((pipe(data()) == 1).all())
    pipe.add_module("3", nn.ReLU())
    with pytest.raises(fp.PlanError, match=r"has 4 layers, but its balance \[1, 2\] is for 3"):
        pipe(data())


def test_the_dtype_may_change():
    pipe = piped(net())
    pipe(data())
    pipe.to(torch.float32)
    y = pipe(data().float())
    assert y.dtype is torch.float32
    y.sum().backward()
    assert all(param.grad.dtype is torch.float32 for param in pipe.parameters())
    pipe.bfloat16()
    assert pipe(data().bfloat16()).dtype is torch.bfloat16
    assert pipe.double()(data()).dtype is torch.float64
