"""Parameters that a stage has on its device only while it computes: it gathers and frees them.

The stage is bound to tensors of the whole size, which have no memory at first. They get memory when
U begins to gather the parameters, or, without U, when the stage first computes. After the last
action before the next U, their memory is freed, with all values that a compiled stage computed from
them. `sharded` gathers from the other replicas, `host_params` from host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.tree import Tree, flatten, map_tensors, unflatten
from funcpipe._src.data.kinds import COMPUTES, COUNTED
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.program import LaneProgram, Run
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.engine.steps import Step
from funcpipe._src.lower.gathers import last_uses, useful_gathers
from funcpipe._src.replicas.replicas import Reduction, Sharding
from funcpipe._src.stages.bound import Bound, ForwardReport


class GatheredParams(ABC):
    """The parameters of a stage, some of them gathered before use, for one run.

    Attributes:
        stage: the number of the stage.
        given: the leaves that the caller gave.
        leaves: all leaves that the stage is bound to, gathered ones in whole size.
        parts: all leaves as this process keeps them.
        hollow: the numbers of the leaves that have memory only while they are gathered.
        cuts: the sharding of sharded leaves, by leaf number.
        counted: the numbers of the U that gather. Others are no-ops; see `count`.
    """

    def __init__(self, stage: int, tree: Tree) -> None:
        self.stage = stage
        leaves, self._spec = flatten(tree)
        self.given, self.leaves, self.parts = leaves, [*leaves], [*leaves]
        self.hollow: list[int] = []
        self.cuts: Mapping[int, Sharding] = {}
        self.counted = frozenset({0})
        self._is_begun = self._is_here = False
        self._copied: Any = None
        """The end of the last copy from host memory. None: nothing is copied."""

    def tree(self) -> Tree:
        """Return the tree that the stage is bound to."""
        return unflatten(self._spec, self.leaves)

    def count(self, fewest: Lowered) -> None:
        """Select the U that gather: the first, and those that serve actions of ``fewest``.

        ``fewest`` is the program of the replica with the fewest microbatches. Its U are in the
        programs of all replicas. So all replicas make the same gathers in the same order; another
        selection would deadlock.
        """
        self.counted = useful_gathers(fewest, self.stage)

    def begin(self, box: Mailbox, place: Place) -> None:
        """Begin to gather, on the stage's lane."""
        for number in self.hollow:  # from the pool of the lane's stream
            place.backend.grow(self.leaves[number], place.device)
        self._gather(box, place)
        self._is_begun, self._is_here = True, False

    def wait(self, box: Mailbox, place: Place) -> None:
        """Wait on the lane until the parameters are gathered. Gather first if no U did."""
        if not self._is_begun:
            self.begin(box, place)
        if not self._is_here:
            self._await(box, place)
            self._is_here = True

    @abstractmethod
    def _gather(self, box: Mailbox, place: Place) -> None:
        """Begin to fill the gathered leaves, while the lane's stream continues."""

    @abstractmethod
    def _await(self, box: Mailbox, place: Place) -> None:
        """Wait on the lane until the gathered leaves are filled."""

    def drop(self, place: Place) -> None:
        """Free the memory of the gathered leaves."""
        self._is_begun = self._is_here = False
        for number in self.hollow:
            place.backend.shrink(self.leaves[number])

    def apart(self, value: Any) -> Any:
        """Return a stage's value with copies of tensors that share memory with the parameters.

        The parameters' memory is freed, so such a tensor would lose its numbers.
        """
        memory = {self.leaves[number].untyped_storage().data_ptr() for number in self.hollow}

        def shares(leaf: Any) -> bool:
            return type(leaf) is Tensor and leaf.untyped_storage().data_ptr() in memory

        def own(leaf: Tensor) -> Tensor:
            return leaf.clone() if shares(leaf) else leaf

        if isinstance(value, Border):
            return value.mapped(own) if any(map(shares, value.leaves)) else value
        if isinstance(value, ForwardReport):
            loss = value.loss and value.loss._replace(
                sum=own(value.loss.sum), aux=map_tensors(own, value.loss.aux)
            )
            return value._replace(stats=map_tensors(own, value.stats), loss=loss)
        return value

    def reduce(self, gradients: list[Tensor | None], reduction: Reduction) -> None:
        """Deliver gradients that are summed over the microbatches of the only replica."""
        reduction.deliver(lambda: gradients)

    def as_given(self, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Return gradients in the form of the given leaves."""
        return [*gradients]

    def settle(self) -> None:
        """Make the host wait until the given leaves may change."""
        if self._copied is not None:
            self._copied.synchronize()


def hollow_like(leaf: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the same size and type on a device, without memory."""
    with torch.no_grad():
        whole = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        whole.untyped_storage().resize_(0)
    return whole


def holding(
    program: LaneProgram,
    steps: Sequence[Step],
    params: Mapping[int, GatheredParams],
    bounds: Mapping[int, Bound],
    box: Mailbox,
    place: Place,
) -> list[Step]:
    """Wrap the steps of a lane, so that stages compute with gathered parameters and free them."""
    out = [*steps]
    for number, call in enumerate(program.calls):
        held = params.get(call.stage)
        if held is not None and call.kind in COUNTED:
            out[number] = _gathering(steps[number], call.first, held, box, place)
        elif held is not None and call.kind in COMPUTES:
            uses = last_uses(program, call.stage, held.counted)
            out[number] = _computing(steps[number], held, bounds[call.stage], box, place, uses)
    return out


def _gathering(step: Step, first: int, params: GatheredParams, box: Mailbox, place: Place) -> Step:
    def gather(reads: list[Any], run: Run) -> Sequence[Any]:
        if first + run.microbatch in params.counted:
            params.begin(box, place)
        return step(reads, run)

    return gather


def _computing(
    step: Step,
    params: GatheredParams,
    bound: Bound,
    box: Mailbox,
    place: Place,
    last: Collection[tuple[int, int]],
) -> Step:
    def compute(reads: list[Any], run: Run) -> Sequence[Any]:
        params.wait(box, place)
        results = [params.apart(value) for value in step(reads, run)]
        if (run.call, run.microbatch) in last:
            params.drop(place)
            bound.params.forget()
        return results

    return compute
