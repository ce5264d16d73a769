"""What a stage's function closes over: has any of it changed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.stage import Stage
from funcpipe.core.torch_names import storage_number, version
from funcpipe.runtime.reached import Reached
from funcpipe.testing.match import differences


class Captured:
    """What one stage closes over, as it is now.

    Attributes:
        found: see `Reached`.
    """

    def __init__(self, stage: Stage) -> None:
        self.found = Reached(stage).found
        self._frozen = {name: _frozen(value) for name, value in self.found.items()}

    def changed(self, stage: Stage) -> list[str]:
        """The names whose values are others now, or that have come or gone."""
        now = Reached(stage).found
        both = [name for name in self.found if name in now]
        other = [name for name in both if not _same(self._frozen[name], _frozen(now[name]))]
        other += [name for name in (*self.found, *now) if (name in now) != (name in self.found)]
        grown = tuple(f"{name[4:-1]}[" for name in other if name.startswith("len("))
        return [name for name in other if not name.startswith(grown)]  # its length says it of a container

    def names(self, identities: Collection[int]) -> list[str]:
        """The names of the tensors with these ids."""
        return [name for name, value in self.found.items() if isinstance(value, Tensor) and id(value) in identities]


def _frozen(value: Any) -> Any:
    """A value as it is now: bits, and how often it was written to."""
    if not isinstance(value, Tensor):
        return value
    return value, 0 if value.is_inference() else version(value), value.detach().clone()


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, tuple) and isinstance(after, tuple):
        if before[0] is after[0] and before[1] != after[1]:
            return False
        return not differences(after[2], before[2], "")[0]
    return type(before) is type(after) and (before == after or before != before)


def storages(values: Any) -> set[int]:
    """The memory of the tensors among some values, told by address."""
    return {
        storage_number(value.untyped_storage())
        for value in values
        if isinstance(value, Tensor) and value.layout is torch.strided
    }
