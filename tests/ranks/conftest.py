"""Pools of processes that run the tasks of `rank_tasks`: each is started once and kept for all
tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_pool import Pool

HERE = Path(__file__).parent
MADE: dict[int, Pool] = {}


@pytest.fixture(scope="session")
def pools():
    """By number of processes; one that a test has hurt is made anew."""

    def pool(size: int) -> Pool:
        if size in MADE and not MADE[size].whole:
            MADE.pop(size).end()
        if size not in MADE:
            MADE[size] = Pool(size)
        return MADE[size]

    return pool


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem):
    """After the last test of this folder the processes end; each takes time from the others' tests,
    though it is idle."""
    try:
        return (yield)  # fixtures of the test still use them
    finally:
        if nextitem is None or HERE not in nextitem.path.parents:
            while MADE:
                MADE.popitem()[1].end()
