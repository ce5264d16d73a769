"""Check that the copies of a parameter in several processes are stepped with the same options."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.errors import RanksError, raise_all
from funcpipe._src.core.tree import Tree, at
from funcpipe._src.data.exchange import Exchange, alone
from funcpipe._src.optimizing.leaf_gradients import LeafGradient, Ties

_ALIKE = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable"}
"""Entries of a parameter group that do not change what a step computes."""


class OptionHashes(NamedTuple):
    """Hashes of the optimizer's options for parameters that other processes have, too.

    Hashes are ints, because exchanges cache the form of a message with ints.
    """

    tied: tuple[int, ...]  # for each tie, the hash of the leaf here; 0: all or no places are here
    copied: int  # the hash of all leaves, which all replicas of the stages have; 0: no replicas


def _option_hashes(
    optimizer: torch.optim.Optimizer | None,
    params: Tree,
    entries: Iterable[LeafGradient],
    ties: Ties,
    exchange: Exchange,
) -> OptionHashes:
    """Return the hashes of this process. A leaf that the optimizer lacks has a hash, too."""
    options: dict[int, str] = {}
    for group in () if optimizer is None else optimizer.param_groups:
        words = f"{type(optimizer).__name__} {_plain(group)}"
        options.update((id(leaf), words) for leaf in group["params"])
    tied: list[int] = []
    for places in ties:
        here = [place for place in places if params[place[0]] is not None]
        apart = here and len(here) < len(places)
        tied.append(_hashed(options.get(id(at(params[here[0][0]], here[0][1])))) if apart else 0)
    copied = 0
    if len(exchange.copies) > 1:
        copied = _hashed([options.get(id(entry.leaf)) for entry in entries])
    return OptionHashes(tuple(tied), copied)


def compared(
    optimizer: torch.optim.Optimizer | None,
    params: Tree,
    entries: Sequence[LeafGradient],
    ties: Ties,
    exchange: Exchange,
) -> dict[str, Any]:
    """Return the keywords of `norm_of` that compare the options of all processes.

    `norm_of` raises RanksError if a parameter has other options in another process.
    """
    if exchange == alone:
        return {}
    hashes = _option_hashes(optimizer, params, entries, ties, exchange)
    return {"fact": hashes, "check": partial(_refuse_unlike, ties=ties, exchange=exchange)}


def _refuse_unlike(everyone: Sequence[OptionHashes], ties: Ties, exchange: Exchange) -> None:
    # All processes have the same hashes, so all raise.
    ranks = len(everyone) // max(1, len(exchange.copies))
    faults = [
        "the tied parameter " + " and ".join(f"{path!r} of stage {stage}" for stage, path in places)
        for number, places in enumerate(ties)
        if len({each.tied[number] for each in everyone} - {0}) > 1
    ]
    faults += [
        f"the parameters of rank {rank}, in the replicas"
        for rank in range(ranks)
        if len({each.copied for each in everyone[rank::ranks]}) > 1
    ]
    raise_all(
        "the ranks step copies of one parameter with different options, such as learning rates, so "
        "the copies would no longer be equal; give all copies the same options (nothing was "
        "stepped):",
        faults,
        RanksError,
    )


def _plain(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(
        (name, value.tolist() if isinstance(value, Tensor) else value)
        for name, value in group.items()
        if name not in _ALIKE
    )


def _hashed(value: Any) -> int:
    # Not `hash`, which differs between processes. Seven bytes fit into a signed 64-bit number.
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=7).digest())
