"""Two processes on one real GPU, over their host and by NCCL, and on two: the bits of one process.
Skipped without CUDA."""

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

WAYS = ["one device", "one device, joined", "two devices"]


def pool_on(way):
    if way == "two devices" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    made = Pool(2)
    made.all("use_gpu", way)
    return made


@pytest.fixture(scope="module", params=WAYS)
def pool(request):
    made = pool_on(request.param)
    made.joined = request.param != "one device"
    yield made
    made.end()


@pytest.mark.parametrize("number", range(5))
def test_the_bits(pool, number):
    for wrong, joined in pool.all("on_gpus", number, [8, 10, 3], seconds=200):
        assert [] == wrong
        assert joined is pool.joined


@pytest.mark.parametrize("shard", [False, True])
def test_replicas(pool, shard):
    """Gradients are summed and parts gathered."""
    for wrong, joined in pool.all("replicas_on_gpus", shard, seconds=200):
        assert [] == wrong
        assert joined is pool.joined


@pytest.mark.parametrize("kind", ["lanes", "replicas", "sharded"])
def test_steps_in_runs(pool, kind):
    """They are those after runs, one by one and in batches that follow each other without a
    pause."""
    for wrong, joined in pool.all("steps_on_gpus", kind, seconds=200):
        assert [] == wrong
        assert joined is pool.joined


def test_a_stage_that_raises(pool):
    """All raise within two seconds, and the next run is right."""
    (one, first, before), (other, second, after) = pool.all("faults_on_gpus", "raise", seconds=60)
    assert ("PeerError", "StageError[ValueError]") == (one, other)
    assert max(first, second) < 2
    assert before == after == []


@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_dies(way):
    pool = pool_on(way)
    try:
        (kind, seconds, _), gone = pool.run("faults_on_gpus", "kill", seconds=60)
        assert gone is None
        assert kind == "PeerError"
        assert seconds < 2
    finally:
        pool.end()
