"""The helpers of this folder can be imported; kept lanes end with their test."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from fault_rig import EXECUTORS, Executors


@pytest.fixture(params=EXECUTORS)
def executor(request):
    """From a plan to an executor: "serial", "threads", or lanes that are kept until the test
    ends."""
    chosen = Executors(request.param)
    yield chosen
    chosen.close()


@pytest.fixture(autouse=True)
def _a_setting_of_its_own():
    """What a run could forget to set back is none of its own values, and not what an earlier run
    left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.set_autocast_cache_enabled(True)
    torch._C._set_multithreading_enabled(True)
    yield
    torch.set_num_threads(threads)
