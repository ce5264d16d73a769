"""Check the devices and the launcher of the processes of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.plan import Plan
from funcpipe._src.devices.devices import plan_devices


def refuse_devices(plan: Plan) -> None:
    """Raise PlanError if lanes are on devices other than the CPU and CUDA."""
    devices = enumerate(plan_devices(plan, ()))
    others = [
        f"lane {lane} on {device}" for lane, device in devices if device.type not in ("cpu", "cuda")
    ]
    if others:
        raise PlanError(
            "ranks run lanes on the CPU and on CUDA devices only, but the plan has "
            f"{', '.join(others)}: make_plan(..., devices='cuda')"
        )


def refuse_other_devices(
    lanes: Sequence[int], own: Sequence[torch.device], new: Sequence[torch.device]
) -> None:
    """Raise PlanError if lanes of this process are on other devices than in the plan of the
    ranks."""
    faults = [
        f"lane {lane} on {new[lane]}, not on {own[lane]}"
        for lane in lanes
        if own[lane] != new[lane]
    ]
    if faults:
        raise PlanError(
            f"the plan has {', '.join(faults)} as in the plan of these ranks; make ranks for this "
            "plan: fp.ranks(plan)"
        )


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    import torch.distributed as dist

    return dist.is_torchelastic_launched()
