"""What is around the processes of a plan: the launcher, devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.plan import Plan
from funcpipe._src.devices.devices import plan_devices


def refuse_devices(plan: Plan) -> None:
    """Raise PlanError where lanes compute elsewhere than on the CPU or CUDA."""
    devices = enumerate(plan_devices(plan, ()))
    others = [
        f"lane {lane} on {device}" for lane, device in devices if device.type not in ("cpu", "cuda")
    ]
    if others:
        raise PlanError(
            "ranks run lanes on the CPU and on CUDA devices, and the plan has "
            f"{', '.join(others)}: make_plan(..., devices='cuda')"
        )


def refuse_other_devices(
    lanes: Sequence[int], own: Sequence[torch.device], new: Sequence[torch.device]
) -> None:
    """Raise PlanError where a plan has lanes that are here on other devices than the plan that
    ranks were made for."""
    faults = [
        f"lane {lane} on {new[lane]}, not on {own[lane]}"
        for lane in lanes
        if own[lane] != new[lane]
    ]
    if faults:
        raise PlanError(
            f"the plan has {', '.join(faults)}, as the one that these ranks were made for; make "
            "ranks for it"
        )


def is_under_torchrun() -> bool:
    """Did torchrun start this process."""
    import torch.distributed as dist

    return dist.is_torchelastic_launched()
