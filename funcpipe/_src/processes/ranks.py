"""`ranks`: find the processes that run a plan together. `rank_lanes` runs the plan."""

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
"""The number of `Ranks` of the same processes so far. Each gets its own keys in the store, so that
none reads old entries."""


def ranks(
    plan: Plan,
    mesh: Any = None,
    *,
    pp: str = "pp",
    dp: str | None = None,
    lanes: Sequence[int] | None = None,
    timeout: float | None = None,
) -> Ranks:
    """Make an executor that runs a plan in several processes.

    Start the processes with torchrun. Each process calls `ranks`, and then makes the same runs in
    the same order. A process has some lanes of the plan, and their stages, ``ranks.stages``.
    Results are bit-identical to a run in one process. With replicas, gradients are equal up to
    rounding, because they are summed in the order of the replicas.

    - Parameters, state, gradients: a process gives and gets trees for its own stages, and None for
      all other stages. ``fp.place(plan, params, ranks)`` returns this form.
    - Inputs: read by the process of stage 0. Target: read by the process of the last stage. Feeds:
      read by the processes whose stages declare them. A process may also give values that it does
      not read.
    - Loss, losses, weight and aux are on every rank. Outputs are on the rank of the last stage.

    Each pair of processes has one socket. Values between two CUDA devices travel by NCCL if
    possible, else through host memory. A lane whose device has no number, as in ``devices="cuda"``,
    uses the current CUDA device of its process. If a process fails, all others raise `PeerError`,
    under torchrun a second later. The next run connects again.

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
        plan: a plan on the CPU or on CUDA. Other plans with the same stages on the same lanes run,
            too, for example to evaluate.
        mesh: a ``DeviceMesh``. The processes along its dimension ``pp`` run the plan. None, the
            default: all processes run the plan.
        pp: the name of the pipeline dimension, "pp" by default.
        dp: the name of a dimension of replicas. Each replica runs the plan on its own rows. The
            result is the result of one batch with the rows of all replicas, in the order of the
            replicas. None, the default: pipelines along other dimensions train separately.
        lanes: the rank of each lane, a number along ``pp``. None, the default: each rank has the
            same number of lanes, in order.
        timeout: seconds. If no action begins on any rank for this time, all ranks raise an error
            that says what each rank does. The ``timeout=`` of a run overrides it. None, the
            default: 600 seconds, without the timer of ``faulthandler``.

    Returns:
        A `typing.Ranks`, an executor for `run` and a context manager. The end of the ``with`` block
        closes its threads and connections.

    Raises:
        RanksError: there is no process group; the mesh has no such dimension; or lanes and ranks do
            not fit. The ``with`` statement raises it if the processes have different plans,
            versions or lanes.
        PlanError: ``plan`` is not a plan, or uses devices other than the CPU and CUDA.
        PlacementError: this process does not have the devices of its lanes.
        PeerError: raised by the ``with`` statement if another process does not come in time.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        checked_plan("ranks", plan)
        raise RanksError(
            "there is no process group; start the script with torchrun --nproc-per-node 2 "
            "script.py, and call torch.distributed.init_process_group('gloo') in every process"
        )
    replicas = _replicas(mesh, pp, dp)
    members = tuple(rank for replica in replicas for rank in replica)
    number = _made[members] = _made[members] + 1
    name = f"funcpipe/{hashlib.blake2b(str(members).encode(), digest_size=8).hexdigest()}/{number}"
    group: Any = dist.group.WORLD
    store = below(name, group.get_group_store())
    me = members.index(dist.get_rank())
    size = len(replicas[0])
    try:
        checked_plan("ranks", plan)
        if timeout is not None:
            timeout = _checked_timeout(timeout)
        refuse_devices(plan)
        rank_of = _ranks_of(plan, lanes, size)
        plan_devices(plan, [lane for lane, rank in enumerate(rank_of) if rank == me % size])
    except Exception as error:  # tell the others, which would wait for this process otherwise
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
    """Warn of mesh dimensions that the call does not name: their pipelines train separately."""
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
        "told of: the pipelines along this dimension train separately, each with gradients of its "
        "own rows. "
        + (
            f"If they are replicas: fp.ranks(plan, mesh, pp={pp!r}, dp={first!r}). "
            if dp is None
            else ""
        )
        + f"If they are meant to be separate, or the stages use {first!r} themselves (tensor "
        "parallelism): "
        f"fp.ranks(plan, mesh[{kept}], ...)",
        stacklevel=3,
    )


def _replicas(mesh: Any, pp: str, dp: str | None) -> list[list[int]]:
    """Return the global ranks of the processes of each replica. Raises RanksError."""
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
        raise RanksError(
            "this process is not in the mesh; call fp.ranks only in the processes of the mesh"
        )
    wanted = [names.index(name) for name in (dp, pp) if name is not None]
    # Take this process's coordinate along all other dimensions, then order the rest as (dp, pp).
    others = [dim for dim in range(len(names)) if dim not in wanted]
    ranks = mesh.mesh.permute(*others, *wanted)
    for dim in others:
        ranks = ranks[coordinate[dim]]
    return ranks.tolist() if dp is not None else [ranks.tolist()]


def _ranks_of(plan: Plan, lanes: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """Return the rank of each lane. Raises RanksError."""
    count = plan.num_devices
    if lanes is None:
        if count < size:
            raise RanksError(
                f"the plan has {count} lanes and there are {size} ranks, so some would have no lane; "
                f"start {count} processes, or train replicas: fp.ranks(plan, mesh, dp='dp') with "
                "mesh = torch.distributed.init_device_mesh('cpu', (replicas, ranks), "
                "mesh_dim_names=('dp', 'pp'))"
            )
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
        why = f"{wrong} are not ranks" if wrong else f"ranks {idle} have no lane"
        why = why if len(named) == count else f"it has {len(named)} entries"
        raise RanksError(
            f"lanes= has the rank (0 to {size - 1}) of each of {count} lanes, and each rank at "
            f"least once; {why}"
        )
    return named
