"""Tells plain tensors from others, and finds the addresses of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.torch_names import data_address, is_shared_lazily, is_zero_tensor


def address(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; all that share it, even copy-on-write, have the same. 0:
    it has none."""
    return data_address(tensor)


def addresses(leaves: Sequence[Any]) -> frozenset[int]:
    """The addresses of all plain tensors among some leaves."""
    return frozenset(
        address(leaf) for leaf in leaves if isinstance(leaf, Tensor) and is_plain(leaf)
    )


def is_plain(tensor: Tensor) -> bool:
    """Is this torch's own dense tensor, without a wrapper or a lazy bit, with memory that can be
    taken as it is."""
    kind = type(tensor)
    odd = (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_nested
    )
    if odd or not (kind is Tensor or kind is torch.nn.Parameter):
        return False
    return not (tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor))


def materialized(tensor: Tensor) -> Tensor:
    """The tensor; a copy where its memory is shared copy-on-write, so that no stream could be
    recorded on it."""
    return tensor.clone() if is_shared_lazily(tensor) else tensor
