"""`PlanPart`: the part of a plan that one process runs, and its exchanges with the other processes.

`WholePlan` is one process with all lanes. `Ranks` is one of several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from funcpipe._src.core.remembered import Remembered
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.exchange import Exchange, alone
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import LaneProgram
from funcpipe._src.devices.devices import plan_devices
from funcpipe._src.engine.agreement import Agreed, Word, agreed_alone
from funcpipe._src.replicas.replicas import GiveSums, Sharding, Told
from funcpipe._src.replicas.same_numbers import ComparedLeaves


class PlanPart(Protocol):
    """Some lanes of a plan in this process, and the exchanges with the other processes."""

    @property
    def lanes(self) -> Sequence[int]:
        """The lanes of this process."""
        ...

    @property
    def stages(self) -> Collection[int]:
        """The stages of the lanes of this process."""
        ...

    @property
    def rank_of(self) -> Sequence[int]:
        """The rank of each lane of the plan."""
        ...

    @property
    def rank(self) -> int:
        """The number of this process within its replica."""
        ...

    @property
    def replica(self) -> int:
        """The number of this replica. Each replica runs the whole plan on its own rows."""
        ...

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        ...

    @property
    def mesh(self) -> Any:
        """The ``DeviceMesh`` of the replicas, or None without replicas."""
        ...

    @property
    def beside(self) -> int:
        """The number of lanes on this machine, in all processes."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The name of each process in errors, by replica and rank."""
        ...

    @property
    def compared(self) -> ComparedLeaves:
        """The parameter leaves that runs have compared with other processes."""
        ...

    def devices(self, plan: Plan) -> Sequence[torch.device]:
        """Return the device of each lane. For lanes of other processes, as the plan names it."""
        ...

    def programs(self, program: Lowered) -> Sequence[LaneProgram]:
        """Return the programs of the lanes of this process."""
        ...

    def exchange(self, about: str, mine: Any) -> list[Any]:
        """Return the values of all processes, by replica and rank.

        All processes call this with the same ``about``, and wait for each other.
        """
        ...

    def agree(self, word: Word, limit: int) -> Agreed:
        """Exchange the facts of this process, and return the facts that follow from those of all.

        ``limit`` is the plan's number of microbatches. Raises RanksError in every process.
        """
        ...

    @property
    def others(self) -> Exchange:
        """The exchange that a `Result` uses after the run."""
        ...

    def spread(self, stage: int, tree: Tree) -> Mapping[int, Sharding | None]:
        """Return how the DTensors among a stage's parameters are spread over its replicas.

        The result is by leaf number. None says that each replica has the whole tensor.

        Raises:
            PlanError: a leaf is spread in a way that cannot be gathered.
        """
        ...

    def gather_params(
        self,
        stage: int,
        parts: Sequence[tuple[Tensor, Sequence[Tensor]]],
        done: Callable[[Any], None],
    ) -> None:
        """Begin to gather parameter parts from the other replicas, and call ``done`` when they
        come.

        Args:
            stage: the stage of the parameters.
            parts: for each tensor, the part of this replica, and memory for the part of each
                replica.
            done: a function that may be called on another thread. Its argument is the event after
                which the parts are ready, or None if they are ready.
        """
        ...

    def reduce(
        self, stage: int, gradients: list[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> Callable[[], GiveSums]:
        """Begin to sum the gradients of a stage of this process over the replicas.

        Args:
            stage: the stage.
            gradients: the gradients of all its leaves. Their memory is freed.
            cuts: the leaves of which this replica gets only its part, by number.
            told: a function that may be called on another thread. Its argument is a function that
                returns the sums.

        Returns:
            A function that waits for the sums on the caller's thread. It raises PeerError.
        """
        ...

    def gather(
        self, mine: Mapping[int, Tensor], holders: Sequence[int], like: Sequence[Any]
    ) -> list[Tensor]:
        """Return tensors that several processes hold, in order.

        Args:
            mine: the tensors of this process, by their place in the order.
            holders: the rank of each tensor.
            like: the `TensorLayout` of each tensor.
        """
        ...


class WholePlan:
    """All lanes of a plan in one process, so that exchanges return only its own values."""

    rank = replica = 0
    replicas = 1
    mesh = None
    names = ("this process",)
    exchange = others = alone

    def __init__(self, plan: Plan) -> None:
        self.lanes = tuple(range(plan.num_devices))
        self.rank_of = (0,) * plan.num_devices
        self.stages = range(plan.num_stages)
        self.beside = plan.num_devices
        self.compared = ComparedLeaves()

    def agree(self, word: Word, limit: int) -> Agreed:
        """Return the facts of this process: there is nobody to differ."""
        return agreed_alone(word)

    def devices(self, plan: Plan) -> Sequence[torch.device]:
        """Return the devices of all lanes."""
        return plan_devices(plan)

    def programs(self, program: Lowered) -> Sequence[LaneProgram]:
        """Return the programs of all lanes."""
        return program.lanes

    def spread(self, stage: int, tree: Tree) -> Mapping[int, Sharding | None]:
        """Return nothing: there is one replica. DTensors belong to the stages themselves."""
        return {}

    def gather_params(
        self,
        stage: int,
        parts: Sequence[tuple[Tensor, Sequence[Tensor]]],
        done: Callable[[Any], None],
    ) -> None:
        """Call ``done`` at once: there is nothing to gather."""
        done(None)

    def reduce(
        self, stage: int, gradients: list[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> Callable[[], GiveSums]:
        """Deliver the gradients at once: they are the sums."""
        told(lambda: gradients)
        return lambda: lambda: gradients

    def gather(
        self, mine: Mapping[int, Tensor], holders: Sequence[int], like: Sequence[Any]
    ) -> list[Tensor]:
        """Return the tensors of this process, in order."""
        return [mine[place] for place in sorted(mine)]


whole: Remembered[Plan, PlanPart] = Remembered(WholePlan)
"""Return the `WholePlan` of a plan, made once."""


def stages_of(plan: Plan, lanes: Collection[int]) -> frozenset[int]:
    """Return the stages of some lanes."""
    return frozenset(stage for stage, lane in enumerate(plan.schedule.device_of) if lane in lanes)


def lane_program(program: Lowered, lane: int) -> LaneProgram:
    """Return the program of one lane, built once. Programs of other lanes are not built."""
    known = _known(program)
    if lane not in known:
        known[lane] = program.lane(lane)
    return known[lane]


_known: Remembered[Lowered, dict[int, LaneProgram]] = Remembered(lambda _: {})
