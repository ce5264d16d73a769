"""Finds the devices of a plan."""

from __future__ import annotations

from collections.abc import Collection

import torch

from funcpipe._src.core.errors import PlacementError, raise_all
from funcpipe._src.data.plan import Plan


def devices(count: int) -> tuple[torch.device, ...]:
    """A device for each lane: the CUDA devices if there are any (in turn, if there are fewer), else
    the CPU.

    >>> len(fp.devices(4))
    4
    """
    if torch.cuda.is_available():
        return tuple(
            torch.device("cuda", index % torch.cuda.device_count()) for index in range(count)
        )
    return (torch.device("cpu"),) * count


def plan_devices(plan: Plan, here: Collection[int] | None = None) -> tuple[torch.device, ...]:
    """The torch device of each lane of a plan.

    Of a process that has only the lanes ``here`` these are looked for; where the plan numbers no
    device they are on that which is current in this process.

    Raises:
        PlacementError: torch has no such device.
    """
    if plan.devices is None:
        return devices(plan.num_devices) if here is None else (_current(),) * plan.num_devices
    faults: list[str] = []
    out: list[torch.device] = []
    for lane, name in enumerate(plan.devices):
        try:
            device = torch.device(name)
            if device.type == "cuda" and (here is None or lane in here):
                if not torch.cuda.is_available():
                    faults.append(f"device {lane} is {name}, but torch sees no CUDA device")
                elif str(device) == "cuda":
                    device = _current()
                elif device.index >= torch.cuda.device_count():
                    faults.append(
                        f"device {lane} is {name}, but torch sees {torch.cuda.device_count()} "
                        "CUDA devices"
                    )
            out.append(device)
        except (RuntimeError, TypeError) as error:
            faults.append(f"device {lane} is {name!r}: {str(error).splitlines()[0]}")
    raise_all(
        "the plan's devices are not here; make it with fp.devices(n):", faults, PlacementError
    )
    return tuple(out)


def _current() -> torch.device:
    """The CUDA device that is current in this process; the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def same_device(a: torch.device, b: torch.device) -> bool:
    """Are both one device; every CPU is the same."""
    return a == b or (a.type == b.type == "cpu")
