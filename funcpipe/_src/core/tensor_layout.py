"""The layout of a tensor: size, strides and dtype, without its numbers."""

from __future__ import annotations

import os
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError


class TensorLayout(NamedTuple):
    """What a tensor is, without its numbers.

    Attributes:
        size, strides: of a dense tensor, its axes in any order.
        dtype: its type.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """The layout of a contiguous tensor with this one's size and type."""
        return cls(
            tuple(tensor.shape), torch.empty(tensor.shape, device="meta").stride(), tensor.dtype
        )

    def view_of(self, data: Tensor) -> Tensor:
        """The tensor whose memory these bytes are: [nbytes], uint8. Raises PlanError for more or
        fewer bytes."""
        if data.numel() != self.nbytes:
            raise PlanError(
                f"what came from another process is damaged: {data.numel()} bytes, not "
                f"{self.nbytes}"
            )
        return data.view(self.dtype).as_strided(self.size, self.strides)

    @property
    def nbytes(self) -> int:
        """The size of its memory."""
        return prod(self.size) * self.dtype.itemsize

    def room(self, device: torch.device | None = None) -> Tensor:
        """Make a tensor with memory for the numbers. Raises PlanError if this machine has less
        memory."""
        if self.nbytes > machine_memory():
            raise PlanError(
                f"what came from another process is damaged: a tensor of {self.nbytes} bytes"
            )
        return torch.empty_strided(
            self.size, self.strides, dtype=self.dtype, device=device or "cpu"
        )


@lru_cache(1)
def machine_memory() -> int:
    """Return the bytes of this machine's memory, a bound for every value; 2**48 where the system
    does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 48
