"""Cache keys of programs and recorded runs: what these depend on besides numbers in tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import TraceError
from funcpipe._src.core.plain_tensors import is_plain


def leaf_key(leaf: Any) -> Hashable:
    """The key of a leaf: shape, strides, type and device of a tensor; of anything else its value.

    Raises:
        TraceError: the value cannot be compared, or the tensor is no plain one.
    """
    if isinstance(leaf, Tensor):
        if not (is_plain(leaf) or leaf.is_meta):
            raise TraceError(
                f"it gets a {type(leaf).__name__} ({leaf.layout}), which is no plain tensor"
            )
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    try:
        hash(leaf)
    except Exception:
        raise TraceError(
            f"it gets a {type(leaf).__name__}, which cannot be told from another; hand tensors, "
            "numbers or strings in"
        ) from None
    # Floats by their digits: -0.0 differs from 0.0, and nan equals nan.
    return (type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf)


def border_key(border: Border) -> Hashable:
    """The key of a border: of its structure, flags and leaves; computed once.

    Raises:
        TraceError: see `leaf_key`.
    """
    if border.words is None:
        border.words = (border.spec, tuple(border.flags), *map(leaf_key, border.leaves))
    return border.words


def border_key_or_none(border: Border) -> Hashable:
    """The border's `border_key`; None where that raises."""
    try:
        return border_key(border)
    except TraceError:
        return None


def switches_key() -> Hashable:
    """The key of torch's global settings that pick operations or kernels."""
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
