"""Recognize plain tensors, and find their memory and the local parts of DTensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.torch_names import (
    data_address,
    is_shared_lazily,
    is_zero_tensor,
    storage_number,
)

_memory: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


def memory_view(tensor: Tensor) -> memoryview:
    """Return the bytes of a dense tensor's memory. Keep the tensor alive while you use them.

    Not by numpy: torch treats memory that numpy has seen as foreign memory, and works without
    numpy.
    """
    return _memory(tensor.data_ptr(), tensor.nbytes, _WRITABLE)


def bytes_of(tensor: Tensor) -> bytes:
    """Return a copy of the bytes of a dense tensor in host memory."""
    return bytes(memory_view(tensor)) if tensor.numel() else b""


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 if it has none.

    Copy-on-write copies have the address of the original. Reading it does not end the sharing.
    """
    return data_address(tensor)


def addresses(leaves: Sequence[Any]) -> frozenset[int]:
    """Return the addresses of the plain tensors among some leaves."""
    return frozenset(
        address(leaf) for leaf in leaves if isinstance(leaf, Tensor) and is_plain(leaf)
    )


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a dense torch tensor whose memory contains its numbers.

    Subclasses, sparse, quantized, meta and nested tensors are not plain, nor are tensors with a
    pending conjugation or negation.
    """
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


def here(tensor: Any) -> Tensor:
    """Return the local part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def memory_number(leaf: Any) -> int:
    """Return a number that all leaves in the same memory share."""
    return storage_number(leaf.untyped_storage()) if is_plain(leaf) else id(leaf)


def materialized(tensor: Tensor) -> Tensor:
    """Return the tensor, or a real copy if its memory is shared copy-on-write.

    Torch cannot record a stream on memory that is shared copy-on-write.
    """
    return tensor.clone() if is_shared_lazily(tensor) else tensor
