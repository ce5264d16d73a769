"""Sparse gradients, as ``nn.Embedding(sparse=True)`` has them: sums keep them sparse, each row once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def parts(gradient: Any) -> Sequence[Any]:
    """The tensors whose memory a gradient has."""
    sparse = isinstance(gradient, Tensor) and gradient.is_sparse and gradient.is_coalesced()
    return (gradient.indices(), gradient.values()) if sparse else (gradient,)


def added(first: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients: sparse where both are."""
    if not first.is_sparse:
        return first + other
    return (first + other).coalesce() if other.is_sparse else other + first  # torch adds sparse to dense only


def add_gradient(total: Tensor, other: Tensor, factor: float = 1.0) -> Tensor:
    """A sum with a gradient, times a factor, added: into the sum itself but for what is sparse."""
    return added(total, other * factor) if total.is_sparse else total.add_(other, alpha=factor)


def dense(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients that other processes can add to theirs."""
    return [each.to_dense() if each is not None and each.is_sparse else each for each in gradients]
