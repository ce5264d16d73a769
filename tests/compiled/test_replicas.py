"""Replicas, each with a pipeline of its own, that average gradients after every step, as data
parallel training does."""

from __future__ import annotations

import sys
from pathlib import Path

import optree
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn as nn
import torch.nn.functional as F

import funcpipe as fp

WORLD, STEPS = 2, 3

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")


def parts():
    """Linear layers, batch norm and dropout; parameters and state as every replica begins."""
    torch.manual_seed(0)
    net = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh())
        for _ in range(4)
    ]
    return zip(*(fp.from_module(one, name=f"s{i}") for i, one in enumerate(net)), strict=True)


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(14, 6, generator=generator), torch.randn(14, 6, generator=generator)


def updated(params, grads):
    """A step of SGD."""
    return optree.tree_map(lambda p, g: p - 0.1 * g, params, grads)


def replica(rank, path):
    """Train with compiled stages, zero-bubble and remat; gradients are summed over the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=WORLD)
    try:
        stages, params, state = parts()
        schedule = fp.schedules.remat(fp.schedules.zero_bubble(4, 4, num_devices=2))
        plan = fp.make_plan(
            [fp.compile_stage(one, fuse=False) for one in stages],
            schedule,
            loss=F.mse_loss,
            devices="cpu",
        )
        for step in range(STEPS):
            result = fp.run(
                plan,
                params,
                batch(rank, step),
                state=state,
                seed=WORLD * step + rank,
                threads_per_lane=1,
            )
            for grad in fp.leaves(result.grads):
                dist.all_reduce(grad)
            params, state = (
                updated(params, optree.tree_map(lambda g: g / WORLD, result.grads)),
                result.state,
            )
        torch.save((params, state), path / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def alone():
    """The same by eager stages in one process, one replica after the other."""
    stages, params, state = parts()
    plan = fp.make_plan(
        stages, fp.schedules.zero_bubble(4, 4, num_devices=2), loss=F.mse_loss, devices="cpu"
    )
    states = [state] * WORLD
    for step in range(STEPS):
        results = [
            fp.run_sequential(
                plan,
                params,
                batch(rank, step),
                state=states[rank],
                seed=WORLD * step + rank,
                threads_per_lane=1,
            )
            for rank in range(WORLD)
        ]
        states = [one.state for one in results]
        mean = optree.tree_map(
            lambda *grads: sum(grads[1:], grads[0]) / WORLD, *(one.grads for one in results)
        )
        params = updated(params, mean)
    return params, states


@pytest.mark.slow
def test_replicas_stay_the_same_to_the_bit(tmp_path, monkeypatch):
    """Zero-bubble, compiled stages, remat, dropout, batch norm and a reduction of the gradients,
    all together: exact."""
    # The children import this file by its name.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.delitem(sys.modules, "test_replicas", raising=False)
    import test_replicas

    torch.multiprocessing.spawn(test_replicas.replica, args=(tmp_path,), nprocs=WORLD)
    params, states = alone()
    for rank in range(WORLD):
        found, state = torch.load(tmp_path / f"{rank}.pt")
        for mine, wanted in zip(
            fp.leaves((found, state)), fp.leaves((params, states[rank])), strict=True
        ):
            assert torch.equal(mine, wanted)
