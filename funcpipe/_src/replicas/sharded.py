"""Sharded parameters (torch's DTensor): each replica holds a part, and gathers the whole to
compute.

The stage is bound to tensors of the whole size, which have no memory at first. They get memory when
U begins to gather the parts, or, without U, when the stage first computes. After the last action
before the next U, their memory is freed, with all values that a compiled stage computed from them.
Gradients are whole until they are summed over the replicas. Each replica keeps its part of a sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.remembered import Remembered
from funcpipe._src.core.tree import Tree, flatten, map_tensors, unflatten
from funcpipe._src.data.kinds import COMPUTES, COUNTED
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.program import LaneProgram, Run
from funcpipe._src.data.schedule import Action, serving
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.mail import Mailbox
from funcpipe._src.engine.part import PlanPart
from funcpipe._src.engine.steps import Step
from funcpipe._src.replicas.replicas import Sharding, dtensor_of
from funcpipe._src.stages.bound import Bound, ForwardReport


@dataclass(frozen=True)
class Gathered:
    """The mailbox key for the notice that a stage's parameters are gathered.

    ``number`` counts the gathers. Not a tuple: tuples are keys of free slots.
    """

    stage: int
    number: int


class ShardedParams:
    """The parameters of a stage, some of them sharded over its replicas, for one run.

    Attributes:
        cuts: the sharding of sharded leaves, by leaf number.
        leaves: all leaves that the stage is bound to, sharded ones in whole size.
        parts: all leaves, sharded ones as the local part.
        counted: the numbers of the U that gather. Others are no-ops; see `count`.
    """

    def __init__(
        self,
        stage: int,
        tree: Tree,
        cuts: Mapping[int, Sharding | None],
        part: PlanPart,
    ) -> None:
        self.stage, self.part, self.counted = stage, part, frozenset({0})
        self.cuts = {number: cut for number, cut in cuts.items() if cut is not None}
        leaves, self._spec = flatten(tree)
        self.given, self.leaves, self.parts = leaves, [*leaves], [*leaves]
        self._begun, self._here = 0, False
        with torch.no_grad():
            for number, cut in cuts.items():
                leaf = leaves[number]
                local = leaf.to_local()
                self.leaves[number] = self.parts[number] = local
                if cut is not None:
                    self.leaves[number] = whole = torch.empty(
                        leaf.shape, dtype=leaf.dtype, device=local.device
                    )
                    whole.untyped_storage().resize_(0)
            self._spread = [*cuts]

    def tree(self) -> Tree:
        """Return the tree that the stage is bound to."""
        return unflatten(self._spec, self.leaves)

    def count(self, fewest: Lowered) -> None:
        """Select the U that gather: the first, and those that serve actions of ``fewest``.

        ``fewest`` is the program of the replica with the fewest microbatches. Its U are in the
        programs of all replicas. So all replicas make the same gathers in the same order; another
        selection would deadlock.
        """
        self.counted = frozenset(
            {0, *(number for _, stage, number, _ in _serving(fewest) if stage == self.stage)}
        )

    def begin(self, box: Mailbox) -> None:
        """Begin to gather. The lane gets a notice in its mailbox."""
        jobs: list[tuple[Tensor, list[Tensor]]] = []
        for number, cut in self.cuts.items():
            # By ``.data``, so that autograd does not see a write: the numbers are the same as in
            # the last gather, and graphs may have saved the tensor.
            whole, mine = self.leaves[number].data, self.parts[number].detach().contiguous()
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            rooms = [
                cut.part(whole, replica, self.part.replicas)
                for replica in range(self.part.replicas)
            ]
            rooms[self.part.replica].copy_(mine)
            jobs.append((mine, rooms))
        self._begun, self._here = self._begun + 1, False
        key = Gathered(self.stage, self._begun)
        self.part.gather_params(self.stage, jobs, partial(box.put, key))

    def wait(self, box: Mailbox, place: Place) -> None:
        """Wait on the lane until the parameters are gathered."""
        if self._here:
            return
        if not self._begun:
            self.begin(box)
        key = Gathered(self.stage, self._begun)
        if key not in box.came:
            box.wait(key)
        place.wait(box.came[key])
        self._here = True

    def apart(self, value: Any) -> Any:
        """Return a stage's value with copies of tensors that share memory with the parameters.

        The parameters' memory is freed, so such a tensor would lose its numbers.
        """
        memory = {self.leaves[number].untyped_storage().data_ptr() for number in self.cuts}

        def own(leaf: Tensor) -> Tensor:
            return (
                leaf.clone()
                if type(leaf) is Tensor and leaf.untyped_storage().data_ptr() in memory
                else leaf
            )

        if isinstance(value, Border):
            shares = [
                leaf for leaf in value.leaves if isinstance(leaf, Tensor) and own(leaf) is not leaf
            ]
            return value.mapped(own) if shares else value
        if isinstance(value, ForwardReport):
            loss = value.loss and value.loss._replace(
                sum=own(value.loss.sum), aux=map_tensors(own, value.loss.aux)
            )
            return value._replace(stats=map_tensors(own, value.stats), loss=loss)
        return value

    def drop(self) -> None:
        """Free the memory of the whole parameters."""
        self._here = False
        for number in self.cuts:
            self.leaves[number].untyped_storage().resize_(0)

    def as_given(self, gradients: Sequence[Tensor | None]) -> list[Any]:
        """Return gradients in the form of the given leaves, DTensors for sharded leaves."""
        out: list[Any] = [*gradients]
        for number in self._spread:
            gradient = gradients[number]
            out[number] = None if gradient is None else dtensor_of(gradient, self.given[number])
        return out


_serving: Remembered[Lowered, frozenset[Action]] = Remembered(
    lambda program: serving([program.action(code) for code in program.order])
)
"""The U of a program that serve at least one action."""


def holding(
    program: LaneProgram,
    steps: Sequence[Step],
    params: Mapping[int, ShardedParams],
    bounds: Mapping[int, Bound],
    box: Mailbox,
    place: Place,
) -> list[Step]:
    """Wrap the steps of a lane, so that stages compute with gathered parameters and free them."""
    out = [*steps]
    for number, call in enumerate(program.calls):
        held = params.get(call.stage)
        if held is not None and call.kind in COUNTED:
            out[number] = _gathering(steps[number], call.first, held, box)
        elif held is not None and call.kind in COMPUTES:
            out[number] = _computing(
                steps[number], held, bounds[call.stage], box, place, _last_uses(program, held)
            )
    return out


def _gathering(step: Step, first: int, params: ShardedParams, box: Mailbox) -> Step:
    def gather(reads: list[Any], run: Run) -> Sequence[Any]:
        if first + run.microbatch in params.counted:
            params.begin(box)
        return step(reads, run)

    return gather


def _computing(
    step: Step,
    params: ShardedParams,
    bound: Bound,
    box: Mailbox,
    place: Place,
    last: Collection[tuple[int, int]],
) -> Step:
    def compute(reads: list[Any], run: Run) -> Sequence[Any]:
        params.wait(box, place)
        results = [params.apart(value) for value in step(reads, run)]
        if (run.call, run.microbatch) in last:
            params.drop()
            bound.params.forget()
        return results

    return compute


def _last_uses(program: LaneProgram, params: ShardedParams) -> set[tuple[int, int]]:
    """Return (call, microbatch) of each action after which the parameters can be freed.

    These are the last uses before each further gather, and at the end.
    """
    last: set[tuple[int, int]] = set()
    use: tuple[int, int] | None = None
    for run in program.runs:
        call = program.calls[run.call]
        if call.stage != params.stage:
            continue
        if call.kind in COMPUTES:
            use = (run.call, run.microbatch)
        elif (
            call.kind in COUNTED
            and call.first + run.microbatch in params.counted
            and use is not None
        ):
            last.add(use)
            use = None
    return last | ({use} if use is not None else set())
