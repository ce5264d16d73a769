"""Pools of processes that run the tasks of `rank_tasks`: each is started once and kept for all tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import Pool


@pytest.fixture(scope="session")
def pools():
    """By number of processes; one that a test has hurt is made anew."""
    made: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        if size in made and not made[size].whole:
            made.pop(size).end()
        if size not in made:
            made[size] = Pool(size)
        return made[size]

    yield pool
    for each in made.values():
        each.end()
