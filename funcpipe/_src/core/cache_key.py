"""Cache keys of compiled programs and of recorded runs.

A key contains everything that a program depends on, except the numbers in tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import TraceError
from funcpipe._src.core.plain_tensors import is_plain


def leaf_key(leaf: Any) -> Hashable:
    """Return the key of a leaf: shape, strides, type and device of a tensor, else its value.

    Raises TraceError if the value cannot be hashed, or the tensor is not plain.
    """
    if isinstance(leaf, Tensor):
        if not (is_plain(leaf) or leaf.is_meta):
            raise TraceError(
                f"it gets a {type(leaf).__name__} ({leaf.layout}), which is not a plain tensor"
            )
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    try:
        hash(leaf)
    except Exception:
        raise TraceError(
            f"it gets a {type(leaf).__name__}, which cannot be hashed and compared; pass tensors, "
            "numbers or strings"
        ) from None
    # Floats by their repr: -0.0 must differ from 0.0, and nan must equal nan. Otherwise a program
    # would be used for another constant, or traced again for each nan.
    return (type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf)


def border_key(border: Border) -> Hashable:
    """Return the key of a border, computed once per border. Raises TraceError as `leaf_key`."""
    if border.words is None:
        border.words = (border.spec, tuple(border.flags), *map(leaf_key, border.leaves))
    return border.words


def border_key_or_none(border: Border) -> Hashable:
    """Return the border's `border_key`; None if it raises TraceError."""
    try:
        return border_key(border)
    except TraceError:
        return None


def switches_key() -> Hashable:
    """Return the key of torch's global settings that change operations or kernels."""
    autocast = [
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
    ]
    kernels = tuple([enabled() for enabled in _KERNELS])
    return (torch.get_default_dtype(), torch.get_default_device(), *autocast, kernels)


_KERNELS = (
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
)
