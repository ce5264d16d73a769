"""Sum sparse gradients, such as those of ``nn.Embedding(sparse=True)``. Sums stay sparse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def parts(gradient: Any) -> Sequence[Any]:
    """Return the tensors whose memory a gradient uses."""
    sparse = isinstance(gradient, Tensor) and gradient.is_sparse and gradient.is_coalesced()
    return (gradient.indices(), gradient.values()) if sparse else (gradient,)


def added(first: Tensor, other: Tensor) -> Tensor:
    """Add two gradients; the sum is sparse if both are."""
    if not first.is_sparse:
        return first + other
    return (
        (first + other).coalesce() if other.is_sparse else other + first
    )  # torch has only dense + sparse


def add_gradient(total: Tensor, other: Tensor, factor: float = 1.0) -> Tensor:
    """Add a gradient times a factor to a sum: in place, or for a sparse sum into a new tensor."""
    return added(total, other * factor) if total.is_sparse else total.add_(other, alpha=factor)


def dense(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Convert sparse gradients to dense ones, which other processes can add."""
    return [each.to_dense() if each is not None and each.is_sparse else each for each in gradients]
