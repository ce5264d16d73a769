"""Make and abort NCCL groups, which join CUDA devices of several processes."""

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
"""Settings during the creation of a group. With torch's defaults, its watchdog threads would end
this process if another process fails; funcpipe raises PeerError instead. The last setting silences
a warning about serialized transfers, which are intended: each direction has its own group."""

_gate = threading.Lock()


def has_nccl() -> bool:
    """Return whether NCCL is available, and devices have more than one hardware queue.

    With one queue, a transfer that waits for another process would block the transfers that the
    other process waits for: a deadlock.
    """
    distributed: Any = torch.distributed
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    return distributed.is_available() and distributed.is_nccl_available() and queues != "1"


def nccl(store: Any, rank: int, size: int) -> Any:
    """Return an NCCL group. It uses few thread blocks, because lanes compute at the same time.

    Its own timeout is practically infinite: waiting lanes have shorter timeouts, and abort it.
    """
    backend: Any = torch.distributed.ProcessGroupNCCL  # pyright: ignore
    with _quiet():
        group = backend(store, rank, size, timedelta(days=30))
    group.options.is_high_priority_stream = True  # read when its first operation connects
    group.options.config.max_ctas = 4
    return group


@contextmanager
def _quiet() -> Generator[None]:
    """Return a context in which new groups leave the handling of failures to funcpipe."""
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
    """End all transfers of some groups, and wait at most ``seconds``.

    All groups are aborted at the same time, because one abort may wait for another's transfers.
    """

    def end(group: Any) -> None:
        with suppress(RuntimeError):  # the group was never connected, or is broken
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
