"""`devices`, and the `torch.device` of each lane of a plan."""

from __future__ import annotations

from collections.abc import Collection

import torch

from funcpipe._src.core.errors import PlacementError, raise_all
from funcpipe._src.data.plan import Plan


def devices(count: int) -> tuple[torch.device, ...]:
    """Choose a `torch.device` for each lane: CUDA devices if there are any, else the CPU.

    With fewer CUDA devices than lanes, the lanes take the devices in turn.

    >>> len(fp.devices(4))
    4

    Args:
        count: the number of lanes.

    Returns:
        A tuple with ``count`` devices, for ``make_plan(devices=...)``.
    """
    if torch.cuda.is_available():
        return tuple(
            torch.device("cuda", index % torch.cuda.device_count()) for index in range(count)
        )
    return (torch.device("cpu"),) * count


def plan_devices(plan: Plan, here: Collection[int] | None = None) -> tuple[torch.device, ...]:
    """Return the `torch.device` of each lane of a plan.

    With ``here``, the process has only these lanes, and only their devices must exist. A device
    without a number is then the current CUDA device of this process.

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
            elif device.type not in ("cpu", "cuda", "meta"):
                torch.empty(0, device=device)  # raises if this torch cannot use it
            out.append(device)
        except (RuntimeError, TypeError, AssertionError) as error:
            index = "; an int is the index of a device" if isinstance(name, int) else ""
            faults.append(f"device {lane} is {name!r}: {str(error).splitlines()[0]}{index}")
    raise_all(
        "the plan names devices that this process does not have; choose devices with "
        "make_plan(..., devices=fp.devices(n)):",
        faults,
        PlacementError,
    )
    return tuple(out)


def _current() -> torch.device:
    """Return the current CUDA device of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def same_device(a: torch.device, b: torch.device) -> bool:
    """Return whether both are one device. All CPU devices are equal, whatever their index."""
    return a == b or (a.type == b.type == "cpu")
