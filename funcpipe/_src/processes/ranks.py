"""ranks: the processes that run a plan together."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

from funcpipe._src.core.errors import PlanError, RanksError
from funcpipe._src.data.plan import Plan
from funcpipe._src.devices.devices import plan_devices
from funcpipe._src.processes.rank_lanes import Ranks
from funcpipe._src.processes.rendezvous import below, refuse_to_join
from funcpipe._src.processes.surroundings import refuse_devices
from funcpipe._src.stages.context import checked_plan

_made: Counter[tuple[int, ...]] = Counter()
"""How many `Ranks` were made of the same processes: each has keys of its own in the store."""


def ranks(
    plan: Plan,
    mesh: Any = None,
    *,
    pp: str = "pp",
    dp: str | None = None,
    lanes: Sequence[int] | None = None,
    timeout: float | None = None,
) -> Ranks:
    """The processes that run a plan together: ``with fp.ranks(plan) as ranks: fp.run(...,
    executor=ranks)``.

    Every process of them calls this, and makes the same runs in the same order (torchrun starts
    them). Each has some lanes of the plan, the stages of these (``ranks.stages``), their
    parameters, state and gradients; for all other stages it gives and gets None (``fp.place(plan,
    params, ranks)`` makes it so). The process of stage 0 gives the inputs, that of the last stage
    the target, others None, or all give everything; feeds come from where they are declared. Loss,
    losses, weight and aux are on every rank, outputs on the last stage's; the bits are those of one
    process.

    Each pair of processes has one connection, a socket. Values travel over it. Between two CUDA
    devices they travel by NCCL, where that can be, else over the memory of the host. A lane whose
    device has no number (``devices="cuda"``, or none) is on the one that is current in its process.
    When a process fails, all others raise PeerError at once. The next run connects anew.

    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> stages = [fp.stage(lambda p, x: p * x)] * 2
    >>> plan = fp.make_plan(stages, fp.schedules.one_f_one_b(2, 2), loss=nn.functional.mse_loss, devices="cpu")
    >>> with fp.ranks(plan) as ranks:  # torchrun starts several processes; here it is one, with both lanes
    ...     params = fp.place(plan, (torch.tensor(2.0), torch.tensor(3.0)), ranks)
    ...     result = fp.run(plan, params, (torch.ones(4), torch.zeros(4)), executor=ranks)
    >>> result.loss, result.grads
    (tensor(36.), (tensor(36.), tensor(24.)))
    >>> torch.distributed.destroy_process_group()

    Args:
        plan: on the CPU, or on CUDA. Other plans with the same stages on the same lanes (to
            evaluate) run too.
        mesh: a ``DeviceMesh``; the processes of its dimension ``pp`` run the plan. None: all
            processes do.
        pp: the name of that dimension.
        dp: the name of a dimension of replicas: each runs the plan on rows of its own, and what
            comes out is that of one batch with the rows of all, one replica after the other: loss,
            losses and weights, statistics, gradients, random numbers. None: pipelines beside this
            one have nothing to do with it.
        lanes: the rank (in that dimension) of each lane; None: as many lanes on each, in order.
        timeout: seconds without an action that begins on any rank, after which waiting ends in an
            error that says what every rank does. ``timeout=`` of a run overrides it. None: 600, and
            ``faulthandler`` stays free.

    Raises:
        RanksError: there is no process group, the mesh has no such dimension, lanes and ranks do
            not fit, or the processes have other plans, versions or lanes.
        PlanError: this is no plan, or one for other devices.
        PlacementError: the devices of its lanes are not here.
        PeerError: a process did not come.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        checked_plan("ranks", plan)
        raise RanksError(
            "there is no process group: torch.distributed.init_process_group('gloo') in every "
            "process, started by torchrun --nproc-per-node 2 script.py"
        )
    replicas = _replicas(mesh, pp, dp)
    members = tuple(rank for replica in replicas for rank in replica)
    number = _made[members] = _made[members] + 1
    name = f"funcpipe/{hashlib.blake2b(str(members).encode(), digest_size=8).hexdigest()}/{number}"
    group: Any = dist.group.WORLD
    store, me, size = (
        below(name, group.get_group_store()),
        members.index(dist.get_rank()),
        len(replicas[0]),
    )
    try:
        checked_plan("ranks", plan)
        if timeout is not None:
            timeout = _checked_timeout(timeout)
        refuse_devices(plan)
        rank_of = _ranks_of(plan, lanes, size)
        plan_devices(plan, [lane for lane, rank in enumerate(rank_of) if rank == me % size])
    except Exception as error:  # after any error the others would wait for this process
        refuse_to_join(store, me, error)
        raise
    _warn_of_unnamed(mesh, pp, dp)
    across = None if dp is None else mesh[dp]
    return Ranks(plan, store, across, replicas, divmod(me, size), rank_of, timeout)


