"""Looking for hidden tensors goes into what a leaf holds, not into the whole process, and ends
soon."""

import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from funcpipe._src.core import hidden
from funcpipe._src.core.hidden import fault_of, hides_tensors

KEPT = torch.ones(3)


def of_globals(x):
    return x + KEPT


class Keeping(logging.Handler):
    """A handler that keeps what was logged, as those of test runners do."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


class Stranger:
    """A proxy whose object is not there."""

    @property
    def __class__(self):
        raise RuntimeError("there is nothing behind this")


def test_what_others_hold_is_not_the_leafs():
    """Loggers, modules, classes, globals."""
    logger, handler = logging.getLogger("of a stage"), Keeping()
    logger.addHandler(handler)
    logger.propagate = False
    logger.warning("kept: %s", KEPT)
    assert handler.records
    logger.removeHandler(handler)
    logging.getLogger().addHandler(handler)
    try:
        kind = type("Kind", (), {"held": KEPT})
        for one in (
            logger,
            torch,
            of_globals,
            kind,
            kind(),
            random.Random(1),
            threading.Lock(),
            threading.Event(),
        ):
            assert not hides_tensors((SimpleNamespace(one=[one]),)), one
    finally:
        logging.getLogger().removeHandler(handler)


def test_live_things_are_leaves():
    """A pool, a thread, a loader of numbers, a proxy: a stage may have them at hand."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        for one in (pool, threading.current_thread(), DataLoader(list(range(9))), Stranger()):
            assert "" == fault_of(one)
    assert "hides tensors" in fault_of(DataLoader(TensorDataset(KEPT)))


@pytest.mark.parametrize(
    "huge",
    [
        {str(number): number for number in range(200_000)},
        [[number] for number in range(200_000)],
        {number: {"next": {}} for number in range(50_000)},
    ],
    ids=["vocabulary", "rows", "trie"],
)
def test_huge_things_are_not_looked_at_whole(huge, monkeypatch):
    """A tokenizer is handed on at every border; the walk is bounded, and the nearest things come
    first."""
    opened = []
    look = hidden._held
    monkeypatch.setattr(hidden, "_held", lambda thing: opened.append(type(thing)) or look(thing))
    assert not hides_tensors((SimpleNamespace(huge=huge),))
    assert len(opened) <= hidden._ENOUGH
    assert hides_tensors((SimpleNamespace(huge=huge, more=[KEPT]),))


def test_an_endless_list_ends():
    ring = [1]
    ring.append(ring)
    assert not hides_tensors((ring,))
    ring.append(KEPT)
    assert hides_tensors((ring,))
