"""The layout of a tensor, to make a tensor like it without its numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError


class TensorLayout(NamedTuple):
    """Size, strides and dtype of a dense tensor, with axes in any order."""

    size: tuple[int, ...]
    strides: tuple[int, ...]  # the strides, in elements
    dtype: torch.dtype  # the type of the numbers

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor; for a tensor that is not strided, of a contiguous one."""
        if tensor.layout is torch.strided:
            return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return cls.contiguous(tensor.shape, tensor.dtype)

    @classmethod
    def contiguous(cls, size: Sequence[int], dtype: torch.dtype) -> TensorLayout:
        """Return the layout of a contiguous tensor."""
        steps = accumulate(
            reversed(size[1:]), lambda step, length: step * max(1, length), initial=1
        )
        return cls(tuple(size), tuple(steps)[::-1] if size else (), dtype)

    def on(self, device: str | torch.device) -> Tensor:
        """Make a tensor with this layout and arbitrary numbers."""
        return torch.empty_strided(self.size, self.strides, dtype=self.dtype, device=device)

    def view_of(self, data: Tensor) -> Tensor:
        """Return the tensor with these bytes, [nbytes] uint8, as memory.

        Raises PlanError if the number of bytes is wrong.
        """
        if data.numel() != self.nbytes:
            raise PlanError(
                f"what came from another process is damaged: {data.numel()} bytes, not "
                f"{self.nbytes}"
            )
        return data.view(self.dtype).as_strided(self.size, self.strides)

    @property
    def nbytes(self) -> int:
        """The size of the tensor's memory in bytes."""
        return prod(self.size) * self.dtype.itemsize

    def room(self, device: torch.device | None = None) -> Tensor:
        """Make an empty tensor with this layout.

        Raises PlanError if the machine has less memory: the layout came from another process, and a
        damaged message must not exhaust the memory.
        """
        if self.nbytes > machine_memory():
            raise PlanError(
                f"what came from another process is damaged: a tensor of {self.nbytes} bytes"
            )
        return self.on(device or "cpu")


@lru_cache(1)
def machine_memory() -> int:
    """Return the bytes of this machine's memory; 2**48 if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 48
