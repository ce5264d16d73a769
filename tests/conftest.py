"""Fixtures of the whole suite: a fixed seed, and threads that must not outlive a test."""

import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # for `common`, the helpers that several rooms share

settings.register_profile("suite", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Tests compute on the CPU, on machines with GPUs too; those on a GPU are run by ``pytest -m cuda``."""
    if not re.search(r"(?<!not )\bcuda\b", config.getoption("-m")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items):
    """Those that take long may take long on a busy machine too."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_thread_survives():
    before = set(threading.enumerate())
    threads = torch.get_num_threads()
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("funcpipe")]
    assert [] == left
    assert threads == torch.get_num_threads()
