"""Sharded parameters (torch's DTensor): each replica has a part, and gathers the whole to compute.

Gradients are whole until they are summed over the replicas. Each replica keeps its part of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.tree import Tree
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.engine.part import PlanPart
from funcpipe._src.replicas.gathered import GatheredParams, hollow_like
from funcpipe._src.replicas.replicas import Sharding, dtensor_of


@dataclass(frozen=True)
class Gathered:
    """The mailbox key for the notice that a stage's parameters are gathered.

    ``number`` counts the gathers. Not a tuple: tuples are keys of free slots.
    """

    stage: int
    number: int


class ShardedParams(GatheredParams):
    """The parameters of a stage, some of them sharded over its replicas, for one run."""

    def __init__(
        self, stage: int, tree: Tree, cuts: Mapping[int, Sharding | None], part: PlanPart
    ) -> None:
        super().__init__(stage, tree)
        self.part = part
        self.cuts = {number: cut for number, cut in cuts.items() if cut is not None}
        self.hollow, self._spread = [*self.cuts], [*cuts]
        self._gathers = 0
        with torch.no_grad():
            for number, cut in cuts.items():
                leaf = self.given[number]
                local = leaf.to_local()
                self.leaves[number] = self.parts[number] = local
                if cut is not None:
                    self.leaves[number] = hollow_like(leaf, local.device)

    def _gather(self, box: Mailbox, place: Place) -> None:
        jobs: list[tuple[Tensor, list[Tensor]]] = []
        for number, cut in self.cuts.items():
            # By ``.data``, so that autograd does not see a write: the numbers are the same as in
            # the last gather, and graphs may have saved the tensor.
            whole, mine = self.leaves[number].data, self.parts[number].detach().contiguous()
            rooms = [
                cut.part(whole, replica, self.part.replicas)
                for replica in range(self.part.replicas)
            ]
            rooms[self.part.replica].copy_(mine)
            jobs.append((mine, rooms))
        self._gathers += 1
        key = Gathered(self.stage, self._gathers)
        self.part.gather_params(self.stage, jobs, partial(box.put, key))

    def _await(self, box: Mailbox, place: Place) -> None:
        key = Gathered(self.stage, self._gathers)
        if key not in box.came:
            box.wait(key)
        place.wait(box.came[key])

    def as_given(self, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Return gradients in the form of the given leaves, DTensors for sharded leaves."""
        out: list[Any] = [*gradients]
        for number in self._spread:
            gradient = gradients[number]
            out[number] = None if gradient is None else dtensor_of(gradient, self.given[number])
        return out
