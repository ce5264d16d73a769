"""Learning rates, and what else a scheduler sets, for batches that come."""

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
    """A scheduler of an optimizer, or none, and how both were when this was made."""

    def __init__(self, optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        if scheduler is None:
            return
        refuse_scheduler(optimizer, scheduler)
        self._groups = self._now()
        self._kept = [(each, _copied(vars(each))) for each in _schedulers(scheduler)]

    def step(self) -> None:
        """A batch was stepped: what is set now is for the next one."""
        if self.scheduler is not None:
            self.scheduler.step()

    def ahead(self, count: int) -> Sequence[Settings] | None:
        """Go on by so many batches; what each of them is stepped with. None: with what the groups
        have."""
        if self.scheduler is None:
            return None
        setattr(
            self.optimizer, STEPPED, True
        )  # else the scheduler warns that it comes before the first step
        settings: list[Settings] = []
        for _ in range(count):
            settings.append(self._now())
            self.scheduler.step()
        return settings

    def restore(self) -> None:
        """Let all be as it was."""
        if self.scheduler is not None:
            to_the_end(self._restore)

    def _restore(self) -> None:
        assert self.optimizer is not None
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=True):
            for name, value in before.items():
                if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                    group[name].copy_(
                        value
                    )  # the scheduler, or a recorded graph, knows this very tensor
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
    """A scheduler and those that it holds, as warmups and sequences do."""
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
    """A value whose containers are copies; what is no container (an optimizer, a model, a function)
    is itself."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        new = copy(value)
        new.update({key: _copied(each) for key, each in value.items()})
        return new
    return copy(value) if isinstance(value, set) else value


def refuse_scheduler(optimizer: torch.optim.Optimizer | None, scheduler: Any) -> None:
    """Raise PlanError for what steps no learning rates of this optimizer batch by batch."""
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if plateau or not isinstance(scheduler, LRScheduler):
        why = "wants the loss of each batch before the next one begins" if plateau else "is none"
        raise PlanError(
            "scheduler is one of torch.optim.lr_scheduler, which is stepped after each batch; a "
            f"{type(scheduler).__name__} {why}: leave it out, and step it after run_batches"
        )
    if scheduler.optimizer is not optimizer:
        raise PlanError("scheduler is of another optimizer than optimizer=; make it of this one")
