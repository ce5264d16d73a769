"""Which tensors are spread over the replicas of their stage, DTensors on the mesh of these
replicas; and all of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import raise_all
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.data.exchange import entire, lies_over
from funcpipe._src.replicas.replicas import Sharding


def cuts_of(
    tree: Tree, root: str, copies: Sequence[int], members: Collection[int]
) -> Mapping[int, Sharding | None]:
    """How DTensors among the leaves of a stage's parameters are spread over its replicas, by leaf
    number.

    Those on another mesh (tensor-parallel ones) are the stage's own business, and not among them.

    Args:
        tree: the parameters.
        root: what to call them.
        copies: the processes that have the stage, by replica.
        members: all processes that run the plan.

    Raises:
        PlanError: one is spread in a way that no plan gathers.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    leaves = flatten(tree)[0]
    cuts: dict[int, Sharding | None] = {}
    faults: dict[int, str] = {}
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, DTensor):
            continue
        mesh: Any = leaf.device_mesh.mesh
        ranks: list[int] = mesh.flatten().tolist()
        if lies_over(leaf, copies):
            placement = leaf.placements[0]
            if type(placement) is Shard:
                cuts[number] = Sharding(placement.dim % leaf.dim())
            elif isinstance(placement, Replicate):
                cuts[number] = None
            else:
                faults[number] = f"is {placement}"
        elif len({*ranks} & {*members}) > 1:
            faults[number] = (
                f"lies on the mesh {mesh.tolist()}, and its stage's replicas are the processes "
                f"{[*copies]}"
            )
    if faults:
        names = locations(tree, root)
        raise_all(
            "DTensors among the parameters are whole, or cut along one axis, over the replicas of "
            "their stage "
            '(mesh["dp"] for ranks(plan, mesh, dp="dp")):',
            [f"{names[number]} {fault}" for number, fault in faults.items()],
        )
    return cuts


def whole_of(
    tensor: Any,
    copies: Sequence[int],
    gather: Callable[[Tensor, Sequence[TensorLayout]], list[Tensor]],
) -> Tensor:
    """All of a tensor of which replicas may have parts; any other DTensor is put together by torch.

    Args:
        tensor: what is here of it.
        copies: the processes that have its stage, by replica.
        gather: of the part that is here, and the layouts of those of all replicas, the parts of
            all.
    """
    if not lies_over(tensor, copies):
        return entire(tensor.detach())
    local, placement = tensor.detach().to_local(), tensor.placements[0]
    if not placement.is_shard():
        return local
    cut = Sharding(placement.dim % tensor.dim())
    sizes = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    like = [
        TensorLayout.of(cut.part(sizes, replica, len(copies))) for replica in range(len(copies))
    ]
    return torch.cat(gather(local.contiguous().cpu(), like), cut.axis)
