"""Two processes on one real GPU, over their hosts, and on two, by NCCL: the bits of one process. Skipped without CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from rank_pool import Pool

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def pool():
    made = Pool(2)
    yield made
    made.end()


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("number", range(4))
def test_the_bits(pool, gpus, number):
    """The lanes of both on one device, or of each on its own."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    for wrong in pool.all("on_gpus", gpus, number, [8, 10, 3], seconds=200):
        assert [] == wrong


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("shard", [False, True])
def test_replicas(pool, gpus, shard):
    """Gradients are summed and parts gathered, over hosts or by NCCL."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    for wrong in pool.all("replicas_on_gpus", gpus, shard, seconds=200):
        assert [] == wrong
