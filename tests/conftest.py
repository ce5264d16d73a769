"""Fixtures of the whole suite: a fixed seed; threads that must not outlive a test, and Ctrl-C,
which must."""

import gc
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# For `common`, the helpers that several folders share.
sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile(
    "suite", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")


if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Tests compute on the CPU, on machines with GPUs too; those on a GPU are run by ``pytest -m
    cuda``."""
    if not re.search(r"(?<!not )\bcuda\b", config.getoption("-m")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


gc.disable()  # importing makes no garbage worth a search; see `pytest_collection_finish`


def pytest_collection_finish():
    """The collector comes back. It leaves out what was there before the first test: millions of
    objects of imported modules, which it would look at in every full search."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    """Those that take long may take long on a busy machine too."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ctrl_c_stays_python_s():
    """A solver in C may leave SIGINT to its default, unseen by Python; then the next Ctrl-C of a
    test ends the worker."""
    yield
    status = Path("/proc/self/status")
    if status.exists():
        (caught,) = re.findall(r"^SigCgt:\t([0-9a-f]+)$", status.read_text(), re.MULTILINE)
        signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))  # for the next test
        assert int(caught, 16) >> (signal.SIGINT - 1) & 1, "the handler of SIGINT is gone"


@pytest.fixture(autouse=True)
def _no_thread_survives():
    before = set(threading.enumerate())
    threads = torch.get_num_threads()
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("funcpipe")]
    saving = [thread for thread in left if thread.name.startswith("funcpipe save")]
    for thread in saving:  # it ends by itself, shortly after its files
        thread.join(5.0)
    assert [] == [t.name for t in left if t.is_alive() or t not in saving]
    assert threads == torch.get_num_threads()
