"""What parameters, and the optimizer's state of them, were before steps, so that these can be
undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Kept:
    """What a leaf and the optimizer's state of it were before a step.

    Attributes:
        leaf: what was stepped.
        numbers: of the leaf.
        state: of the optimizer, each value with a copy of it; None: it had none.
    """

    leaf: Tensor
    numbers: Tensor
    state: Mapping[str, tuple[Any, Any]] | None

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Make it so again; tensors are the objects that they were."""
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
    """What leaves of an optimizer, and its state of them, were before the first step of them."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self._kept: dict[int, _Kept] = {}

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep what is now, but for what is kept already."""
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
        """Make it so again; it stays known."""
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
    """Do what may be done over again, and all of it: Ctrl-C on the way is raised when it is
    done."""
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
