"""Check the counts that users give to families, and divide stages into blocks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple, cast

from funcpipe._src.core.errors import ScheduleError, raise_all


class ScheduleCounts(NamedTuple):
    """The counts of a schedule."""

    stages: int
    microbatches: int
    devices: int
    slices: int = 1

    @property
    def pieces(self) -> int:
        """The number of pieces: all slices, or microbatches if they are not cut."""
        return self.microbatches * self.slices


def counted(
    arguments: Mapping[str, Any], faults: list[str], *, optional: str = ""
) -> dict[str, int]:
    """Return the counts as ints, by name. Values that are not positive whole numbers are faults.

    Args:
        arguments: the values that the user gave, by name.
        faults: the list to which faults are added.
        optional: the name of the argument that may be None, and is then left out.
    """
    counts: dict[str, int] = {}
    for name, value in arguments.items():
        if value is None and name == optional:
            continue
        try:
            if isinstance(value, bool):
                raise TypeError
            counts[name] = index(cast("Any", value))
        except TypeError:
            faults.append(f"{name} must be a whole number; got {value!r}")
            continue
        if counts[name] <= 0:
            faults.append(f"{name} must be positive; got {value}")
    return counts


def schedule_counts(
    num_stages: int,
    num_microbatches: int,
    num_devices: int | None,
    *,
    num_slices: int = 1,
    looped: bool = False,
    folded: bool = False,
    share: int = 1,
) -> ScheduleCounts:
    """Return the counts of a family as ints. Raises ScheduleError with all faults.

    Args:
        num_stages, num_microbatches, num_devices, num_slices: the values that the user gave.
        looped: whether the number of devices must divide the number of stages.
        folded: whether there must be two stages per device.
        share: the number of stages per device without ``num_devices``, if ``share`` divides the
            number of stages; else one stage per device.
    """
    faults: list[str] = []
    arguments = {
        "num_stages": num_stages,
        "num_microbatches": num_microbatches,
        "num_devices": num_devices,
        "num_slices": num_slices,
    }
    counts = counted(arguments, faults, optional="num_devices")
    stages, devices = counts.get("num_stages", 0), counts.get("num_devices", 0)
    if stages > 0 and num_devices is None:
        devices = stages // share if stages % share == 0 else stages
    if 0 < stages < devices:
        faults.append(
            f"num_devices must be at most num_stages; got {devices} devices for {stages} stages"
        )
    elif looped and stages > 0 and devices > 0 and stages % devices:
        divisors = [d for d in range(1, stages + 1) if stages % d == 0]
        faults.append(
            f"looped stages are spread evenly, so num_devices must divide num_stages; got {stages} "
            f"stages on {devices} devices; take num_devices from {divisors}"
        )
    elif folded and stages > 0 and devices > 0 and stages != 2 * devices:
        odd = stages % 2
        remedy = f"num_stages={stages + 1}" if odd else f"num_devices={stages // 2}"
        faults.append(
            f"a V has two stages per device, so num_stages must be twice num_devices; got {stages} "
            f"stages on {devices} devices; take {remedy}"
        )
    raise_all("no such schedule:", faults, ScheduleError)
    return ScheduleCounts(stages, counts["num_microbatches"], devices, counts["num_slices"])


def blocks(count: int, parts: int) -> list[range]:
    """Divide ``range(count)`` into contiguous blocks of nearly equal size."""
    size, larger = divmod(count, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]
