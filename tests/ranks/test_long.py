"""A thousand steps, and three hundred faults: nothing grows, nothing hangs."""

import random

import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4])
def test_a_thousand_steps(pools, size):
    for memory, descriptors, threads in pools(size).all("soak", 1000, seconds=250):
        assert memory < 8
        assert descriptors <= 0
        assert threads <= 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_hundred_faults(pools):
    pool = pools(4)
    seed = random.randrange(2**30)
    pool.all("start", 10.0)
    for wrong in pool.all("luck", 300, seed, seconds=280):
        assert [] == wrong, seed
    assert [[]] * 4 == pool.all("stop")
