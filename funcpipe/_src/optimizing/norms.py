"""The norm of gradients, of which processes may have parts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from funcpipe._src.data.exchange import Exchange, alone, entire, lies_over, numbers


def norm_of(gradients: list[tuple[int, Tensor]], exchange: Exchange) -> Tensor:
    """The 2-norm of the gradients of all processes, each with its stage."""
    if exchange == alone:
        return _total([numbers(gradient) for _, gradient in gradients])
    norms = on_host([local_norm(stage, gradient, exchange) for stage, gradient in gradients])
    return norm_of_norms(exchange("the norm of the gradients", norms), exchange)


LocalNorm: TypeAlias = tuple[int, bool, Tensor]
"""Of a gradient: its stage, has each copy of that another part of it, and the norm of what is
here."""


def local_norm(stage: int, gradient: Tensor, exchange: Exchange) -> LocalNorm:
    """What others must know of a gradient for the norm of all."""
    return stage, _is_part(gradient, exchange), _local_norm(gradient, exchange)


def on_host(norms: Sequence[LocalNorm]) -> list[LocalNorm]:
    """Norms that can be told to others."""
    return [(stage, is_part, norm.cpu()) for stage, is_part, norm in norms]


def norm_of_norms(everyone: Sequence[Sequence[LocalNorm]], exchange: Exchange) -> Tensor:
    """The 2-norm of gradients, by what every process has of each."""
    ranks = len(everyone) // max(1, len(exchange.copies))
    found = [
        _of_copies(row) for rank in range(ranks) for row in zip(*everyone[rank::ranks], strict=True)
    ]
    # Together those of one type, in the order of the stages: as torch does it, for the same bits.
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for _, norm in sorted(found, key=itemgetter(0)):
        by_type.setdefault(norm.dtype, []).append(norm)
    ordered = [norm for same in by_type.values() for norm in same]
    return torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.tensor(0.0)


def _is_part(gradient: Any, exchange: Exchange) -> bool:
    """Has each copy of the stage another part of the gradient."""
    return lies_over(gradient, exchange.copies) and any(
        each.is_shard() for each in gradient.placements
    )


def _local_norm(gradient: Tensor, exchange: Exchange) -> Tensor:
    """The 2-norm of what is here of a gradient."""
    return entire(torch.linalg.vector_norm(numbers(exchange.here(gradient))))


def _of_copies(row: Sequence[LocalNorm]) -> tuple[int, Tensor]:
    """The stage and the norm of a gradient, by what each copy of the stage has of it."""
    stage, is_part, norm = row[0]
    if is_part:
        parts = torch.stack([part for *_, part in row])
        norm = torch.linalg.vector_norm(parts, dtype=torch.float64).to(norm.dtype)
    return stage, norm


def _total(gradients: list[Tensor]) -> Tensor:
    """The 2-norm of the gradients of this process; of DTensors of all that have parts of them."""
    if not any(hasattr(gradient, "full_tensor") for gradient in gradients):
        return get_total_norm(gradients)
    norms = [entire(torch.linalg.vector_norm(gradient)).double() for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)).to(gradients[0].dtype)
