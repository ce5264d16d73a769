"""The layout of a dense tensor, with which another process can receive its numbers."""

from __future__ import annotations

import os
from functools import lru_cache
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
        """Return the layout of a contiguous tensor with the size and type of a tensor."""
        return cls(
            tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), tensor.dtype
        )

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
        return torch.empty_strided(
            self.size, self.strides, dtype=self.dtype, device=device or "cpu"
        )


@lru_cache(1)
def machine_memory() -> int:
    """Return the bytes of this machine's memory; 2**48 if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 48
