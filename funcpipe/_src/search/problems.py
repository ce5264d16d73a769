"""Check the arguments of a search, and turn them into problems, one per placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.placed_cost import placed_cost
from funcpipe._src.schedules.counts import counted
from funcpipe._src.search.placement import placed, shapes_for
from funcpipe._src.search.problem import Problem, limits_of

_UNEVEN = 0.03
"""The largest difference between times of slices, as a share of a slice. Lengths are whole numbers,
so times cannot be exactly equal."""


def problems_of(
    cost: Cost,
    num_devices: Any,
    num_microbatches: Any,
    num_stages: Any,
    num_slices: Any,
    memory_limit: Any,
    placement: Any,
    remat: bool,
    offload: bool,
    objective: Any,
    exact: bool,
    evaluations: Any,
    seconds: Any,
) -> list[Problem]:
    """Return one problem per placement. Raises ScheduleError with all faults of the arguments."""
    faults: list[str] = []
    arguments: dict[str, Any] = {
        "num_devices": num_devices,
        "num_microbatches": num_microbatches,
        "num_stages": num_stages,
        "num_slices": num_slices,
        "evaluations": evaluations,
    }
    counts = counted(arguments, faults, optional="num_stages")
    if placement is not None and not isinstance(placement, (str, Sequence)):
        faults.append(
            f"placement is 'line', 'loop', 'v', or the device of each stage; got {placement!r}"
        )
    if objective not in ("makespan", "span"):
        faults.append(f"objective is 'makespan' or 'span'; got {objective!r}")
    flags: dict[str, Any] = {"remat": remat, "offload": offload, "exact": exact}
    faults += [
        f"{name} is True or False; got {flag!r}"
        for name, flag in flags.items()
        if not isinstance(flag, bool)
    ]
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        faults.append(f"seconds is a positive number; got {seconds!r}")
    slices = counts.get("num_slices", 1)
    if slices > 1 and exact:
        faults.append(
            "exact=True proves schedules of whole microbatches; leave it or num_slices= out"
        )
    if cost.hides and exact:
        faults.append(
            "exact=True proves schedules in which nothing overlaps; leave it out, or forward_link "
            "and backward_link"
        )
    if exact and (cost.microbatches or cost.microbatch_sizes):
        faults.append(
            "exact=True proves schedules of equal microbatches; leave it out, or microbatches and "
            "microbatch_sizes of the cost"
        )
    raise_all("no such search:", faults, ScheduleError)
    cost.factors(counts["num_microbatches"])  # raises ScheduleError for another count
    times = [time for time, _ in cost.slice_shares(slices)]
    if max(times) - min(times) > _UNEVEN / slices:
        raise ScheduleError(
            "search needs slices that take equally long, but these take "
            f"{', '.join(f'{time:.3f}' for time in times)} of their microbatch; give "
            "Cost(slices=fp.schedules.balanced_slices(length, num_slices, attention=...)), with a "
            "length so large that rounding to whole numbers does not matter (its unit is free)"
        )
    devices = counts["num_devices"]
    stages = counts.get("num_stages") or _stages_of(cost, placement, devices)
    cost.check_stages(stages)
    if stages < devices:
        raise ScheduleError(
            f"num_devices must be at most the number of stages; got {devices} devices for {stages} "
            "stages"
        )
    limits = limits_of(memory_limit, devices)
    shapes = shapes_for(stages, devices) if placement is None else [placement]
    pieces = counts["num_microbatches"] * slices
    return [
        Problem(
            placed_cost(cost, device_of, devices),
            device_of,
            pieces,
            limits,
            objective,
            remat,
            offload,
            slices,
        )
        for device_of in (placed(shape, stages, devices) for shape in shapes)
    ]


def _stages_of(cost: Cost, placement: Any, devices: int) -> int:
    """Return the number of stages of the placement or the cost; else one per device, two on a V."""
    if placement is not None and not isinstance(placement, str):
        return len(placement)
    return cost.num_stages or (2 * devices if placement == "v" else devices)
