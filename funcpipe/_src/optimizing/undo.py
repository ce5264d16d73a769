"""Keep copies of parameters and optimizer state before steps, so that the steps can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Kept:
    """The values of a leaf and its optimizer state before a step."""

    leaf: Tensor
    numbers: Tensor  # a copy of the leaf
    # The optimizer's state of the leaf, each value with a copy. None: there was no state.
    state: Mapping[str, tuple[Any, Any]] | None

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the values in place, so that all tensors stay the same objects."""
        self.leaf.detach().copy_(self.numbers)
        if self.state is None:
            optimizer.state.pop(self.leaf, None)
            return
        now = optimizer.state[self.leaf]
        now.clear()
        for name, (value, copy) in self.state.items():
            now[name] = value if isinstance(value, Tensor) else copy
            if isinstance(value, Tensor):
                value.detach().copy_(copy)


class Undo:
    """Copies of an optimizer's leaves and their state, from before the first step of each leaf."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._kept: dict[int, _Kept] = {}

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Copy the present values of leaves that have no copy yet."""
        if self.optimizer is None:
            return
        for leaf in tensors:
            if id(leaf) not in self._kept:
                state = self.optimizer.state.get(leaf)
                copies = (
                    None
                    if state is None
                    else {name: (value, _copied(value)) for name, value in state.items()}
                )
                self._kept[id(leaf)] = _Kept(leaf, _copied(leaf), copies)

    def restore(self) -> None:
        """Restore all values. The copies stay, so `restore` can be called again."""
        to_the_end(self._restore)

    def _restore(self) -> None:
        if self.optimizer is None:
            return
        with torch.no_grad():
            for kept in self._kept.values():
                kept.restore(self.optimizer)

    def close(self) -> None:
        """Release the copies: nothing will be undone after this call."""
        self._kept = {}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)


def to_the_end(work: Callable[[], None]) -> None:
    """Do work that can be repeated, until it completes. Raise a Ctrl-C only afterwards."""
    interrupt: KeyboardInterrupt | None = None
    done = False
    while not done:
        try:
            work()
            done = True
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
