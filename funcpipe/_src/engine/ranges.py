"""``ranges=True``: make each action a range of torch.profiler, and of NVTX on CUDA devices."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from funcpipe._src.data.program import LaneProgram, Run
from funcpipe._src.engine.steps import Step


def named_range(name: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a context whose work, on the host and queued on the device, has a name in profiles."""
    return _for_both(name) if device.type == "cuda" else record_function(name)


@contextmanager
def _for_both(name: str) -> Generator[None]:
    """Open both ranges: torch.profiler shows only record_function, Nsight Systems only NVTX."""
    torch.cuda.nvtx.range_push(name)
    try:
        with record_function(name):
            yield
    finally:
        torch.cuda.nvtx.range_pop()


def ranged(step: Step, program: LaneProgram, device: torch.device) -> Step:
    """Wrap a step in a range with the name of its action, such as ``action 2F3``."""

    def ranged(reads: list[Any], run: Run) -> Sequence[Any]:
        # Without the word, profilers take a name such as 2F0 for a C++ symbol and show F0.
        with named_range(f"action {program.action(run)}", device):
            return step(reads, run)

    return ranged
