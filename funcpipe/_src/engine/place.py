"""`place`: move parameters and state to the devices of a plan, and check where tensors are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlacementError, PlanError, raise_all
from funcpipe._src.core.tree import Tree, flatten, locations, map_leaves, refuse_hidden
from funcpipe._src.data.plan import Plan
from funcpipe._src.devices.devices import same_device
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.part import PlanPart, whole
from funcpipe._src.replicas.same_numbers import whole_digests
from funcpipe._src.stages.context import checked_plan
from funcpipe._src.stages.trainable import refuse_undeclared_ties, resolve_ties, trainable_leaves


def place(
    plan: Plan,
    params: Sequence[Tree],
    ranks: PlanPart | None = None,
    *,
    shard: bool = False,
    home: Any = None,
) -> tuple[Tree, ...]:
    """Move the tree of each stage to the device of the stage.

    Works for parameters, for state, and for any tuple with one tree per stage. A tensor that is
    already on its device stays the same object, so a module or an optimizer with this tensor sees
    each step. A moved tensor keeps ``requires_grad``, and a Parameter stays a Parameter. A tensor
    on the meta device stays there until `load` creates it on the device of its stage.

    >>> stages = [fp.stage(lambda p, x: x * p["w"]), fp.stage(lambda p, x: x * p["w"])]
    >>> plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2), devices="cpu")  # or ["cuda:0", "cuda:1"]
    >>> params = fp.place(plan, ({"w": torch.ones(2)}, {"w": torch.ones(2)}))
    >>> [str(tree["w"].device) for tree in params]
    ['cpu', 'cpu']

    Args:
        plan: the plan that will run.
        params: a tuple with one tree per stage.
        ranks: the processes of `fp.ranks`. The result has None for the stages of other processes.
            None, the default: one process has all stages.
        shard: spread each tensor over the replicas. Each replica keeps one part, a ``DTensor`` cut
            along axis 0. A run gathers the parts of a stage before the stage computes, see
            `schedules.gather_params`. Gradients and optimizer state are parts, too.
        home: "cpu" keeps parameters in host memory, page-locked if a stage is on a GPU. A run copies
            the parameters of a stage to its device at ``U``, and frees them after the last use.
            Gradients are in host memory, too. So the model may be larger than the device. The
            schedule needs ``U`` for each stage, see `schedules.gather_params`. None, the default:
            parameters are on the device of their stage.

    Returns:
        A tuple with one tree per stage.

    Raises:
        PlanError: ``plan`` is not a plan; or one tensor is in two stages on different devices, and
            the plan has no tie for it.
        PlacementError: ``params`` has not one tree per stage; a tree contains tensors in objects
            that are not trees; ``shard=True`` without replicas; or ``home="cpu"`` with replicas, or
            for a stage without ``U``.
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
    raise_all("place cannot move tensors that it cannot see:", faults, PlacementError)
    part = ranks or whole(plan)
    by_lane, device_of = part.devices(plan), plan.schedule.device_of
    if home is not None:
        _refuse_home(plan, part, home, shard=shard)
        page_locks = any(Place.backend.asynchronous(device) for device in by_lane)
        return tuple(
            _at_home(tree, page_locks=page_locks) if stage in part.stages else None
            for stage, tree in enumerate(params)
        )
    if (
        plan.schedule.has_backward
        and len({by_lane[device_of[stage]] for stage in range(plan.num_stages)}) > 1
    ):
        trained = trainable_leaves(params, None)
        try:
            ties = resolve_ties(plan, params, trained)
        except PlanError:  # the trees are state: it has other paths than params, and no ties
            ties = None
        if ties is not None:
            # An undeclared tie would become one copy per device, and the copies would diverge.
            refuse_undeclared_ties(params, [flatten(tree)[0] for tree in params], trained, ties)
    if shard and part.mesh is None:
        raise PlacementError(
            "shard=True spreads parameters over replicas, and there are no replicas; name their "
            "mesh dimension: fp.ranks(plan, mesh, dp=...)"
        )
    placed = tuple(
        _move(tree, by_lane[device_of[stage]]) if stage in part.stages else None
        for stage, tree in enumerate(params)
    )
    return tuple([_sharded(tree, part.mesh) for tree in placed]) if shard else placed


