"""Named ranges of torch.profiler, and of NVTX on CUDA devices."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.profiler import record_function


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
