"""Joins devices of several processes by NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch


def has_nccl() -> bool:
    """Can torch do it."""
    distributed: Any = torch.distributed
    return distributed.is_available() and distributed.is_nccl_available()


def nccl(store: Any, rank: int, size: int) -> Any:
    """A backend of NCCL for who makes it, with few blocks of the device, for lanes compute beside it.

    It waits for ever: whoever needs what comes waits for less, and aborts it.
    """
    backend: Any = torch.distributed.ProcessGroupNCCL  # pyright: ignore
    group = backend(store, rank, size, timedelta(days=30))
    group.options.is_high_priority_stream = True  # read when its first operation connects
    group.options.config.max_ctas = 4
    return group
