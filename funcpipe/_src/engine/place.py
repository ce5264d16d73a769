"""Moves trees to the devices of a plan."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlacementError, PlanError, raise_all
from funcpipe._src.core.tree import Tree, flatten, locations, map_leaves, refuse_hidden
from funcpipe._src.data.plan import Plan
from funcpipe._src.devices.devices import plan_devices, same_device
from funcpipe._src.replicas.same_numbers import whole
from funcpipe._src.stages.context import checked_plan
from funcpipe._src.stages.trainable import refuse_undeclared_ties, resolve_ties, trainable_leaves


class HasStages(Protocol):
    """Something that some stages of a plan are at, and each at every replica: `Ranks`."""

    @property
    def stages(self) -> Container[int]:
        """Their numbers."""
        ...

    def devices(self, plan: Plan) -> Sequence[torch.device]:
        """The device of each lane of a plan."""
        ...

    @property
    def mesh(self) -> Any:
        """The ``DeviceMesh`` of the replicas; None: there are none."""
        ...


def place(
    plan: Plan, params: Sequence[Tree], ranks: HasStages | None = None, *, shard: bool = False
) -> tuple[Tree, ...]:
    """Each stage's tree on its device. Works for parameters, state, or any tuple with a tree per
    stage.

    With ``ranks`` (of `fp.ranks`) there is None in place of what other processes have. With
    ``shard`` each replica keeps its part of every tensor: a ``DTensor`` that is cut along its first
    axis; a run then gathers the parts of a stage when it computes (`fp.schedules.gather_params`
    says when), gradients and what an optimizer keeps are parts too.

    Tensors that are there already stay the very same, so an optimizer and a module that hold them
    see every step. Moved ones keep ``requires_grad`` and being a Parameter. Those on the meta
    device stay there, without numbers, until `load` makes them where they belong.

    >>> stages = [fp.stage(lambda p, x: x * p["w"]), fp.stage(lambda p, x: x * p["w"])]
    >>> plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2), devices="cpu")  # or ["cuda:0", "cuda:1"]
    >>> params = fp.place(plan, ({"w": torch.ones(2)}, {"w": torch.ones(2)}))
    >>> [str(tree["w"].device) for tree in params]
    ['cpu', 'cpu']

    Raises:
        PlanError: this is no plan; one tensor in two stages, and no tie of the plan names it.
        PlacementError: not one tree per stage, one hides tensors, or there are no replicas to shard
            over.
    """
    checked_plan("place", plan)
    if not isinstance(params, (tuple, list)) or len(params) != plan.num_stages:
        raise PlacementError(
            f"place takes a tuple with one tree for each of {plan.num_stages} stages; got "
            f"{_describe(params)}"
        )
    faults = [
        fault
        for stage, tree in enumerate(params)
        for fault in refuse_hidden(tree, f"[{stage}]", *flatten(tree))
    ]
    raise_all("tensors that cannot be seen cannot be moved:", faults, PlacementError)
    by_lane = plan_devices(plan) if ranks is None else ranks.devices(plan)
    device_of = plan.schedule.device_of
    if (
        plan.schedule.has_backward
        and len({by_lane[device_of[stage]] for stage in range(plan.num_stages)}) > 1
    ):
        trained = trainable_leaves(params, None)
        try:
            ties = resolve_ties(plan, params, trained)
        except PlanError:  # state has other paths than params, and nothing in it is tied
            ties = None
        if ties is not None:
            refuse_undeclared_ties(
                params, [flatten(tree)[0] for tree in params], trained, ties
            )  # copies on several devices would go apart
    if shard and (ranks is None or ranks.mesh is None):
        raise PlacementError(
            "shard=True spreads parameters over replicas, and there are none: fp.ranks(plan, "
            "mesh, dp=...)"
        )
    placed = tuple(
        _move(tree, by_lane[device_of[stage]]) if ranks is None or stage in ranks.stages else None
        for stage, tree in enumerate(params)
    )
    return (
        tuple([_sharded(tree, ranks.mesh) for tree in placed])
        if shard and ranks is not None
        else placed
    )


def _sharded(tree: Tree, mesh: Any) -> Tree:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    made: dict[int, Tensor] = {}  # a tensor that stands twice stays one

    def shard(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or not leaf.dim():
            return leaf
        if id(leaf) not in made:
            # Every replica has all of it: nothing is sent.
            new = distribute_tensor(leaf.detach(), mesh, [Shard(0)], src_data_rank=None)
            if isinstance(leaf, nn.Parameter):
                new = nn.Parameter(new, leaf.requires_grad)
            made[id(leaf)] = new.requires_grad_(leaf.requires_grad)
            if not leaf.is_meta:
                whole.keep(
                    made[id(leaf)], leaf
                )  # parts alone cannot show whether replicas began alike
        return made[id(leaf)]

    return map_leaves(shard, tree)


def _move(tree: Tree, device: torch.device) -> Tree:
    moved: dict[int, Tensor] = {}  # a tensor that stands twice stays one

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_meta or same_device(leaf.device, device):
            return leaf
        if id(leaf) not in moved:
            new = leaf.detach().to(device)
            if isinstance(leaf, nn.Parameter):
                new = nn.Parameter(new, leaf.requires_grad)
            moved[id(leaf)] = new.requires_grad_(leaf.requires_grad)
        return moved[id(leaf)]

    return map_leaves(move, tree)


def misplaced(
    plan: Plan,
    trees: Sequence[Tree],
    by_lane: Sequence[torch.device],
    root: str,
    rows: Sequence[Sequence[Any]] | None = None,
) -> list[str]:
    """The tensors that do not lie on their stage's device, one line each. ``rows`` are the leaves,
    if at hand."""
    device_of = plan.schedule.device_of
    faults: list[str] = []
    for stage, tree in enumerate(trees):
        device = by_lane[device_of[stage]]
        leaves = flatten(tree)[0] if rows is None else rows[stage]
        if all(same_device(leaf.device, device) for leaf in leaves if isinstance(leaf, Tensor)):
            continue
        for name, leaf in zip(locations(tree, f"{root}[{stage}]"), leaves, strict=True):
            if isinstance(leaf, Tensor) and not same_device(leaf.device, device):
                faults.append(f"{name} lies on {leaf.device}, stage {stage} runs on {device}")
    return faults


def _describe(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (tuple, list, dict)) else f"a {kind}"  # pyright: ignore