def _checked_timeout(timeout: Any) -> float:
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool) or not timeout > 0:
        raise PlanError(f"timeout is a number of seconds above 0; got {timeout!r}")
    return float(timeout)


def _warn_of_unnamed(mesh: Any, pp: str, dp: str | None) -> None:
    """Warn of mesh dimensions that the call does not name: pipelines along them train apart."""
    if mesh is None:
        return
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    sizes = {name: mesh.mesh.shape[dim] for dim, name in enumerate(names) if name not in (pp, dp)}
    unnamed = {name: size for name, size in sizes.items() if size > 1}
    if not unnamed:
        return
    first, kept = next(iter(unnamed)), ", ".join(repr(name) for name in names if name in (pp, dp))
    warnings.warn(
        f"the mesh has the dimension {' and '.join(map(repr, unnamed))}, which fp.ranks was not "
        "told of: the pipelines along it train apart, each with gradients of its own rows. "
        + (
            f"If they are replicas: fp.ranks(plan, mesh, pp={pp!r}, dp={first!r}). "
            if dp is None
            else ""
        )
        + f"If they are meant to be apart, or the stages use {first!r} themselves (tensor "
        "parallelism): "
        f"fp.ranks(plan, mesh[{kept}], ...)",
        stacklevel=3,
    )


def _replicas(mesh: Any, pp: str, dp: str | None) -> list[list[int]]:
    """The global ranks of the processes of each replica. Raises RanksError."""
    import torch.distributed as dist

    if mesh is None and dp is None:
        return [[*range(dist.get_world_size())]]
    if mesh is None or not hasattr(mesh, "get_coordinate"):
        kind = "None" if mesh is None else f"a {type(mesh).__name__}"
        raise RanksError(f"mesh is a DeviceMesh (torch.distributed.init_device_mesh); got {kind}")
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    missing = [name for name in (pp, dp) if name is not None and name not in names]
    if missing:
        raise RanksError(
            f"the mesh has the dimensions {names}, and none of them is "
            f"{' or '.join(map(repr, missing))}; name them: fp.ranks(plan, mesh, pp=..., dp=...)"
        )
    if pp == dp:
        raise RanksError(f"pp= and dp= are two dimensions of the mesh; got {pp!r} for both")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RanksError("this process is not in the mesh; let those that are call fp.ranks")
    wanted = [names.index(name) for name in (dp, pp) if name is not None]
    # The other dimensions as they are for this process; these two in this order.
    others = [dim for dim in range(len(names)) if dim not in wanted]
    ranks = mesh.mesh.permute(*others, *wanted)
    for dim in others:
        ranks = ranks[coordinate[dim]]
    return ranks.tolist() if dp is not None else [ranks.tolist()]


def _ranks_of(plan: Plan, lanes: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """The rank of each lane. Raises RanksError."""
    count = plan.num_devices
    if lanes is None:
        if count % size:
            raise RanksError(
                f"the plan has {count} lanes and there are {size} ranks; start {count} processes, "
                "or say which rank has which lane: fp.ranks(plan, lanes=[0, 0, 1, ...])"
            )
        return tuple(lane * size // count for lane in range(count))
    named = tuple(lanes)
    wrong = [
        rank
        for rank in named
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size
    ]
    idle = [rank for rank in range(size) if rank not in named]
    if len(named) != count or wrong or idle:
        why = f"{wrong} are no ranks" if wrong else f"ranks {idle} have none"
        why = why if len(named) == count else f"it names {len(named)}"
        raise RanksError(
            f"lanes= is the rank (0 to {size - 1}) of each of {count} lanes, at least one a rank; "
            f"{why}"
        )
    return named
