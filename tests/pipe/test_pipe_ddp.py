"""DistributedDataParallel around a Pipe, in every checkpoint mode: its hooks fire once for each
parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import funcpipe as fp

CHECKPOINTS = ("always", "except_last", "never")

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def data(rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def gradients(checkpoint, rank, steps=2):
    """The gradients of a rank's last step, and how often each parameter's hook fired in it."""
    pipe = fp.Pipe(net(), 3, checkpoint, balance=[2, 2], devices="cpu")
    parallel = DistributedDataParallel(pipe)
    fired = []
    for name, param in pipe.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for _ in range(steps):
        parallel.zero_grad()
        fired.clear()
        parallel(data(rank)).square().mean().backward()
    assert sorted(fired) == sorted(name for name, _ in pipe.named_parameters())
    return [param.grad for param in pipe.parameters()]


def expected(world):
    """The mean over ranks of the plain model's gradients, microbatch by microbatch."""
    totals = None
    for rank in range(world):
        model = copy.deepcopy(net())
        torch.cat([model(part) for part in data(rank).tensor_split(3)]).square().mean().backward()
        own = [param.grad / world for param in model.parameters()]
        totals = own if totals is None else [a + b for a, b in zip(totals, own, strict=True)]
    return totals


def start(rank, world, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_one_process(checkpoint, tmp_path):
    start(0, 1, tmp_path / "store")
    try:
        found = gradients(checkpoint, 0)
    finally:
        dist.destroy_process_group()
    for a, b in zip(found, expected(1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def work(rank, world, path):
    torch.set_num_threads(1)
    start(rank, world, path)
    try:
        for checkpoint in CHECKPOINTS:
            for a, b in zip(gradients(checkpoint, rank), expected(world), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path, monkeypatch):
    import sys
    from pathlib import Path

    # The children import this file by its name.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "test_pipe_ddp", raising=False)
    import test_pipe_ddp

    torch.multiprocessing.spawn(test_pipe_ddp.work, args=(2, tmp_path / "store"), nprocs=2)
