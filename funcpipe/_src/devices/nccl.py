"""Joins devices of several processes by NCCL."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import torch

_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Torch's threads beside a group would end the process when another one fails; here that is told,
and raised. The last is about what waits in line, as it is meant to: what goes one way has a group
of its own."""

_gate = threading.Lock()


def has_nccl() -> bool:
    """Can torch do it, on devices that take work from more than one queue.

    With one a transfer that waits for another process would hold up those that this one waits for.
    """
    distributed: Any = torch.distributed
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    return distributed.is_available() and distributed.is_nccl_available() and queues != "1"


def nccl(store: Any, rank: int, size: int) -> Any:
    """A backend of NCCL for who makes it, with few blocks of the device, for lanes compute beside
    it.

    It waits for ever: whoever needs what comes waits for less, and aborts it.
    """
    backend: Any = torch.distributed.ProcessGroupNCCL  # pyright: ignore
    with _quiet():
        group = backend(store, rank, size, timedelta(days=30))
    group.options.is_high_priority_stream = True  # read when its first operation connects
    group.options.config.max_ctas = 4
    return group


@contextmanager
def _quiet() -> Generator[None]:
    """Inside, groups are made that leave failures to who made them."""
    with _gate:
        before = {name: os.environ.get(name) for name in _QUIET}
        os.environ.update(_QUIET)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def abort(groups: list[Any], seconds: float) -> None:
    """End all transfers of some groups, which ends what waits for them; wait for that so long at
    most.

    All at once: to end one may take what another one's transfers hold.
    """

    def end(group: Any) -> None:
        with suppress(RuntimeError):  # it was not connected, or is broken
            group.abort()

    threads = [
        threading.Thread(target=end, args=(group,), name="funcpipe abort", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    deadline = monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
