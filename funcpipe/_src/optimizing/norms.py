"""Compute the norm of gradients that may be spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from funcpipe._src.data.exchange import Exchange, alone, entire, lies_over, numbers


def norm_of(
    gradients: list[tuple[int, Tensor]],
    exchange: Exchange,
    about: str = "the norm of the gradients",
    fact: Any = None,
    check: Callable[[list[Any]], None] = lambda _: None,
) -> Tensor:
    """Return the 2-norm of the gradients of all processes. Each gradient comes with its stage.

    ``about`` names the call. Processes that name other calls raise RanksError. ``check`` gets the
    ``fact`` of each process, which travels with the norms.
    """
    if exchange == alone:
        return _total([numbers(gradient) for _, gradient in gradients])
    norms = on_host([local_norm(stage, gradient, exchange) for stage, gradient in gradients])
    everyone = exchange(about, (norms, fact))
    check([fact for _, fact in everyone])
    return norm_of_norms([norms for norms, _ in everyone], exchange)


LocalNorm: TypeAlias = tuple[int, bool, Tensor]
"""For a gradient: its stage, whether each replica has another part, and the norm of this part."""


def local_norm(stage: int, gradient: Tensor, exchange: Exchange) -> LocalNorm:
    """Return the facts of a gradient that other processes need for the norm."""
    return stage, _is_part(gradient, exchange), _local_norm(gradient, exchange)


def on_host(norms: Sequence[LocalNorm]) -> list[LocalNorm]:
    """Return norms on the CPU, which can be sent to other processes."""
    return [(stage, is_part, norm.cpu()) for stage, is_part, norm in norms]


def norm_of_norms(everyone: Sequence[Sequence[LocalNorm]], exchange: Exchange) -> Tensor:
    """Return the 2-norm of all gradients, from the norms of all processes."""
    ranks = len(everyone) // max(1, len(exchange.copies))
    found = [
        _of_copies(row) for rank in range(ranks) for row in zip(*everyone[rank::ranks], strict=True)
    ]
    # Grouped by dtype, in the order of the stages, as torch does. Another order would round
    # differently from a run in one process.
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for _, norm in sorted(found, key=itemgetter(0)):
        by_type.setdefault(norm.dtype, []).append(norm)
    ordered = [norm for same in by_type.values() for norm in same]
    return torch.linalg.vector_norm(torch.stack(ordered)) if ordered else torch.tensor(0.0)


def _is_part(gradient: Any, exchange: Exchange) -> bool:
    """Return whether each replica of the stage has another part of the gradient."""
    return lies_over(gradient, exchange.copies) and any(
        each.is_shard() for each in gradient.placements
    )


def _local_norm(gradient: Tensor, exchange: Exchange) -> Tensor:
    """Return the 2-norm of this process's part of a gradient."""
    return entire(torch.linalg.vector_norm(numbers(exchange.here(gradient))))


def _of_copies(row: Sequence[LocalNorm]) -> tuple[int, Tensor]:
    """Return the stage and the norm of a gradient, from the norms of all replicas."""
    stage, is_part, norm = row[0]
    if is_part:
        parts = torch.stack([part for *_, part in row])
        norm = torch.linalg.vector_norm(parts, dtype=torch.float64).to(norm.dtype)
    return stage, norm


def _total(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of the gradients of this process. A DTensor counts as a whole."""
    if not any(hasattr(gradient, "full_tensor") for gradient in gradients):
        return get_total_norm(gradients)
    norms = [entire(torch.linalg.vector_norm(gradient)).double() for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack(norms)).to(gradients[0].dtype)
