"""Pipe on a GPU: lanes of one device, and layers tied between the GPU and the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn

import funcpipe as fp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def net():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.0)
    ).double()
    model[3].weight = model[0].weight
    return model


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(
    "devices", [["cuda:0", "cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids="-".join
)
def test_the_numbers_of_the_plain_model(devices, checkpoint):
    model, x = net(), torch.randn(10, 4, dtype=torch.float64)
    pipe = fp.Pipe(copy.deepcopy(model), 3, checkpoint, balance=[3, 2], devices=devices)
    assert pipe[0].weight.device == pipe.devices[0]
    a, b = (x.clone().requires_grad_() for _ in range(2))
    y = pipe(a)
    assert y.device == pipe.devices[1]
    y.square().sum().backward()
    expected = torch.cat([model(part) for part in b.tensor_split(3)])
    expected.square().sum().backward()
    torch.testing.assert_close(y.cpu(), expected)
    torch.testing.assert_close(a.grad, b.grad)
    for one, other in zip(pipe.parameters(), model.parameters(), strict=True):
        assert one.grad.device == one.device
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    for one, other in zip(pipe.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_no_deadlock_inside_of_an_outer_backward():
    pipes = [fp.Pipe(net(), 2, "always", balance=[3, 2], devices=["cuda:0"] * 2) for _ in range(2)]
    x = torch.randn(8, 4, dtype=torch.float64, device="cuda:0", requires_grad=True)
    for _ in range(3):
        (pipes[1](pipes[0](x * 2).tanh()) + pipes[0](x)).sum().backward()
    assert x.grad.isfinite().all()


def test_without_devices_layers_move_to_the_gpus():
    pipe = fp.Pipe(net(), 2)
    assert {device.type for device in pipe.devices} == {"cuda"}
    assert pipe(torch.randn(4, 4, dtype=torch.float64)).is_cuda
