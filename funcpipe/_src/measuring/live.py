"""Count the bytes that are alive: a dispatch mode that follows each storage from its creation to
its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.torch_names import WatchingMode, lazy_clone_operation, storage_number

_ALIAS: Any = torch.ops.aten.alias.default


class Live(WatchingMode):
    """Counts the storages that operations create, each once, until they are freed.

    Attributes:
        now: bytes alive.
        peak: the largest number of bytes alive since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}

    def restart(self) -> int:
        """Start a new peak. Returns the bytes alive."""
        self.peak = self.now
        return self.now

    def forget(self) -> None:
        """Stop counting the storages that are alive now."""
        self._sizes = dict.fromkeys(self._sizes, 0)
        self.now = 0

    def known(self, tensors: Iterable[Any]) -> None:
        """Exclude the storages of these tensors from the count."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and self._watch(tensor):
                key = storage_number(tensor.untyped_storage())
                self.now -= self._sizes[key]
                self._sizes[key] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages of its results."""
        # A copy-on-write clone takes no memory before the first write.
        out = _ALIAS(args[0]) if func is lazy_clone_operation else func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):  # pyright: ignore[reportUnknownVariableType]
            for tensor in item if isinstance(item, (tuple, list)) else (item,):  # pyright: ignore[reportUnknownVariableType]
                if isinstance(tensor, Tensor):
                    self._watch(tensor)
        return out

    def _watch(self, tensor: Tensor) -> bool:
        """Count a storage. Returns False for a tensor without storage."""
        # Fake tensors report a real device, so only true meta tensors are excluded.
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return False
        storage = tensor.untyped_storage()
        key = storage_number(storage)
        if key in self._alive:
            return True

        def gone(_: Any) -> None:
            del self._alive[key]
            self.now -= self._sizes.pop(key)

        # The callback runs when the storage is freed, which ends its count.
        self._alive[key] = weakref.ref(storage, gone)
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        return True

    def holds(self, key: int) -> bool:
        """Whether a storage, given by its `storage_number`, is alive."""
        return key in self._alive
