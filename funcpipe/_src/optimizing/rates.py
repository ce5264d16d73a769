"""Advance a learning rate scheduler for several batches in advance, and restore it after errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import STEPPED
from funcpipe._src.optimizing.stepping import Settings
from funcpipe._src.optimizing.undo import to_the_end


class Rates:
    """A scheduler of an optimizer, or None, and a copy of the values of both to restore."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        if scheduler is None:
            return
        refuse_scheduler(optimizer, scheduler)
        self._groups = self._now()
        self._kept = [(each, _copied(vars(each))) for each in _schedulers(scheduler)]

    def step(self) -> None:
        """Step the scheduler after a batch."""
        if self.scheduler is not None:
            self.scheduler.step()

    def ahead(self, count: int) -> Sequence[Settings] | None:
        """Step the scheduler ``count`` times, and return the group settings for each batch.

        None: there is no scheduler, so the groups' present settings hold.
        """
        if self.scheduler is None:
            return None
        # Otherwise the scheduler warns that it steps before the optimizer.
        setattr(self.optimizer, STEPPED, True)
        settings: list[Settings] = []
        for _ in range(count):
            settings.append(self._now())
            self.scheduler.step()
        return settings

    def restore(self) -> None:
        """Restore the scheduler and the settings of the optimizer's groups."""
        if self.scheduler is not None:
            to_the_end(self._restore)

    def _restore(self) -> None:
        assert self.optimizer is not None
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=True):
            for name, value in before.items():
                # In place: the scheduler, or a CUDA graph, refers to this tensor object.
                if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
        for scheduler, kept in self._kept:
            own = vars(scheduler)
            own.update(_copied(kept))
            for name in own.keys() - kept.keys():
                del own[name]

    def _now(self) -> list[Mapping[str, Any]]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        names = ("params", "param_names")
        return [
            {
                name: value.clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name not in names
            }
            for group in groups
        ]


def _schedulers(value: Any) -> list[LRScheduler]:
    """Return a scheduler and the schedulers within it, as in SequentialLR."""
    found: list[LRScheduler] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, LRScheduler) and all(each is not other for other in found):
            found.append(each)
            left += vars(each).values()
        elif isinstance(each, (list, tuple)):
            left += each
        elif isinstance(each, dict):
            left += each.values()
    return found


def _copied(value: Any) -> Any:
    """Copy the containers of a value. Other objects, such as optimizers and functions, are
    shared."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        new = copy(value)
        new.update({key: _copied(each) for key, each in value.items()})
        return new
    return copy(value) if isinstance(value, set) else value


def refuse_scheduler(optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    """Raise PlanError if this is not a scheduler of the optimizer that steps after each batch."""
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if plateau or not isinstance(scheduler, LRScheduler):
        why = "needs the loss of each batch before the next begins" if plateau else "is not one"
        raise PlanError(
            "scheduler is a scheduler of torch.optim.lr_scheduler that steps after each batch; a "
            f"{type(scheduler).__name__} {why}: leave it out, and step it after run_batches"
        )
    if scheduler.optimizer is not optimizer:
        raise PlanError(
            "scheduler has another optimizer than optimizer=; make the scheduler with the "
            "optimizer that you give to run_batches"
        )