def _refuse_home(plan: Plan, part: PlanPart, home: Any, *, shard: bool) -> None:
    """Raise PlacementError if parameters of the plan cannot be at home in host memory."""
    if str(home) != "cpu":
        raise PlacementError(f'home= is "cpu" (host memory) or None; got {home!r}')
    if shard or part.mesh is not None:
        raise PlacementError(
            'home="cpu" is for plans with one replica; with replicas, shard the parameters: '
            "fp.place(plan, params, ranks, shard=True)"
        )
    lacking = {*range(plan.num_stages)} - plan.schedule.gathered_stages
    if lacking:
        raise PlacementError(
            f"stages {sorted(lacking)} have no U, which copies their parameters from host memory "
            "to the device; make the plan with fp.schedules.gather_params(schedule, whole=1)"
        )


def _at_home(tree: Tree, *, page_locks: bool) -> Tree:
    """Move a tree to host memory; page-locked memory, so that copies overlap with computation."""
    moved = _move(tree, torch.device("cpu"))
    return _replaced(moved, _page_locked) if page_locks else moved


def _page_locked(leaf: Tensor) -> Tensor:
    if leaf.is_meta:
        return leaf
    new = Place.backend.page_locked(leaf.detach())
    return leaf if new.data_ptr() == leaf.data_ptr() else new


def _sharded(tree: Tree, mesh: Any) -> Tree:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def shard(leaf: Tensor) -> Tensor:
        if isinstance(leaf, DTensor) or not leaf.dim():
            return leaf
        # src_data_rank=None: each replica has the whole tensor, so nothing is sent.
        return distribute_tensor(leaf.detach(), mesh, [Shard(0)], src_data_rank=None)

    sharded = _replaced(tree, shard)
    for leaf, part in zip(flatten(tree)[0], flatten(sharded)[0], strict=True):
        if part is not leaf and not leaf.is_meta:
            # The parts alone cannot show whether all replicas began with equal numbers.
            whole_digests.keep(part, leaf)
    return sharded


def _move(tree: Tree, device: torch.device) -> Tree:
    def move(leaf: Tensor) -> Tensor:
        stays = leaf.is_meta or same_device(leaf.device, device)
        return leaf if stays else leaf.detach().to(device)

    return _replaced(tree, move)


def _replaced(tree: Tree, replacement: Callable[[Tensor], Tensor]) -> Tree:
    """Replace tensors. A Parameter stays a Parameter, and ``requires_grad`` stays.

    ``replacement`` returns its argument if the tensor stays.
    """
    replaced: dict[int, Tensor] = {}  # a tensor that appears twice stays one tensor

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in replaced:
            new = replacement(leaf)
            if new is not leaf:
                if isinstance(leaf, nn.Parameter):
                    new = nn.Parameter(new, leaf.requires_grad)
                new.requires_grad_(leaf.requires_grad)
            replaced[id(leaf)] = new
        return replaced[id(leaf)]

    return map_leaves(replace, tree)


def misplaced(
    plan: Plan,
    trees: Sequence[Tree],
    by_lane: Sequence[torch.device],
    root: str,
    rows: Sequence[Sequence[Any]] | None = None,
    home: Collection[int] = (),
) -> list[str]:
    """Describe the tensors that are not on their stage's device, one line each.

    ``rows`` are the leaves of the trees, if the caller has them. Tensors of the stages in ``home``
    may be in host memory.
    """
    device_of = plan.schedule.device_of
    faults: list[str] = []
    for stage, tree in enumerate(trees):
        device = by_lane[device_of[stage]]
        leaves = flatten(tree)[0] if rows is None else rows[stage]
        if all(same_device(leaf.device, device) for leaf in leaves if isinstance(leaf, Tensor)):
            continue
        for name, leaf in zip(locations(tree, f"{root}[{stage}]"), leaves, strict=True):
            if stage in home and isinstance(leaf, Tensor) and leaf.is_cpu:
                continue
            if isinstance(leaf, Tensor) and not same_device(leaf.device, device):
                faults.append(f"{name} is on {leaf.device}, but stage {stage} runs on {device}")
    return faults


def _describe(value: Any) -> str:
    kind = type(value).__name__
    return f"a {kind} of {len(value)}" if isinstance(value, (tuple, list, dict)) else f"a {kind}"  # pyright: ignore
