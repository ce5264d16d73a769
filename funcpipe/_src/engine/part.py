"""The part of a plan that a process runs: all of it, or some lanes, with whom it then agrees on
what concerns all."""

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
from funcpipe._src.replicas.replicas import GiveSums, Sharding, Told
from funcpipe._src.replicas.same_numbers import ComparedLeaves


class PlanPart(Protocol):
    """Some lanes of a plan, which are here, and the way to the others."""

    @property
    def lanes(self) -> Sequence[int]:
        """The lanes that are here."""
        ...

    @property
    def stages(self) -> Collection[int]:
        """The stages of these lanes."""
        ...

    @property
    def rank_of(self) -> Sequence[int]:
        """The process of each lane of the plan."""
        ...

    @property
    def rank(self) -> int:
        """The number of this process among those of its replica."""
        ...

    @property
    def replica(self) -> int:
        """The number of this replica: of the processes that run the whole plan, each with rows of
        its own."""
        ...

    @property
    def replicas(self) -> int:
        """How many there are."""
        ...

    @property
    def beside(self) -> int:
        """How many lanes run on this machine, in whichever process."""
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
        """The device of each lane; of those that are not here as the plan names it."""
        ...

    def programs(self, program: Lowered) -> Sequence[LaneProgram]:
        """The programs of the lanes that are here."""
        ...

    def exchange(self, about: str, mine: Any) -> list[Any]:
        """What every process gives, by replica and rank; all give something about the same, and go
        on when all came."""
        ...

    @property
    def others(self) -> Exchange:
        """The same for what comes out of a run."""
        ...

    def spread(self, stage: int, tree: Tree) -> Mapping[int, Sharding | None]:
        """The leaves of a stage's parameters, by number, that are spread over its replicas; None:
        each has all.

        Raises:
            PlanError: one is spread in a way that cannot be gathered.
        """
        ...

    def gather_params(
        self,
        stage: int,
        parts: Sequence[tuple[Tensor, Sequence[Tensor]]],
        done: Callable[[Any], None],
    ) -> None:
        """Begin to fetch the parts of parameters that other replicas have, and call ``done`` when
        they come.

        Args:
            stage: whose.
            parts: of each tensor what this replica has, and rooms for what each has.
            done: called, maybe from another thread, with the event after which they are there,
                None: they are.
        """
        ...

    def reduce(
        self, stage: int, gradients: list[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> Callable[[], GiveSums]:
        """Begin to sum the gradients of a stage that is here over the replicas.

        Args:
            stage: whose.
            gradients: of all its leaves; they have no memory afterwards.
            cuts: of which this replica gets its part.
            told: called, maybe from another thread, with what gives the sums.

        Returns:
            What lets the caller's thread wait for them. It raises PeerError.
        """
        ...

    def gather(
        self, mine: Mapping[int, Tensor], holders: Sequence[int], like: Sequence[Any]
    ) -> list[Tensor]:
        """Tensors that several processes hold, in order.

        Args:
            mine: those that are here, by their place in the order.
            holders: the process of each.
            like: the `TensorLayout` of each.
        """
        ...


class WholePlan:
    """All lanes, in this process: it agrees with itself."""

    rank = replica = 0
    replicas = 1
    names = ("this process",)
    exchange = others = alone

    def __init__(self, plan: Plan) -> None:
        self.lanes = tuple(range(plan.num_devices))
        self.rank_of = (0,) * plan.num_devices
        self.stages = range(plan.num_stages)
        self.beside = plan.num_devices
        self.compared = ComparedLeaves()

    def devices(self, plan: Plan) -> Sequence[torch.device]:
        """The devices of all lanes."""
        return plan_devices(plan)

    def programs(self, program: Lowered) -> Sequence[LaneProgram]:
        """The programs of all lanes."""
        return program.lanes

    def spread(self, stage: int, tree: Tree) -> Mapping[int, Sharding | None]:
        """There is one replica, which has all; DTensors are of the stages' own."""
        return {}

    def gather_params(
        self,
        stage: int,
        parts: Sequence[tuple[Tensor, Sequence[Tensor]]],
        done: Callable[[Any], None],
    ) -> None:
        """There is nothing to fetch."""
        done(None)

    def reduce(
        self, stage: int, gradients: list[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> Callable[[], GiveSums]:
        """There is nothing to add: the sums are the gradients."""
        told(lambda: gradients)
        return lambda: lambda: gradients

    def gather(
        self, mine: Mapping[int, Tensor], holders: Sequence[int], like: Sequence[Any]
    ) -> list[Tensor]:
        """What is here, in order."""
        return [mine[place] for place in sorted(mine)]


whole: Remembered[Plan, PlanPart] = Remembered(WholePlan)
"""The part that is everything."""


def stages_of(plan: Plan, lanes: Collection[int]) -> frozenset[int]:
    """The stages of some lanes."""
    return frozenset(stage for stage, lane in enumerate(plan.schedule.device_of) if lane in lanes)


def lane_program(program: Lowered, lane: int) -> LaneProgram:
    """The program of a lane, worked out once; those of the others are not built."""
    known = _known(program)
    if lane not in known:
        known[lane] = program.lane(lane)
    return known[lane]


_known: Remembered[Lowered, dict[int, LaneProgram]] = Remembered(lambda _: {})
