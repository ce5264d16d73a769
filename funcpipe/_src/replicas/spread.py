"""Find parameters that are DTensors over the replicas of their stage, and gather a whole tensor.

`sharded` gathers parameters within a run.
"""

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
    """Return how DTensors among a stage's parameters are spread over its replicas.

    The result is by leaf number. DTensors on another mesh, such as tensor-parallel parameters,
    belong to the stage itself and are not in the result.

    Args:
        tree: the parameters.
        root: the name of the parameters in errors.
        copies: the processes with this stage, by replica.
        members: all processes that run the plan.

    Raises:
        PlanError: a parameter is spread in a way that funcpipe cannot gather.
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
                f"is on the mesh {mesh.tolist()}, but the replicas of its stage are the processes "
                f"{[*copies]}"
            )
    if faults:
        names = locations(tree, root)
        raise_all(
            "DTensors among the parameters must be whole, or cut along one axis, over the "
            'replicas of their stage (mesh["dp"] for ranks(plan, mesh, dp="dp")):',
            [f"{names[number]} {fault}" for number, fault in faults.items()],
        )
    return cuts


def whole_of(
    tensor: Any,
    copies: Sequence[int],
    gather: Callable[[Tensor, Sequence[TensorLayout]], list[Tensor]],
) -> Tensor:
    """Return the whole of a tensor that may be spread over replicas.

    Torch gathers other DTensors.

    Args:
        tensor: the tensor; if it is spread, the DTensor with this replica's part.
        copies: the processes with the tensor's stage, by replica.
        gather: a function from this replica's part, and the layouts of all parts, to all parts.
    """
    if not lies_over(tensor, copies):
        return entire(tensor.detach())
    local, placement = tensor.detach().to_local(), tensor.placements[0]
    if not placement.is_shard():
        return local
    cut = Sharding(placement.dim % tensor.dim())
    sizes = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    like = [
        TensorLayout.contiguous(cut.part(sizes, replica, len(copies)).shape, tensor.dtype)
        for replica in range(len(copies))
    ]
    return torch.cat(gather(local.contiguous().cpu(), like), cut.axis)
